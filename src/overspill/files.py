"""Files that are replaced in one step: readers see what was there before or what is there now, never a part."""

import os
import tempfile
from pathlib import Path


def replace_file(path: Path, text: str, *, mode: int = 0o600, sync: bool = False) -> None:
    """Without `sync` a crash of the machine may leave an empty file: for what can be had again."""
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
