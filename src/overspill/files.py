"""Overspill's own folder, and files that are replaced in one step."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def state_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The XDG state folder's part for Overspill: the registry, logs, and what runs; None for a user without a home, as
    in some containers."""
    base = environ.get("XDG_STATE_HOME", "")
    if Path(base).is_absolute():  # others are to be ignored, says the XDG Base Directory Specification
        return Path(base) / "overspill"
    try:
        return Path(environ.get("HOME") or Path.home()) / ".local/state/overspill"
    except RuntimeError:
        return None


def ledger_file(gpu_uuid: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where engines of a GPU keep account of its memory; a CPU, whose RAM plays it, has one too."""
    folder = state_folder(environ)
    return None if folder is None else folder / "ledgers" / f"{gpu_uuid or 'cpu'}.ledger"


def replace_file(path: Path, text: str, *, mode: int = 0o600, sync: bool = False) -> None:
    """Readers see the text before or the text after, never a part.

    Without `sync` a crash of the machine may leave an empty file: for what can be had again.
    """
    handle, new = tempfile.mkstemp(prefix=f".{path.stem}", suffix=".new", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.chmod(new, mode)
        os.replace(new, path)
    except BaseException:
        os.unlink(new)
        raise
