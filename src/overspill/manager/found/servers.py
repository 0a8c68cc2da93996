"""vLLM servers that Overspill did not start: found by /proc, and asked what they serve."""

import asyncio
import json
import os
import pwd
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import httpx

from overspill.flags import without_secrets
from overspill.manager.found.listening import Listener, listeners_by_inode, ports_of, shares_our_network
from overspill.manager.found.vllm_argv import has_tls, is_titled, is_vllm, served_name, stated_port
from overspill.manager.watching.procfs import children_of_all, kilobytes, read_argv, read_stat, tree
from overspill.processes import identity

_ANSWER_S = 1.5
_MAX_ANSWER_BYTES = 1 << 20
_MAX_PORTS = 4
_MAX_MODELS = 50
_MAX_TEXT = 200
_MAX_COMMAND = 100
_INIT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundServer:
    pid: int
    identity: str
    """Boot and start time: the number alone may be another process's by now."""
    name: str
    """What a confirmation has to say."""
    user: str
    argv: tuple[str, ...]
    """Without secrets."""
    pids: tuple[int, ...]
    """It and all processes below it."""
    ram_bytes: int
    gpu_bytes: int | None
    """None where the driver does not count by process."""
    port: int | None = None
    url: str | None = None
    """Where it answers; None if it does not, as while it starts."""
    models: tuple[str, ...] = ()
    version: str | None = None
    needs_key: bool = False
    """It answers, and tells its models only to those who have its key."""
    owner: int | None = None
    """The running program, not a server, whose engine it is: a script that uses `LLM()`. It is not ours to stop."""
    note: str = ""


def find_servers(ours: Collection[int] = (), gpu_bytes: Mapping[int, int | None] | None = None) -> list[FoundServer]:
    """By /proc alone; `ours` are the first processes of our engines, and the manager's, whose children may run engines
    as well; `gpu_bytes` are NVML's figures by process.

    A process of vLLM's whose server is gone is listed as well: it may still hold its GPU.
    """
    children = children_of_all()
    excluded = {one for pid in ours for one in tree(pid, children)}
    argvs = {pid: argv for some in children.values() for pid in some if is_vllm(argv := read_argv(pid))}
    inside = {below for pid in argvs for below in tree(pid, children)[1:]}
    # Wrappers, such as a container's first process, do not look like vLLM, so the outermost that does is the server.
    servers = (_server(pid, argvs[pid], children, gpu_bytes) for pid in argvs.keys() - inside - excluded)
    return sorted((server for server in servers if server is not None), key=lambda server: server.pid)


async def look_at(servers: Sequence[FoundServer]) -> list[FoundServer]:
    """The same with port, models and version, as each tells of itself within a second or two."""
    # trust_env: a proxy that is set for the internet must not be asked for this machine's ports.
    async with httpx.AsyncClient(timeout=_ANSWER_S, trust_env=False, verify=False) as client:
        return list(await asyncio.gather(*(_look_at(client, server) for server in servers)))


def _server(
    pid: int, argv: list[str], children: dict[int, list[int]], gpu_bytes: Mapping[int, int | None] | None
) -> FoundServer | None:
    who = identity(pid)
    if who is None:  # it ended meanwhile
        return None
    pids = tree(pid, children)
    sizes = [size for one, size in (gpu_bytes or {}).items() if one in pids]
    listeners = ports_of([one for one in pids if not _is_engine(one)], listeners_by_inode(pid))
    owner = owner_of(pid) if is_titled(argv) else None
    if owner is not None:
        note = f"the engine of {program_of(owner)}, which is running; to end it, end that program"
    else:
        note = "its server is gone, and it is left over" if _is_engine(pid) else ""
    if not shares_our_network(pid):
        note = "in a network of its own, as in a container, so it is not asked"
    return FoundServer(
        pid=pid,
        identity=who,
        name=served_name(argv),
        user=user_of(pid),
        argv=tuple(without_secrets(argv)),
        pids=tuple(pids),
        ram_bytes=sum(_ram_bytes(one) for one in pids),
        gpu_bytes=None if gpu_bytes is None or None in sizes else sum(size for size in sizes if size is not None),
        port=_likely_port(listeners, argv),
        owner=owner,
        note=note,
    )


def owner_of(pid: int) -> int | None:
    """The living process that started an engine; None for an engine whose program is gone.

    The kernel gives an orphan to init or to a subreaper, such as `systemd --user`, and does not tell it from their own
    children. A session does: it is inherited, so a process that neither leads its session nor is in that of its parent
    was started by another. Where all are in one session, as in a container, only init is known to take orphans.
    Whatever cannot be told is somebody's: an engine that is left over wastes memory, one that is stopped loses work.
    """
    stat = read_stat(pid)
    parent = read_stat(stat.parent) if stat is not None else None
    if stat is None or parent is None or stat.session not in (parent.session, pid):
        return None
    if stat.parent == _INIT and not _may_run_the_same_program(_INIT, pid):
        return None
    return stat.parent


def _may_run_the_same_program(pid: int, other: int) -> bool:
    """An engine has its script's interpreter, and a script may be the first process of a container.

    The kernel may hide another process's program, even from root; its arguments are open to all.
    """
    try:
        return os.readlink(f"/proc/{pid}/exe") == os.readlink(f"/proc/{other}/exe")
    except OSError:
        argv = read_argv(pid)
        return not argv or "python" in argv[0].rsplit("/", 1)[-1] or is_titled(argv)


def program_of(pid: int) -> str:
    """A process for a sentence: its number, and the beginning of its command without folders, secrets and code."""
    argv = read_argv(pid)
    argv = argv[: argv.index("-c") + 1] if "-c" in argv else argv
    words = [word.rsplit("/", 1)[-1] if word.startswith("/") else word for word in without_secrets(argv)]
    command = _text(" ".join(words)) or ""
    return (
        f"process {pid} ({command[: _MAX_COMMAND - 1]}…)"
        if len(command) > _MAX_COMMAND
        else f"process {pid} ({command})"
    )


def _is_engine(pid: int) -> bool:
    """Engines and workers listen too, for each other."""
    argv = read_argv(pid)
    return is_titled(argv) and not argv[0].startswith("VLLM::APIServer")


def _likely_port(listeners: Sequence[Listener], argv: Sequence[str]) -> int | None:
    ports = [listener.port for listener in listeners]
    stated = stated_port(argv)
    return stated if stated in ports or not ports else ports[0]


async def _look_at(client: httpx.AsyncClient, server: FoundServer) -> FoundServer:
    if not shares_our_network(server.pid):
        return server
    listeners = ports_of([pid for pid in server.pids if not _is_engine(pid)], listeners_by_inode(server.pid))
    # Of another user's process the files are hidden, and the port is known from its arguments only.
    if not listeners and server.port is not None and not server.note:
        listeners = [Listener("127.0.0.1", server.port)]
    scheme = "https" if has_tls(server.argv) else "http"
    first_the_likely = sorted(listeners, key=lambda listener: listener.port != server.port)
    for listener in first_the_likely[:_MAX_PORTS]:
        host = f"[{listener.host}]" if ":" in listener.host else listener.host
        url = f"{scheme}://{host}:{listener.port}"
        status, told = await _get(client, f"{url}/v1/models")
        needs_key = status == httpx.codes.UNAUTHORIZED
        if not needs_key and _models(told) is None:
            continue
        _, version = await _get(client, f"{url}/version")
        return replace(
            server,
            port=listener.port,
            url=url,
            models=_models(told) or (),
            version=_text(version.get("version")) if isinstance(version, dict) else None,
            needs_key=needs_key,
        )
    return server


async def _get(client: httpx.AsyncClient, url: str) -> tuple[int, Any]:
    """Status and JSON; 0 and None for whatever is not an answer. It may be anybody's program."""
    body = bytearray()
    try:
        async with asyncio.timeout(_ANSWER_S), client.stream("GET", url) as answer:
            async for piece in answer.aiter_raw():
                body += piece
                if len(body) > _MAX_ANSWER_BYTES:
                    return 0, None
            return answer.status_code, json.loads(bytes(body))
    except json.JSONDecodeError:
        return answer.status_code, None
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError, RecursionError, OSError):
        return 0, None


def _models(told: Any) -> tuple[str, ...] | None:
    if not isinstance(told, dict) or not isinstance(told.get("data"), list):
        return None
    names = [_text(model.get("id")) for model in told["data"][:_MAX_MODELS] if isinstance(model, dict)]
    return tuple(name for name in names if name)


def _text(value: Any) -> str | None:
    return "".join(one if one.isprintable() else "?" for one in value[:_MAX_TEXT]) if isinstance(value, str) else None


def user_of(pid: int) -> str:
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return ""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # of another container
        return str(uid)


def _ram_bytes(pid: int) -> int:
    with suppress(OSError, ValueError), open(f"/proc/{pid}/status", "rb") as file:
        return sum(kilobytes(file.read(), (b"RssAnon", b"RssShmem")).values())
    return 0
