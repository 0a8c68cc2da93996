"""Random admissions, steps, aborts, preemptions, resets and faults against what must hold after every one of them.

`simulated_engine` says what that is: no block leaked, none freed in flight, no hit on content that is not there.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from overspill.kv.host_cache import HostCache
from overspill.kv.loads import Loads
from overspill.kv.scheduler import OffloadScheduler
from overspill.kv.stores import Stores
from tests.simulated_copies import ScriptedTransfer, Setup, Violation
from tests.simulated_engine import MAX_MODEL_LEN, Engine

FULL, FULL_AND_WINDOW, UNEQUAL = ((4, 0),), ((4, 0), (4, 10)), ((8, 0), (4, 6))
PREFIXES = [[100 * p + i % 90 for i in range(MAX_MODEL_LEN)] for p in range(1, 7)]

Operation = tuple[Any, ...]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Thousands of faults are meant here."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    groups = draw(st.sampled_from([FULL, FULL, FULL_AND_WINDOW, UNEQUAL]))
    # The smallest pools barely hold one request of the greatest length, so that the others are preempted.
    blocks_of_longest = sum(MAX_MODEL_LEN // size for size, _ in groups)
    return Setup(
        groups=groups,
        gpu_blocks=1 + blocks_of_longest + draw(st.sampled_from([2, 6, 12, 40])),
        host_slots=draw(st.sampled_from([1, 12, 40, 120, 120])),
        store=draw(st.sampled_from(["eager", "lazy"])),
        eviction=draw(st.sampled_from(["lru", "arc"])),
        load=draw(st.sampled_from(["always", "always", "auto"])),
        batched_tokens=draw(st.sampled_from([8, 16, 64])),
        chunk_tokens=draw(st.sampled_from([0, 8])),
        max_seqs=draw(st.sampled_from([2, 6])),
        ranks=draw(st.sampled_from([1, 1, 2])),
        asynchronous=draw(st.booleans()),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        longest_flight=draw(st.sampled_from([0, 1, 5, 5])),
        keep_on_reset=draw(st.booleans()),
        ahead=draw(st.sampled_from([False, True, True])),
        fault_rate=draw(st.sampled_from([0.0, 0.0, 0.2])),
        seed=draw(st.integers(0, 2**16)),
    )


_index = st.integers(0, 255)
_kinds: dict[str, st.SearchStrategy[Operation]] = {
    # A prompt is a piece of a shared prefix, or an earlier conversation, and something new.
    "add": st.tuples(
        st.booleans(),
        _index,
        st.sampled_from([0, 16, 24, 33, 48]),
        st.integers(1, 9),
        st.integers(1, 10),
        st.integers(0, 2),
    ),
    "step": st.tuples(st.sampled_from([1, 2, 4, 8])),
    "abort": st.tuples(_index),
    "damage": st.tuples(_index, st.booleans()),
    "reset": st.tuples(st.booleans(), st.booleans()),
    "reset_connector": st.tuples(),
    "change_weights": st.tuples(),
    "rest": st.tuples(),
}
_weighted = ["add"] * 16 + ["step"] * 16 + ["abort"] * 2 + ["damage"] * 2
_weighted += ["reset", "reset_connector", "change_weights", "rest", "rest"]
_operations = st.lists(
    st.sampled_from(_weighted)
    .flatmap(lambda kind: st.tuples(st.just(kind), _kinds[kind]))
    .map(lambda o: (o[0], *o[1])),
    min_size=20,
    max_size=60,
)


def perform(engine: Engine, operation: Operation) -> None:
    match operation:
        case "add", returning, which, length, tail, max_tokens, priority:
            known = list(engine.requests.values())
            base = (
                list(known[which % len(known)].all_token_ids)
                if returning and known
                else PREFIXES[which % len(PREFIXES)][:length]
            )
            prompt = [*base, *(200 + (which + i) % 7 for i in range(tail))][: MAX_MODEL_LEN - max_tokens - 1]
            engine.add(prompt, max_tokens, priority)
        case "step", times:
            for _ in range(times):
                engine.step()
        case "abort", which:
            alive = [request.request_id for request in engine.scheduler.requests.values()]
            if alive:
                engine.abort(alive[which % len(alive)])
        case "damage", which, every_rank:
            engine.damage(which, every_rank=every_rank)
        case "reset", running, connector:
            engine.reset(running=running, connector=connector)
        case ("reset_connector",):
            engine.reset_connector()
        case ("change_weights",):
            engine.change_weights()
        case ("rest",):  # the next request is alone, and its load has idle steps to itself
            for _ in range(600):  # `drain` says if that was not enough
                if not engine.scheduler.has_requests():
                    break
                engine.step()
        case _:
            raise ValueError(operation)


class Tally:
    """What all sequences of a test did together: a run in which nothing was loaded proves nothing."""

    def __init__(self) -> None:
        self.operations = self.preemptions = 0
        self.announced_ahead = {"busy": 0, "idle": 0}
        self.slow_hit_tokens = 0.0
        self.totals: dict[str, float] = {}

    def add(self, engine: Engine, operations: int) -> None:
        self.operations += operations + engine.steps
        self.preemptions += sum(request.num_preemptions for request in engine.requests.values())
        for when, count in engine.announced_ahead.items():
            self.announced_ahead[when] += count
        if engine.link_seems_slow:
            self.slow_hit_tokens += engine.totals.get("hit_tokens", 0)
        for name, value in engine.totals.items():
            self.totals[name] = self.totals.get(name, 0) + value


def sequences(examples: int, tally: Tally, *, search: bool = True) -> Callable[[], None]:
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink] if search else [Phase.generate],
        report_multiple_bugs=False,
    )
    @given(setup=setups(), operations=_operations, abort_all=st.booleans())
    def run(setup: Setup, operations: list[Operation], abort_all: bool) -> None:
        engine = Engine(setup)
        for operation in operations:
            perform(engine, operation)
        if abort_all:
            for name in list(engine.scheduler.requests):
                engine.abort(name)
        engine.drain()
        tally.add(engine, len(operations))

    return run


def check_that_everything_happened(tally: Tally) -> None:
    assert tally.preemptions > 0
    assert min(tally.announced_ahead.values()) > 0, tally.announced_ahead
    for name in ("hit_tokens", "load_bytes", "store_bytes", "evicted_blocks", "corrupt_blocks", "load_failures",
                 "loads_skipped_tokens", "stores_dropped_blocks", "store_failures"):  # fmt: skip
        assert tally.totals.get(name, 0) > 0, f"no sequence had any {name}"


def test_no_sequence_leaks_or_frees_in_flight_or_hits_stale_kv() -> None:
    tally = Tally()
    sequences(250, tally)()
    assert tally.operations > 10_000
    check_that_everything_happened(tally)


@pytest.mark.soak
def test_none_of_ten_thousand_sequences_leaks_or_hits_stale_kv() -> None:
    tally = Tally()
    sequences(10_000, tally)()
    check_that_everything_happened(tally)
    # Too rare to be in each choice of a few hundred; tests/test_offload.py shows it on an engine.
    assert tally.slow_hit_tokens > 0, "nothing was loaded to look at a slow link again"


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("store", ["eager", "lazy"])
def test_blocks_preempted_before_their_step_are_not_found(store: str, asynchronous: bool) -> None:
    """With priorities vLLM preempts a request that is already part of the pass, and left the hashes of the blocks that
    it was to compute: on the GPU they were hit, and lazy stores copied them to RAM."""
    setup = Setup(gpu_blocks=11, store=store, policy="priority", chunk_tokens=8, asynchronous=asynchronous)
    engine = Engine(setup)
    victim = engine.add(PREFIXES[0][:36], max_tokens=1, priority=1)
    engine.step()
    engine.add(PREFIXES[1][:8], max_tokens=8, priority=0)
    engine.drain(limit=60)
    assert engine.requests[victim].num_preemptions > 0


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every look for a block in RAM."""
    seen: list[Any] = []
    find = HostCache.find

    def counted(self: HostCache, key: Any) -> Any:
        seen.append(key)
        return find(self, key)

    monkeypatch.setattr(HostCache, "find", counted)
    return seen


def test_requests_waiting_for_a_load_do_not_look_up_its_prefix(probes: list[Any]) -> None:
    """All of them looked it up in every pass: 63 requests took 0.2 s of each step for a prefix of 100k tokens."""
    engine = Engine(Setup(gpu_blocks=400, host_slots=100, batched_tokens=64, max_seqs=40))
    engine.add(PREFIXES[0][:57], max_tokens=1)
    while engine.scheduler.has_requests():
        engine.step()
    engine.forget_gpu()
    for tail in range(30):
        engine.add([*PREFIXES[0][:56], 300 + tail], max_tokens=1)
    for copier in engine.copiers:
        copier.longest_flight = 100
    engine.step()
    assert len(engine.offload.loads.in_flight) == 1
    probes.clear()
    engine.step()
    assert engine.offload.loads.in_flight and not probes
    engine.drain()
    assert engine.totals["hit_tokens"] == 56


@pytest.mark.parametrize("eviction", ["lru", "arc"])
def test_admission_does_not_look_up_a_local_prefix_by_block(probes: list[Any], eviction: str) -> None:
    engine = Engine(Setup(gpu_blocks=60, host_slots=60, batched_tokens=64, eviction=eviction))
    for tail in range(3):
        probes.clear()
        engine.add([*PREFIXES[0][:56], 300 + tail], max_tokens=1)
        while engine.scheduler.has_requests():
            engine.step()
    assert len(probes) < 10 < 56 // 4


@pytest.mark.parametrize("fault", ["unreadable", "corrupt"])
def test_a_request_whose_load_failed_is_recomputed_not_reloaded(fault: str) -> None:
    """vLLM keeps blocks free for requests that load, and goes on to count one whose load has failed: it never admitted
    the second load of a prompt that needs more than half of the pool."""
    engine = Engine(Setup(gpu_blocks=19, host_slots=40))
    for prefix in PREFIXES[:2]:
        engine.add(prefix[:50], max_tokens=1)
        while engine.scheduler.has_requests():
            engine.step()
    if fault == "unreadable":
        engine.copiers[0].unreadable.update(range(40))
    else:
        last = max(slot for slot, content in enumerate(engine.copiers[0].host) if content[0] >= 0 and slot < 12)
        engine.copiers[0].damage(last)
    engine.add(PREFIXES[0][:50], max_tokens=1)
    engine.drain(limit=60)
    assert engine.totals["load_failures"] == 1


def test_a_failed_load_yields_to_requests_with_loads_in_flight() -> None:
    """vLLM left the failed request before them. Computing its window takes more blocks than loading it, so it waited
    for their blocks, and they for their turn."""
    setup = Setup(groups=FULL_AND_WINDOW, gpu_blocks=35, host_slots=120, batched_tokens=64, longest_flight=1, seed=3)
    engine = Engine(setup)
    long, short = PREFIXES[0][:57], PREFIXES[1][:33]
    for prompt in (long, short):
        engine.add(prompt, max_tokens=1)
        while engine.scheduler.has_requests():
            engine.step()
    engine.forget_gpu()
    engine.copiers[0].unreadable.add(0)
    for prompt in (long, short):
        engine.add(prompt, max_tokens=1)
    engine.drain(limit=60)
    assert engine.totals["load_failures"] == 1
    assert engine.totals["hit_tokens"] > len(long)


def test_two_loaded_requests_do_not_wait_for_each_other() -> None:
    """vLLM reserved no blocks for the rest of a window that had moved on, and admitted one load too many."""
    engine = Engine(Setup(groups=FULL_AND_WINDOW, gpu_blocks=33, host_slots=120, longest_flight=0))
    known = [PREFIXES[0][:44], PREFIXES[1][:40]]
    for prompt in known:
        engine.add([*prompt, 1], max_tokens=1)
        while engine.scheduler.has_requests():
            engine.step()
    engine.forget_gpu()
    for prompt in known:
        engine.add([*prompt, *range(500, 516)], max_tokens=1)
    engine.drain(limit=80)
    assert engine.totals["hit_tokens"] == sum(map(len, known))


def test_a_request_whose_load_failed_does_not_wait_for_others() -> None:
    """vLLM keeps blocks free for it, which a preempted request before it did not get to load into; and looked no
    further."""
    engine = Engine(Setup(gpu_blocks=19, host_slots=40, batched_tokens=64, longest_flight=0))
    long = PREFIXES[0][:57]
    engine.add(long, max_tokens=1)
    while engine.scheduler.has_requests():
        engine.step()
    engine.forget_gpu()
    engine.copiers[0].damage(0)
    engine.add(PREFIXES[1][:4], max_tokens=58)
    pushed_out = engine.add(PREFIXES[2][:4], max_tokens=40)
    engine.add(long, max_tokens=1)
    engine.drain(limit=200)
    assert engine.totals["load_failures"] == 1
    assert engine.requests[pushed_out].num_preemptions == 1


def test_a_preempted_request_finds_in_ram_what_it_had_computed() -> None:
    """Blocks that waited to be stored together were forgotten when their request was preempted."""
    engine = Engine(Setup(gpu_blocks=19, host_slots=40, batched_tokens=64, longest_flight=0))
    names = [engine.add(prefix[:33], max_tokens=24) for prefix in PREFIXES[:2]]
    engine.drain()
    assert engine.requests[names[1]].num_preemptions > 0
    assert engine.totals.get("hit_tokens", 0) > 0


@pytest.mark.parametrize("seed", range(3))
def test_lazy_copies_in_a_small_pool_do_not_evict_each_other(seed: int) -> None:
    """In a pool smaller than the range near eviction they did, and were made again: an idle engine never slept."""
    setup = Setup(
        groups=((4, 0), (4, 6)), gpu_blocks=65, host_slots=12, store="lazy", batched_tokens=32, ranks=4,
        asynchronous=True, longest_flight=8, seed=seed,
    )  # fmt: skip
    engine = Engine(setup)
    for first in range(0, 2000, 100):
        engine.add([first + token for token in range(60)], max_tokens=3)
    while engine.scheduler.has_unfinished_requests():
        engine.step()
    for _ in range(16):  # two flights, one after the other
        engine.step()
    assert not engine.offload.stores.is_busy()
    queue = engine.scheduler.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()
    leaving = [block.block_hash for block in queue if block.block_hash is not None]
    assert all(engine.offload.host.find(key) is not None for key in leaving[:4])
    engine.drain(limit=1)


# The checks can fail: each of these faults is planted, and found.


def finds(what: str) -> None:
    with pytest.raises(Violation, match=what):
        sequences(1000, Tally(), search=False)()


def test_freeing_gpu_blocks_before_their_store_ends_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    finished = OffloadScheduler.finished

    def frees_at_once(self: OffloadScheduler, *args: Any) -> None:
        finished(self, *args)
        for store in self.stores.in_flight.values():
            self._gpu.free_blocks(store.gpu_blocks)
            self.stores.num_blocks -= len(store.gpu_blocks)
            store.gpu_blocks = []

    monkeypatch.setattr(OffloadScheduler, "finished", frees_at_once)
    finds("GPU block freed during its store")


def test_publishing_a_hash_before_its_store_ends_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Stores._start

    def finds_at_once(self: Stores, *args: Any, **kwargs: Any) -> None:
        before = set(self.in_flight)
        start(self, *args, **kwargs)
        for job in self.in_flight.keys() - before:
            store = self.in_flight[job]
            for block, origin, tokens in zip(store.host_blocks, store.origins, store.token_counts, strict=True):
                self._host.pool._insert_block_hash(origin.key, block, num_tokens=tokens)

    monkeypatch.setattr(Stores, "_start", finds_at_once)
    finds("RAM block .* is found by a hash that is not its content's")


def test_keeping_a_corrupt_block_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loads, "drop_corrupt", lambda self, slots: None)
    finds("corrupt can be found again")


def test_a_forward_that_does_not_wait_for_an_early_load_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedTransfer, "fence", lambda self: None)
    finds("reads what is not its own")


def test_a_load_that_keeps_one_of_its_blocks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    release = Loads._release

    def leaks(self: Loads, load: Any) -> None:
        self._gpu.touch(load.gpu_blocks[:1])
        release(self, load)

    monkeypatch.setattr(Loads, "_release", leaks)
    finds("GPU blocks leaked")
