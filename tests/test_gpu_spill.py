"""Spill on a GPU: virtual memory, stream order, vLLM's CUDA runner and its graphs. Run with `pytest -m gpu`."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from overspill.kv.errors import OverspillError
from overspill.kv.spill.geometry import Geometry
from tests.engine import (
    PAGE,
    Answer,
    Engine,
    assert_identical,
    assert_same_but_for_ties,
    engine,
    overspill_config,
    random_prompt,
)
from tests.gpu_memory import used_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

MIB = 2**20
GEOMETRY = Geometry(num_blocks=24, num_spilled=16, num_regions=5, page_bytes=MIB // 2)


class Rig:
    """A mapped buffer, an arena and the streams between them."""

    def __init__(self) -> None:
        from overspill.kv.buffer import CudaBuffer, spill_pieces
        from overspill.kv.cuda import PinnedRanges
        from overspill.kv.host_memory import HostMemory
        from overspill.kv.spill.streams import CudaStreams

        device = torch.device("cuda", 0)
        torch.cuda.init()
        self.used_before = used_bytes()
        self.memory = CudaBuffer(GEOMETRY.buffer_bytes, spill_pieces(GEOMETRY), device)
        self.buffer = self.memory.tensor().view(torch.uint8)
        self.arena = HostMemory(GEOMETRY.num_regions, GEOMETRY.half_bytes)
        self.arena.prepare(PinnedRanges(device))
        assert self.arena.wait_until_prepared(60)
        self.streams = CudaStreams(GEOMETRY, self.buffer, self.arena)

    def window(self, region: int) -> torch.Tensor:
        start = GEOMETRY.spilled_offset(region)
        return self.buffer[start : start + GEOMETRY.half_bytes].view(GEOMETRY.num_spilled, -1)

    def resident(self, region: int) -> torch.Tensor:
        start = region * GEOMETRY.region_bytes
        return self.buffer[start : start + GEOMETRY.resident_bytes].view(GEOMETRY.num_resident, -1)

    def kept(self, region: int) -> torch.Tensor:
        return torch.from_numpy(self.arena.slots[region]).view(GEOMETRY.num_spilled, -1)

    def close(self) -> None:
        self.streams.close()
        self.arena.close()
        self.memory.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def test_regions_of_a_parity_share_their_window_and_nothing_else(rig: Rig) -> None:
    assert bool((rig.buffer == 0).all()), "fresh memory is zeroed"
    for region in range(GEOMETRY.num_regions):
        rig.resident(region).fill_(10 + region)
    rig.window(0).fill_(1)
    rig.window(1).fill_(2)
    torch.cuda.synchronize()
    assert [int(rig.window(region).float().mean()) for region in range(5)] == [1, 2, 1, 2, 1]
    assert [int(rig.resident(region).float().mean()) for region in range(5)] == [10, 11, 12, 13, 14]


def test_the_buffer_costs_its_resident_blocks_and_two_halves() -> None:
    rig = Rig()
    used = used_bytes() - rig.used_before
    mapped = GEOMETRY.num_regions * GEOMETRY.resident_bytes + 2 * GEOMETRY.half_bytes
    assert mapped <= used < mapped + 64 * MIB < GEOMETRY.buffer_bytes + 64 * MIB
    rig.close()
    assert used_bytes() - rig.used_before < 64 * MIB, "memory was not given back"


def test_copies_move_runs_of_blocks_both_ways(rig: Rig) -> None:
    for region in range(GEOMETRY.num_regions):
        rig.kept(region)[:] = torch.arange(GEOMETRY.num_spilled, dtype=torch.uint8)[:, None] + 16 * region
    runs = [(0, 3), (7, 8), (10, 16)]
    rig.streams.fill(3, runs)
    rig.streams.compute_after(rig.streams.fill_event())
    expected = torch.zeros(16, dtype=torch.uint8)
    for start, end in runs:
        expected[start:end] = torch.arange(start, end, dtype=torch.uint8) + 48
    assert torch.equal(rig.window(3)[:, 0].cpu(), expected) and torch.equal(rig.window(3)[:, -1].cpu(), expected)
    rig.window(3).add_(100)
    rig.streams.save_after(rig.streams.compute_event())
    rig.streams.save(3, [(1, 2), (10, 12)])
    rig.streams.wait(rig.streams.save_event())
    assert rig.kept(3)[:, 5].tolist() == [48, 149, *range(50, 58), 158, 159, *range(60, 64)]
    assert rig.streams.bytes_in == 10 * MIB // 2 and rig.streams.bytes_out == 3 * MIB // 2


def test_a_save_waits_for_compute_and_a_fill_for_the_save(rig: Rig) -> None:
    rig.kept(0)[:] = 1
    rig.kept(2)[:] = 2
    torch.cuda._sleep(200_000_000)
    rig.window(0).fill_(7)  # what layer 0 writes
    rig.streams.save_after(rig.streams.compute_event())
    rig.streams.save(0, [(0, 16)])
    rig.streams.fill_after(rig.streams.save_event())
    rig.streams.fill(2, [(0, 16)])  # the same half
    rig.streams.compute_after(rig.streams.fill_event())
    seen = rig.window(2).clone()
    torch.cuda.synchronize()
    assert bool((rig.kept(0) == 7).all()) and bool((seen == 2).all())


def test_blocks_move_from_ram_to_the_gpu_and_within_it(rig: Rig) -> None:
    for region in range(GEOMETRY.num_regions):
        rig.resident(region)[1] = 20 + region
        rig.kept(region)[3] = 40 + region
    torch.cuda.synchronize()
    rig.streams.copy_blocks([(GEOMETRY.num_resident + 3, 5), (1, 6)])
    rig.streams.compute_after(rig.streams.fill_event())
    for region in range(GEOMETRY.num_regions):
        assert bool((rig.resident(region)[5] == 40 + region).all())
        assert bool((rig.resident(region)[6] == 20 + region).all())


def test_h2d_copies_can_be_timed(rig: Rig) -> None:
    start = rig.streams.mark()
    rig.streams.fill(0, [(0, 16)])
    end = rig.streams.mark()
    torch.cuda.synchronize()
    seconds = start.seconds_until(end)
    assert seconds is not None and seconds > 0


@dataclass(frozen=True)
class Graphed:
    """A graph whose layers see the last byte of their blocks, and add one to block 5."""

    graphs: Any
    graph: torch.cuda.CUDAGraph
    seen: torch.Tensor

    def step(self, step: Any) -> None:
        self.graphs.begin(step)
        self.graph.replay()
        self.graphs.end()
        torch.cuda.synchronize()


def graphed(rig: Rig) -> Graphed:
    from overspill.kv.spill.graphs import SpilledGraphs
    from overspill.kv.spill.window import Layer, Window, plan_accesses

    regions = range(GEOMETRY.num_regions)
    window = Window(plan_accesses([Layer(f"l{region}", 0, region) for region in regions], GEOMETRY), rig.streams)
    graphs = SpilledGraphs(window, rig.streams, 32)
    seen = torch.zeros(GEOMETRY.num_regions, GEOMETRY.num_spilled, dtype=torch.uint8, device="cuda")
    for region in regions:
        rig.kept(region)[:] = torch.arange(GEOMETRY.num_spilled, dtype=torch.uint8)[:, None] + 16 * region

    def layers() -> None:
        graphs.begin_model()
        for region in regions:
            rig.window(region)[5].add_(1)
            graphs.begin_attention(f"l{region}")
            seen[region].copy_(rig.window(region)[:, -1])
            graphs.end_attention([])

    layers()  # warms up, and waits for nothing
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    return Graphed(graphs, graph, seen)


def test_a_graph_waits_for_copies_and_copies_for_the_graph(rig: Rig) -> None:
    """Every layer of a captured graph sees its own blocks, writes one, and the arena gets it back."""
    from overspill.kv.spill.steps import GroupStep, SpillStep

    made = graphed(rig)
    blocks = [*range(6), *range(9, 16)]
    for number in range(1, 4):
        made.step(SpillStep({0: GroupStep(reads=[(0, 5), (9, 16)], partial=[(5, 6)], writes=[(5, 6)])}))
        for region in range(GEOMETRY.num_regions):
            expected = [16 * region + block + (number if block == 5 else 0) for block in blocks]
            assert made.seen[region, blocks].tolist() == expected
            assert int(rig.kept(region)[5, 0]) == 16 * region + 5 + number


def test_a_step_has_more_copies_than_a_stream_takes(rig: Rig) -> None:
    """Were all queued before the graph is replayed, the driver would wait for it, and it for the driver's caller."""
    from overspill.kv.spill.steps import GroupStep, SpillStep

    made = graphed(rig)
    apart = [(block, block + 1) for block in (*range(5), *range(6, 16))] * 1000
    made.step(SpillStep({0: GroupStep(reads=apart, partial=[(5, 6)], writes=[(5, 6)])}))
    for region in range(GEOMETRY.num_regions):
        assert made.seen[region].tolist() == [16 * region + block + (block == 5) for block in range(16)]


def test_a_lost_copy_ends_the_engine_and_says_so(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    from overspill.kv.cuda import FlagQueue, StreamFlags
    from overspill.kv.spill import watchdog as watching

    reasons: list[str] = []
    monkeypatch.setattr(watching, "_STALL_S", 0.5)
    monkeypatch.setattr(watching.Watchdog, "end", lambda self, reason: reasons.append(reason))
    flags, stream = StreamFlags(torch.zeros(1, dtype=torch.int32, device="cuda")), rig.streams.inbound
    watchdog = watching.Watchdog()
    queue = FlagQueue()
    begun = stream.record_event()
    queue(flags.taken(0), stream)
    watchdog.watch(begun, 0).over = {"copies": stream.record_event()}
    for _ in range(100):
        time.sleep(0.1)
        if reasons:
            break
    queue(flags.raised(0), torch.cuda.Stream())  # or nothing ends here, either
    torch.cuda.synchronize()
    assert "still running: copies" in reasons[0] and "the engine exits" in reasons[0]


# Engines. Memory is mapped 2 MiB at a time, which is 256 blocks of the tiny model.

RESIDENT, SPILLED = 256, 768
PROMPT = 15_000


def spilling(spilled: int = SPILLED, **extra: Any) -> Any:
    """The window keeps its memory unless `spill_lends` is given."""
    page = PAGE // 2  # bf16
    sizes = {"spill_bytes": spilled * 4 * page, "resident_bytes": RESIDENT * 4 * page + 2 * spilled * page}
    return overspill_config({**sizes, "reserve_bytes": 0, "spill_lends": False, **extra})


SETTINGS: dict[str, Any] = {"max_model_len": 20_000, "max_num_batched_tokens": 2048}


@pytest.mark.parametrize("extra", [{}, {"host_bytes": "256MiB", "load": "always", "verify": "all"}], ids=str)
def test_a_prompt_longer_than_the_gpu_gives_the_same_tokens(llama: Path, extra: dict[str, Any]) -> None:
    prompts = [random_prompt(1, PROMPT), random_prompt(2, 300), random_prompt(3, 9000)]
    with engine(llama, blocks=1400, **SETTINGS) as plain:
        expected = [plain.ask_one(p) for p in prompts]
        turn = prompts[0] + list(expected[0].tokens) + random_prompt(4, 100)
        expected_turn = plain.ask_one(turn)
        expected_together = plain.ask(prompts)
    with engine(llama, spilling(spill_share=1.0, **extra), **SETTINGS) as spills:
        assert (spills.spill.geometry.num_resident, spills.spill.geometry.num_spilled) == (RESIDENT, SPILLED)
        assert_identical([spills.ask_one(prompts[0])], expected[:1])
        assert spills.metric("spill_in_bytes") > 0 and spills.metric("spill_out_bytes") > 0
        answer = spills.ask_one(turn)
        assert answer.num_cached == expected_turn.num_cached > 12_000
        assert_identical([answer], [expected_turn])
        assert_same_but_for_ties(spills.ask(prompts), expected_together)
        if extra:
            spills.forget_gpu()
            assert_same_but_for_ties([spills.ask_one(p) for p in prompts], expected_together)
            assert spills.metric("hit_tokens") > 10_000


def test_a_damaged_block_in_ram_changes_the_answer(llama: Path) -> None:
    prompt = random_prompt(1, PROMPT)
    with engine(llama, spilling(), **SETTINGS) as spills:
        before = spills.ask_one(prompt)
        cached = spills.ask_one(prompt)
        arena = spills.spill_worker.arena
        assert arena is not None
        # Zeros, in the first and the last layer: other values, none of them infinite.
        arena.slots[0][:] = 0
        arena.slots[-1][:] = 0
        after = spills.ask_one(prompt)
    assert_same_but_for_ties([cached], [before])
    assert after.num_cached > 12_000
    with pytest.raises(AssertionError):
        assert_same_but_for_ties([after], [cached])


def test_fp8_kv_spills_too(llama: Path) -> None:
    # 512 blocks hold 16,384 tokens: beside a first request, the second spills.
    prompts = [random_prompt(2, PROMPT), random_prompt(1, PROMPT)]
    settings = {**SETTINGS, "kv_cache_dtype": "fp8"}
    with engine(llama, blocks=1400, **settings) as plain:
        expected = plain.ask(prompts)
    page = PAGE // 4
    sizes = {"spill_bytes": 1024 * 4 * page, "resident_bytes": 512 * 4 * page + 2 * 1024 * page}
    config = overspill_config({**sizes, "reserve_bytes": 0, "spill_lends": False})
    with engine(llama, config, **{**settings, "max_model_len": 20_000}) as spills:
        assert_same_but_for_ties(spills.ask(prompts), expected)
        assert spills.metric("spill_in_bytes") > 0


# vLLM compiles a model anew where there is a connector. Without the deterministic mode the compiler chooses kernels by
# timing them, so that two such engines round differently.
GRAPHS = {
    **SETTINGS, "enforce_eager": False,
    "compilation_config": {
        "cudagraph_capture_sizes": [1, 2, 4],
        "inductor_compile_config": {"deterministic": True},
    },
}  # fmt: skip


def test_streaming_decodes_run_in_full_graphs_of_their_own(llama: Path) -> None:
    long, short = [random_prompt(1, PROMPT), random_prompt(3, 9000)], random_prompt(2, 300)
    with engine(llama, blocks=1400, **GRAPHS) as plain:
        expected = [plain.ask_one(p) for p in long]
        expected_short = plain.ask_one(short)
        expected_together = plain.ask([*long, short])
    with engine(llama, spilling(spill_share=1.0, spill_compute="gpu"), **GRAPHS) as spills:
        assert full_graph_runs(spills, lambda: assert_identical([spills.ask_one(long[0])], expected[:1])) == 0
        assert spills.metric("graphed_steps") >= 20 and spills.metric("spill_in_bytes") > 0
        assert full_graph_runs(spills, lambda: assert_identical([spills.ask_one(short)], [expected_short])) > 20
        before = spills.metric("graphed_steps")
        assert_same_but_for_ties(spills.ask([*long, short]), expected_together)
        assert spills.metric("graphed_steps") > before


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models have little KV."""
    from overspill.kv.spill import scheduler

    monkeypatch.setattr(scheduler, "_LEAST_FAR_BYTES", 1)
    monkeypatch.setattr(scheduler.SpillScheduler, "far_share", lambda self: 0.6)


def test_the_cpus_part_and_the_gpus_make_the_whole(llama: Path, small_parts: None) -> None:
    from overspill.kv.spill import far_cuda

    long, short = [random_prompt(1, PROMPT), random_prompt(3, 9000)], random_prompt(2, 300)
    with engine(llama, blocks=1400, **GRAPHS) as plain:
        expected = plain.ask([*long, short])
        unspilled = [random_prompt(seed, length) for seed, length in ((4, 20), (5, 300))]
        expected_unspilled = [plain.ask_one(p) for p in unspilled]
    with engine(llama, spilling(spill_share=1.0, spill_threads=4), **GRAPHS) as spills:
        alone = [spills.ask_one(p) for p in long]
        # After a step that shared its attention, one without spilled KV does not.
        assert_identical([spills.ask_one(p) for p in unspilled], expected_unspilled)
        assert_same_but_for_ties(alone, expected[:2])
        assert spills.metric("spill_far_bytes") > 0 and spills.metric("graphed_steps") >= 20
        before = spills.metric("spill_far_bytes")
        assert_same_but_for_ties(spills.ask([*long, short]), expected)
        assert spills.metric("spill_far_bytes") > before
        right = far_cuda.Segments
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                far_cuda, "Segments", lambda parts: right([(blocks[::-1] // 2, who) for blocks, who in parts])
            )
            damaged = spills.ask_one(long[0])
        with pytest.raises(AssertionError):
            assert_same_but_for_ties([damaged], alone[:1])
        assert_same_but_for_ties([spills.ask_one(long[0])], alone[:1])


def test_a_stalled_thread_ends_the_engine_and_says_so(
    llama: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from overspill.kv.attention.pool import Fault
    from overspill.kv.spill import watchdog

    prompt, reasons = random_prompt(1, PROMPT), []
    with engine(llama, spilling(spill_threads=2), **GRAPHS) as spills:
        expected = spills.ask_one(prompt)
        assert spills.spill_worker.far is not None
        pool = spills.spill_worker.far.pool

        def end(self: watchdog.Watchdog, reason: str) -> None:
            reasons.append(reason)
            pool.inject_fault(1, Fault.NONE)  # or the test would hang, too

        monkeypatch.setattr(watchdog, "_STALL_S", 0.5)
        monkeypatch.setattr(watchdog.Watchdog, "end", end)
        pool.inject_fault(1, Fault.STALL)
        assert_same_but_for_ties([spills.ask_one(prompt)], [expected])
    assert "the engine exits. Attention on the CPU: attending at layer" in reasons[0]


def test_streaming_steps_run_piecewise_and_others_in_full_graphs(llama: Path) -> None:
    long, short = random_prompt(1, PROMPT), random_prompt(2, 300)
    graphs = GRAPHS
    with engine(llama, blocks=1400, **graphs) as plain:
        expected = [plain.ask_one(p) for p in (long, short)]
        again = plain.ask_one(short)
        assert full_graph_runs(plain, lambda: plain.ask_one(short)) > 20
    with engine(llama, spilling(spill_graphs=False), **graphs) as spills:
        assert full_graph_runs(spills, lambda: assert_identical([spills.ask_one(short)], expected[1:])) > 20
        assert spills.metric("spilled_steps") == 0
        assert full_graph_runs(spills, lambda: assert_same_but_for_ties([spills.ask_one(long)], expected[:1])) == 0
        assert spills.metric("spilled_steps") >= 24
        assert full_graph_runs(spills, lambda: assert_same_but_for_ties([spills.ask_one(short)], [again])) > 0


@pytest.mark.parametrize("settings", [SETTINGS, GRAPHS], ids=["eager", "graphs"])
def test_the_windows_memory_lies_under_gpu_blocks_by_turns(llama: Path, settings: dict[str, Any]) -> None:
    settings = {**settings, "max_model_len": 30_000}
    middle, long, short = random_prompt(1, PROMPT), random_prompt(2, 28_000), random_prompt(3, 300)
    with engine(llama, blocks=2400, **settings) as plain:
        expected = [plain.ask_one(p) for p in (middle, long, short)]
        together = plain.ask([middle, short, long])
    config = spilling(1536, spill_share=1.0, spill_compute="gpu", spill_lends=True, host_bytes="256MiB", verify="all")
    with engine(llama, config, **settings) as spills:
        buffer, used = spills.spill_worker.buffer, used_bytes()
        assert buffer is not None
        first = buffer.mapped_bytes
        for _ in range(3):
            before = spills.metric("spill_in_bytes")
            assert_same_but_for_ties([spills.ask_one(middle)], expected[:1])
            assert spills.metric("spill_in_bytes") == before, "it fits on the GPU with the window's memory"
            assert_same_but_for_ties([spills.ask_one(long)], expected[1:2])
            assert spills.metric("spill_in_bytes") > before and buffer.mapped_bytes <= first
            assert_same_but_for_ties(spills.ask([middle, short, long]), together)
            spills.drain()
            spills.evict_gpu()
        assert spills.metric("window_moves") >= 2, "to GPU blocks, and back"
        assert abs(used_bytes() - used) < 64 * MIB, "what was given up is free for what was taken"


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_request_that_waits_gets_the_memory_back(
    llama: Path, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asynchronously, blocks of a preempted request are in use until the step in flight is over."""
    monkeypatch.setattr("overspill.kv.spill.loan._PATIENCE_S", 0.0)
    settings = {**SETTINGS, "max_model_len": 30_000}
    first, second = random_prompt(1, 24_000), random_prompt(2, 24_000)
    with engine(llama, blocks=2000, **settings) as plain:
        plain.num_logprobs = 5
        expected = [plain.ask_one(prompt, 100) for prompt in (first, second)]
    config = spilling(1536, spill_share=1.0, spill_compute="gpu", spill_lends=True)
    with engine(llama, config, async_scheduling=asynchronous, **settings) as spills:
        spills.num_logprobs = 5
        names, answers, together = [spills.add(first, 100)], dict[str, Answer](), 0
        for _ in range(20):
            answers.update(spills.step())
        assert spills.spill.placement.num_resident > RESIDENT and not answers
        names.append(spills.add(second, 100))
        for _ in range(1000):
            if not spills.llm.llm_engine.has_unfinished_requests():
                break
            answers.update(spills.step())
            together += len(spills.vllm_scheduler.running) == 2
        assert_same_but_for_ties([answers[name] for name in names], expected)
        assert together > 50 and spills.metric("window_preemptions") == 1


def full_graph_runs(running: Engine, ask: Any) -> int:
    """How often a FULL graph is replayed meanwhile."""
    runner = running.core.model_executor.driver_worker.worker.model_runner
    manager, count = runner.cudagraph_manager, 0
    replay = manager.run_fullgraph

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return replay(*args, **kwargs)

    manager.run_fullgraph = counted
    try:
        ask()
    finally:
        manager.run_fullgraph = replay
    return count


def test_ram_that_cannot_be_registered_ends_the_start(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spill went on with pageable memory, whose copies keep to no order."""
    from overspill.kv.cuda import PinnedRanges

    monkeypatch.setattr(PinnedRanges, "register", lambda self, address, length: "CUDA_ERROR_NOT_PERMITTED")
    with (
        pytest.raises(Exception, match=r"registered for DMA.* took 0 B \(CUDA_ERROR_NOT_PERMITTED\)"),
        engine(llama, spilling(), **SETTINGS),
    ):
        pass


def test_memory_comes_back_when_the_engine_stops(llama: Path) -> None:
    with engine(llama, spilling(), **SETTINGS) as spills:
        spills.ask_one(random_prompt(1, PROMPT), 4)
    torch.cuda.empty_cache()
    used = used_bytes()
    with engine(llama, spilling(), **SETTINGS) as spills:
        spills.ask_one(random_prompt(1, PROMPT), 4)
    torch.cuda.empty_cache()
    assert used_bytes() - used < 64 * MIB


def test_more_memory_than_the_gpu_has_is_an_error_that_says_so() -> None:
    from overspill.kv.cuda import PhysicalMemory

    with pytest.raises(OverspillError, match="of GPU memory for KV could not be allocated"):
        PhysicalMemory(0, 4 << 40)
