"""How a manager is asked to run: address, folders that models may come from, and what the web may set."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from overspill.address import is_loopback
from overspill.folders import state_folder
from overspill.kv.sizes import parse_size
from overspill.manager.errors import ManagerError
from overspill.manager.needs import Memory
from overspill.manager.security.binding import DEFAULT_HOST
from overspill.manager.security.sites import origin_of, origins

DEFAULT_PORT = 7999
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    folder: Path
    """The manager's own: logs, records of engines and jobs."""
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    models_folders: tuple[Path, ...] = ()
    """Beside the hub's cache, where models that are named over the web may lie."""
    public_url: str = ""
    """How browsers reach it through a proxy that has TLS, as https://manager.example."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which it may be asked, beside its own."""
    allowed_origins: tuple[str, ...] = ()
    """Sites whose scripts may use the gateway."""
    any_vllm_flag: bool = False
    """Whether flags of vLLM's that run code or open files may be set over the web."""
    memory: Memory | None = None
    """What all engines together may hold; without it, what is free on the machine."""
    keeps_engines: bool = False
    """Whether engines go on when the manager ends."""


def make_setup(
    *,
    host: str,
    port: int,
    models_folder: Iterable[Path] | None,
    public_url: str | None,
    allow_host: Iterable[str] | None,
    allow_origin: Iterable[str] | None,
    ram: str | None,
    gpu_memory: str | None,
    any_vllm_flag: bool,
    keep_engines: bool,
) -> Setup:
    """Of what the flags of `overspill manager` were given, by their names; says what is wrong with one."""
    return Setup(
        folder=own_folder(),
        host=host,
        port=port,
        models_folders=models_folders(models_folder or ()),
        public_url=origin_of(public_url, "--public-url") if public_url else "",
        allowed_hosts=tuple(allow_host or ()),
        allowed_origins=origins(allow_origin or ()),
        any_vllm_flag=any_vllm_flag,
        memory=limit(ram, gpu_memory),
        keeps_engines=keep_engines,
    )


def public_flag(setup: Setup) -> str:
    """The flag by which it says that it is reached from elsewhere; empty if there is none."""
    if setup.public_url:
        return f"--public-url {setup.public_url}"
    return f"--allow-host {setup.allowed_hosts[0]}" if setup.allowed_hosts else ""


def is_for_this_machine_only(setup: Setup) -> bool:
    """Whether whoever asks is on this machine. Behind a proxy everybody seems to be."""
    return is_loopback(setup.host) and not public_flag(setup)


def own_folder(environ: Mapping[str, str] = os.environ) -> Path:
    state = state_folder(environ)
    if state is None:
        raise ManagerError("there is no home to keep the manager's records in; set XDG_STATE_HOME to a folder")
    return state / "manager"


def models_folders(given: Iterable[Path]) -> tuple[Path, ...]:
    """Whole paths, without links."""
    folders = []
    for folder in given:
        if not folder.is_dir():
            raise ManagerError(f"--models-folder {folder} is not a folder; make it, or name another")
        folders.append(folder.resolve())
    return tuple(folders)


def limit(ram: str | None, gpu_memory: str | None) -> Memory | None:
    """None if neither is given; of the other there is no limit then but the machine's."""
    if ram is None and gpu_memory is None:
        return None
    return Memory(
        gpu_bytes=_NO_LIMIT if gpu_memory is None else parse_size(gpu_memory),
        ram_bytes=_NO_LIMIT if ram is None else parse_size(ram),
    )
