"""Memory of the window lies under GPU blocks while it is not needed, and no answer changes."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.kv.spill import placement
from overspill.kv.spill.geometry import Geometry, LentUnits, block_step, lent_blocks, lent_units_of, window_bytes
from overspill.kv.spill.loan import Room, choose_window
from tests.engine import BLOCK, Answer, Engine, assert_same, engine, random_prompt, spilling, stock

MODEL_LEN = 2300
RESIDENT, SPILLED = 10, 64  # of four layers: the window is worth 32 GPU blocks


@settings(deadline=None)
@given(
    spilled=st.integers(1, 400), resident=st.integers(2, 100), regions=st.integers(1, 40),
    page=st.sampled_from([512, 4096, 18432, 65536]), granularity=st.sampled_from([4096, 2 << 20]),
)  # fmt: skip
def test_units_never_take_more_than_the_window(
    spilled: int, resident: int, regions: int, page: int, granularity: int
) -> None:
    step = block_step(page, granularity)
    spilled, resident = spilled * step, resident * step
    unit, count = lent_blocks(spilled, page, regions, granularity)
    geometry = Geometry(
        num_blocks=resident + unit * count + spilled, num_spilled=spilled, num_regions=regions, page_bytes=page
    )
    units = lent_units_of(geometry, granularity)
    assert (units is None) == (count == 0)
    if units is None:
        return
    assert units.num_fixed == resident and units.beside(units.window_count) == 0
    assert (units.blocks(0).start, units.blocks(units.count - 1).stop) == (resident, geometry.num_resident)
    ends = [(one.start, one.stop) for one in map(units.spilled, range(units.window_count))]
    assert [stop for _, stop in ends[:-1]] == [start for start, _ in ends[1:]], "one after the other"
    assert (ends[0][0], ends[-1][1]) == (geometry.num_resident, geometry.num_blocks)
    whole = window_bytes(spilled, page, regions)
    for number in range(units.window_count + 1):
        lent = units.beside(number) * units.num_blocks * regions * page
        assert lent + window_bytes(units.covered(number), page, regions) <= whole
    for stretch in (*map(units.blocks, range(units.count)), *map(units.spilled, range(units.window_count))):
        assert len(stretch) * page % granularity == 0, "memory is mapped in such pieces"


def example() -> LentUnits:
    """Llama-3.1-8B with 18 GB of spilled KV: units of 32 GPU blocks, each worth 512 spilled ones."""
    geometry = Geometry(num_blocks=2208 + 544 + 8832, num_spilled=8832, num_regions=32, page_bytes=65536)
    units = lent_units_of(geometry, 2 << 20)
    assert units is not None and (units.num_blocks, units.count, units.num_spilled) == (32, 17, 512)
    return units


def test_a_request_that_fits_on_the_gpu_gets_the_windows_memory() -> None:
    units = example()
    fresh = Room(18, 2207, 8832)
    chosen = choose_window(units, fresh, need=2439, spare=2, may_lower=True)
    assert 2207 + 32 * units.beside(chosen) >= 2441 > 2207 + 32 * units.beside(chosen + 1), "and no more than that"


def test_a_longer_one_leaves_to_the_window_what_it_spills() -> None:
    units = example()
    fresh = Room(18, 2207, 8832)
    chosen = choose_window(units, fresh, need=3251, spare=2, may_lower=True)
    resident = 2207 + 32 * units.beside(chosen)
    assert 3251 - resident < 0.65 * (3251 - 2207), "much less is spilled"
    assert resident + units.covered(chosen) >= 3253 + 8832 // 8, "and others find room"
    longest = choose_window(units, fresh, need=8193, spare=128, may_lower=True)
    assert 2207 + 32 * units.beside(longest) + units.covered(longest) >= 8193 + 128


def test_the_window_takes_its_memory_back() -> None:
    units = example()
    lent = Room(3, 2207 + 32 * units.beside(3), units.covered(3))
    assert choose_window(units, lent, need=8193, spare=128, may_lower=True) > 12
    # A request that runs gets what it needs, and nothing moves for more.
    assert choose_window(units, Room(3, 0, 1), need=1, spare=0, may_lower=False) == 3
    assert choose_window(units, Room(3, 0, 0), need=1, spare=0, may_lower=False) == 4
    used = Room(9, 100, 512, least_window=7)
    assert choose_window(units, used, need=300, spare=0, may_lower=True) >= 7


Plain = Callable[[Sequence[list[int]], int], list[Answer]]


@pytest.fixture(scope="module")
def plain(models: Callable[[str], Path]) -> Plain:
    known: dict[tuple[tuple[int, ...], int], Answer] = {}

    def ask(prompts: Sequence[list[int]], max_tokens: int) -> list[Answer]:
        missing = [prompt for prompt in prompts if (tuple(prompt), max_tokens) not in known]
        if missing:
            with engine(models("llama"), blocks=400, max_model_len=MODEL_LEN, enable_prefix_caching=False) as unlimited:
                for prompt in missing:
                    known[tuple(prompt), max_tokens] = unlimited.ask_one(prompt, max_tokens)
        return [known[tuple(prompt), max_tokens] for prompt in prompts]

    return ask


def lending(**extra: Any) -> Any:
    return spilling(resident=RESIDENT, spilled=SPILLED, spill_lends=True, **extra)


def held(running: Engine) -> tuple[int, int]:
    """GPU blocks and bytes of the window that have memory, which is never more than at the start."""
    worker, loan = running.spill_worker, running.spill.placement.loan
    assert loan is not None and worker.buffer is not None
    block_bytes = worker.geometry.num_regions * worker.geometry.page_bytes
    assert worker.buffer.mapped_bytes == loan.num_resident * block_bytes + loan.window_bytes
    first = RESIDENT * block_bytes + window_bytes(SPILLED, worker.geometry.page_bytes, worker.geometry.num_regions)
    assert worker.buffer.mapped_bytes <= first
    return loan.num_resident, loan.window_bytes


def test_memory_follows_what_is_spilled(llama: Path, plain: Plain) -> None:
    middle, long = random_prompt(1, 25 * BLOCK), random_prompt(2, 60 * BLOCK)
    expected = plain([middle, long], 8)
    with engine(llama, lending(), max_model_len=MODEL_LEN) as running:
        assert held(running)[0] == RESIDENT
        assert_same(running.ask([middle], max_tokens=8), expected[:1])
        assert running.metric("spilled_steps") == 0, "it fits on the GPU, with the window's memory"
        assert held(running)[0] > 25
        assert_same(running.ask([long], max_tokens=8), expected[1:])
        assert running.metric("spill_in_bytes") > 0 and held(running)[0] < 25
        assert_same(running.ask([middle, long], max_tokens=8), expected)
        assert running.metric("window_moves") >= 2


def test_memory_moves_before_anything_of_a_step_is_queued(llama: Path) -> None:
    """vLLM zeroes new blocks, and copies states, before it hands the step's metadata over."""
    with engine(llama, lending(), max_model_len=MODEL_LEN) as running:
        runner = running.core.model_executor.driver_worker.worker.model_runner
        update, buffer, found = runner._update_states, running.spill_worker.buffer, list[bool]()
        assert buffer is not None

        def watched(scheduler_output: Any) -> Any:
            units = scheduler_output.kv_connector_metadata.units
            found.extend([] if units is None else [buffer._units == units])
            return update(scheduler_output)

        runner._update_states = watched
        running.ask([random_prompt(1, 25 * BLOCK)], max_tokens=2)
        running.ask([random_prompt(2, 60 * BLOCK)], max_tokens=2)
        assert len(found) >= 2 and all(found)


def test_a_request_that_outgrows_the_gpu_goes_on_in_ram(
    llama: Path, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "_GROWTH_TOKENS", 32)
    prompt = random_prompt(3, 30 * BLOCK)
    expected = plain([prompt], 400)
    with engine(llama, lending(), max_model_len=MODEL_LEN) as running:
        assert_same(running.ask([prompt], max_tokens=400), expected)
        assert running.metric("spill_in_bytes") > 0
        held(running)


def test_a_long_request_is_not_kept_waiting_by_short_ones(llama: Path, plain: Plain) -> None:
    """They hold blocks of all units; those that become free are held back for it."""
    middle, long = random_prompt(4, 25 * BLOCK), random_prompt(5, 60 * BLOCK)
    short = [random_prompt(seed, 3 * BLOCK) for seed in range(60, 70)]
    expected = plain([middle, long, *short], 40)
    with engine(llama, lending(), max_model_len=MODEL_LEN, max_num_seqs=6) as running:
        assert_same(running.ask([middle], max_tokens=40), expected[:1])  # the GPU has the window's memory
        asked = [*short[:5], long, *short[5:], *short]
        answers = running.ask(asked, max_tokens=40)
        wanted = dict(zip(map(tuple, [middle, long, *short]), expected, strict=True))
        assert_same(answers, [wanted[tuple(prompt)] for prompt in asked])
        assert running.metric("spill_in_bytes") > 0
        held(running)


def test_a_block_given_back_in_the_pass_that_moves_its_memory_is_not_zeroed(deep: Callable[[str], Path]) -> None:
    """vLLM may preempt a request that it has scheduled in the same pass, and zeroes its new blocks all the same."""
    settings = {"max_model_len": 1500, "max_num_batched_tokens": 32}
    with engine(deep("mamba-hybrid"), spilling(resident=20, spilled=110, spill_lends=True), **settings) as running:
        manager, loan, zeroed = running.vllm_scheduler.kv_cache_manager, running.spill.placement.loan, list[int]()
        assert loan is not None
        gone, take = next(iter(loan._out.ids)), manager.take_new_block_ids
        manager.take_new_block_ids = lambda: [gone, *take()]
        runner = running.core.model_executor.driver_worker.worker.model_runner
        runner._zero_block_ids = zeroed.extend
        running.ask([random_prompt(1, 40)], max_tokens=2)
        assert zeroed and gone not in zeroed


def test_blocks_that_a_window_has_left_keep_their_memory(deep: Callable[[str], Path]) -> None:
    """Tables in workers keep them, and a kernel may read them."""
    settings = {"max_model_len": 1900, "max_num_batched_tokens": 64}
    prompts = short, middle, long = [random_prompt(seed, length) for seed, length in enumerate((150, 700, 1700))]
    answers = dict(zip(map(tuple, prompts), stock(deep("gemma3"), prompts, 60, **settings), strict=True))
    with engine(deep("gemma3"), spilling(resident=16, spilled=60, spill_lends=True), **settings) as running:
        moves = watch_moves(running)
        for asked in [middle], [short, long], [middle]:
            assert_same(running.ask(asked, 60), [answers[tuple(prompt)] for prompt in asked])
            running.drain()
            running.evict_gpu()
        assert len(moves) >= 3, "to the GPU, to the window, to the GPU"
        assert any(behind for behind, _ in moves), "a request runs beside one of them, and its window has moved on"
        assert not any(behind & without for behind, without in moves)
        assert running.metric("spilled_blocks_used") == running.metric("resident_blocks_used") == 0


def test_a_returning_prompt_gives_lent_memory_up(deep: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """What it hit kept the window too small for the rest of it, and nothing else would have changed that."""
    monkeypatch.setattr("overspill.kv.spill.loan._PATIENCE_S", 0.0)
    settings = {"max_model_len": 1900, "max_num_batched_tokens": 64}
    prompt = random_prompt(1, 1890)
    expected = stock(deep("gemma3"), [prompt], 4, **settings)
    # The least memory with which the engine starts.
    with engine(deep("gemma3"), spilling(resident=16, spilled=55, spill_lends=True), **settings) as running:
        running.ask_one(prompt[:900], 1)
        running.drain()
        running.add(prompt, 4)
        assert_same(list(running.run(limit=3000).values()), expected)


def watch_moves(running: Engine) -> list[tuple[set[int], set[int]]]:
    """Whenever memory moves: blocks in workers' tables that windows have left, and blocks without memory."""
    placement, found = running.spill.placement, list[tuple[set[int], set[int]]]()
    loan, known = placement.loan, running.core.model_executor.driver_worker.worker.model_runner.requests
    assert loan is not None
    make_room = loan.make_room

    def watched(*args: Any, **kwargs: Any) -> None:
        make_room(*args, **kwargs)
        if loan._is_changed:
            tables = {
                number for one in running.vllm_scheduler.running if one.request_id in known
                for group in known[one.request_id].block_ids for number in group
            }  # fmt: skip
            behind = {number for number in tables if not running.gpu_pool.blocks[number].ref_cnt}
            found.append((behind, set(loan._out.ids)))

    loan.make_room = watched  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_request_that_waits_gets_the_memory_back(
    llama: Path, plain: Plain, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that came alone has it, and would keep the other waiting until it ends."""
    monkeypatch.setattr("overspill.kv.spill.loan._PATIENCE_S", 0.0)
    first, second = random_prompt(1, 30 * BLOCK), random_prompt(2, 30 * BLOCK)
    expected = plain([first, second], 60)
    with engine(llama, lending(), max_model_len=MODEL_LEN, async_scheduling=asynchronous) as running:
        names, answers, together = [running.add(first, 60)], dict[str, Answer](), 0
        for _ in range(12):
            answers.update(running.step())
        assert held(running)[0] > RESIDENT and not answers
        names.append(running.add(second, 60))
        while running.llm.llm_engine.has_unfinished_requests():
            answers.update(running.step())
            together += len(running.vllm_scheduler.running) == 2
        assert_same([answers[name] for name in names], expected)
        assert together > 30 and held(running)[0] == RESIDENT
        assert running.metric("window_preemptions") == 1


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("offload", [{}, {"host_bytes": "64MiB"}, {"host_bytes": "64MiB", "store": "lazy"}], ids=str)
def test_random_lengths_change_no_answer(
    llama: Path, plain: Plain, offload: dict[str, Any], asynchronous: bool
) -> None:
    draw = random.Random(5)
    shared = random_prompt(7, 12 * BLOCK)
    prompts = [random_prompt(seed, draw.choice([20, 90, 300, 700, 1200, 2000])) for seed in range(20, 32)]
    prompts += [shared + random_prompt(seed, draw.randrange(10, 1200)) for seed in range(40, 46)]
    expected = plain(prompts, 12)
    order = [draw.randrange(len(prompts)) for _ in range(60)]
    with engine(llama, lending(**offload), max_model_len=MODEL_LEN, async_scheduling=asynchronous) as running:
        for start in range(0, len(order), 6):
            chosen = order[start : start + draw.randrange(1, 7)]
            answers = running.ask([prompts[index] for index in chosen], max_tokens=12)
            assert_same(answers, [expected[index] for index in chosen])
            held(running)
        assert running.metric("window_moves") > 5 and running.metric("spill_in_bytes") > 0
        running.drain()
        assert running.gpu_pool.get_num_free_blocks() == running.gpu_pool.num_gpu_blocks - 1, "blocks leaked"
