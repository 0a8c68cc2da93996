"""An engine core that is killed, as the manager shows it and as clients of the gateway see it: real engines."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from overspill.processes import below
from tests.chat_model import make_chat_model
from tests.dying_core import DEATH_S, dying_after_loading, engine_cores
from tests.managed import SETTINGS, Managed, managed

START_S = 240
ASKED = {"model": "tiny", "prompt": "t5 t6", "max_tokens": 3000, "ignore_eos": True}
WHY = "the engine core was killed by SIGKILL; the kernel counts no OOM kill"


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Managed]:
    folder = tmp_path_factory.mktemp("dead")
    with pytest.MonkeyPatch.context() as patch:
        # Engines get the manager's variables.
        flag = f"{folder}/dies"
        dies = f"os.path.exists('{flag}') and (os.rename('{flag}', '{folder}/died'), os.kill(os.getpid(), 9))"
        for name, value in dying_after_loading(folder, dies).items():
            patch.setenv(name, value)
        with managed(folder) as running:
            source = make_chat_model(running.models / "tiny")
            added = {"name": "tiny", "source": str(source), **SETTINGS}
            with running.client() as client:
                answer = client.post("/api/models", json=added)
                assert answer.status_code == 201, answer.text
            yield running


def engine(client: httpx.Client) -> dict[str, Any]:
    told: dict[str, Any] = client.get("/api/engines/tiny").json()
    return told


def assert_fails_soon(client: httpx.Client, since: float) -> None:
    while (told := engine(client))["state"] != "failed":
        assert time.monotonic() - since < DEATH_S, told
        time.sleep(0.1)
    assert WHY in told["error"] and "exit code 0" not in told["error"]
    assert not any("nanobind" in line or "EngineDeadError" in line for line in told["log_lines"])
    assert told["pid"] is None


def test_a_core_killed_during_start_answers_its_waiters(manager: Managed) -> None:
    """vLLM's server then waits for its core for ever; so did the client, and the state was "starting"."""
    (manager.folder / "dies").touch()
    with manager.client() as client:
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(client.post("/v1/completions", json=ASKED)))
        asking.start()
        deadline = time.monotonic() + START_S
        while not (died := manager.folder / "died").exists():
            assert time.monotonic() < deadline and not answers, answers
            time.sleep(0.1)
        since = time.monotonic()
        assert time.time() - died.stat().st_ctime < 5  # so it is looked at while it happens
        asking.join(DEATH_S)
        assert_fails_soon(client, since)
        (answer,) = answers
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_failed"
        assert WHY in answer.json()["error"]["message"] and "while starting to listen" in answer.text


def test_a_core_killed_while_it_streams_ends_the_stream(manager: Managed) -> None:
    with manager.client() as client, manager.client() as other:
        assert other.post("/api/engines/start/tiny", timeout=START_S).status_code == 200
        (core,) = engine_cores(below(engine(other)["pid"]))
        with client.stream("POST", "/v1/completions", json={**ASKED, "stream": True}) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            os.kill(core, signal.SIGKILL)
            died_at = time.monotonic()
            rest = [line for line in lines if line.startswith("data: ")]
            assert time.monotonic() - died_at < DEATH_S
        assert any('"error"' in line for line in rest[-2:]), rest[-2:]
        assert len(rest) < ASKED["max_tokens"] / 2
        assert_fails_soon(other, died_at)


@pytest.mark.soak
def test_a_core_killed_while_idle_fails_the_engine(manager: Managed) -> None:
    with manager.client() as client:
        assert client.post("/api/engines/start/tiny", timeout=START_S).status_code == 200
        (core,) = engine_cores(below(engine(client)["pid"]))
        os.kill(core, signal.SIGKILL)
        assert_fails_soon(client, time.monotonic())
