"""Foreign vLLM servers, not started by Overspill: found in /proc, shown with their models, stopped only by name."""

import asyncio
import json
import os
import re
import signal
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import psutil

from overspill.flags import without_secrets
from overspill.manager.backend import Identity, identify
from overspill.manager.errors import ManagerError
from overspill.processes import (
    Process,
    argv_of,
    family,
    identity,
    listeners,
    processes,
    ram_of,
    read_process,
    wait_until_none,
)  # fmt: skip
from overspill.upstream import Upstream

PATIENCE_S = 20.0
_ANSWER_S = 1.5
_MAX_ANSWER_BYTES = 1 << 20
_MAX_PORTS = 4
_MAX_MODELS = 50
_MAX_TEXT = 200
_MAX_COMMAND = 100
_MAX_NAME = 120
_INIT = 1
# Titles that vLLM gives to processes below its server (VLLM_PROCESS_NAME_PREFIX).
_TITLE = re.compile(r"VLLM::\w+")
_MODULE = re.compile(r"vllm\.entrypoints\.(openai\.)?(api_server|cli\.main)")
_PYTHON = re.compile(r"python[0-9.]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundServer:
    pid: int
    identity: str
    """Boot and start time: the pid alone may be another process's by now."""
    name: str
    """Name that must be repeated to confirm a stop."""
    user: str
    argv: tuple[str, ...]
    """Command line without secrets."""
    pids: tuple[int, ...]
    """The process and all its descendants."""
    ram_bytes: int
    gpu_bytes: int | None
    """GPU memory; None where the driver does not count by process."""
    port: int | None = None
    url: str | None = None
    """Address where the server answers; None if it does not, as during startup."""
    models: tuple[str, ...] = ()
    version: str | None = None
    needs_key: bool = False
    """Whether the server answers but lists its models only to clients with its key."""
    owner: int | None = None
    """Pid of the running program that owns this engine, such as a script using `LLM()`; not ours to stop."""
    note: str = ""


def find_servers(ours: Collection[int] = (), gpu_bytes: Mapping[int, int | None] | None = None) -> list[FoundServer]:
    """Find servers by /proc alone; `ours` are the root pids of our engines and of the manager, whose children may run
    engines as well; `gpu_bytes` are NVML's figures by pid.

    A vLLM process whose server is gone is listed as well: it may still hold its GPU.
    """
    every = [one for one in processes() if one.is_alive]
    excluded = {one for pid in ours for one in family(pid, every)}
    argvs = {one.pid: argv for one in every if is_vllm(argv := argv_of(one.pid))}
    inside = {below for pid in argvs for below in family(pid, every)[1:]}
    # Wrappers, such as a container's first process, do not look like vLLM, so the outermost match is the server.
    servers = (_server(pid, argvs[pid], every, gpu_bytes) for pid in argvs.keys() - inside - excluded)
    return sorted((server for server in servers if server is not None), key=lambda server: server.pid)


async def look_at(servers: Sequence[FoundServer]) -> list[FoundServer]:
    """The servers, with port, models and version where they answer within a second or two."""
    upstream = Upstream()
    return list(await asyncio.gather(*(_look_at(upstream, server) for server in servers)))


def _server(
    pid: int, argv: list[str], every: Sequence[Process], gpu_bytes: Mapping[int, int | None] | None
) -> FoundServer | None:
    who = identity(pid)
    if who is None:  # the process has ended meanwhile
        return None
    pids = family(pid, every)
    sizes = [size for one, size in (gpu_bytes or {}).items() if one in pids]
    ports = [one.port for one in listeners(one for one in pids if not _is_engine(one))]
    stated = stated_port(argv)
    owner = owner_of(pid) if is_titled(argv) else None
    if owner is not None:
        note = f"the engine of {program_of(owner)}, which is running; to end it, end that program"
    else:
        note = "left over from a server that is gone" if _is_engine(pid) else ""
    if not _shares_our_network(pid):
        note = "in its own network namespace, as in a container, so its server cannot be queried"
    return FoundServer(
        pid=pid,
        identity=who,
        name=served_name(argv),
        user=user_of(pid),
        argv=tuple(without_secrets(argv)),
        pids=tuple(pids),
        ram_bytes=ram_of(pids),
        gpu_bytes=None if gpu_bytes is None or None in sizes else sum(size for size in sizes if size is not None),
        port=stated if stated in ports or not ports else ports[0],
        owner=owner,
        note=note,
    )


def owner_of(pid: int) -> int | None:
    """Pid of the living process that started an engine; None for an engine whose program is gone.

    The kernel hands an orphan to init or to a subreaper such as `systemd --user`, where it looks like their own
    children. Sessions tell them apart: they are inherited, so a process that neither leads its session nor shares its
    parent's was started by another. Where all share one session, as in a container, only init is known to adopt
    orphans. In doubt an engine has an owner: a leftover engine wastes memory, a stopped one loses work.
    """
    process = read_process(pid)
    parent = read_process(process.parent) if process is not None else None
    if process is None or parent is None or process.session not in (parent.session, pid):
        return None
    if parent.pid == _INIT and not _may_run_the_same_program(_INIT, pid):
        return None
    return parent.pid


def _may_run_the_same_program(pid: int, other: int) -> bool:
    """Whether both may run the same interpreter, as a script and its engine do; a script may be a container's init.

    The kernel may hide another process's executable, even from root; its arguments are open to all.
    """
    try:
        return os.readlink(f"/proc/{pid}/exe") == os.readlink(f"/proc/{other}/exe")
    except OSError:
        argv = argv_of(pid)
        return not argv or "python" in argv[0].rsplit("/", 1)[-1] or is_titled(argv)


def program_of(pid: int) -> str:
    """A process in words: its pid, and the beginning of its command without folders, secrets and code."""
    argv = argv_of(pid)
    argv = argv[: argv.index("-c") + 1] if "-c" in argv else argv
    words = [word.rsplit("/", 1)[-1] if word.startswith("/") else word for word in without_secrets(argv)]
    command = _text(" ".join(words)) or ""
    command = f"{command[: _MAX_COMMAND - 1]}…" if len(command) > _MAX_COMMAND else command
    return f"process {pid} ({command})"


def _is_engine(pid: int) -> bool:
    """Whether the process is an engine or a worker, whose ports serve each other and not clients."""
    argv = argv_of(pid)
    return is_titled(argv) and not argv[0].startswith("VLLM::APIServer")


async def _look_at(upstream: Upstream, server: FoundServer) -> FoundServer:
    if not _shares_our_network(server.pid):
        return server
    places = [(one.host, one.port) for one in listeners(pid for pid in server.pids if not _is_engine(pid))]
    # Another user's open files are hidden, so the port is known only from the arguments.
    if not places and server.port is not None and not server.note:
        places = [("127.0.0.1", server.port)]
    scheme = "https" if flag(serve_arguments(server.argv) or (), "--ssl-keyfile") is not None else "http"
    for host, port in sorted(places, key=lambda place: place[1] != server.port)[:_MAX_PORTS]:
        url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        status, answer = await _get(upstream, url, "/v1/models")
        models, needs_key = _models(answer), status == 401
        if not needs_key and models is None:
            continue
        _, about = await _get(upstream, url, "/version")
        version = _text(about.get("version")) if isinstance(about, dict) else None
        return replace(server, port=port, url=url, models=models or (), version=version, needs_key=needs_key)
    return server


async def _get(upstream: Upstream, url: str, path: str) -> tuple[int, Any]:
    """Status and JSON of an answer; 0 and None where missing."""
    answer = await upstream.ask(url, path, _ANSWER_S, most_bytes=_MAX_ANSWER_BYTES)
    with suppress(ValueError, RecursionError):
        return (0, None) if answer is None else (answer[0], json.loads(answer[1]))
    return 0 if answer is None else answer[0], None


def _models(answer: Any) -> tuple[str, ...] | None:
    if not isinstance(answer, dict) or not isinstance(answer.get("data"), list):
        return None
    names = [_text(model.get("id")) for model in answer["data"][:_MAX_MODELS] if isinstance(model, dict)]
    return tuple(name for name in names if name)


def _text(value: Any) -> str | None:
    return "".join(one if one.isprintable() else "?" for one in value[:_MAX_TEXT]) if isinstance(value, str) else None


def user_of(pid: int) -> str:
    with suppress(psutil.Error):
        return psutil.Process(pid).username()
    return ""


def _shares_our_network(pid: int) -> bool:
    """Whether the process shares our network, unlike some containers; True if unknown."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net")
    except OSError:
        return True


# Stopping


def stop_found(
    pid: int, expected: str, confirm_name: str, *, ours: Collection[int] = (), patience_s: float = PATIENCE_S
) -> bool:
    """End a server and its descendants; True if some had to be killed. Blocks for little more than `patience_s`.

    Refuses anything but a vLLM process that is still the one shown, is confirmed by its name, is not one of `ours`,
    and is not the engine of a running program: a web request must not become a way to end any process.
    """
    every = [one for one in processes() if one.is_alive]
    targets = [who for one in family(pid, every) if (who := identify(one)) is not None]
    if not targets or targets[0] != Identity(pid, expected):
        raise ManagerError(f"process {pid} has ended, or its pid was reused; nothing was stopped. Look again")
    argv = argv_of(pid)
    if pid == os.getpid() or any(pid in family(one, every) for one in ours) or not is_vllm(argv):
        raise ManagerError(f"process {pid} is not one of the vLLM servers found; nothing was stopped")
    if is_titled(argv) and (owner := owner_of(pid)) is not None:
        raise ManagerError(
            f"process {pid} is the engine of {program_of(owner)}, which is running; nothing was stopped. To end it, "
            "end that program"
        )
    if confirm_name != (name := served_name(argv)):
        raise ManagerError(
            f"to stop process {pid}, confirm with its name, {name!r}, not {confirm_name!r:.100}. Nothing was stopped"
        )

    def living() -> list[int]:
        return [one.pid for one in targets if one.is_alive]

    # vLLM's server ends its engine itself and cleanly if only the server gets SIGTERM.
    _signal(targets[0], signal.SIGTERM)
    if wait_until_none(living, patience_s):
        return False
    for one in targets:
        _signal(one, signal.SIGKILL)
    if not wait_until_none(living, 5.0):
        raise ManagerError(
            f"process {living()[0]} was killed and has not ended: it hangs in the kernel, maybe in a driver"
        )
    return True


def _signal(who: Identity, sign: signal.Signals) -> None:
    try:
        who.signal(sign)
    except PermissionError as error:
        raise ManagerError(
            f"process {who.pid} belongs to {user_of(who.pid) or 'another user'}, and the manager's user may not "
            "stop it; stop it as that user"
        ) from error
    except OSError as error:
        raise ManagerError(f"process {who.pid} cannot be reached: {error.strerror}; nothing was stopped") from error


# Command lines of vLLM's processes


def serve_arguments(argv: Sequence[str]) -> list[str] | None:
    """Arguments after `vllm serve`; None for another command, including a shell that got this one as a string."""
    words = list(argv)
    if words and _PYTHON.fullmatch(PurePath(words[0]).name):
        words = words[1:]
        while words and words[0].startswith("-") and words[0] != "-m":
            words = words[1:]
        if words[:1] == ["-m"]:
            is_ours = len(words) > 1 and (_MODULE.fullmatch(words[1]) or words[1] == "vllm")
            words = [words[1], *words[2:]] if is_ours else []
    if not words:
        return None
    program, rest = PurePath(words[0]).name, words[1:]
    if _MODULE.fullmatch(program) and not program.endswith("main"):
        return rest
    if (program == "vllm" or _MODULE.fullmatch(program)) and rest[:1] == ["serve"]:
        return rest[1:]
    return rest if words[0].endswith("vllm/entrypoints/openai/api_server.py") else None


def is_vllm(argv: Sequence[str]) -> bool:
    return serve_arguments(argv) is not None or is_titled(argv)


def is_titled(argv: Sequence[str]) -> bool:
    """Whether the process is vLLM's own, below a server: these overwrite their command line with a title."""
    return bool(argv) and _TITLE.match(argv[0]) is not None


def flag(arguments: Sequence[str], *names: str) -> str | None:
    """Value of a flag; the last occurrence wins, as in vLLM."""
    value = None
    for at, word in enumerate(arguments):
        given, equals, rest = word.partition("=")
        if given.replace("_", "-") in names:
            value = rest if equals else next(iter(arguments[at + 1 : at + 2]), None)
    return value


def served_name(argv: Sequence[str]) -> str:
    """Name shown on the page and typed to confirm a stop: the model's, or vLLM's process title."""
    arguments = serve_arguments(argv)
    if arguments is None:
        title = _TITLE.match(argv[0]) if argv else None
        return title[0] if title is not None else "vllm"
    positional = arguments[0] if arguments and not arguments[0].startswith("-") else None
    name = flag(arguments, "--served-model-name") or flag(arguments, "--model", "--model-tag") or positional or "vllm"
    return "".join(one if one.isprintable() else "?" for one in name)[:_MAX_NAME]


def stated_port(argv: Sequence[str]) -> int:
    port = flag(serve_arguments(argv) or (), "--port") or ""
    return int(port) if port.isdecimal() and int(port) < 65536 else 8000
