"""vLLM servers of others: found with what they serve and take, and stopped only by name. With real processes."""

import asyncio
import json
import os
import pwd
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from overspill.kv.sizes import MiB
from overspill.manager.errors import ManagerError
from overspill.manager.foreign import (
    FoundServer,
    find_servers,
    look_at,
    serve_arguments,
    served_name,
    stated_port,
    stop_found,
)
from overspill.processes import Listener, argv_of, family, identity, listeners, processes
from tests.llm_script import ENGINE, running_script

LOOKALIKE = Path(__file__).parent / "vllm_lookalike.py"


@dataclass(frozen=True)
class Running:
    process: subprocess.Popen[str]
    port: int

    @property
    def pid(self) -> int:
        return self.process.pid

    def found(self) -> FoundServer:
        (server,) = [server for server in find_servers() if server.pid == self.pid]
        return server

    def looked_at(self) -> FoundServer:
        (server,) = asyncio.run(look_at([self.found()]))
        return server


Start = Callable[..., Running]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A process as `vllm serve` is one: Python with a script `vllm`."""
    started: list[subprocess.Popen[str]] = []
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(LOOKALIKE.read_text())

    def start(*behaviour: str, argv: tuple[str, ...] = SERVE) -> Running:
        process = subprocess.Popen(
            [sys.executable, program, *argv], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "LOOKALIKE": json.dumps(behaviour)},
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None
        return Running(process, int(process.stdout.readline()))

    yield start
    for process in started:
        for pid in reversed(family(process.pid, processes())):
            if identity(pid) is not None:
                os.kill(pid, signal.SIGKILL)
        process.communicate()


SERVE = ("serve", "Qwen/Qwen3-8B", "--port", "8000", "--api-key", "geheim")


def child_of(server: Running) -> int:
    """The engine, once it has its title and its memory."""
    while True:
        for pid in family(server.pid, processes())[1:]:
            status = Path(f"/proc/{pid}/status").read_text()
            if argv_of(pid)[0] == "VLLM::EngineCore" and int(status.split("VmRSS:")[1].split()[0]) > 32 * 1024:
                return pid
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    return identity(pid) is not None


def test_a_found_server_shows_models_and_memory_but_no_secrets(start: Start) -> None:
    server = start("--models", "qwen", "lora-1")
    found = server.looked_at()
    assert found.identity == identity(server.pid) and found.name == "Qwen/Qwen3-8B"
    assert found.user == pwd.getpwuid(os.getuid()).pw_name
    assert (found.port, found.url) == (server.port, f"http://127.0.0.1:{server.port}"), "what it listens on, not says"
    assert (found.models, found.version, found.needs_key) == (("qwen", "lora-1"), "0.32.0", False)
    assert found.argv[-2:] == ("--api-key", "***") and "geheim" not in repr(found)
    assert found.ram_bytes > MiB and found.gpu_bytes is None


def test_an_engines_memory_counts_for_its_server(start: Start) -> None:
    server = start("--has-child")
    engine = child_of(server)
    servers = find_servers(gpu_bytes={engine: 7 * MiB, server.pid: MiB, 1: 99 * MiB})
    assert engine not in [one.pid for one in servers]
    (found,) = [one for one in servers if one.pid == server.pid]
    assert set(found.pids) == {server.pid, engine}
    assert found.ram_bytes > 32 * MiB and found.gpu_bytes == 8 * MiB
    (uncounted,) = [one for one in find_servers(gpu_bytes={engine: None}) if one.pid == server.pid]
    assert uncounted.gpu_bytes is None


def test_an_orphaned_engine_is_found_and_can_be_stopped(start: Start) -> None:
    """It may hold a GPU."""
    server = start("--has-child")
    engine = child_of(server)
    server.process.kill()
    server.process.wait()
    try:
        (found,) = [one for one in find_servers() if one.pid == engine]
        assert (found.name, found.note) == ("VLLM::EngineCore", "left over from a server that is gone")
        assert asyncio.run(look_at([found])) == [found]
        assert not stop_found(engine, found.identity, "VLLM::EngineCore")
        assert not is_alive(engine)
    finally:
        if is_alive(engine):
            os.kill(engine, signal.SIGKILL)


def test_an_engine_of_a_running_script_is_not_left_over(tmp_path: Path) -> None:
    with running_script(tmp_path) as (process, engine):
        (found,) = [one for one in find_servers() if one.pid == engine]
        assert f"process {process.pid} (" in found.note and "batch.py" in found.note and "is running" in found.note
        assert "left over" not in found.note and "geheim" not in repr(found)
        assert found.owner == process.pid
        with pytest.raises(ManagerError, match=rf"engine of process {process.pid} .*batch\.py.*nothing was stopped"):
            stop_found(engine, found.identity, found.name)
        assert is_alive(engine)


def test_a_scripts_engine_can_be_stopped_once_the_script_is_gone(tmp_path: Path) -> None:
    with running_script(tmp_path) as (process, engine):
        process.kill()
        process.wait()
        (found,) = [one for one in find_servers() if one.pid == engine]
        assert (found.owner, found.note) == (None, "left over from a server that is gone")
        stop_found(engine, found.identity, found.name)
        assert not is_alive(engine)


# It takes orphans, as `systemd --user` does; its child starts an engine in a session of its own, and ends.
SUBREAPER = """
import ctypes, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
print(int(subprocess.check_output([sys.executable, "-c", sys.argv[1]], start_new_session=True)), flush=True)
sys.stdin.read()
"""


def test_an_engine_that_a_subreaper_took_over_is_left_over() -> None:
    command = [sys.executable, "-c", SUBREAPER, ENGINE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reaper:
        assert reaper.stdout is not None
        engine = int(reaper.stdout.readline())
        try:
            while argv_of(engine)[:1] != ["VLLM::EngineCore"]:
                time.sleep(0.05)
            assert engine in family(reaper.pid, processes()), "it is a child of the subreaper now"
            (found,) = [one for one in find_servers() if one.pid == engine]
            assert (found.owner, found.note) == (None, "left over from a server that is gone")
            stop_found(engine, found.identity, found.name)
            assert not is_alive(engine)
        finally:
            if is_alive(engine):
                os.kill(engine, signal.SIGKILL)


def test_our_own_engines_are_not_found_nor_stopped(start: Start) -> None:
    server = start()
    who = server.found().identity
    assert server.pid not in [one.pid for one in find_servers(ours=[server.pid])]
    # Below a process of ours, as a guard's server is.
    assert server.pid not in [one.pid for one in find_servers(ours=[os.getpid()])]
    with pytest.raises(ManagerError, match="is not one of the vLLM servers found; nothing was stopped"):
        stop_found(server.pid, who, "Qwen/Qwen3-8B", ours=[server.pid])
    assert is_alive(server.pid)


@pytest.mark.parametrize("behaviour", ["--hangs", "--huge", "--needs-key"])
def test_a_misbehaving_server_is_still_listed(start: Start, behaviour: str) -> None:
    found = start(behaviour).looked_at()
    assert (found.models, found.needs_key) == ((), behaviour == "--needs-key")
    assert (found.url is not None) == (behaviour == "--needs-key")
    assert found.name == "Qwen/Qwen3-8B"


def test_a_server_that_vanishes_in_between_is_no_error(start: Start) -> None:
    server = start()
    found = server.found()
    server.process.kill()
    server.process.wait()
    assert server.pid not in [one.pid for one in find_servers()]
    (looked_at,) = asyncio.run(look_at([found]))
    assert (looked_at.models, looked_at.url) == ((), None)
    with pytest.raises(ManagerError, match="has ended, or its pid was reused"):
        stop_found(found.pid, found.identity, found.name)


def test_processes_that_come_and_go_do_not_disturb_the_search() -> None:
    churn = subprocess.Popen(["sh", "-c", "while true; do true & /bin/true; done"], start_new_session=True)
    try:
        for _ in range(20):
            find_servers()
    finally:
        os.killpg(churn.pid, signal.SIGKILL)
        churn.wait()


def test_a_server_stops_when_it_is_named_and_its_engine_with_it(start: Start) -> None:
    server = start("--has-child")
    engine = child_of(server)
    found = server.found()
    assert stop_found(found.pid, found.identity, found.name, patience_s=0.5), "the engine had to be killed"
    assert server.process.wait() == -signal.SIGTERM
    assert not is_alive(engine)


def test_a_server_that_ignores_sigterm_is_killed_in_the_end(start: Start) -> None:
    server = start("--ignores-sigterm")
    assert stop_found(server.pid, server.found().identity, "Qwen/Qwen3-8B", patience_s=0.3)
    assert server.process.wait() == -signal.SIGKILL


def test_stop_refuses_another_name_or_another_process(start: Start) -> None:
    server = start()
    who = server.found().identity
    for name in ("", "qwen", "Qwen/Qwen3-8B ", str(server.pid)):
        with pytest.raises(ManagerError, match="confirm with its name, 'Qwen/Qwen3-8B'"):
            stop_found(server.pid, who, name)
    boot, _, began = who.partition(":")
    with pytest.raises(ManagerError, match="its pid was reused"):
        stop_found(server.pid, f"{boot}:{int(began) - 1}", "Qwen/Qwen3-8B")
    assert is_alive(server.pid)


def test_no_other_program_can_be_stopped_this_way() -> None:
    other = subprocess.Popen(["sleep", "3600"])
    try:
        who = identity(other.pid)
        assert who is not None
        for name in ("vllm", "sleep", ""):
            with pytest.raises(ManagerError, match="is not one of the vLLM servers"):
                stop_found(other.pid, who, name)
        own = identity(os.getpid())
        assert own is not None
        with pytest.raises(ManagerError, match="is not one of the vLLM servers"):
            stop_found(os.getpid(), own, "vllm")
        for pid in (0, -1, 1 << 22):
            with pytest.raises(ManagerError, match="nothing was stopped"):
                stop_found(pid, who, "vllm")
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


AS_NOBODY = """
import os, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
from overspill.manager.foreign import find_servers, stop_found
from overspill.manager.errors import ManagerError
(found,) = [one for one in find_servers() if one.pid == int(sys.argv[1])]
print(found.name, found.port, found.ram_bytes > 0)
try:
    stop_found(found.pid, found.identity, found.name)
except ManagerError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_server_is_listed_and_cannot_be_stopped(start: Start) -> None:
    server = start()
    # Imported before it gives up its rights: the packages may lie where that user cannot look.
    code = AS_NOBODY.replace("os.setgroups", "import overspill.manager.foreign; os.setgroups")
    done = subprocess.run(
        [sys.executable, "-c", code, str(server.pid)], capture_output=True, text=True, timeout=60, check=False
    )
    first, second = done.stdout.splitlines()
    assert first == "Qwen/Qwen3-8B 8000 True", "its sockets are hidden, so the port is what its arguments say"
    assert second == (
        f"process {server.pid} belongs to root, and the manager's user may not stop it; stop it as that user"
    ), done.stderr
    assert is_alive(server.pid)


@pytest.mark.parametrize(
    ("line", "name", "port"),
    [
        ("vllm serve Qwen/Qwen3-8B", "Qwen/Qwen3-8B", 8000),
        ("/venv/bin/python3.11 /venv/bin/vllm serve m --port=9001", "m", 9001),
        ("python3 -u -m vllm.entrypoints.openai.api_server --model a/b --port 81", "a/b", 81),
        ("python -m vllm.entrypoints.cli.main serve a/b --served-model-name x y", "x", 8000),
        ("python -m vllm serve a/b", "a/b", 8000),
        ("vllm serve --model a/b --served_model_name x --port 99999999", "x", 8000),
        ("python /opt/vllm/entrypoints/openai/api_server.py --model a/b", "a/b", 8000),
        ("vllm serve", "vllm", 8000),
    ],
)
def test_command_lines_of_vllm(line: str, name: str, port: int) -> None:
    argv = line.split()
    assert serve_arguments(argv) is not None
    assert (served_name(argv), stated_port(argv)) == (name, port)


@pytest.mark.parametrize(
    "line",
    ["", "vllm", "vllm bench serve", "bash -c vllm", "grep vllm serve", "vim vllm.py", "python -m pytest vllm",
     "python", "python -m", "python -c pass vllm serve", "sudo vllm serve x", "python3 -m http.server"],
)  # fmt: skip
def test_command_lines_of_others(line: str) -> None:
    assert serve_arguments(line.split()) is None


def test_listeners_have_addresses_reachable_from_this_machine() -> None:
    with ExitStack() as stack:
        for host in ("127.0.0.1", "0.0.0.0", "::1", "::", "::ffff:127.0.0.2"):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            one = stack.enter_context(socket.socket(family))
            one.bind((host, 0))
            one.listen()
            reached = {"127.0.0.1": "127.0.0.1", "::1": "::1", "::ffff:127.0.0.2": "127.0.0.2"}.get(host, "127.0.0.1")
            assert Listener(reached, one.getsockname()[1], os.getpid()) in listeners([os.getpid()]), host
        one.close()
        assert len(listeners([os.getpid()])) >= 4
