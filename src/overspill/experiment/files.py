"""Reports in files: refused before anything is measured, and replaced in one step."""

import os
import stat
import sys
from pathlib import Path

from overspill.experiment.errors import CannotCompare, ExperimentError
from overspill.files import replace_file


def require_writable(path: Path) -> None:
    """An hour later would be too late to hear of a misspelt folder."""
    if path.is_dir():
        raise ExperimentError(f"{path} is a folder; name a file in it")
    if path.exists() and not os.access(path, os.W_OK):
        raise ExperimentError(f"{path} cannot be written: this user may not; name another file")
    if _is_written_through(path):
        return
    folder = _behind_links(path).parent
    if not folder.is_dir():
        raise ExperimentError(f"{path} cannot be written: there is no folder {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ExperimentError(
            f"{path} cannot be written: this user may make no file in {folder}, where it is made anew; name a file in "
            "another folder"
        )


def write_text(path: Path, text: str) -> None:
    try:
        if (own := _own_stream(path)) is not None:
            _write_to(own, text)
        elif _is_written_through(path):
            path.write_text(text, encoding="utf-8")
        else:
            replace_file(_behind_links(path), text, mode=0o644)
    except OSError as error:
        raise CannotCompare(
            f"{path} could not be written: {error.strerror}. The results are kept; overspill results export writes them"
        ) from error


def _is_written_through(path: Path) -> bool:
    """Devices and pipes, and what this process prints to: a file put in their place would not reach their reader."""
    try:
        found = path.stat()
    except OSError:
        return False
    return not stat.S_ISREG(found.st_mode) or _own_stream(path) is not None


def _own_stream(path: Path) -> int | None:
    """As /dev/stdout that a shell sends to a file: opened a second time, it would be written from its beginning."""
    for handle in (1, 2):
        try:
            if os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        except OSError:  # it is closed, or there is no such file yet
            continue
    return None


def _write_to(handle: int, text: str) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with os.fdopen(os.dup(handle), "w", encoding="utf-8") as file:
        file.write(text)


def _behind_links(path: Path) -> Path:
    return Path(os.path.realpath(path))
