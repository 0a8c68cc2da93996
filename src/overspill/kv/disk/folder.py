"""The folder that holds a server's KV on disk: its path, its lock, a subfolder for each key, and their sizes."""

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overspill.kv.errors import OverspillError

_LOCK, _FACTS = "lock", "key.json"
_KEY = re.compile(r"[0-9a-f]{32}")
_ODD = re.compile(r"[^A-Za-z0-9.]+")
JOURNAL = "journal"


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Overspill's folder for KV inside the XDG cache folder."""
    base = environ.get("XDG_CACHE_HOME", "")
    if not Path(base).is_absolute():
        try:
            base = str(Path(environ.get("HOME") or Path.home()) / ".cache")
        except RuntimeError as error:
            raise OverspillError("there is no home folder for KV on disk; give disk_path") from error
    return Path(base) / "overspill" / "kv"


def default_folder(model: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The model's own folder in the cache, named after the last two parts of its name or path."""
    name = _ODD.sub("-", "/".join(Path(model).parts[-2:])).strip("-.")[:80]
    return cache_folder(environ) / (name or "model")


@dataclass(frozen=True, slots=True)
class Kept:
    """One key's KV in a folder."""

    path: Path
    num_bytes: int
    used_at: float  # seconds since the epoch
    facts: dict[str, Any]


class Folder:
    """A folder locked for the sole use of this process."""

    def __init__(self, root: Path) -> None:
        self.root = root
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if root.stat().st_uid != os.geteuid():
                raise OverspillError(f"{root} belongs to another user; give another disk_path")
            if not (root / _LOCK).exists() and any(root.iterdir()):
                raise OverspillError(f"{root} holds other files; give a disk_path that is empty or does not exist yet")
            root.chmod(0o700)  # prompts can be recovered from KV
            self._lock = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise OverspillError(f"KV cannot be kept on disk at {root}: {error}; give another disk_path") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise OverspillError(f"{root} cannot be locked: {error}; give a disk_path on this machine") from error
            raise OverspillError(
                f"{root} is in use by another server; stop it, or give this one a disk_path of its own"
            ) from error

    def open(self, identity: bytes, facts: dict[str, Any]) -> Path:
        """Create the key's subfolder, record its facts there, and return it."""
        path = self.root / identity.hex()[:32]
        path.mkdir(mode=0o700, exist_ok=True)
        (path / _FACTS).write_text(json.dumps(facts, indent=1, sort_keys=True, default=str))
        return path

    def trim(self, own: Path, own_bytes: int, bound: int) -> int:
        """Delete other keys' KV, least recently used first, until the folder fits `bound`; this key counts with
        `own_bytes`, or its present size if that is larger. Returns the bytes that other keys still hold."""
        kept_now = kept_in(self.root)
        room = bound - max(own_bytes, *(kept.num_bytes for kept in kept_now if kept.path == own), 0)
        others = [kept for kept in kept_now if kept.path != own]
        total = sum(kept.num_bytes for kept in others)
        for kept in sorted(others, key=lambda kept: kept.used_at):
            if total <= room:
                break
            shutil.rmtree(kept.path)
            total -= kept.num_bytes
        return total

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)  # also releases the lock
            self._lock = -1


def kept_in(root: Path) -> list[Kept]:
    """KV of every key in a folder."""
    found = []
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if not _KEY.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
            continue
        files = [file.lstat() for file in path.rglob("*")]
        journal = path / JOURNAL
        try:
            facts = json.loads((path / _FACTS).read_text())
        except (OSError, ValueError):
            facts = {}
        used_at = (journal if journal.exists() else path).stat().st_mtime
        found.append(Kept(path, sum(stat.st_blocks * 512 for stat in files), used_at, facts))
    return found


def clear_folder(root: Path) -> int:
    """Delete all KV in a folder that no server uses; returns the bytes freed."""
    if not root.is_dir():
        return 0
    folder = Folder(root)
    try:
        before = sum(kept.num_bytes for kept in kept_in(root))
        for kept in kept_in(root):
            shutil.rmtree(kept.path)
        return before
    finally:
        folder.close()
