"""Setup of a manager: its address, the folders that models may come from, and what the web may set."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from overspill.address import is_loopback
from overspill.files import state_folder
from overspill.manager.errors import ManagerError
from overspill.manager.needs import NO_LIMIT, Memory
from overspill.manager.upstreams import Server, parse_servers
from overspill.settings import BY_NAME

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 7999
SET_PASSWORD = "overspill manager password"
ADD_KEY = "overspill manager keys add NAME"
_USUAL_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    folder: Path
    """The manager's own folder: logs, records of engines and jobs."""
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    models_folders: tuple[Path, ...] = ()
    """Folders that models named over the web may come from, besides the hub's cache."""
    public_url: str = ""
    """Address at which browsers reach the manager through a TLS proxy, as https://manager.example."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names that the manager answers to, besides its own."""
    allowed_origins: tuple[str, ...] = ()
    """Sites whose scripts may use the gateway."""
    any_vllm_flag: bool = False
    """Whether vLLM's flags that run code or open files may be set over the web."""
    memory: Memory | None = None
    """Memory that all engines together may hold; None for what is free on the machine."""
    upstreams: tuple[Server, ...] = ()
    """Other servers whose models the gateway serves too."""
    keeps_engines: bool = False
    """Whether engines keep running when the manager ends."""

    @property
    def public_flag(self) -> str:
        """The flag that makes the manager reachable from elsewhere, such as through a proxy; empty if none does."""
        if self.public_url:
            return f"--public-url {self.public_url}"
        return f"--allow-host {self.allowed_hosts[0]}" if self.allowed_hosts else ""

    @property
    def is_local(self) -> bool:
        """Whether all clients are on this machine; never with a proxy, behind which all of them seem to be."""
        return is_loopback(self.host) and not self.public_flag


def make_setup(
    *, models_folder: Sequence[Path] | None, public_url: str | None, allow_host: Iterable[str] | None,
    allow_origin: Iterable[str] | None, ram: str | None, gpu_memory: str | None, keep_engines: bool,
    upstream: Iterable[str] | None = None, upstream_key: Iterable[str] | None = None, **same: Any,
) -> Setup:  # fmt: skip
    """The setup that the flags of `overspill manager` describe; `same` holds fields that are used as they are."""
    for folder in models_folder or ():
        if not folder.is_dir():
            raise ManagerError(f"--models-folder {folder} is not a folder; make it, or name another")
    return Setup(
        folder=own_folder(),
        models_folders=tuple(folder.resolve() for folder in models_folder or ()),
        public_url=origin_of(public_url, "--public-url") if public_url else "",
        allowed_hosts=tuple(allow_host or ()),
        allowed_origins=tuple(origin_of(one, "--allow-origin") for one in allow_origin or ()),
        memory=limit(ram, gpu_memory),
        upstreams=parse_servers(upstream or (), upstream_key or ()),
        keeps_engines=keep_engines,
        **same,
    )


def require_protection(setup: Setup, *, is_protected: bool) -> None:
    """Raise if other machines can reach the manager while it has neither a key nor a password."""
    if is_protected or setup.is_local:
        return
    if is_loopback(setup.host):
        flag, instead = setup.public_flag, "leave that out"
    else:
        flag, instead = f"--host {setup.host}", f"use --host {DEFAULT_HOST}"
    raise ManagerError(
        f"{flag} lets other machines reach the manager, which starts and stops programs, and it has neither a "
        f"password nor an API key. Set one with: {SET_PASSWORD}, or: {ADD_KEY}. Or {instead}"
    )


def own_folder(environ: Mapping[str, str] = os.environ) -> Path:
    state = state_folder(environ)
    if state is None:
        raise ManagerError("there is no home folder for the manager's records; set XDG_STATE_HOME to a folder")
    return state / "manager"


def limit(ram: str | None, gpu_memory: str | None) -> Memory | None:
    """Memory limit from two flags, None if neither is given; without one, what is free counts. `gpu_memory` is for each
    GPU."""
    if ram is None and gpu_memory is None:
        return None
    return Memory(
        gpus=(NO_LIMIT if gpu_memory is None else BY_NAME["gpu_memory"].parse(gpu_memory),),
        ram_bytes=NO_LIMIT if ram is None else BY_NAME["ram"].parse(ram),
    )


def origin_of(given: str, flag: str) -> str:
    """The site as browsers write it in `Origin`: scheme, name, and the port unless it is the scheme's default."""
    try:
        parts = urlsplit(given)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in _USUAL_PORTS or not parts.hostname or parts.path not in ("", "/") or "@" in parts.netloc:
        raise ManagerError(f"{flag} {given} is not a site; write scheme and host, as https://chat.example")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}" + ("" if port in (None, _USUAL_PORTS[parts.scheme]) else f":{port}")
