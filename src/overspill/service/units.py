"""What the units hold: pure functions from a service to the text of its files.

A template for every model and a drop-in for each. What is the same for all is written once, `overspill@*` names them
all, and the template alone serves any model (`overspill@Qwen-Qwen3\\x2d8B` is Qwen/Qwen3-8B) as `overspill serve` plans
it. The drop-in holds what was planned for one: the exact command and the RAM it may take.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import PurePosixPath

from overspill.flags import HIDDEN
from overspill.kv.errors import OverspillError
from overspill.service.quoting import (
    escape_instance,
    quote_assignment,
    quote_environment,
    quote_path,
    quote_program,
    quote_word,
)

TEMPLATE = "overspill@.service"
MARKER = "# Written by `overspill service "
_USUAL_PORT = "8000"
# systemd refuses longer ones, and most file systems longer file names: `.d` and a temporary name need some too.
_LONGEST_UNIT_NAME = 240
# Where nothing loaded nvidia-uvm yet, CUDA does so through a setuid program, which NoNewPrivileges stops.
LOAD_UVM = "ExecStartPre=-+/usr/bin/nvidia-modprobe -c=0 -u"


class Mode(StrEnum):
    USER = "user"
    SYSTEM = "system"


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One model to serve."""

    mode: Mode
    name: str
    """What systemd's instance is called: the model, or a shorter name for it."""
    command: tuple[str, ...]
    """The interpreter and its arguments."""
    memory_max_bytes: int
    environment: tuple[tuple[str, str], ...] = ()
    secrets: tuple[tuple[str, str], ...] = ()
    """Variables that only the owner of the units may read; they are in a file of their own."""
    folder: PurePosixPath | None = None
    """Where the units will lie, by its whole path: the unit names the file of secrets, which needs it."""
    run_as: str | None = None
    """The user of a system service; a user's service is that user's."""

    @property
    def unit(self) -> str:
        return unit_name(self.name)

    @property
    def port(self) -> str:
        return port_of(self.command)

    @property
    def files(self) -> tuple["UnitFile", ...]:
        return unit_files(self)


@dataclass(frozen=True, slots=True)
class UnitFile:
    path: PurePosixPath
    """Below the folder of units."""
    text: str
    mode: int = 0o644
    shown: str = ""
    """What others are shown of it, if not the text."""


def unit_name(name: str) -> str:
    """The unit of an instance."""
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
    """Where a server with this command listens; the last flag counts."""
    ports = [after for word, after in pairwise(words) if word == "--port"]
    return ports[-1] if ports else _USUAL_PORT


def drop_in_path(name: str) -> PurePosixPath:
    return PurePosixPath(f"{unit_name(name)}.d") / "overspill.conf"


def secrets_path(name: str) -> PurePosixPath:
    """Beside the drop-in; systemd reads only `*.conf` there."""
    return drop_in_path(name).with_name("secrets.env")


def unit_files(service: Service) -> tuple[UnitFile, ...]:
    """Template, secrets if there are some, and drop-in, in the order to write them in."""
    files = [UnitFile(PurePosixPath(TEMPLATE), marked(_template(service)))]
    if service.secrets:
        text = marked(f"{name}={quote_environment(value)}" for name, value in service.secrets)
        shown = marked(f"{name}={HIDDEN}" for name, _ in service.secrets)
        files.append(UnitFile(secrets_path(service.name), text, mode=0o600, shown=shown))
    return (*files, UnitFile(drop_in_path(service.name), marked(_drop_in(service))))


def marked(lines: Iterator[str], command: str = "") -> str:
    """The text of a file that is known as Overspill's own, and names the command below `overspill service` for it."""
    first = f"{MARKER}{command}install`; `overspill service {command}remove` takes it away."
    return "\n".join([first, *lines]) + "\n"


def _template(service: Service) -> Iterator[str]:
    is_system = service.mode is Mode.SYSTEM
    yield "[Unit]"
    yield "Description=Overspill serving %I"
    if is_system:
        # A model may have to be fetched. A user's manager knows no such targets.
        yield "Wants=network-online.target"
        yield "After=network-online.target nvidia-persistenced.service"
    # A start takes minutes, so that only a long interval ever counts several.
    yield "StartLimitIntervalSec=1h"
    yield "StartLimitBurst=4"
    yield ""
    yield "[Service]"
    # Started is a server that answers; `overspill serve` says so.
    yield "Type=notify"
    yield "NotifyAccess=main"
    if is_system:
        yield LOAD_UVM
    yield f"ExecStart={quote_program(service.command[0])} -m overspill serve %I"
    yield from run_as(service.run_as)
    yield "WorkingDirectory=~"
    yield "Environment=PYTHONUNBUFFERED=1"
    # Settings and secrets (HF_TOKEN) that do not belong in a unit, which everybody may read.
    yield "EnvironmentFile=-%E/overspill/environment"
    yield "Restart=on-failure"
    yield "RestartSec=10s"
    # A mistake in the settings stays one.
    yield "RestartPreventExitStatus=2"
    # Weights come from disk, or from the hub.
    yield "TimeoutStartSec=1h"
    # The server ends its engine itself; what is left after this time is killed, and the GPU with it is free.
    yield "KillMode=mixed"
    yield "TimeoutStopSec=2min"
    yield "LimitMEMLOCK=infinity"
    yield "LimitNOFILE=65536"
    yield "StandardOutput=journal"
    yield "StandardError=journal"
    yield "SyslogIdentifier=overspill"
    if is_system:
        yield "PrivateTmp=yes"
        yield from hardening()
    yield from wanted_by(service.mode)


def _drop_in(service: Service) -> Iterator[str]:
    yield "[Service]"
    # Empty first: a second ExecStart= would be added to the template's.
    yield "ExecStart="
    yield exec_start(service.command)
    yield f"MemoryMax={service.memory_max_bytes}"
    yield from run_as(service.run_as)
    yield from environment(service.environment)
    if service.secrets and service.folder is not None:
        # Without a `-`: a server that lost its key must not start open to all.
        yield f"EnvironmentFile={quote_path(str(service.folder / secrets_path(service.name)))}"


# Lines that the manager's unit has too.


def exec_start(command: Sequence[str]) -> str:
    program, *arguments = command
    return "ExecStart=" + " ".join([quote_program(program), *map(quote_word, arguments)])


def run_as(user: str | None) -> Iterator[str]:
    if user is not None:
        yield f"User={user.replace('%', '%%')}"


def environment(variables: Iterable[tuple[str, str]]) -> Iterator[str]:
    for name, value in variables:
        yield f"Environment={quote_assignment(name, value)}"


def hardening() -> Iterator[str]:
    """Of a system service; a user's manager may not make the namespaces these need."""
    # Not PrivateDevices, DevicePolicy or ProtectClock (which implies a list of devices): CUDA needs /dev/nvidia*.
    # Not MemoryDenyWriteExecute: kernels are compiled. Not ProtectHome: models are in the cache of a home.
    yield "NoNewPrivileges=yes"
    yield "ProtectSystem=full"
    yield "ProtectControlGroups=yes"
    yield "ProtectKernelLogs=yes"
    yield "ProtectKernelModules=yes"
    yield "ProtectHostname=yes"
    yield "RestrictSUIDSGID=yes"
    yield "RestrictRealtime=yes"
    yield "LockPersonality=yes"


def wanted_by(mode: Mode) -> Iterator[str]:
    yield ""
    yield "[Install]"
    yield f"WantedBy={'multi-user' if mode is Mode.SYSTEM else 'default'}.target"
