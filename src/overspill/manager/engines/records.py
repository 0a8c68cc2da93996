"""What a manager started, on disk: how the next one finds its engines again after a crash."""

import dataclasses
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from overspill.files import replace_file
from overspill.manager.engines.memory import Memory
from overspill.manager.engines.process import Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    name: str
    pid: int
    process: str
    url: str | None
    """None where the engine chooses its address itself, and tells it later."""
    log_file: str | None
    settings: dict[str, Any]
    """The model's, when it was started."""
    holds: Memory
    started_at: float
    unit: str | None = None
    """systemd's, if it was started by that."""
    journal: str | None = None
    """The command that shows the unit's log."""

    @property
    def identity(self) -> Identity:
        return Identity(self.pid, self.process)


class Records:
    """One file for each engine, in a folder of the manager's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, record: Record) -> None:
        replace_file(self._path(record.name), json.dumps(dataclasses.asdict(record)))

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._path(name).unlink()

    def read_all(self) -> list[Record]:
        """Of engines that live; what is left of others is removed."""
        found = []
        for path in sorted(self.folder.glob("*.json")):
            try:
                told = json.loads(path.read_text())
                record = Record(**{**told, "holds": Memory(**told["holds"])})
            except (OSError, ValueError, TypeError, KeyError):
                record = None
            if record is not None and record.identity.is_alive:
                found.append(record)
            else:
                with suppress(OSError):
                    path.unlink()
        return found

    def _path(self, name: str) -> Path:
        return self.folder / f"{file_name(name)}.json"


def file_name(name: str) -> str:
    """A model's name as one file's."""
    return quote(name, safe="")
