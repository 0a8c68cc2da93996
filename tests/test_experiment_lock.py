"""An experiment has one process at a time, and none that is dead."""

import subprocess
import sys
from pathlib import Path

import pytest

from overspill.measure import CannotMeasure
from overspill.measure.trial import locked

HOLDER = """
import sys, time
from pathlib import Path
from overspill.measure.trial import locked
with locked(Path(sys.argv[1]), "ab-1"):
    print("has it", flush=True)
    time.sleep(600)
"""


def test_a_lock_names_its_process_and_ends_when_it_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "has it\n"
            sentence = f"ab-1 is being measured by process {holder.pid}; wait"
            with pytest.raises(CannotMeasure, match=sentence), locked(folder, "ab-1"):
                pytest.fail("it was taken twice")
            with locked(folder, "ab-2"):
                pass  # another experiment is nobody's
        finally:
            holder.kill()
    with locked(folder, "ab-1"), pytest.raises(CannotMeasure), locked(folder, "ab-1"):
        pytest.fail("it was taken twice")
    with locked(folder, "ab-1"):
        pass


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    sentence = r"cannot be written: .*name another with XDG_STATE_HOME"
    with pytest.raises(CannotMeasure, match=sentence), locked(tmp_path / "file" / "logs", "ab-1"):
        pytest.fail("there is no such folder")
