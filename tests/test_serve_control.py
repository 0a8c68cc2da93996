"""A server's control routes: vLLM's real server on the CPU is parked and woken by its secret, and by nothing else."""

import asyncio
import contextlib
import json
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from overspill.launch.vllm import CONTROL
from overspill.processes import identity
from overspill.serve import control
from overspill.serve.control import HEADER, VARIABLE, ControlMiddleware, forget_secret, make_secret, secret_of
from overspill.serve.status import folder_of
from tests.command import run_overspill
from tests.engine import random_prompt
from tests.test_serve import ASKED, Serve, model, serving, words

__all__ = ["model"]  # a fixture of the module that it is made in

# Made once: loading certificates takes seconds while another thread reads a stream.
HTTP = httpx.Client(timeout=120)
SHORT, LONG = random_prompt(3, 600), random_prompt(4, 3200)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with serving(model, "--park", folder=tmp_path_factory.mktemp("park")) as running:
        running.wait_for("/v1 serves")
        yield running


def secret_for(server: Serve) -> str:
    status = server.status()
    assert status is not None and status.can_park
    found = secret_of(status, server.home)
    assert found is not None
    return found


def call(server: Serve, action: str, secret: str | None = None, method: str = "POST") -> httpx.Response:
    headers = {} if secret is None else {HEADER: secret}
    return HTTP.request(method, f"http://127.0.0.1:{server.port}/overspill/{action}", headers=headers)


def ask(server: Serve, prompt: list[int]) -> tuple[str, int]:
    answer = server.client().completions.create(model="tiny", prompt=words(prompt), **ASKED)
    assert answer.usage is not None and answer.usage.prompt_tokens == len(prompt)
    return answer.choices[0].text, int(server.metric("hit_tokens"))


def test_a_server_is_parked_and_woken_between_requests(server: Serve) -> None:
    secret = secret_for(server)
    before, _ = ask(server, LONG)
    assert call(server, "state", secret, "GET").json() == {"state": "running"}
    for cycle in range(3):
        _, loaded = ask(server, SHORT)
        parked = call(server, "park", secret)
        assert parked.status_code == 200 and parked.json()["state"] == "parked", parked.text
        assert parked.json()["copied_bytes"] == 0 or cycle == 0
        assert call(server, "state", secret, "GET").json()["state"] == "parked"
        assert httpx.get(f"http://127.0.0.1:{server.port}/health").status_code == 200
        assert call(server, "wake", secret).json()["state"] == "running"
        after, hit = ask(server, LONG)
        assert after == before and hit > loaded


def test_a_request_meanwhile_waits_and_a_running_one_goes_on(server: Serve) -> None:
    secret = secret_for(server)
    expected, _ = ask(server, LONG)
    asked: dict[str, Any] = {**ASKED, "model": "tiny", "prompt": words(SHORT)}
    enough = 2400  # must outlast the way of a request to park
    tokens: list[int] = []
    has_begun, is_parked = threading.Event(), threading.Event()

    def stream() -> None:
        with server.client().completions.create(stream=True, **{**asked, "max_tokens": enough}) as parts:
            for part in parts:
                tokens.extend(part.choices[0].token_ids)  # type: ignore[attr-defined]
                has_begun.set()
                is_parked.wait(60)  # reading would take this process's time from the request to park
                if len(tokens) >= enough:
                    return

    running = threading.Thread(target=stream)
    running.start()
    assert has_begun.wait(60)
    assert call(server, "park", secret).json()["state"] == "parked"
    is_parked.set()
    answers: list[str] = []
    late = threading.Thread(target=lambda: answers.append(ask(server, LONG)[0]))
    late.start()
    time.sleep(0.5)
    were_waiting = late.is_alive() and running.is_alive() and len(tokens) < enough
    enough = len(tokens) + 32
    assert call(server, "wake", secret).json()["state"] == "running"
    assert were_waiting
    late.join(60)
    running.join(120)
    assert answers == [expected] and len(tokens) >= enough
    whole = server.client().completions.create(**{**asked, "max_tokens": len(tokens)})
    assert whole.choices[0].token_ids == tokens  # type: ignore[attr-defined]


def test_commands_without_a_manager_say_that_it_is_parked(server: Serve) -> None:
    """`ps` listed it as ready, and a chat with it waited in silence."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OVERSPILL_")}
    env = {**clean, **server.home}
    assert run_overspill("park", "tiny", env=env).stdout == "parked tiny; requests wait until: overspill wake tiny\n"
    try:
        (listed,) = json.loads(run_overspill("ps", "--json", env=env).stdout)["engines"]
        assert listed["state"] == "parked"
        chat = [sys.executable, "-m", "overspill", "run", "tiny"]
        pipe = subprocess.PIPE
        with subprocess.Popen(chat, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as asking:
            assert asking.stdin is not None and asking.stdout is not None and asking.stderr is not None
            asking.stdin.write("t5 t6")
            asking.stdin.close()
            seen = [asking.stderr.readline(), asking.stderr.readline()]
            assert "tiny is parked, and answers when it is woken: overspill wake tiny" in seen[1], seen
            assert run_overspill("wake", "tiny", env=env).stdout == "tiny is awake\n"
            assert asking.stdout.read(1)
            asking.kill()
    finally:
        call(server, "wake", secret_for(server))
    assert "ready" in run_overspill("ps", env=env).stdout


@pytest.mark.parametrize("secret", [None, "", "wrong", "é"])
def test_without_the_secret_nothing_is_done(server: Serve, secret: str | None) -> None:
    for method, action in (("POST", "park"), ("POST", "wake"), ("GET", "state"), ("GET", "anything")):
        headers = {} if secret is None else {HEADER: secret.encode()}
        url = f"http://127.0.0.1:{server.port}/overspill/{action}"
        assert httpx.request(method, url, headers=headers).status_code == 403
    assert call(server, "state", secret_for(server), "GET").json()["state"] == "running"


def test_other_routes_are_not_there(server: Serve) -> None:
    for method, action in (("GET", "park"), ("POST", "state"), ("POST", "sleep")):
        assert call(server, action, secret_for(server), method).status_code == 404


def test_the_secret_is_in_no_command_line_and_in_one_file(server: Serve) -> None:
    secret = secret_for(server)
    folder = folder_of(server.home)
    assert folder is not None
    (file,) = folder.glob("*.secret")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(folder.stat().st_mode) == 0o700
    lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in (server.process.pid, *server.started())]
    status = next(folder.glob("*.json")).read_text()
    assert len(lines) > 2 and not any(secret in text for text in (*lines, status, server.told))


def test_a_server_without_park_has_no_control(model: Path, tmp_path: Path) -> None:
    with serving(model, folder=tmp_path) as running:
        running.wait_for("/v1 serves")
        status = running.status()
        assert status is not None and not status.can_park and secret_of(status, running.home) is None
        assert call(running, "park", "").status_code == 404


@pytest.mark.soak
def test_two_servers_take_turns_fifty_times(model: Path, tmp_path: Path) -> None:
    """Under load, each answering as one that never parked; memory, threads and processes return to what they were."""
    with contextlib.ExitStack() as stack:
        servers = []
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            servers.append(stack.enter_context(serving(model, "--park", folder=tmp_path / name)))
            servers[-1].wait_for("/v1 serves")
        prompts = [random_prompt(seed, length) for seed, length in enumerate((3200, 600, 40, 1500))]
        expected = [[ask(one, prompt)[0] for prompt in prompts] for one in servers]
        assert call(servers[0], "park", secret_for(servers[0])).status_code == 200
        held: list[list[tuple[int, int]]] = []
        for turn in range(100):
            away, to = servers[(turn + 1) % 2], servers[turn % 2]
            with ThreadPoolExecutor(2) as clients:
                # These are computed, wait, or come too late, as it happens.
                late = [clients.submit(ask, away, prompt) for prompt in prompts[1:3]]
                assert call(away, "park", secret_for(away)).json()["state"] == "parked"
                assert call(to, "wake", secret_for(to)).json()["state"] == "running"
                got = [ask(to, prompt)[0] for prompt in prompts]
                assert got == expected[turn % 2], turn
                assert call(to, "park", secret_for(to)).status_code == 200
                assert call(away, "wake", secret_for(away)).status_code == 200
                assert [one.result()[0] for one in late] == expected[(turn + 1) % 2][1:3]
                assert call(away, "park", secret_for(away)).status_code == 200
                assert call(to, "wake", secret_for(to)).status_code == 200
            if turn in (19, 99):
                held.append([memory_of(one) for one in servers])
        for (before, threads), (after, threads_after) in zip(*held, strict=True):
            assert after < 1.05 * before + (32 << 20) and threads_after <= threads + 2


def memory_of(server: Serve) -> tuple[int, int]:
    """RAM and threads of all its processes."""
    rss = threads = 0
    for pid in (server.process.pid, *server.started()):
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        rss += int(fields["VmRSS"].split()[0]) << 10
        threads += int(fields["Threads"])
    return rss, threads


# The middleware alone.


def test_launches_name_this_middleware() -> None:
    assert f"{ControlMiddleware.__module__}.{ControlMiddleware.__name__}" == CONTROL


def answered(
    monkeypatch: pytest.MonkeyPatch, *, secret: str = "s", client: Any = ("127.0.0.1", 1), **fault: Any
) -> Any:
    """What it answers to a park with the secret "s"."""
    monkeypatch.setenv(VARIABLE, secret)
    sent: list[Any] = []

    async def call_utility_async(method: str) -> dict[str, str]:
        if fault:
            raise RuntimeError("Call to overspill_park method failed: it is paused")
        return {"state": method}

    async def send(message: Any) -> None:
        sent.append(message)

    core = SimpleNamespace(call_utility_async=call_utility_async)
    engine_client = SimpleNamespace(engine_core=core, errored=fault.get("is_dead", False))
    app = SimpleNamespace(state=SimpleNamespace(engine_client=engine_client))
    scope = {
        "type": "http", "method": "POST", "path": "/overspill/park", "headers": [(HEADER.encode(), b"s")],
        "client": client, "app": app,
    }  # fmt: skip
    asyncio.run(ControlMiddleware(None)(scope, None, send))  # type: ignore[arg-type]
    return sent[0]["status"], json.loads(sent[1]["body"])


def test_only_this_machine_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for client in (("127.0.0.1", 1), ("::1", 1), None):
        assert answered(monkeypatch, client=client) == (200, {"state": "overspill_park"})
    assert answered(monkeypatch, client=("192.168.0.7", 1))[0] == 403


def test_without_a_secret_of_its_own_nobody_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answered(monkeypatch, secret="")[0] == 403


def test_the_engines_reason_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answered(monkeypatch, is_dead=False) == (409, {"error": "it is paused"})
    assert answered(monkeypatch, is_dead=True)[0] == 503


def test_a_server_whose_secret_cannot_be_stored_runs_without_park(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "overspill").write_text("a file where the folder would be")
    assert make_secret({"XDG_STATE_HOME": str(tmp_path)}) == ""
    assert "cannot be parked, as its secret cannot be stored" in capsys.readouterr().err


def test_a_secret_is_of_one_process(tmp_path: Path) -> None:
    home = {"XDG_STATE_HOME": str(tmp_path)}
    status = SimpleNamespace(pid=os.getpid(), process=identity(os.getpid()))
    assert secret_of(status, home) is None  # type: ignore[arg-type]
    first = make_secret(home)
    assert secret_of(status, home) == first and len(first) > 30  # type: ignore[arg-type]
    left = control._path(2**22 + 1, home)
    assert left is not None
    left.write_text("of a process that was killed")
    assert make_secret(home) != first and not left.exists()
    status.process = "another"
    assert secret_of(status, home) is None  # type: ignore[arg-type]
    forget_secret(home)
    assert not list(tmp_path.rglob("*.secret"))
