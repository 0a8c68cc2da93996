"""On a machine with several GPUs a model has room, makes room and shares KV on its own ones only."""

import asyncio
from typing import Any

import pytest

from overspill.kv.sizes import GiB, MiB
from overspill.launch.machine import plan_for
from overspill.manager import fleet, needs
from overspill.manager.needs import NOTHING, Memory, Need, free_memory, need_of, on_gpus, with_more
from overspill.manager.states import State
from overspill.manager.swaps import Running, Verdict, choose
from overspill.registry import Model
from tests.manager_process import Place, eventually, gateway, managing
from tests.test_manager_elastic import CARD, FLOOR, burst, elastic, kv
from tests.test_plan_ranks import found


def test_memory_of_one_gpu_is_no_room_on_another() -> None:
    assert Memory(gpus=(0, 0)) == NOTHING and Memory(gpus=(1, 0)) == on_gpus(1)
    free = Memory(gpus=(8, 2), ram_bytes=9)
    assert free.holds(on_gpus(8)) and not free.holds(on_gpus(8, [1])) and free.holds(on_gpus(2, [0, 1]))
    assert not free.holds(on_gpus(1, [2])), "a GPU that is not there"
    assert free - on_gpus(8) == Memory(gpus=(0, 2), ram_bytes=9)
    assert free - on_gpus(2, [1]) == Memory(gpus=(8,), ram_bytes=9)
    assert str(Memory(gpus=(0, 2 * GiB), ram_bytes=GiB)) == "2 GiB of GPU memory on GPU 1 and 1 GiB of RAM"
    assert str(free.where_needed(on_gpus(1, [1]))) == "2 B of GPU memory on GPU 1"


def test_an_engine_on_another_gpu_is_not_evicted() -> None:
    here = Running(name="here", holds=on_gpus(8), in_flight=0, last_used=1, ready_since=0)
    there = Running(name="there", holds=on_gpus(8, [1]), in_flight=0, last_used=9, ready_since=0)
    choice = choose(on_gpus(6, [1]), Memory(gpus=(1, 1)), [here, there], now=99, least_service_s=1)
    assert (choice.verdict, choice.victims) == (Verdict.EVICT, ("there",))
    both = choose(on_gpus(6, [0, 1]), Memory(gpus=(1, 1)), [here, there], now=99, least_service_s=1)
    assert (both.verdict, set(both.victims)) == (Verdict.EVICT, {"here", "there"})


def test_a_model_needs_memory_of_the_gpus_that_it_names(llama: object, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = found(3)
    settings: dict[str, Any] = {"device": "cuda", "max_model_len": 4096, "gpu_memory": 4 * GiB, "gpus": "1"}
    assert need_of(plan_for(str(llama), settings, found=machine), settings).least.gpus == (0, 4 * GiB)
    two = {**settings, "gpus": "0,2", "tensor_parallel_size": 2}
    assert need_of(plan_for(str(llama), two, found=machine), two).least.gpus == (4 * GiB, 0, 4 * GiB)
    monkeypatch.setattr(needs, "detect", lambda: machine)
    free = [gpu.free_bytes.value for gpu in machine.gpus]
    assert free_memory().gpus == tuple(free)
    gone = with_more(machine, on_gpus(MiB, [1]))
    assert [gpu.free_bytes.value for gpu in gone.gpus] == [
        free[0], min(machine.gpus[1].total_bytes.value, free[1] + MiB), free[2]
    ]  # fmt: skip


def reckon(model: Model, evictable: Memory) -> Need:
    need = on_gpus(model.settings.gpu_memory or FLOOR, [int(model.settings.gpus or 0)])
    return Need(least=need, takes=need)


def test_each_gpu_is_divided_among_its_own_engines(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = found(2)
    for module in (fleet, needs):
        monkeypatch.setattr(module, "detect", lambda: machine)
    uuids = [gpu.uuid for gpu in machine.gpus]
    place.add("a", behaviour={**elastic(), "device": "cuda", "gpu": (0, uuids[0])})
    place.add("b", behaviour={**elastic(), "device": "cuda", "gpu": (1, uuids[1])}, gpus="1")
    place.add("c", gpu_memory=700 * MiB, gpus="1")

    async def run() -> None:
        budget = Memory(gpus=(CARD,), ram_bytes=64 * GiB)
        async with managing(place, memory=budget, reckon=reckon) as engines, gateway(engines) as url:
            for name in ("a", "b"):
                await engines.ensure_ready(name)
            await eventually(lambda: all(engines._engine(name).account for name in ("a", "b")))
            assert engines.snapshot("b").holds.gpus == (0, kv(engines, "b").held)
            task = asyncio.create_task(burst(url, "a", 3))
            await eventually(lambda: kv(engines, "a").held >= 900 * MiB)
            assert {one.status_code for one in await task} == {200}
            await eventually(lambda: kv(engines, "b").held == CARD)
            await engines.ensure_ready("c")
            assert {engines.snapshot(name).state for name in "abc"} == {State.READY}
            assert kv(engines, "a").held >= 900 * MiB and kv(engines, "b").held <= 300 * MiB

    asyncio.run(run())
