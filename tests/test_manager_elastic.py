"""The manager moves memory between elastic engines as requests need it, and makes room by shrinking them."""

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from overspill.kv.ledger import Account, Ledger
from overspill.kv.sizes import GiB, MiB
from overspill.manager.errors import NoRoom
from overspill.manager.fleet import Engines
from overspill.manager.grants import committed
from overspill.manager.needs import Memory, Need
from overspill.manager.states import State
from overspill.manager.swaps import Swaps
from overspill.manager.telemetry import machine
from overspill.manager.telemetry.machine import GpuSampler
from overspill.registry import Model
from tests.chromium import Watched, chromium, needs_chromium
from tests.managed_here import managed_here
from tests.manager_process import Place, eventually, gateway, managing
from tests.shared_card import WEIGHTS, shared_card
from tests.test_hardware_nvml import Device, FakeNvml, used

CARD = 1000 * MiB
REQUEST = 300 * MiB
FLOOR = 100 * MiB
MEMORY = Memory(gpus=(CARD,), ram_bytes=64 * GiB)


def elastic(held: int = CARD // 2, **more: int) -> dict[str, Any]:
    return {"token_s": 0.1, "elastic": {"held": held, "floor": FLOOR, "most": CARD, "request": REQUEST, **more}}


def reckon(model: Model, evictable: Memory) -> Need:
    """A model's GPU memory, as its settings say."""
    need = Memory(gpus=(model.settings.gpu_memory or FLOOR,))
    return Need(least=need, takes=need)


def sharing(place: Place, **options: Any) -> "contextlib.AbstractAsyncContextManager[Engines]":
    return managing(place, **{"memory": MEMORY, "reckon": reckon, **options})


@contextlib.contextmanager
def watched(place: Place) -> Iterator[list[int]]:
    """What all engines together held or were granted, again and again."""
    path, seen, end = place.folder / "state/overspill/ledgers/cpu.ledger", [0], threading.Event()

    def watch() -> None:
        ledger = Ledger(path)
        while not end.wait(0.005):
            seen.append(committed(ledger.accounts().values()))
        ledger.close()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        end.set()
        thread.join()
    assert max(seen) <= CARD, max(seen) / MiB


def kv(engines: Engines, name: str) -> Account:
    found = engines._engine(name).account
    assert found is not None
    return found


async def burst(url: str, name: str, count: int = 2) -> list[httpx.Response]:
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        asked = {"model": name, "prompt": "x", "max_tokens": 30}
        return await asyncio.gather(*(client.post(f"{url}/v1/completions", json=asked) for _ in range(count)))


async def both_ready(engines: Engines) -> None:
    for name in ("a", "b"):
        await engines.ensure_ready(name)
    await eventually(lambda: all(engines._engine(name).account for name in ("a", "b")))


def test_memory_follows_requests_from_one_engine_to_the_other(place: Place) -> None:
    place.add("a", behaviour=elastic())
    place.add("b", behaviour=elastic())

    async def run() -> None:
        async with sharing(place) as engines, gateway(engines) as url:
            await both_ready(engines)
            for busy, idle in (("a", "b"), ("b", "a")):
                task = asyncio.create_task(burst(url, busy, 3))
                await eventually(lambda busy=busy: kv(engines, busy).held >= 900 * MiB)
                assert kv(engines, idle).held == FLOOR
                assert {one.status_code for one in await task} == {200}
            assert engines.snapshot("a").kv["held"] == FLOOR

    with watched(place):
        asyncio.run(run())


def test_a_start_shrinks_elastic_engines_and_stops_none(place: Place) -> None:
    place.add("a", behaviour=elastic(), keep=True)
    place.add("b", behaviour=elastic())
    place.add("c", gpu_memory=700 * MiB)

    async def run() -> None:
        async with sharing(place) as engines:
            await both_ready(engines)
            await engines.ensure_ready("c")
            assert {engines.snapshot(name).state for name in "abc"} == {State.READY}
            assert kv(engines, "a").held + kv(engines, "b").held <= 300 * MiB
            assert len(place.starts("a")) == len(place.starts("b")) == 1
            await engines.stop("c")
            await eventually(lambda: kv(engines, "a").held + kv(engines, "b").held > 900 * MiB)

    with watched(place):
        asyncio.run(run())


def test_memory_that_was_granted_is_not_free(place: Place) -> None:
    place.add("a", behaviour=elastic(slow_ms=1500))
    place.add("b", behaviour=elastic(400 * MiB), gpu_memory=400 * MiB)

    async def run() -> None:
        async with sharing(place) as engines:
            await engines.ensure_ready("a")
            while [one.granted for one in engines._grants[0].look().values()] != [CARD]:
                await asyncio.sleep(0.002)
            await engines.ensure_ready("b")
            await eventually(lambda: len(engines._grants[0].look()) == 2)

    with watched(place):
        asyncio.run(run())


def test_a_model_that_needs_more_than_engines_give_back_stops_one(place: Place) -> None:
    place.add("a", behaviour=elastic(), keep=True)
    place.add("b", behaviour=elastic())
    place.add("c", gpu_memory=850 * MiB)
    place.add("d", gpu_memory=950 * MiB)

    async def run() -> None:
        async with sharing(place) as engines:
            await both_ready(engines)
            await engines.ensure_ready("c")
            assert [engines.snapshot(name).state for name in "abc"] == [State.READY, State.STOPPED, State.READY]
            assert kv(engines, "a").held <= 150 * MiB
            with pytest.raises(NoRoom, match="a is set to be kept"):
                await engines.ensure_ready("d")

    asyncio.run(run())


def test_a_killed_engine_leaves_its_memory_to_the_other(place: Place) -> None:
    place.add("a", behaviour=elastic())
    place.add("b", behaviour=elastic())

    async def run() -> None:
        async with sharing(place) as engines:
            await both_ready(engines)
            os.kill(place.starts("a")[0], signal.SIGKILL)
            await eventually(lambda: kv(engines, "b").held == CARD)
            assert engines.snapshot("a").state is State.FAILED and engines.snapshot("a").kv == {}

    with watched(place):
        asyncio.run(run())


def test_grants_stand_without_a_manager_and_the_next_goes_on(place: Place) -> None:
    place.add("a", behaviour=elastic(held=700 * MiB))
    place.add("b", behaviour=elastic(held=300 * MiB))
    before: list[int] = []

    async def first() -> None:
        with place.registry() as registry:
            async with Engines(registry, place.options(memory=MEMORY, reckon=reckon)) as engines:
                await both_ready(engines)
                await eventually(lambda: all(kv(engines, name).granted for name in ("a", "b")))
                before.extend(kv(engines, name).granted for name in ("a", "b"))
                await engines.close(keep=True)

    async def then() -> None:
        async with sharing(place) as engines, gateway(engines) as url:
            await both_ready(engines)
            assert [kv(engines, name).held for name in ("a", "b")] == before
            task = asyncio.create_task(burst(url, "b", 3))
            await eventually(lambda: kv(engines, "b").held >= 900 * MiB)
            await task
            assert len(place.starts("a")) == len(place.starts("b")) == 1

    with watched(place):
        asyncio.run(first())
        ledger = Ledger(place.folder / "state/overspill/ledgers/cpu.ledger")
        time.sleep(0.5)
        assert sorted(one.granted for one in ledger.accounts().values()) == sorted(before)
        ledger.close()
        asyncio.run(then())


def test_an_engine_that_is_measured_keeps_its_memory(place: Place) -> None:
    place.add("a", behaviour=elastic())
    place.add("b", behaviour=elastic())

    async def run() -> None:
        async with sharing(place) as engines, gateway(engines) as url:
            await both_ready(engines)
            async with engines.using("a", hold=True):
                held = kv(engines, "a").held
                task = asyncio.create_task(burst(url, "b", 3))
                await eventually(lambda: kv(engines, "b").used)
                await asyncio.sleep(1.0)
                assert kv(engines, "a").held == held
            await task

    with watched(place):
        asyncio.run(run())


@pytest.mark.parametrize("late_ms", [0, 500])
def test_a_parked_engine_lends_its_kv_and_gets_it_back(
    place: Place, late_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = Swaps.free_for_kv

    async def look_slowly(swaps: Swaps, gpus: Iterable[int]) -> dict[int, int]:
        await asyncio.sleep(0.3)  # in which an engine is woken
        return await look(swaps, gpus)

    monkeypatch.setattr(Swaps, "free_for_kv", look_slowly)
    place.add("a", behaviour={**elastic(late_ms=late_ms), "parks": 0})
    place.add("b", behaviour=elastic())

    async def run() -> None:
        async with sharing(place) as engines:
            await both_ready(engines)
            await eventually(lambda: engines._engine("a").can_park)
            held = kv(engines, "a").held
            await engines.park("a")
            assert engines.snapshot("a").holds.gpu_bytes == 0
            await eventually(lambda: kv(engines, "b").held == CARD)
            await engines.ensure_ready("a")
            await eventually(lambda: committed(engines._grants[0].look().values()) == CARD)
            await eventually(lambda: kv(engines, "a").held == held and kv(engines, "b").held == CARD - held)
            await asyncio.sleep(1)  # in which the GPU is divided again
            assert len(place.starts("a")) == len(place.starts("b")) == 1, "none was stopped"

    with watched(place):
        asyncio.run(run())


def test_a_ledger_that_cannot_be_read_stops_nothing(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    path = place.folder / "state/overspill/ledgers/cpu.ledger"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"something else" * 1000)
    place.add("a")

    async def run() -> None:
        async with sharing(place) as engines:
            await engines.ensure_ready("a")
            await eventually(lambda: "is not a ledger of this version" in caplog.text)
            await asyncio.sleep(2.5)

    asyncio.run(run())
    assert caplog.text.count("dividing the GPU's memory failed") == 1


class Shared(Place):
    def options(self, **more: Any) -> Any:
        return super().options(**{"memory": MEMORY, "reckon": reckon, **more})


@needs_chromium
def test_the_bar_of_a_card_moves_with_its_engines(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, weights = Shared(place.folder), 50 * MiB
    for name in ("a", "b"):
        shared.add(name, behaviour={**elastic(), "device": "cuda", "parks": weights})
    device = Device(MemoryInfo=SimpleNamespace(total=4 * GiB, reserved=0, free=2 * GiB))
    monkeypatch.setattr(machine, "GpuSampler", lambda: GpuSampler(FakeNvml(device)))
    with managed_here(shared) as here, here.client() as client, chromium() as browser:
        for name in ("a", "b"):
            assert client.post(f"/api/engines/start/{name}").json()["state"] == "ready"
        pids = [shared.starts(name)[0] for name in ("a", "b")]
        device.answers["ComputeRunningProcesses"] = [used(pid, CARD) for pid in pids]
        watched_page = Watched(browser, here.url)
        page = watched_page.page()
        page.goto("/")
        bar = page.locator("figure.map", has_text="GPU 0")
        bar.get_by_text("weights of a 50 MiB").wait_for()
        bar.get_by_text("KV cache of b 500 MiB").wait_for()
        assert bar.get_by_text("KV in use").count() == 0
        before = float(bar.locator("rect", has_text="KV cache of b").first.get_attribute("width") or 0)
        asking = threading.Thread(target=lambda: asyncio.run(burst(here.url, "a", 3)))
        asking.start()
        bar.get_by_text("KV in use of a 900 MiB").wait_for()
        bar.get_by_text("KV cache of b 100 MiB").wait_for()
        after = float(bar.locator("rect", has_text="KV cache of b").first.get_attribute("width") or 0)
        assert before > 4 * after > 0
        asking.join()
        page.get_by_text("KV in numbers").click()
        page.get_by_text("KV granted").first.wait_for()
        told = client.get("/api/engines/a").json()["kv"]
        assert told["held"] == 900 * MiB and told["floor"] == FLOOR
        watched_page.close()
    assert not watched_page.problems and not watched_page.elsewhere


@needs_chromium
def test_a_model_of_three_on_a_card_is_parked_and_woken_from_the_page() -> None:
    with shared_card() as card, chromium() as browser:
        watched_page = Watched(browser, card.here.url)
        page = watched_page.page()
        legend = page.locator("figure.map", has_text="GPU 0").locator("li")

        def press(button: str, state: str) -> None:
            page.goto("/models")
            model = page.locator("article.card", has=page.get_by_role("heading", name="llama-3.2-3b"))
            model.get_by_role("button", name=button).click()
            model.locator(f".state.{state}").wait_for()
            card.look()
            page.goto("/")
            page.locator("article.engine", has_text="llama-3.2-3b").locator(f".state.{state}").wait_for()

        page.goto("/")
        for name in WEIGHTS:
            legend.filter(has_text=f"weights of {name}").wait_for()
        press("Park", "parked")
        legend.filter(has_text="weights of llama-3.2-3b").wait_for(state="detached")
        legend.filter(has_text="other of this engine of llama-3.2-3b 500 MiB").wait_for()
        assert legend.filter(has_text="weights of qwen3-1.7b 3.29 GiB").is_visible()
        press("Wake", "ready")
        legend.filter(has_text="weights of llama-3.2-3b 6 GiB").wait_for()
        assert [len(card.place.starts(name)) for name in WEIGHTS] == [1, 1, 1], "none was started again"
        watched_page.close()
    assert not watched_page.problems and not watched_page.elsewhere
