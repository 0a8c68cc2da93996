"""Files of reports: what stands in their place, and who reads them."""

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from overspill.measure import MeasureError
from overspill.measure.report.file import require_writable, write_text


def test_a_link_stays_and_what_it_names_is_written(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    link, file = tmp_path / "link", tmp_path / "kept" / "report"
    link.symlink_to(file)
    for text in ("new", "replaced"):
        require_writable(link)
        write_text(link, text)
        assert link.is_symlink() and not file.is_symlink() and file.read_text() == text
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["report"]


def test_a_link_into_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "report")
    with pytest.raises(MeasureError, match=r"there is no folder \S+/nowhere"):
        require_writable(tmp_path / "link")


def test_a_pipe_stays_a_pipe_and_its_reader_gets_the_report(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()), daemon=True)
    reader.start()
    require_writable(pipe)
    write_text(pipe, "report")
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    reader.join(timeout=60)
    assert got == ["report"]


def test_a_device_stays_a_device(tmp_path: Path) -> None:
    """A link to it, so that a mistake does not cost this machine its own."""
    link = tmp_path / "null"
    link.symlink_to("/dev/null")
    require_writable(link)
    write_text(link, "report")
    assert link.is_symlink() and stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.parametrize("is_pipe", [True, False], ids=["a pipe", "a file"])
def test_standard_output_keeps_the_report_in_print_order(tmp_path: Path, is_pipe: bool) -> None:
    # As /dev/stdout is, and not itself: put in its place, a file would be everybody's standard output.
    link = tmp_path / "stdout"
    link.symlink_to("/proc/self/fd/1")
    program = (
        "import sys; from pathlib import Path; from overspill.measure.report.file import require_writable, write_text\n"
        "out = Path(sys.argv[1]); require_writable(out)\n"
        "print('before'); write_text(out, 'report\\n'); print('after')"
    )
    file = tmp_path / "out"
    with file.open("w") as handle:
        out = subprocess.PIPE if is_pipe else handle
        words = [sys.executable, "-c", program, str(link)]
        ended = subprocess.run(words, stdout=out, text=True, timeout=60, check=True)
    assert link.is_symlink()
    assert (ended.stdout if is_pipe else file.read_text()) == "before\nreport\nafter\n"


def test_the_folder_where_the_file_is_made_anew_must_be_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that may be written, in a folder that may not, failed an hour later."""
    file = tmp_path / "report"
    file.write_text("old")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may do anything
    with pytest.raises(MeasureError, match=f"may not create files in {tmp_path}"):
        require_writable(file)
