"""What the units hold: pure functions from a service to the text of its files.

A template for every model and a drop-in for each. What is the same for all is written once, `overspill@*` names them
all, and the template alone serves any model (`overspill@Qwen-Qwen3\\x2d8B` is Qwen/Qwen3-8B) as `overspill serve` plans
it. The drop-in holds what was planned for one: the exact command and the RAM it may take.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import PurePosixPath

from overspill.kv.errors import OverspillError
from overspill.service.quoting import escape_instance, quote_assignment, quote_program, quote_word

TEMPLATE = "overspill@.service"
MARKER = "# Written by `overspill service install`"
_USUAL_PORT = "8000"
# systemd refuses longer ones, and most file systems longer file names: `.d` and a temporary name need some too.
_LONGEST_UNIT_NAME = 240


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
    run_as: str | None = None
    """The user of a system service; a user's service is that user's."""

    @property
    def unit(self) -> str:
        return unit_name(self.name)

    @property
    def port(self) -> str:
        return port_of(self.command)


@dataclass(frozen=True, slots=True)
class UnitFile:
    path: PurePosixPath
    """Below the folder of units."""
    text: str


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


def unit_files(service: Service) -> tuple[UnitFile, UnitFile]:
    """Template and drop-in, in the order to write them in."""
    return (
        UnitFile(PurePosixPath(TEMPLATE), _text(_template(service))),
        UnitFile(drop_in_path(service.name), _text(_drop_in(service))),
    )


def _text(lines: Iterator[str]) -> str:
    return "\n".join([f"{MARKER}; `overspill service remove` takes it away.", *lines]) + "\n"


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
        # Where nothing loaded nvidia-uvm yet, CUDA does so through a setuid program, which NoNewPrivileges stops.
        yield "ExecStartPre=-+/usr/bin/nvidia-modprobe -c=0 -u"
    yield f"ExecStart={quote_program(service.command[0])} -m overspill serve %I"
    yield from _user(service)
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
        # A user's manager may not make the namespaces these need.
        # Not PrivateDevices, DevicePolicy or ProtectClock (which implies a list of devices): CUDA needs /dev/nvidia*.
        # Not MemoryDenyWriteExecute: kernels are compiled. Not ProtectHome: models are in the cache of a home.
        yield "NoNewPrivileges=yes"
        yield "PrivateTmp=yes"
        yield "ProtectSystem=full"
        yield "ProtectControlGroups=yes"
        yield "ProtectKernelLogs=yes"
        yield "ProtectKernelModules=yes"
        yield "ProtectHostname=yes"
        yield "RestrictSUIDSGID=yes"
        yield "RestrictRealtime=yes"
        yield "LockPersonality=yes"
    yield ""
    yield "[Install]"
    yield f"WantedBy={'multi-user' if is_system else 'default'}.target"


def _drop_in(service: Service) -> Iterator[str]:
    program, *arguments = service.command
    yield "[Service]"
    # Empty first: a second ExecStart= would be added to the template's.
    yield "ExecStart="
    yield "ExecStart=" + " ".join([quote_program(program), *map(quote_word, arguments)])
    yield f"MemoryMax={service.memory_max_bytes}"
    yield from _user(service)
    for name, value in service.environment:
        yield f"Environment={quote_assignment(name, value)}"


def _user(service: Service) -> Iterator[str]:
    if service.run_as is not None:
        yield f"User={service.run_as.replace('%', '%%')}"
