"""Report files: unwritable paths are refused before anything is measured, and files are replaced atomically."""

import contextlib
import os
import stat
import sys
from pathlib import Path

from overspill.files import replace_file
from overspill.measure import CannotMeasure, MeasureError


def require_writable(path: Path) -> None:
    """Raise if a report cannot be written; after an hour's measurement it is too late to report a misspelt folder."""
    if path.is_dir():
        raise MeasureError(f"{path} is a folder; name a file in it")
    if path.exists() and not os.access(path, os.W_OK):
        raise MeasureError(f"{path} cannot be written: this user may not; name another file")
    if _is_written_through(path):
        return
    folder = _behind_links(path).parent
    if not folder.is_dir():
        raise MeasureError(f"{path} cannot be written: there is no folder {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise MeasureError(
            f"{path} cannot be written: this user may not create files in {folder}, which replacing it needs; name a "
            "file in another folder"
        )


def write_text(path: Path, text: str) -> None:
    try:
        if (own := _own_stream(path)) is not None:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            with os.fdopen(os.dup(own), "w", encoding="utf-8") as file:
                file.write(text)
        elif _is_written_through(path):
            path.write_text(text, encoding="utf-8")
        else:
            replace_file(_behind_links(path), text, mode=0o644)
    except OSError as error:
        raise CannotMeasure(
            f"{path} could not be written: {error.strerror}. The results are kept; overspill results export writes them"
        ) from error


def _is_written_through(path: Path) -> bool:
    """Whether to write into a device, a pipe or our own output: a file put in its place would not reach its reader."""
    try:
        return not stat.S_ISREG(path.stat().st_mode) or _own_stream(path) is not None
    except OSError:
        return False


def _own_stream(path: Path) -> int | None:
    """Our stdout or stderr, if it is this file: opened again, /dev/stdout sent to a file would be overwritten."""
    for handle in (1, 2):
        with contextlib.suppress(OSError):  # the stream is closed, or the file does not exist yet
            if os.path.samestat(os.fstat(handle), path.stat()):
                return handle
    return None


def _behind_links(path: Path) -> Path:
    return Path(os.path.realpath(path))
