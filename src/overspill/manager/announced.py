"""Where a manager runs, for commands of the same user: a small file in its folder."""

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from overspill.files import replace_file
from overspill.processes import identity

_NAME = "manager.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    url: str
    pid: int
    process: str
    """Boot and start time: the number alone may be another process's by now."""


def announce(folder: Path, url: str) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    told = Announced(url=url, pid=os.getpid(), process=identity(os.getpid()) or "")
    replace_file(folder / _NAME, json.dumps(asdict(told)))


def withdraw(folder: Path) -> None:
    with suppress(OSError):
        (folder / _NAME).unlink()


def find_manager(folder: Path) -> Announced | None:
    """The one that lives, if any."""
    try:
        told = Announced(**json.loads((folder / _NAME).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return told if identity(told.pid) == told.process else None
