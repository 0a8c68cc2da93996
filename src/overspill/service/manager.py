"""The manager's own unit: one that leaves engines alone when the manager crashes, and has it end them when it stops."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from overspill.registry.place import VARIABLE as DATABASE_URL
from overspill.registry.place import find_place
from overspill.service import units
from overspill.service.planned import kept_environment
from overspill.service.units import Mode, UnitFile
from overspill.settings import SETTINGS

UNIT = "overspill-manager.service"


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerService:
    mode: Mode
    command: tuple[str, ...]
    """The interpreter and its arguments."""
    environment: tuple[tuple[str, str], ...] = ()
    run_as: str | None = None
    """The user of a system service; a user's service is that user's."""

    @property
    def unit(self) -> str:
        return UNIT

    @property
    def files(self) -> tuple[UnitFile, ...]:
        return (UnitFile(PurePosixPath(UNIT), units.marked(_lines(self), "manager ")),)


def manager_service(
    given: Mapping[str, object], *, mode: Mode, run_as: str | None, program: str, environment: Mapping[str, str]
) -> ManagerService:
    """`given` is what the manager's flags were given, by their names; folders by their whole paths."""
    return ManagerService(
        mode=mode,
        command=(program, "-m", "overspill", "manager", *_flags(given)),
        environment=tuple(environment.items()),
        run_as=run_as,
    )


def manager_environment(program: str, environment: Mapping[str, str], *, for_oneself: bool) -> dict[str, str]:
    """Engines are planned when they start, so that what decides their plans is kept too, and no secret."""
    kept = kept_environment(program, environment, for_oneself=for_oneself)
    if not for_oneself:
        return kept
    # A GPU that is only planned for is none to serve on; and nobody leaves `--force` switched on.
    settings = [one.variable for one in SETTINGS if one.name not in ("gpu", "force")]
    kept |= {name: environment[name] for name in settings if environment.get(name)}
    if not left_out(environment, for_oneself=True) and environment.get(DATABASE_URL):
        kept[DATABASE_URL] = environment[DATABASE_URL]
    return kept


def left_out(environment: Mapping[str, str], *, for_oneself: bool) -> list[str]:
    """What the unit would need, and cannot hold."""
    if not for_oneself or not environment.get(DATABASE_URL) or find_place(environ=environment).file is not None:
        return []
    return [
        f"{DATABASE_URL} names a server and may hold a password, and everybody may read a unit: it is not in the unit. "
        "Write it into the file that the unit's EnvironmentFile= names, readable by its owner only"
    ]


def _flags(given: Mapping[str, object]) -> Iterator[str]:
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            yield flag
        elif isinstance(value, list | tuple):
            for each in value:
                yield from (flag, str(each))
        elif value is not None and value is not False:
            yield from (flag, str(value))


def _lines(service: ManagerService) -> Iterator[str]:
    is_system = service.mode is Mode.SYSTEM
    yield "[Unit]"
    yield "Description=Overspill manager"
    if is_system:
        # A user's manager knows no such targets.
        yield "Wants=network-online.target"
        yield "After=network-online.target nvidia-persistenced.service"
    yield "StartLimitIntervalSec=10min"
    yield "StartLimitBurst=5"
    yield ""
    yield "[Service]"
    # Started is a manager that listens; models that it starts by itself come later.
    yield "Type=notify"
    yield "NotifyAccess=main"
    if is_system:
        yield units.LOAD_UVM
    yield units.exec_start(service.command)
    yield from units.run_as(service.run_as)
    yield "WorkingDirectory=~"
    yield "Environment=PYTHONUNBUFFERED=1"
    yield from units.environment(service.environment)
    # Settings and secrets (HF_TOKEN) that do not belong in a unit, which everybody may read.
    yield "EnvironmentFile=-%E/overspill/environment"
    yield "Restart=on-failure"
    yield "RestartSec=2s"
    # A mistake in the settings stays one.
    yield "RestartPreventExitStatus=2"
    yield "# Of the manager alone: engines outlive its crash, and the next one finds them. Asked to stop, it ends them."
    yield "KillMode=process"
    yield "# An engine that takes too much RAM is killed; the manager tells of it, and does not end with it."
    yield "OOMPolicy=continue"
    # A job is given a minute to end, and then engines another one each, all at once.
    yield "TimeoutStopSec=4min"
    # For engines, which pin memory.
    yield "LimitMEMLOCK=infinity"
    yield "LimitNOFILE=65536"
    yield "StandardOutput=journal"
    yield "StandardError=journal"
    yield "SyslogIdentifier=overspill-manager"
    if is_system:
        # Not PrivateTmp: systemd empties it when it starts the manager again, under engines that go on.
        yield from units.hardening()
    yield from units.wanted_by(service.mode)
