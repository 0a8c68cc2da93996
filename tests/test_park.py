"""A parked engine has no memory under its KV and its weights, and goes on where it stopped once it is woken."""

import os
import random
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.lora.request import LoRARequest

from overspill.kv import park as park_module
from overspill.kv import plugin
from overspill.kv.buffer import HostBuffer
from overspill.kv.copies import PlainCopier
from overspill.kv.errors import OverspillError
from overspill.kv.ram import Ram
from overspill.kv.vllm_api import own_connector
from overspill.kv.weights import HostWeights, Weights, are_constant
from tests.engine import (
    BLOCK,
    Answer,
    Engine,
    assert_same,
    engine,
    overspill,
    random_prompt,
    spilling,
    stock,
)
from tests.test_hybrids import NUM_TOKENS, ask_all, settings
from tests.test_loading import SETTINGS as OFFLOAD
from tests.test_loading import multi
from tests.test_new_weights import ask_adapter, change, write_adapter
from tests.test_soak import HOST_BLOCKS, SLOT_BYTES, answer_all, asks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="looks into the CPU platform's memory")

PROMPTS = [random_prompt(seed, 5 * BLOCK + 7) for seed in range(3)]


def parking(**extra: Any) -> KVTransferConfig:
    return overspill(park=True, **extra)


def weights_of(running: Engine) -> Weights:
    worker = running.core.model_executor.driver_worker.worker
    found: Weights = worker.overspill_weights
    return found


def buffer_of(running: Engine) -> Any:
    return own_connector("buffer").buffer


def park(running: Engine) -> dict[str, Any]:
    figures: dict[str, Any] = running.core.overspill_park()
    assert figures["state"] == "parked"
    assert buffer_of(running).mapped_bytes == 0 == weights_of(running).mapped_bytes
    return figures


def wake(running: Engine) -> None:
    assert running.core.overspill_wake()["state"] == "running"


def cycle(running: Engine) -> dict[str, Any]:
    figures = park(running)
    wake(running)
    return figures


@pytest.fixture
def expected(llama: Path) -> list[Answer]:
    return stock(llama, PROMPTS)


@pytest.mark.parametrize("store", ["eager", "lazy"])
def test_conversations_come_back_from_ram_after_a_park(llama: Path, expected: list[Answer], store: str) -> None:
    with engine(llama, parking(store=store)) as parked:
        assert_same([parked.ask_one(prompt) for prompt in PROMPTS], expected)
        figures = cycle(parked)
        assert figures["freed_bytes"] > figures["weights_bytes"] > 100_000
        for prompt, answer in zip(PROMPTS, expected, strict=True):
            again = parked.ask_one(prompt)
            assert_same([again], [answer])
            assert again.num_cached == 5 * BLOCK, "all full blocks, and so no token that could be loaded was computed"
        parked.assert_nothing_is_held()


@pytest.mark.parametrize("store", ["eager", "lazy"])
@pytest.mark.parametrize("cycles", [1, 3])
def test_running_requests_go_on_after_a_park(llama: Path, store: str, cycles: int) -> None:
    """In the middle of their answers, and one of them within its prompt."""
    prompts = [random_prompt(seed, length) for seed, length in enumerate((100, 200, 1000))]
    expected = stock(llama, prompts, 60)
    with engine(llama, parking(store=store), blocks=60, max_num_batched_tokens=512) as parked:
        names = [parked.add(prompt, 60) for prompt in prompts]
        done: dict[str, Answer] = {}
        for _ in range(cycles):
            for _ in range(3):
                done |= parked.step()
            loaded = parked.metric("hit_tokens")
            cycle(parked)
        done |= parked.run()
        assert_same([done[name] for name in names], expected)
        assert parked.metric("hit_tokens") > loaded and parked.metric("load_failures") == 0
        parked.assert_nothing_is_held()


def test_a_damaged_block_changes_what_follows_a_park(llama: Path) -> None:
    """Else the tests above could pass without KV being what it should be."""
    with engine(llama, parking(verify="off")) as parked:
        before = parked.ask_one(PROMPTS[0])
        park(parked)
        memory = parked.worker.memory
        assert memory is not None
        memory.slots.view(np.float32)[:] = 3.0
        wake(parked)
        assert parked.ask_one(PROMPTS[0]).differs_from(before)


def test_weights_that_do_not_come_back_change_the_answer(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(llama, parking()) as parked:
        before = parked.ask_one(PROMPTS[0])
        parked.drain()
        monkeypatch.setattr(HostWeights, "_transfer", lambda *_: None)
        park(parked)
        wake(parked)
        parked.scheduler.reset()
        assert parked.ask_one(PROMPTS[0]).differs_from(before)


def test_later_parks_copy_no_weights(llama: Path, expected: list[Answer]) -> None:
    with engine(llama, parking()) as parked:
        assert [cycle(parked)["copied_bytes"] for _ in range(3)] == [0, 0, 0], "the first copy is made after the start"
        assert_same([parked.ask_one(PROMPTS[0])], expected[:1])


def test_memory_that_steps_change_is_copied_at_each_park() -> None:
    def is_copied_once(*, lora: object = None, balances: bool = False, reads_images: bool = False) -> bool:
        parallel, model = SimpleNamespace(enable_eplb=balances), SimpleNamespace(is_multimodal_model=reads_images)
        config: Any = SimpleNamespace(lora_config=lora, parallel_config=parallel, model_config=model)
        return are_constant(config)

    assert is_copied_once()
    assert not (is_copied_once(lora=object()) or is_copied_once(balances=True) or is_copied_once(reads_images=True))


@pytest.mark.parametrize("way", ["rpc", "reset"])
def test_new_weights_are_copied_again(llama: Path, way: str) -> None:
    with engine(llama) as fresh:
        fresh.core.model_executor.collective_rpc("apply_model", args=(change,))
        expected = fresh.ask_one(PROMPTS[0])
    with engine(llama, parking()) as parked:
        assert parked.ask_one(PROMPTS[0]).differs_from(expected)
        cycle(parked)
        if way == "rpc":
            parked.llm.apply_model(change)
        else:  # unseen, and then vLLM's caches are reset, as vLLM's documentation says
            parked.core.model_executor.collective_rpc("apply_model", args=(change,))
            assert parked.llm.reset_prefix_cache()
        assert cycle(parked)["copied_bytes"] > 0
        assert_same([parked.ask_one(PROMPTS[0])], [expected])
        assert cycle(parked)["copied_bytes"] == 0


def test_requests_that_come_meanwhile_wait(llama: Path, expected: list[Answer]) -> None:
    with engine(llama, parking()) as parked:
        park(parked)
        kept, dropped = parked.add(PROMPTS[0]), parked.add(PROMPTS[1])
        for _ in range(5):
            assert parked.step() == {}
        parked.llm.llm_engine.abort_request([dropped])
        for _ in range(5):
            assert parked.step() == {}
        wake(parked)
        assert_same([parked.run()[kept]], expected[:1])
        parked.assert_nothing_is_held()


def test_nothing_reaches_the_workers_of_a_parked_engine(llama: Path, expected: list[Answer]) -> None:
    with engine(llama, parking()) as parked:
        park(parked)
        for call in (
            lambda: parked.llm.apply_model(change),
            parked.core.resume_scheduler,
            lambda: parked.core.add_lora(LoRARequest("a", 1, "/nowhere")),
        ):
            with pytest.raises(OverspillError, match="this engine is parked: wake it first"):
                call()
        parked.core.model_executor.collective_rpc("check_health")
        wake(parked)
        assert_same([parked.ask_one(PROMPTS[0])], expected[:1])


def test_parking_twice_and_waking_twice_is_once(llama: Path, expected: list[Answer]) -> None:
    with engine(llama, parking()) as parked:
        assert parked.core.overspill_state() == {"state": "running"}
        wake(parked)
        park(parked)
        park(parked)
        assert parked.core.overspill_state()["state"] == "parked"
        wake(parked)
        wake(parked)
        assert_same([parked.ask_one(PROMPTS[0])], expected[:1])


def test_a_request_that_is_loading_is_parked(llama: Path, expected: list[Answer], open_gate: None) -> None:
    with engine(llama, parking()) as parked:
        parked.ask_one(PROMPTS[0])
        parked.forget_gpu()
        name = parked.add(PROMPTS[0])
        parked.worker.idle_wait_s = 0
        PlainCopier.gate.clear()
        parked.step()
        assert parked.scheduler.loads.in_flight
        PlainCopier.gate.set()
        cycle(parked)
        assert_same([parked.run()[name]], expected[:1])
        parked.assert_nothing_is_held()


def test_stuck_copies_leave_the_engine_running(
    llama: Path, expected: list[Answer], open_gate: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(park_module, "_MOST_SECONDS_TO_SETTLE", 0.2)
    with engine(llama, parking()) as parked:
        parked.ask_one(PROMPTS[0])
        PlainCopier.gate.clear()
        name = parked.add(PROMPTS[1])
        for _ in range(12):
            parked.step()
        with pytest.raises(OverspillError, match="still in flight"):
            parked.core.overspill_park()
        PlainCopier.gate.set()
        assert parked.core.overspill_state() == {"state": "running"}
        assert_same([parked.run()[name]], expected[1:2])
        parked.assert_nothing_is_held()


@pytest.fixture(params=["copy", "unmap", "release"])
def failing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One step of a worker's park fails, as often as the list says."""
    owner, name = {
        "copy": (HostWeights, "_transfer"),
        "unmap": (HostBuffer, "unmap"),
        "release": (HostWeights, "_release"),
    }[request.param]
    call, times = getattr(owner, name), [0]

    def fail(self: Any, *args: Any) -> Any:
        if times[0] > 0:
            times[0] -= 1
            raise RuntimeError("a planted fault")
        return call(self, *args)

    monkeypatch.setattr(owner, name, fail)
    yield times


def test_a_failed_park_leaves_the_engine_running(llama: Path, expected: list[Answer], failing: list[int]) -> None:
    with engine(llama, parking()) as parked:
        assert_same([parked.ask_one(PROMPTS[0])], expected[:1])
        parked.llm.apply_model(lambda model: None)  # so that weights are copied
        failing[0] = 1
        with pytest.raises(RuntimeError, match="a planted fault"):
            parked.core.overspill_park()
        assert parked.core.overspill_state() == {"state": "running"}
        assert_same([parked.ask_one(prompt) for prompt in PROMPTS], expected)
        cycle(parked)
        assert_same([parked.ask_one(prompt) for prompt in PROMPTS], expected)


@pytest.mark.parametrize("part", ["buffer", "weights"])
def test_a_failed_wake_leaves_the_engine_parked(
    llama: Path, expected: list[Answer], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For want of GPU memory, say: nothing of the engine keeps any, and a later wake succeeds."""
    with engine(llama, parking()) as parked:
        assert_same([parked.ask_one(PROMPTS[0])], expected[:1])
        park(parked)
        name = parked.add(PROMPTS[1])
        attach = HostBuffer._map
        target = {"buffer": buffer_of(parked), "weights": weights_of(parked)._buffer}[part]  # type: ignore[attr-defined]

        def refuse(self: HostBuffer, piece: Any) -> None:
            if self is target:
                raise OverspillError("no memory is left")
            attach(self, piece)

        monkeypatch.setattr(HostBuffer, "_map", refuse)
        with pytest.raises(OverspillError, match="no memory is left"):
            parked.core.overspill_wake()
        assert parked.core.overspill_state()["state"] == "parked"
        assert buffer_of(parked).mapped_bytes == 0 == weights_of(parked).mapped_bytes
        assert parked.step() == {}
        monkeypatch.undo()
        wake(parked)
        assert_same([parked.run()[name], parked.ask_one(PROMPTS[0])], [expected[1], expected[0]])


def test_an_engine_that_can_neither_park_nor_wake_ends(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(llama, parking()) as parked:
        parked.ask_one(PROMPTS[0])

        def fail(*_: Any) -> None:
            raise RuntimeError("a planted fault")

        monkeypatch.setattr(HostBuffer, "_unmap", fail)
        monkeypatch.setattr(HostBuffer, "map", fail)
        with pytest.raises(RuntimeError, match="a planted fault"):
            parked.core.overspill_park()
        assert parked.core.overspill_state()["state"] == "failed"
        with pytest.raises(OverspillError, match="must be restarted"):
            parked.core.overspill_wake()
        parked.add(PROMPTS[1])
        with pytest.raises(OverspillError, match="the engine ends: parking failed"):
            parked.step()


def test_a_step_that_fails_before_a_park_ends_the_engine(llama: Path) -> None:
    """vLLM's loop would have ended it. It went on, and the step's request waited for its token for ever."""
    with engine(llama, parking()) as parked:
        core = parked.core
        core.batch_queue, core.batch_queue_size = deque(maxlen=2), 2  # as with asynchronous scheduling on a GPU
        core.step_fn = core.step_with_batch_queue
        parked.add(PROMPTS[0])
        parked.step()
        execute, failed, nothing = core.model_executor.execute_model, Future[None](), Future[None]()
        failed.set_exception(RuntimeError("a planted fault"))
        nothing.set_result(None)
        core.model_executor.execute_model = lambda output, non_block: failed
        core.model_executor.sample_tokens = lambda grammar, non_block: nothing
        core.post_step(core.step_fn()[1])
        assert core.batch_queue, "no step is in flight"
        core.model_executor.execute_model = execute
        with pytest.raises(RuntimeError, match="a planted fault"):
            core.overspill_park()
        assert core.overspill_state()["state"] == "failed"
        with pytest.raises(OverspillError, match="the engine ends: a step failed before parking"):
            core.step_fn()


def test_a_paused_engine_is_not_parked(llama: Path, expected: list[Answer]) -> None:
    with engine(llama, parking()) as parked:
        parked.core.pause_scheduler(mode="keep", clear_cache=False)
        with pytest.raises(OverspillError, match="cannot be parked before it is resumed"):
            parked.core.overspill_park()
        parked.core.resume_scheduler()
        assert_same([parked.ask_one(PROMPTS[0])], expected[:1])


def test_vllms_sleep_is_refused(llama: Path) -> None:
    with engine(llama, parking()) as parked, pytest.raises(OverspillError, match="instead of vLLM's sleep mode"):
        parked.core.model_executor.collective_rpc("sleep")


def test_what_does_not_fit_in_ram_is_recomputed(llama: Path, expected: list[Answer]) -> None:
    with engine(llama, parking(host_bytes="256KiB")) as parked:
        for _ in range(2):
            assert_same([parked.ask_one(prompt) for prompt in PROMPTS], expected)
            cycle(parked)
        parked.assert_nothing_is_held()


@pytest.mark.parametrize("offload", [{}, {"host_bytes": "64MiB", "load": "always"}], ids=["alone", "offload"])
def test_spilled_requests_go_on_after_a_park(llama: Path, offload: dict[str, Any], schedule: None) -> None:
    prompts = [random_prompt(seed, length) for seed, length in enumerate((900, 100))]
    expected = stock(llama, prompts, 40)
    with engine(llama, spilling(park=True, **offload)) as parked:
        names = [parked.add(prompt, 40) for prompt in prompts]
        done: dict[str, Answer] = {}
        for _ in range(8):
            done |= parked.step()
        assert parked.metric("spill_in_bytes") > 0
        figures = cycle(parked)
        geometry = parked.spill.geometry
        resident = geometry.num_regions * geometry.resident_bytes
        window = geometry.num_halves * geometry.half_bytes
        assert figures["freed_bytes"] == resident + window + figures["weights_bytes"]
        streamed = parked.metric("spill_in_bytes")
        done |= parked.run()
        assert_same([done[name] for name in names], expected)
        assert parked.metric("spill_in_bytes") > streamed
        if offload:
            assert parked.metric("hit_tokens") > 0 and parked.metric("load_failures") == 0


def test_adapters_stay_after_a_park(llama: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter", seed=1)
    adapter = LoRARequest("a", 1, str(tmp_path / "adapter"))
    lora = {"enable_lora": True, "max_lora_rank": 8}
    with engine(llama, **lora) as plain:
        expected = ask_adapter(plain, adapter)
    with engine(llama, parking(), **lora) as parked:
        assert_same([ask_adapter(parked, adapter)], [expected])
        assert cycle(parked)["copied_bytes"] > 0, "adapters are put into memory that is copied"
        again = ask_adapter(parked, adapter)
        assert_same([again], [expected])
        assert again.num_cached > 0


@pytest.mark.parametrize("name", ["gemma3", "mamba-hybrid"])
def test_hybrids_go_on_after_a_park(models: Any, name: str) -> None:
    prompts = [random_prompt(seed, 600) for seed in range(2)]
    expected = stock(models(name), prompts, NUM_TOKENS, **settings(name))
    with engine(models(name), parking(verify="all"), **settings(name)) as parked:
        assert_same(ask_all(parked, prompts), expected)
        cycle(parked)
        again = ask_all(parked, prompts)
        assert_same(again, expected)
        assert all(answer.num_cached >= 480 for answer in again)
        parked.assert_nothing_is_held()


def test_beside_another_connector_it_parks(llama: Path, expected: list[Answer]) -> None:
    transfer = multi(kv_load_failure_policy="recompute")
    transfer.kv_connector_extra_config["connectors"][1]["kv_connector_extra_config"] = {**OFFLOAD, "park": True}
    with engine(llama, transfer) as parked:
        assert_same([parked.ask_one(PROMPTS[0])], expected[:1])
        cycle(parked)
        again = parked.ask_one(PROMPTS[0])
        assert_same([again], expected[:1])
        assert again.num_cached == 5 * BLOCK


def test_two_ranks_park_and_wake(llama: Path, expected: list[Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with engine(llama, parking(), **ranks) as parked:
        assert_same([parked.ask_one(prompt) for prompt in PROMPTS], expected)
        name = parked.add(random_prompt(9, 100), 40)
        for _ in range(5):
            parked.step()
        parked.core.overspill_park()
        with pytest.raises(OverspillError, match="parked"):
            parked.core.model_executor.collective_rpc("apply_model")
        parked.core.overspill_wake()
        assert_same([parked.run()[name]], stock(llama, [random_prompt(9, 100)], 40))
        again = [parked.ask_one(prompt) for prompt in PROMPTS]
        assert_same(again, expected)
        assert all(answer.num_cached == 5 * BLOCK for answer in again)
        parked.assert_nothing_is_held()


def test_another_worker_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "use_own_classes", lambda *_, **__: None)
    with pytest.raises(OverspillError, match="park needs its own worker class"), engine(llama, parking()):
        pass


def test_ram_for_the_weights_is_asked_for(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overspill.kv.ram.available_ram", lambda: Ram((64 << 20) + 1000, "a small machine"))
    said = r"host_bytes \+ park needs .* do without park \(.* for a copy of the weights\)"
    with pytest.raises(ValueError, match=said), engine(llama, parking()):
        pass


@pytest.mark.parametrize("spills", [False, True])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.soak), pytest.param(3, marks=pytest.mark.soak)])
def test_random_parks_change_no_answer(llama: Path, spills: bool, seed: int) -> None:
    """Requests come, run, and are aborted around parks; pools are small."""
    wanted = asks(40, seed)
    small = {"host_bytes": HOST_BLOCKS * SLOT_BYTES}
    config = spilling(park=True, load="always", **small) if spills else parking(**small)
    with engine(llama, blocks=400) as plain:
        expected = [plain.ask_one(ask.prompt, ask.max_tokens) for ask in wanted]
    with engine(llama, config, **({} if spills else {"blocks": 60})) as parked:
        draw, step = random.Random(seed), parked.step

        def step_or_park() -> dict[str, Answer]:
            if draw.random() < 0.05:
                park(parked)
                assert step() == {}
                wake(parked)
            return step()

        parked.step = step_or_park  # type: ignore[method-assign]
        answers = answer_all(parked, wanted, seed)
        assert len(answers) > 30
        assert_same([answers[i] for i in sorted(answers)], [expected[i] for i in sorted(answers)])
        parked.assert_nothing_is_held()
