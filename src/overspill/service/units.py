"""systemd units: the text of their files, rendered from the templates beside this module and quoted for systemd.

All models share a template unit, and each has a drop-in. The template alone serves any model
(`overspill@Qwen-Qwen3\\x2d8B` is Qwen/Qwen3-8B) as `overspill serve` plans it, and `overspill@*` names them all. A
drop-in holds the plan for one model: the exact command and the RAM it may take. The manager has a unit of its own,
which leaves engines alone when the manager crashes.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import pairwise
from pathlib import Path, PurePosixPath

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from overspill.flags import HIDDEN
from overspill.kv.errors import OverspillError

TEMPLATE = "overspill@.service"
MANAGER_UNIT = "overspill-manager.service"
MARKER = "# Written by `overspill service "
_USUAL_PORT = "8000"
# systemd refuses longer names, and most file systems longer file names: `.d` and a temporary name need some room.
_LONGEST_UNIT_NAME = 240
# Words without special meaning to systemd, so that most command lines stay as people write them.
_PLAIN_WORD = re.compile(r"[A-Za-z0-9_./:=,@+-]+")
_KEPT = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789:_.")


class Mode(StrEnum):
    USER = "user"
    SYSTEM = "system"


@dataclass(frozen=True, slots=True)
class UnitFile:
    path: PurePosixPath
    """Path relative to the folder of units."""
    text: str
    mode: int = 0o644
    shown: str = ""
    """Text that `overspill service print` shows instead, if any."""


@dataclass(frozen=True, kw_only=True)
class _Command:
    """An Overspill command that systemd runs."""

    mode: Mode
    command: tuple[str, ...]
    """The interpreter and its arguments."""
    environment: tuple[tuple[str, str], ...] = ()
    run_as: str | None = None
    """The user that a system service runs as; a user's service runs as that user."""

    def _rendered(self, template: str, **more: object) -> str:
        values = {**vars(self), "is_system": self.mode is Mode.SYSTEM, **more}
        return _templates().get_template(f"{template}.j2").render(values)


class ManagerService(_Command):
    @property
    def unit(self) -> str:
        return MANAGER_UNIT

    @property
    def files(self) -> tuple[UnitFile, ...]:
        return (UnitFile(PurePosixPath(MANAGER_UNIT), _marked(self._rendered("manager.service"), "manager ")),)


@dataclass(frozen=True, kw_only=True)
class ModelService(_Command):
    name: str
    """Name of systemd's instance: the model, or a shorter name for it."""
    memory_max_bytes: int
    secrets: tuple[tuple[str, str], ...] = ()
    """Variables that only the owner of the units may read, in a file of their own."""
    folder: PurePosixPath | None = None
    """Absolute path of the folder of units, by which the unit names its file of secrets."""

    @property
    def unit(self) -> str:
        return unit_name(self.name)

    @property
    def port(self) -> str:
        return port_of(self.command)

    @property
    def files(self) -> tuple[UnitFile, ...]:
        """Template, secrets if there are any, and drop-in."""
        files = [UnitFile(PurePosixPath(TEMPLATE), _marked(self._rendered("model.service")))]
        secrets = secrets_path(self.name)
        if self.secrets:
            text = "".join(f"{name}={quote_environment(value)}\n" for name, value in self.secrets)
            shown = "".join(f"{name}={HIDDEN}\n" for name, _ in self.secrets)
            files.append(UnitFile(secrets, _marked(text), mode=0o600, shown=_marked(shown)))
        secrets_file = str(self.folder / secrets) if self.secrets and self.folder is not None else None
        drop_in = self._rendered("model.conf", secrets_file=secrets_file)
        return (*files, UnitFile(drop_in_path(self.name), _marked(drop_in)))


Service = ManagerService | ModelService


def unit_name(name: str) -> str:
    """Name of an instance's unit."""
    if not name:
        raise OverspillError("a service needs a name; give a model, or a name with --name")
    unit = f"overspill@{escape_instance(name)}.service"
    if len(unit) > _LONGEST_UNIT_NAME:
        raise OverspillError(
            f"the unit's name would have {len(unit)} characters, and {_LONGEST_UNIT_NAME} is the most; give a shorter "
            "one with --name"
        )
    return unit


def port_of(words: Sequence[str]) -> str:
    """Port that a server with this command listens on; the last flag counts."""
    ports = [after for word, after in pairwise(words) if word == "--port"]
    return ports[-1] if ports else _USUAL_PORT


def drop_in_path(name: str) -> PurePosixPath:
    return PurePosixPath(f"{unit_name(name)}.d") / "overspill.conf"


def secrets_path(name: str) -> PurePosixPath:
    """File of secrets beside the drop-in; systemd reads only `*.conf` there."""
    return drop_in_path(name).with_name("secrets.env")


def _marked(text: str, command: str = "") -> str:
    """Text marked as Overspill's own, naming the `overspill service` command that removes the file."""
    return f"{MARKER}{command}install`; `overspill service {command}remove` takes it away.\n{text}"


@cache
def _templates() -> Environment:
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")), undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    templates.filters |= {
        "program": quote_program,
        "exec": lambda command: " ".join([quote_program(command[0]), *map(quote_word, command[1:])]),
        # For Environment=, where `$` has no special meaning.
        "assignment": lambda value, name: f'"{_escaped(f"{name}={value}")}"',
        "path": quote_path,
        "percent": lambda text: text.replace("%", "%%"),
    }
    return templates


def escape_instance(name: str) -> str:
    """Escape as systemd-escape(1) does, so that %I restores the name; no path separator or leading dot is left."""
    escaped = "".join(chr(byte) if byte in _KEPT else f"\\x{byte:02x}" for byte in _utf8(name))
    escaped = escaped.replace("\\x2f", "-")
    return f"\\x2e{escaped[1:]}" if escaped.startswith(".") else escaped


def quote_word(word: str) -> str:
    """Quote one word of ExecStart= after the program."""
    return word if _PLAIN_WORD.fullmatch(word) else f'"{_escaped(word).replace("$", "$$")}"'


def quote_program(path: str) -> str:
    """Quote the first word of ExecStart=, where systemd accepts no quotes or backslashes in the path, and expands a `$`
    in only one of the two places it passes the path on to."""
    if strange := sorted({each for each in path if each in "$\\\"'" or not each.isprintable()}):
        raise OverspillError(
            f"systemd cannot start {path!r}: its path holds {' '.join(strange)!r}; install the unit with a Python "
            "whose path is without it"
        )
    return path if _PLAIN_WORD.fullmatch(path) else f'"{_escaped(path)}"'


def quote_environment(value: str) -> str:
    """Quote a value in the file of EnvironmentFile=, where `%` has no special meaning and a line holds one variable."""
    _utf8(value)
    if not value.isprintable():
        raise OverspillError("a secret holds a line break or another control character; use one without")
    return '"' + re.sub(r'(["\\`$])', r"\\\1", value) + '"'


def quote_path(path: str) -> str:
    """Quote the path of EnvironmentFile=, which takes the rest of the line."""
    if not path.isprintable() or path != path.strip():
        raise OverspillError(f"systemd cannot read {path!r}; give another --folder or --name")
    return path.replace("%", "%%")


def _escaped(text: str) -> str:
    _utf8(text)
    for character, written in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%")):
        text = text.replace(character, written)
    strange = (each for each in set(text) if not each.isprintable())
    return text.translate({ord(each): "".join(f"\\x{byte:02x}" for byte in each.encode()) for each in strange})


def _utf8(text: str) -> bytes:
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        raise OverspillError(
            f"{text!r} is not valid UTF-8, and systemd reads nothing else; rename the folder"
        ) from error
    if b"\0" in content:
        raise OverspillError(f"{text!r} holds a zero byte, and no name can; remove it")
    return content
