"""Reports in files: refused before anything is measured, and replaced in one step."""

import os
from pathlib import Path

from overspill.experiment.errors import CannotCompare, ExperimentError
from overspill.files import replace_file


def require_writable(path: Path) -> None:
    """An hour later would be too late to hear of a misspelt folder."""
    folder = path.parent
    if path.is_dir():
        raise ExperimentError(f"{path} is a folder; name a file in it")
    if not folder.is_dir():
        raise ExperimentError(f"{path} cannot be written: there is no folder {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ExperimentError(f"{path} cannot be written: this user may not; name another file")


def write_text(path: Path, text: str) -> None:
    try:
        replace_file(path, text, mode=0o644)
    except OSError as error:
        raise CannotCompare(
            f"{path} could not be written: {error.strerror}. The results are kept; overspill results export writes them"
        ) from error
