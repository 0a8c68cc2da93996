"""The manager parks engines where it stopped them, wakes them for requests, and finds them parked after a crash."""

import asyncio
import dataclasses
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from overspill.kv.sizes import GiB
from overspill.manager.engine import Engine
from overspill.manager.errors import NoRoom, NotParked
from overspill.manager.fleet import Engines
from overspill.manager.needs import Memory
from overspill.manager.states import State
from overspill.manager.swaps import may_park
from tests.chat_model import make_chat_model
from tests.chromium import Watched, chromium, needs_chromium
from tests.managed import SETTINGS, managed
from tests.managed_here import Here
from tests.manager_process import IMPATIENT, Place, eventually, gateway, managing

# A machine of 2 GiB, as in the other tests: a model that takes all of it frees most by being parked.
FREED = 2 * GiB - GiB // 4
PARKS = {"parks": FREED}


def engine(engines: Engines, name: str) -> Engine:
    return engines._engine(name)


async def parkable(engines: Engines, name: str) -> None:
    """Ready, and its status is known."""
    await engines.ensure_ready(name)
    await eventually(lambda: engine(engines, name).can_park)


async def complete(url: str, model: str, **more: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        return await client.post(f"{url}/v1/completions", json={"model": model, "prompt": "x", **more})


def test_parking_is_enough_only_where_ram_allows() -> None:
    gpu, ram = 20 * GiB, 30 * GiB
    need = Memory(gpus=(gpu,), ram_bytes=ram)
    frees = [Memory(gpus=(gpu,))]
    assert may_park(need, Memory(gpus=(GiB,), ram_bytes=ram), [], frees)
    assert not may_park(need, Memory(gpus=(GiB,), ram_bytes=ram - 1), [], frees), "the parked one keeps its RAM"
    assert may_park(need, Memory(gpus=(GiB,)), [Memory(ram_bytes=ram)], frees), "another one leaves"


def test_a_swap_parks_and_a_request_wakes(place: Place) -> None:
    place.add("a", ram=2 * GiB, behaviour=PARKS)
    place.add("b", ram=GiB, behaviour={"parks": GiB})

    async def run() -> None:
        async with managing(place) as engines, gateway(engines) as url:
            await parkable(engines, "a")
            first = engine(engines, "a").record
            assert (await complete(url, "b")).status_code == 200
            parked = engines.snapshot("a")
            assert parked.state is State.PARKED and parked.stop_reason == "it was parked to make room for b"
            assert parked.holds.ram_bytes == GiB // 4
            await eventually(lambda: engine(engines, "b").can_park)
            assert (await complete(url, "a")).json()["choices"][0]["text"].startswith("a-0")
            assert engines.snapshot("a").state is State.READY and engines.snapshot("a").holds.ram_bytes == 2 * GiB
            assert engines.snapshot("b").state is State.PARKED
            assert first is not None and place.starts("a") == [first.pid], "the same process"
            assert len(place.starts("b")) == 1

    asyncio.run(run())


def test_where_ram_does_not_allow_it_is_stopped(place: Place) -> None:
    """What it would keep is more than the other model leaves."""
    place.add("a", ram=2 * GiB, behaviour=PARKS)
    place.add("b", ram=2 * GiB)

    async def run() -> None:
        async with managing(place) as engines:
            await parkable(engines, "a")
            await engines.ensure_ready("b")
            assert engines.snapshot("a").state is State.STOPPED
            assert engines.snapshot("a").stop_reason == "it was stopped to make room for b"

    asyncio.run(run())


def test_a_parked_model_is_stopped_when_its_ram_is_needed(place: Place) -> None:
    place.add("a", ram=2 * GiB, behaviour=PARKS)
    place.add("b", ram=2 * GiB)

    async def run() -> None:
        async with managing(place) as engines:
            await parkable(engines, "a")
            assert (await engines.park("a")).state is State.PARKED
            await engines.ensure_ready("b")
            assert engines.snapshot("a").state is State.STOPPED

    asyncio.run(run())


def test_an_engine_that_cannot_be_parked_is_stopped_for_another(place: Place) -> None:
    place.add("a", ram=2 * GiB, behaviour={**PARKS, "refuses": "park"})
    place.add("b", ram=GiB)

    async def run() -> None:
        async with managing(place) as engines:
            await parkable(engines, "a")
            await engines.ensure_ready("b")
            assert engines.snapshot("a").state is State.STOPPED
            assert engine(engines, "a").refusal == "a could not be parked: not with me"

    asyncio.run(run())


def test_a_refused_park_does_not_leave_the_engine_draining(place: Place) -> None:
    """It had drained for another model, which then waited in vain, as did requests for itself."""
    place.add("a", ram=2 * GiB, behaviour={**PARKS, "refuses": "park"})
    place.add("b", ram=2 * GiB)

    async def run() -> None:
        async with managing(place) as engines:
            await parkable(engines, "a")
            async with engines.using("a"):
                loading = asyncio.create_task(engines.ensure_ready("b", within=20))
                await eventually(lambda: engines.snapshot("a").is_draining)
                with pytest.raises(NotParked, match="not with me"):
                    await engines.park("a")
            assert (await loading).state is State.READY

    asyncio.run(run())


def test_an_engine_is_not_silent_while_it_parks(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a long park, a single health check without an answer was enough for the engine to be ended."""
    place.add("a", behaviour={**PARKS, "answers_late_s": 4.0})

    async def run() -> None:
        async with managing(place, timing=dataclasses.replace(IMPATIENT, silent_s=3.0)) as engines:
            await parkable(engines, "a")
            ask, is_parked, checks = engines.upstream.ask, asyncio.Event(), list[str]()

            async def late_once(url: str, path: str, *args: Any, **more: Any) -> tuple[int, bytes] | None:
                answer = await ask(url, path, *args, **more)
                if path.endswith("/park"):
                    is_parked.set()
                elif path == "/health" and is_parked.is_set():
                    checks.append(path)
                return None if len(checks) == 1 and path == "/health" else answer

            monkeypatch.setattr(engines.upstream, "ask", late_once)
            assert (await engines.park("a")).state is State.PARKED
            assert checks

    asyncio.run(run())


def test_a_park_on_request_that_fails_leaves_it_ready(place: Place) -> None:
    place.add("a", behaviour={**PARKS, "refuses": "park"})
    place.add("b")

    async def run() -> None:
        async with managing(place) as engines:
            with pytest.raises(NotParked, match="a is stopped, and only a model that is ready can be parked"):
                await engines.park("a")
            await parkable(engines, "a")
            with pytest.raises(NotParked, match="a could not be parked: not with me"):
                await engines.park("a")
            await eventually(lambda: engines.snapshot("a").state is State.READY)
            await engines.ensure_ready("b")
            with pytest.raises(NotParked, match="b was started without --park"):
                await engines.park("b")

    asyncio.run(run())


def test_a_failed_wake_is_said_and_tried_again(place: Place) -> None:
    place.add("a", behaviour={**PARKS, "refuses": "wake"})

    async def run() -> None:
        async with managing(place) as engines:
            await parkable(engines, "a")
            await engines.park("a")
            for _ in range(2):
                with pytest.raises(NoRoom, match="a could not be woken: not with me"):
                    await engines.ensure_ready("a")
                assert engines.snapshot("a").state is State.PARKED

    asyncio.run(run())


def test_requests_in_flight_wait_in_the_parked_engine(place: Place) -> None:
    """It has its next turn for them, without a new request."""
    place.add("a", ram=2 * GiB, behaviour={**PARKS, "token_s": 0.3})
    place.add("b", ram=GiB, behaviour={"parks": GiB})

    async def run() -> None:
        timing = dataclasses.replace(IMPATIENT, drain_s=0.2, least_service_s=0.0)
        async with managing(place, timing=timing) as engines, gateway(engines) as url:
            await parkable(engines, "a")
            slow = asyncio.create_task(complete(url, "a", max_tokens=8))
            await eventually(lambda: engine(engines, "a").in_flight)
            assert (await complete(url, "b")).status_code == 200
            assert not slow.done()
            answer = await slow
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 8
            assert len(place.starts("a")) == 1 and engines.snapshot("a").state is State.READY

    asyncio.run(run())


def test_an_answer_that_is_lost_is_asked_for_again(place: Place) -> None:
    """The engine is parked, and its answer did not come: it must not count as ready."""
    place.add("a", behaviour={**PARKS, "answers_late_s": 2.0})

    async def run() -> None:
        async with managing(place, timing=dataclasses.replace(IMPATIENT, park_s=0.5)) as engines:
            await parkable(engines, "a")
            assert (await engines.park("a")).state is State.PARKED
            assert engine(engines, "a").refusal == "a could not be parked: it does not answer"
            await engines.ensure_ready("a")
            assert len(place.starts("a")) == 1

    asyncio.run(run())


def test_ttl_parks_first_and_stops_later(place: Place) -> None:
    place.add("a", behaviour=PARKS, ttl=1)
    seen: list[State] = []

    async def run() -> None:
        async with managing(place) as engines:
            await parkable(engines, "a")

            def is_stopped() -> bool:
                seen.append(engines.snapshot("a").state)
                return seen[-1] is State.STOPPED

            await eventually(is_stopped)
            assert engines.snapshot("a").stop_reason == "it was not used for 1 s"

    asyncio.run(run())
    assert State.PARKED in seen


def test_a_manager_that_comes_later_finds_it_parked(place: Place) -> None:
    """And does not take it for one that was never used."""
    place.add("a", ram=2 * GiB, behaviour=PARKS, ttl=100)

    async def park() -> None:
        with place.registry() as registry:
            engines = Engines(registry, place.options())
            async with engines:
                await parkable(engines, "a")
                await engines.park("a")
                await engines.close(keep=True)

    async def find() -> None:
        async with managing(place) as engines:
            await eventually(lambda: engines.snapshot("a").state is State.PARKED)
            assert engines.snapshot("a").holds.ram_bytes == GiB // 4
            await asyncio.sleep(0.5)
            await engines.ensure_ready("a")
            assert len(place.starts("a")) == 1

    asyncio.run(park())
    asyncio.run(find())


def test_a_parked_engine_that_dies_has_failed(place: Place) -> None:
    place.add("a", behaviour=PARKS)

    async def run() -> None:
        async with managing(place) as engines:
            await parkable(engines, "a")
            await engines.park("a")
            os.kill(place.starts("a")[0], signal.SIGKILL)
            await eventually(lambda: engines.snapshot("a").state is State.FAILED)
            await engines.start("a")
            assert engines.snapshot("a").state is State.READY and len(place.starts("a")) == 2

    asyncio.run(run())


def test_pages_and_commands_park_and_wake(here: Here, place: Place) -> None:
    place.behave("a", **PARKS)
    with here.client() as client, here.client() as browser:
        page = browser.get("/models").text
        assert 'hx-post="/models/park/a"' not in page and 'hx-post="/models/wake/a"' not in page
        assert client.post("/api/engines/start/a").json()["state"] == "ready"
        while not client.get("/api/engines/a").json()["can_park"]:
            time.sleep(0.05)
        assert 'hx-post="/models/park/a"' in browser.get("/models").text
        parked = client.post("/api/engines/park/a").json()
        assert parked["state"] == "parked" and parked["stop_reason"].startswith("it was parked by ")
        page = browser.get("/models").text
        assert 'hx-post="/models/wake/a"' in page and "RAM held" in page and "GPU memory held" in page
        assert client.post("/api/engines/wake/a").json()["state"] == "ready"
        refused = client.post("/api/engines/park/b")
        assert refused.status_code == 409 and "b is stopped" in refused.text
        actions = [row["action"] for row in client.get("/api/audit").json()]
        assert actions.count("park") == 2 and "wake" in actions


@needs_chromium
def test_a_click_parks_and_another_wakes(here: Here, place: Place) -> None:
    place.behave("a", **PARKS)
    with chromium() as browser:
        watched = Watched(browser, here.url)
        page = watched.page(viewport={"width": 1280, "height": 900})
        page.goto("/models")
        card = page.locator("article.card", has=page.get_by_role("heading", name="a", exact=True))
        card.get_by_role("button", name="Start").click()
        card.get_by_role("button", name="Park").click()
        card.locator(".state.parked").wait_for()
        assert "it was parked by" in (card.text_content() or "")
        card.get_by_role("button", name="Wake").click()
        card.locator(".state.ready").wait_for()
        watched.close()
    assert len(place.starts("a")) == 1


def test_a_real_engine_is_parked_by_command_and_woken_by_a_request(tmp_path: Path) -> None:
    with managed(tmp_path) as manager, manager.client() as client:
        source = make_chat_model(manager.models / "tiny")
        settings = {**SETTINGS, "source": str(source), "park": True}
        assert client.post("/api/models", json={"name": "tiny", **settings}).status_code == 201
        asked = {"model": "tiny", "prompt": "t5 t6 " * 300, "max_tokens": 12, "temperature": 0}
        first = client.post("/v1/completions", json=asked)
        assert first.status_code == 200, first.text
        while not client.get("/api/engines/tiny").json()["can_park"]:
            time.sleep(0.1)
        done = manager.overspill("park", "tiny")
        assert (done.returncode, done.stdout) == (0, "parked tiny\n"), done.stderr
        assert "parked" in manager.overspill("ps").stdout
        again = client.post("/v1/completions", json=asked)
        assert again.json()["choices"][0]["text"] == first.json()["choices"][0]["text"]
        assert client.get("/api/engines/tiny").json()["state"] == "ready"
        manager.overspill("park", "tiny")
        assert manager.overspill("wake", "tiny").stdout == "tiny is awake\n"
        manager.kill_and_start_again()
        assert client.post("/v1/completions", json=asked).status_code == 200
        while not client.get("/api/engines/tiny").json()["can_park"]:
            time.sleep(0.1)
        assert manager.overspill("park", "tiny").returncode == 0
        stopped = manager.overspill("stop", "tiny")
        assert stopped.returncode == 0, "while it is parked"
        assert manager.others() == [] and "was killed" not in manager.out.read_text()


@pytest.mark.soak
def test_two_models_take_turns_a_hundred_times(place: Place) -> None:
    place.add("a", ram=2 * GiB, behaviour=PARKS)
    place.add("b", ram=GiB, behaviour={"parks": GiB})

    async def run() -> None:
        timing = dataclasses.replace(IMPATIENT, least_service_s=0.0)
        async with managing(place, timing=timing) as engines, gateway(engines) as url:
            for name in ("a", "b") * 100:
                answer = await complete(url, name)
                assert answer.json()["choices"][0]["text"].startswith(f"{name}-0")
                await eventually(lambda name=name: engine(engines, name).can_park)
            assert len(place.starts("a")) == len(place.starts("b")) == 1

    asyncio.run(run())
