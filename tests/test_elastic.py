"""An engine whose KV cache grows and shrinks while it runs answers as one with all of the memory."""

import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.core.sched.interface import PauseState

from overspill.kv.buffer import Units
from overspill.kv.elastic import Elastic, Shape, least_units
from overspill.kv.ledger import Ledger
from overspill.kv.options import Options
from overspill.kv.vllm_api import own_connector, watch_outputs
from tests.engine import BLOCK, Answer, Engine, assert_same, engine, overspill, random_prompt, spilling, stock
from tests.simulated_copies import Setup
from tests.simulated_engine import Engine as Simulated
from tests.test_serve import (
    ASKED,
    PROMPT,
    model,  # noqa: F401 (a fixture)
    serving,
)
from tests.test_soak import HOST_BLOCKS, PRIORITY, SLOT_BYTES, answer_all, asks, mismatch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="looks into the CPU platform's memory")

PROMPTS = [random_prompt(seed, 5 * BLOCK + 7) for seed in range(4)]
MODEL_LEN = 8 * BLOCK


@pytest.fixture
def expected(llama: Path) -> list[Answer]:
    return stock(llama, PROMPTS)


class Grown:
    """An engine on a ledger, and the manager's side of it."""

    def __init__(self, running: Engine, ledger: Ledger) -> None:
        self.engine, self._ledger = running, ledger
        (self.row,) = ledger.accounts()
        self.elastic: Elastic = next(
            one.elastic for one in [running.core.scheduler.connector] if getattr(one, "elastic", None)
        )

    @property
    def account(self) -> Any:
        return self._ledger.accounts()[self.row]

    @property
    def mapped_bytes(self) -> int:
        return int(own_connector("buffer").buffer.mapped_bytes)

    def grant(self, num_units: int, steps: int = 400) -> None:
        self._ledger.write(self.row, granted=num_units * self.elastic.units.unit_bytes)
        self.settle(steps)
        assert len(self.elastic.mapped) == num_units and self.mapped_bytes == self.account.held
        # The last unit may be a small one.
        assert 0 <= num_units * self.elastic.units.unit_bytes - self.account.held < self.elastic.units.unit_bytes

    def settle(self, steps: int = 400) -> None:
        for _ in range(steps):
            self.engine.core.overspill_adjust()
            if self.elastic.is_settled():
                return
            # As the engine's loop: a step may be in flight after the last request.
            if self.engine.core.scheduler.has_requests() or self.engine.core.batch_queue:
                Engine.step(self.engine)
            else:
                time.sleep(0.01)  # stores that found no room in RAM are offered again after a while
        raise AssertionError((self.elastic.mapped, self.elastic._leaving))


def elastic(llama: Path, ledger: Ledger, *, blocks: int = 64, **extra: Any) -> Any:
    return engine(
        llama, overspill(ledger=str(ledger.path), **extra), blocks=blocks, max_model_len=MODEL_LEN, max_num_seqs=4
    )


def test_a_smaller_last_unit_is_counted_as_it_is(llama: Path, ledger: Ledger) -> None:
    with elastic(llama, ledger, blocks=62) as running:
        grown, units = Grown(running, ledger), Grown(running, ledger).elastic.units
        assert len(units.blocks(units.count - 1)) < units.blocks_per_unit
        whole = grown.account.most
        assert whole == 62 * units.block_bytes == grown.account.held == grown.mapped_bytes
        grown.grant(grown.elastic._floor)
        assert grown.account.held == grown.elastic._floor * units.unit_bytes
        ledger.write(grown.row, granted=whole)
        grown.settle()
        assert grown.account.held == grown.mapped_bytes == whole


@pytest.mark.parametrize("store", ["eager", "lazy"])
def test_cached_kv_survives_a_shrink_in_ram(llama: Path, ledger: Ledger, expected: list[Answer], store: str) -> None:
    with elastic(llama, ledger, store=store) as running:
        grown = Grown(running, ledger)
        assert grown.account.held == grown.account.most == grown.mapped_bytes
        assert_same([running.ask_one(prompt) for prompt in PROMPTS], expected)
        grown.grant(grown.elastic._floor)
        again = [running.ask_one(prompt) for prompt in PROMPTS]
        assert_same(again, expected)
        assert all(answer.num_cached >= 5 * BLOCK for answer in again)
        assert running.metric("shrink_lost_blocks") == 0 and running.metric("shrunk_bytes") > 0


@pytest.mark.parametrize("eviction", ["lru", "arc"])
def test_repeated_prompts_are_offloaded_fetched_and_evicted(llama: Path, ledger: Ledger, eviction: str) -> None:
    """What kvcached's own test of CPU offload shows, on memory that comes and goes."""
    prompts = [random_prompt(20 + seed, 5 * BLOCK + 7) for seed in range(12)]  # 60 full blocks, and RAM for 40
    expected = stock(llama, prompts)
    with elastic(llama, ledger, store="eager", eviction=eviction, host_bytes=40 * SLOT_BYTES) as running:
        grown = Grown(running, ledger)
        for num_units in (grown.elastic._floor, grown.elastic.units.count, grown.elastic._floor):
            grown.grant(num_units)
            for _ in range(2):
                assert_same([running.ask_one(prompt) for prompt in prompts], expected)
                again = running.ask_one(prompts[-1])  # still in RAM, if no longer on the GPU
                assert again.num_cached >= 4 * BLOCK
                running.drain()
        assert running.metric("store_bytes") > 0 < running.metric("load_bytes")
        assert running.metric("evicted_blocks") > 0 == running.metric("load_failures")


def test_what_was_given_back_returns(llama: Path, ledger: Ledger, expected: list[Answer]) -> None:
    with elastic(llama, ledger, ledger_bytes=1) as running:
        grown = Grown(running, ledger)
        assert grown.account.held == grown.account.floor < grown.account.most
        for num_units in (12, 9, 16, grown.elastic._floor, 16):
            grown.grant(num_units)
            assert_same([running.ask_one(prompt) for prompt in PROMPTS], expected)
        free = running.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert free == 64 - 1
        assert running.llm.reset_prefix_cache()


def test_a_grant_below_the_floor_gives_the_floor(llama: Path, ledger: Ledger) -> None:
    with elastic(llama, ledger) as running:
        grown = Grown(running, ledger)
        ledger.write(grown.row, granted=1)
        for _ in range(100):
            running.core.overspill_adjust()
        assert grown.account.held == grown.account.floor
        assert grown.account.floor >= MODEL_LEN // BLOCK * grown.elastic.units.block_bytes


def test_running_requests_give_way_and_go_on(
    llama: Path, ledger: Ledger, expected: list[Answer], impatient: None
) -> None:
    with elastic(llama, ledger) as running:
        grown = Grown(running, ledger)
        names = [running.add(prompt) for prompt in PROMPTS]
        answers: dict[str, Answer] = {}
        for _ in range(3):
            answers.update(running.step())
        assert not answers
        ledger.write(grown.row, granted=grown.account.floor)
        while running.llm.llm_engine.has_unfinished_requests():
            running.core.overspill_adjust()
            answers.update(running.step())
        assert_same([answers[name] for name in names], expected)
        assert running.metric("shrink_preemptions") > 0


@pytest.mark.parametrize("patience", [60.0, 0.05], ids=["it ends", "it is preempted"])
def test_no_memory_goes_while_a_request_reads_behind_its_window(
    deep: Callable[[str], Path], ledger: Ledger, patience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables in workers keep blocks that its window has left, and a kernel may read them."""
    monkeypatch.setattr("overspill.kv.elastic._PATIENCE_S", patience)
    settings = {"max_model_len": 24 * BLOCK, "max_num_batched_tokens": 12 * BLOCK, "blocks": 90}
    prompts, gemma3 = [random_prompt(seed, 20 * BLOCK) for seed in range(2)], deep("gemma3")
    expected = stock(gemma3, prompts, max_tokens=40, **settings)
    with engine(gemma3, overspill(ledger=str(ledger.path)), **settings) as running:
        grown = Grown(running, ledger)
        names, answers = [running.add(prompt, max_tokens=40) for prompt in prompts], dict[str, Answer]()
        for _ in range(6):
            answers.update(running.step())
        requests = list(running.vllm_scheduler.running)
        known = running.core.model_executor.driver_worker.worker.model_runner.requests
        tables = {number for one in requests for group in known[one.request_id].block_ids for number in group}
        behind = {number for number in tables if not running.gpu_pool.blocks[number].ref_cnt}
        at_risk = {unit for unit in grown.elastic.mapped if behind.intersection(grown.elastic.units.blocks(unit))}
        ledger.write(grown.row, granted=grown.account.floor)
        running.core.overspill_adjust()
        assert at_risk & grown.elastic._leaving.keys(), "units with nothing but blocks that windows have left"
        while running.llm.llm_engine.has_unfinished_requests():
            running.core.overspill_adjust()
            if len(running.vllm_scheduler.running) == 2 and not any(one.num_preemptions for one in requests):
                assert at_risk <= grown.elastic.mapped
            answers.update(running.step())
        assert_same([answers[name] for name in names], expected)
        assert any(one.num_preemptions for one in requests) == (patience < 1)
        grown.settle()
        assert grown.account.held == grown.account.floor


def test_memory_without_a_grant_cannot_be_touched(llama: Path, ledger: Ledger) -> None:
    """So that any use of it in these tests ends the process."""
    with elastic(llama, ledger, ledger_bytes=1) as running:
        grown = Grown(running, ledger)
        maps = Path("/proc/self/maps").read_text().splitlines()
        buffer = own_connector("buffer").buffer
        last = buffer._address + buffer.reserved_bytes - 1
        (line,) = (
            line for line in maps
            if int(line.split("-")[0], 16) <= last < int(line.split()[0].split("-")[1], 16)
        )  # fmt: skip
        assert line.split()[1].startswith("---")
        grown.grant(16)
        memory = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * 1).from_address(last))
        assert memory[0] == 0


def test_waiting_requests_are_wanted(llama: Path, ledger: Ledger) -> None:
    with elastic(llama, ledger, ledger_bytes=1) as running:
        grown = Grown(running, ledger)
        running.core.overspill_adjust()
        idle = grown.account
        assert idle.used == 0 and idle.wanted == grown.elastic.units.unit_bytes
        for prompt in PROMPTS:
            running.add(prompt)
        running.step()
        running.core.overspill_adjust()
        busy = grown.account
        assert busy.used > 0 and busy.wanted > busy.held
        while running.llm.llm_engine.has_unfinished_requests():
            running.step()
        running.core.overspill_adjust()
        assert grown.account.used == 0


def test_a_parked_engine_holds_nothing_until_it_wakes(llama: Path, ledger: Ledger, expected: list[Answer]) -> None:
    with elastic(llama, ledger, park=True) as running:
        grown = Grown(running, ledger)
        grown.grant(12)
        assert_same([running.ask_one(prompt) for prompt in PROMPTS], expected)
        assert running.core.overspill_park()["state"] == "parked"
        running.core.overspill_adjust()
        assert grown.account.held == grown.mapped_bytes == 0
        assert running.core.overspill_wake()["state"] == "running"
        running.core.overspill_adjust()
        assert grown.account.held == grown.mapped_bytes == 12 * grown.elastic.units.unit_bytes
        assert_same([running.ask_one(prompt) for prompt in PROMPTS], expected)


def test_a_damaged_block_changes_the_answer(llama: Path, ledger: Ledger, expected: list[Answer]) -> None:
    """What comes back after a shrink is what is in RAM."""
    with elastic(llama, ledger, verify="off") as running:
        grown = Grown(running, ledger)
        running.ask(PROMPTS)
        grown.grant(grown.elastic._floor)
        running.worker.memory.slots[:] = 7
        with pytest.raises(AssertionError):
            assert_same([running.ask_one(prompt) for prompt in PROMPTS], expected)


def test_spilled_requests_go_on_when_the_gpu_shrinks(llama: Path, ledger: Ledger) -> None:
    long = random_prompt(9, 30 * BLOCK)
    (expected,) = stock(llama, [long])
    transfer = spilling(resident=32, host_bytes="64MiB", load="always", spill_share=1.0, ledger=str(ledger.path))
    with engine(llama, transfer) as running:
        grown = Grown(running, ledger)
        first = running.add(long)
        answers: dict[str, Answer] = {}
        for _ in range(4):
            answers.update(running.step())
        ledger.write(grown.row, granted=8 * grown.elastic.units.unit_bytes)
        while running.llm.llm_engine.has_unfinished_requests():
            running.core.overspill_adjust()
            answers.update(running.step())
        assert_same([answers[first]], [expected])
        grown.settle()
        assert grown.account.used == 0, "blocks in RAM are not counted"
        assert grown.account.held == 8 * grown.elastic.units.unit_bytes
        assert_same([running.ask_one(long)], [expected])


class Granted(Engine):
    """Before each step the memory may be granted anew."""

    def step(self) -> dict[str, Answer]:
        if self.draw.random() < 0.1:
            num_units = self.draw.randrange(self.grown.elastic._floor, self.grown.elastic.units.count + 1)
            self.ledger.write(self.grown.row, granted=num_units * self.grown.elastic.units.unit_bytes)
            self.grants += 1
        self.core.overspill_adjust()
        return super().step()


def run(llama: Path, ledger: Ledger, *, count: int, seed: int, **settings: Any) -> int:
    wanted = asks(count, seed)
    with engine(llama, blocks=300) as plain:
        expected = answer_all(plain, wanted, seed)
    options = {"host_bytes": HOST_BLOCKS * SLOT_BYTES, "verify": "all", "ledger": str(ledger.path)}
    transfer = overspill(**options, **settings.pop("options", {}))
    with engine(llama, transfer, blocks=64, max_model_len=700, **settings) as running:
        running.__class__ = Granted
        running.draw, running.grants, running.ledger = random.Random(seed), 0, ledger
        running.grown = Grown(running, ledger)
        answers = answer_all(running, wanted, seed)
        wrong = {n: why for n in answers.keys() & expected.keys() if (why := mismatch(answers[n], expected[n]))}
        assert not wrong, wrong
        assert len(answers) == sum(ask.abort_after is None for ask in wanted) or len(answers) > 0.8 * count
        assert running.metric("shrunk_bytes") > 0 < running.metric("grown_bytes")
        assert running.metric("corrupt_blocks") == running.metric("load_failures") == 0
        running.grown.grant(running.grown.elastic.units.count)
        running.assert_nothing_is_held()
        grants: int = running.grants
        return grants


def test_random_grants_change_no_answer(llama: Path, ledger: Ledger, impatient: None) -> None:
    assert run(llama, ledger, count=100, seed=3) > 20


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("store", ["eager", "lazy"])
def test_five_hundred_grants_change_no_answer(
    llama: Path, ledger: Ledger, impatient: None, store: str, asynchronous: bool
) -> None:
    scheduling = {**PRIORITY, "async_scheduling": asynchronous}
    assert run(llama, ledger, count=800, seed=5, options={"store": store}, **scheduling) > 125


def test_a_served_engine_follows_its_grants_idle_or_busy(model: Path, ledger: Ledger, tmp_path: Path) -> None:  # noqa: F811
    def held(num_bytes: int) -> None:
        deadline = time.monotonic() + 60
        while next(iter(ledger.accounts().values())).held != num_bytes:
            assert time.monotonic() < deadline, ledger.accounts()
            time.sleep(0.05)

    with serving(model, "--kv-options", f"load=always,ledger={ledger.path}", folder=tmp_path) as server:
        server.wait_for("/v1 serves")
        ((row, account),) = ledger.accounts().items()
        client = server.client()
        first = client.completions.create(model="tiny", prompt=PROMPT, **ASKED)
        ledger.write(row, granted=account.floor)
        held(account.floor)
        again = client.completions.create(model="tiny", prompt=PROMPT, **ASKED)
        assert again.choices[0].token_ids == first.choices[0].token_ids
        ledger.write(row, granted=account.most)
        held(account.most)
        os.kill(account.pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while ledger.accounts():
            assert time.monotonic() < deadline
            time.sleep(0.05)


class Shrunk:
    """A simulated engine of 33 blocks, four to a unit of memory."""

    def __init__(self, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, **setup: Any) -> None:
        self.engine = Simulated(Setup(gpu_blocks=33, host_slots=40, max_seqs=2, **setup))
        monkeypatch.setattr(self.engine, "check", lambda: None)  # it misses blocks that are held out
        self.scheduler, self.unmapped = self.engine.scheduler, list[set[int]]()
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.core = SimpleNamespace(scheduler=self.scheduler, batch_queue=self.engine._in_flight)
        shape = Shape(Units(num_blocks=33, blocks_per_unit=4, block_bytes=4096), first=9, floor=4)
        self.elastic = Elastic(shape, Options.parse({"ledger": str(ledger.path), "host_bytes": "1GiB"}), block_tokens=4)
        self.elastic.bind(self.scheduler.kv_cache_manager, self.engine.offload.stores)
        monkeypatch.setattr(
            "overspill.kv.elastic.call_workers", lambda core, name, units: self.unmapped.append(set(units))
        )
        monkeypatch.setattr("overspill.kv.elastic.is_frozen", lambda core: False)
        self.elastic.attach(watch_outputs(self.core, self.elastic.done))
        self._ledger, schedule = ledger, self.scheduler.schedule

        def planned() -> Any:
            output = schedule()
            self.elastic.planned()
            return output

        self.scheduler.schedule = planned

    def grant(self, num_units: int) -> None:
        (row,) = self._ledger.accounts()
        self._ledger.write(row, granted=num_units * self.elastic.units.unit_bytes)

    def step(self) -> None:
        self.elastic.adjust(self.core)
        self.engine.step()


def test_a_preempted_holder_leaves_before_it_runs_again(
    ledger: Ledger, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a step in flight, whose blocks vLLM frees when its output is read."""
    monkeypatch.setattr("overspill.kv.elastic._PATIENCE_S", 0.0)
    shrunk = Shrunk(ledger, monkeypatch, asynchronous=True)
    engine = shrunk.engine
    taken = shrunk.pool.get_new_blocks(32)
    shrunk.pool.free_blocks(taken[::3])  # so that the request has blocks in every unit
    request = engine.requests[engine.add(list(range(3, 40)), max_tokens=20)]
    for _ in range(8):
        engine.step()
    shrunk.pool.free_blocks([block for number, block in enumerate(taken) if number % 3])
    tokens = request.num_output_tokens
    assert 0 < tokens < 8 and len(engine._in_flight) == 1
    shrunk.grant(6)
    for _ in range(8):
        shrunk.step()
    elastic = shrunk.elastic
    assert elastic.is_settled() and shrunk.unmapped[-1] == elastic.mapped and len(elastic.mapped) == 6
    assert request.num_preemptions == 1 and request.num_output_tokens > tokens
    for _ in range(40):
        engine.step()
    assert request.is_finished() and request.num_output_tokens == 20
    elastic.close()


def two_loads(ledger: Ledger, monkeypatch: pytest.MonkeyPatch, **setup: Any) -> tuple[Shrunk, list[str]]:
    """Two requests load their prefixes, and the engine has to shrink meanwhile."""
    shrunk = Shrunk(ledger, monkeypatch, longest_flight=0, batched_tokens=64, **setup)
    engine = shrunk.engine
    known = [[100 * number + token for token in range(40)] for number in (1, 2)]
    for prompt in known:
        engine.add([*prompt, 1], max_tokens=1)
        while shrunk.scheduler.has_requests():
            shrunk.step()
    engine.forget_gpu()
    for copier in engine.copiers:
        copier.longest_flight = 40
    names = [engine.add([*prompt, *range(500, 520)], max_tokens=1) for prompt in known]
    shrunk.step()
    assert len(engine.offload.loads.in_flight) == 2
    shrunk.grant(6)
    return shrunk, names


@pytest.mark.parametrize("pause", [PauseState.UNPAUSED, PauseState.PAUSED_NEW], ids=lambda pause: pause.name)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_loaded_requests_whose_blocks_left_do_not_wait_for_ever(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, asynchronous: bool, pause: PauseState
) -> None:
    """vLLM had promised each of them the rest of the blocks that it needs, and those went to another engine. A pause
    that waits for such requests has to end, too."""
    shrunk, names = two_loads(ledger, monkeypatch, asynchronous=asynchronous)
    engine = shrunk.engine
    shrunk.scheduler.set_pause_state(pause)
    for _ in range(90):
        shrunk.step()
    assert shrunk.scheduler.get_num_unfinished_requests() == 0  # but for those that a pause leaves in the queue
    shrunk.scheduler.set_pause_state(PauseState.UNPAUSED)
    for _ in range(90):
        shrunk.step()
    assert shrunk.elastic.is_settled() and len(shrunk.elastic.mapped) == 6
    assert all(engine.requests[name].is_finished() for name in names)
    assert shrunk.elastic.stats.data["standstills"] == 1
    shrunk.elastic.close()


def test_an_aborted_load_is_waited_for(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives its blocks back when its copies end; the other request has room then, and loads nothing again."""
    shrunk, names = two_loads(ledger, monkeypatch)
    engine = shrunk.engine
    first, second = engine.copiers[0].under_way
    first._steps_to_done = first._steps_to_queued = 0
    second._steps_to_done = second._steps_to_queued = 30
    for _ in range(3):
        shrunk.step()
    engine.abort(names[1])
    for _ in range(60):
        shrunk.step()
    assert engine.requests[names[0]].is_finished()
    assert not shrunk.elastic.stats.data.get("standstills")
    shrunk.elastic.close()


def test_the_least_units_hold_the_longest_request_whichever_stay() -> None:
    for num_blocks, per_unit in itertools.product(range(1, 40), range(1, 9)):
        units = Units(num_blocks=num_blocks, blocks_per_unit=per_unit, block_bytes=4096)
        sizes = [len(units.blocks(unit)) for unit in range(units.count)]
        for least in range(1, num_blocks + 1):
            floor = least_units(units, least)
            assert sizes[0] + sum(sorted(sizes[1:])[: floor - 1]) >= least
            assert floor == 1 or sizes[0] + sum(sorted(sizes[1:])[: floor - 2]) < least
