"""Overspill's state folder, and atomic replacement of files."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def state_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Overspill's part of the XDG state folder: registry, logs and server status; None for a user without a home, as in
    some containers."""
    base = environ.get("XDG_STATE_HOME", "")
    if Path(base).is_absolute():  # the XDG Base Directory Specification ignores relative paths
        return Path(base) / "overspill"
    try:
        return Path(environ.get("HOME") or Path.home()) / ".local/state/overspill"
    except RuntimeError:
        return None


def ledger_file(gpu_uuid: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """File in which a GPU's engines keep account of its memory; a CPU, whose RAM stands in for that, has one too."""
    folder = state_folder(environ)
    return None if folder is None else folder / "ledgers" / f"{gpu_uuid or 'cpu'}.ledger"


def replace_file(path: Path, text: str, *, mode: int = 0o600, sync: bool = False) -> None:
    """Replace a file atomically: readers see the old text or the new text, never a part.

    Without `sync` a crash of the machine may leave an empty file: leave it out only for text that can be recreated.
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
