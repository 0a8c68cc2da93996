"""Signs of life: a start that ticks, a stop that drains, what holds memory, and what the next manager still knows."""

import asyncio
import re
import threading
import time
from typing import Any

import httpx

from overspill.manager.errors import Stopped
from overspill.manager.fleet import Engines
from overspill.manager.states import Snapshot, State
from overspill.manager.web.model_pages import Card
from overspill.manager.web.rendering import fragment
from tests.chromium import Watched, chromium, needs_chromium
from tests.managed_here import managed_here
from tests.manager_process import Place, eventually, managing
from tests.pages import program


def asked(url: str, model: str, tokens: int) -> str:
    body = {"model": model, "prompt": "x", "stream": True, "max_tokens": tokens}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False).text


def in_background(url: str, model: str, tokens: int) -> tuple[threading.Thread, list[str]]:
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(asked(url, model, tokens)))
    thread.start()
    return thread, answers


def until(client: httpx.Client, name: str, is_so: Any) -> dict[str, Any]:
    deadline = time.monotonic() + 30
    while not is_so(engine := client.get(f"/api/engines/{name}").json()):
        assert time.monotonic() < deadline, engine
        time.sleep(0.05)
    return dict(engine)


def test_a_stop_lets_streams_end_and_a_second_one_does_not(place: Place) -> None:
    place.add("a", behaviour={"token_s": 0.1})
    with managed_here(place) as here, program(here) as client:
        assert client.post("/api/engines/start/a").is_success
        for tokens, stops in ((12, 1), (600, 2)):
            thread, answers = in_background(here.url, "a", tokens)
            until(client, "a", lambda engine: engine["traffic"]["in_flight"] == 1)
            client.post("/api/engines/stop/a?wait=false")
            until(client, "a", lambda engine: engine["is_leaving"])
            refused = client.post("/v1/completions", json={"model": "a", "prompt": "x"})
            assert refused.status_code == 503 and "is being stopped" in refused.text
            if stops == 2:
                client.post("/api/engines/stop/a?wait=false")
            thread.join(60)
            until(client, "a", lambda engine: engine["state"] == "stopped")
            assert answers[0].endswith("data: [DONE]\n\n") == (stops == 1)
            assert client.post("/api/engines/start/a").is_success


def test_why_and_since_outlive_the_manager(place: Place) -> None:
    place.add("a")
    place.add("bad", behaviour={"dies_at_start": True})
    with managed_here(place) as here, program(here) as client:
        assert client.post("/api/engines/start/a").is_success
        assert client.post("/api/engines/stop/a").is_success
        client.post("/api/engines/start/bad")
        before = {one["name"]: one for one in client.get("/api/engines").json()}
    with managed_here(place) as here, program(here) as client:
        after = {one["name"]: one for one in client.get("/api/engines").json()}
        for name in ("a", "bad"):
            for fact in ("state", "since", "stop_reason", "error", "log_lines", "start_s"):
                assert after[name][fact] == before[name][fact], (name, fact)
        assert after["a"]["stop_reason"] == "it was stopped by local" and after["a"]["start_s"] > 0
        assert after["bad"]["state"] == "failed" and "the weights are broken" in after["bad"]["error"]
        place.behave("bad")
        assert client.post("/v1/completions", json={"model": "bad", "prompt": "x"}).is_success  # tried again


def test_a_running_engine_keeps_its_since(place: Place) -> None:
    place.add("a")
    with managed_here(place, keeps_engines=True) as here, program(here) as client:
        assert client.post("/api/engines/start/a").is_success
        before = client.get("/api/engines/a").json()
    with managed_here(place) as here, program(here) as client:
        after = until(client, "a", lambda engine: engine["state"] == "ready")
        assert (after["pid"], after["since"], after["start_s"]) == (before["pid"], before["since"], before["start_s"])


def test_memory_that_a_job_holds_is_shown_where_start_is(place: Place) -> None:
    place.add("a")

    async def run() -> None:
        async with managing(place) as engines:
            with engines.changes.listening() as listener, engines.reserved("job 3, ab of a, runs"):
                assert engines.reserved_for == "job 3, ab of a, runs" and "a" in await listener.next()
                await refuse(engines)
            assert engines.reserved_for == ""

    async def refuse(engines: Engines) -> None:
        task = asyncio.create_task(engines.start("a"))
        await eventually(task.done)
        assert "job 3, ab of a, runs" in str(task.exception())

    asyncio.run(run())
    engine = Snapshot(name="a", state=State.STOPPED, since=0.0, is_registered=True, is_managed=False)
    held = fragment("card_state.html", card=Card(model=None, engine=engine, held_by="job 3 runs"))
    assert "Cannot be started now: job 3 runs" in held


def test_a_model_that_leaves_takes_no_request(place: Place) -> None:
    place.add("a", behaviour={"token_s": 0.05})

    async def run() -> None:
        async with managing(place) as engines, engines.using("a"):
            stopping = asyncio.create_task(engines.stop("a", drains=True))
            await eventually(lambda: engines.snapshot("a").is_leaving)
            try:
                await engines.ensure_ready("a")
            except Stopped as error:
                assert "is being stopped" in str(error)
            else:
                raise AssertionError("it was served")
            assert not stopping.done()
            await engines.stop("a")
            await stopping

    asyncio.run(run())


def test_phases_tell_how_long_each_took() -> None:
    engine = Snapshot(
        name="a", state=State.STARTING, since=0.0, is_registered=True, is_managed=True, start_s=100.0,
        phases=(("planning", 1000.0), ("starting vLLM", 1002.5), ("loading the model", 1012.5)),
    )  # fmt: skip
    card = Card(model=None, engine=engine)
    assert card.timed_phases == [
        ("planning", 1000.0, 2.5), ("starting vLLM", 1002.5, 10.0), ("loading the model", 1012.5, None),
    ]  # fmt: skip
    assert card.start_ends_at == 1100.0


@needs_chromium
def test_a_start_ticks_and_says_how_long_is_left(place: Place) -> None:
    began = time.time() - 30
    phases = (("planning", began), ("loading the model", began + 5))
    engine = Snapshot(
        name="a", state=State.STARTING, since=began, is_registered=True, is_managed=True, start_s=300.0, phases=phases
    )
    place.add("a")
    with managed_here(place) as here, chromium() as browser:
        watched = Watched(browser, here.url)
        page = watched.page()
        page.goto("/models")
        text = fragment("card_state.html", card=Card(model=None, engine=engine))
        # Beside the card itself, which the manager may write anew at any moment.
        page.evaluate("text => document.querySelector('main').insertAdjacentHTML('beforeend', text)", text)
        page.get_by_text(re.compile(r"about 4 min \d+ s left, judging by the last start")).wait_for()
        shown = page.locator("[data-since]").last.inner_text()
        page.wait_for_function(
            "shown => [...document.querySelectorAll('[data-since]')].at(-1).innerText != shown", arg=shown
        )
        assert 0 < page.locator("progress").last.evaluate("one => one.value") < 1
        watched.close()
