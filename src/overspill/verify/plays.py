"""Plays: the requests and injected faults of each scenario, on an engine of its own. Runs only in child processes."""

import random
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from overspill.kv.copies import Ids, PlainCopier, Transfer
from overspill.kv.disk import tier
from overspill.kv.disk.segments import places_per_segment, segment_path
from overspill.kv.errors import OverspillError
from overspill.kv.jobs import DiskReadJob
from overspill.kv.remote import tier as remote_tier
from overspill.kv.spill import loan
from overspill.kv.spill import scheduler as spill_scheduler
from overspill.kv.vllm_api import override_backend, own_connector
from overspill.verify.inprocess import LOAD_FORMAT, Engine, arguments_of
from overspill.verify.stage import EngineSpec
from overspill.verify.workload import Answer, Ask, Played, Reference, Script, Workload, make_script

_LOGPROBS = 5
# A byte that is not 0 as a number in any dtype, so that reading KV where none was written changes the answer.
_SCRAMBLED = 0x41
_FLUSH_S = 600.0
_CONNECT_S = 120.0
_STORE_DEADLINE_S = remote_tier.DEADLINE_S
# By then every running request has needed another block.
_PRESSED_STEPS = 1000

Say = Callable[[str], None]


class TestedEngine(Engine):
    """An engine that records its answers, has its blocks taken away, and counts injected faults."""

    def __init__(self, llm: Any) -> None:
        super().__init__(llm)
        self._held: list[Any] = []
        self._submitted = self._aborted = 0
        self.answers: list[Answer] = []
        self.faults: dict[str, int] = {}
        self.say: Say = lambda text: None

    @classmethod
    def of(cls, spec: EngineSpec) -> "TestedEngine":
        load = {"load_format": LOAD_FORMAT} if spec.random_weights else {}
        if spec.attention:
            override_backend(*spec.attention)
        engine = cls.start(spec.model, spec.options, **load, **arguments_of(spec.flags))
        if spec.keep_blocks is not None:
            taken = max(0, engine._pool.get_num_free_blocks() - spec.keep_blocks)
            engine._held = engine._pool.get_new_blocks(taken) if taken else []
        if spec.far_share:
            engine.leave_to_cpu(spec.far_share)
        return engine

    @property
    def _pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def count(self, name: str, amount: int = 1) -> None:
        self.faults[name] = self.faults.get(name, 0) + amount

    def leave_to_cpu(self, share: float) -> None:
        """Make decode steps leave this share of spilled KV to the CPU. A server decides by speeds and sizes, and would
        leave it nothing of a short context."""
        scheduler = self.spill_scheduler
        assert scheduler is not None
        if not all(self.on_workers(_has_far)):
            self.count("unshared")
            return
        scheduler.far_share = lambda: share  # type: ignore[method-assign]
        spill_scheduler._LEAST_FAR_BYTES = 1

    # Requests.

    def submit(self, ask: Ask) -> Answer:
        self._submitted += 1
        return self.add(ask.prompt, ask.max_tokens, logprobs=_LOGPROBS, name=ask.name)

    def step(self) -> list[Answer]:
        finished = super().step()
        self.answers += finished
        return finished

    def ask(self, *asks: Ask) -> None:
        """Send all prompts at once, and run until they are answered."""
        for ask in asks:
            self.submit(ask)
        self.run()

    def abort(self, *answers: Answer) -> None:
        self._aborted += len(answers)
        super().abort(*answers)

    @property
    def awaited(self) -> int:
        """Number of requests that must be answered: all that were not aborted."""
        return self._submitted - self._aborted

    # Blocks.

    @contextmanager
    def pressure(self) -> Iterator[Callable[[], None]]:
        """Hold all free KV blocks; call the yielded function to hold those freed since, too."""
        taken: list[Any] = []

        def press() -> None:
            taken.extend(self._pool.get_new_blocks(self._pool.get_num_free_blocks()))

        press()
        try:
            yield press
        finally:
            self._pool.free_blocks(taken)

    def evict(self) -> None:
        """Evict everything that no running request uses from the GPU."""
        with self.pressure():
            pass

    def forget(self) -> None:
        """Empty the GPU's KV cache, but not RAM, and overwrite the memory that held KV."""
        self.drain()
        self.evict()
        self.on_workers(_scramble)

    def left_behind(self) -> str:
        """Blocks still held although nothing runs, in words; empty if there are none."""
        self.drain()
        self._pool.free_blocks(self._held)
        self._held = []
        lost = self._pool.num_gpu_blocks - 1 - self._pool.get_num_free_blocks()
        found = [f"{lost} KV block(s) on the GPU"] if lost else []
        if self.has_offload:
            held = sum(block.ref_cnt != 0 for block in self.offload_scheduler.host.pool.blocks[1:])
            found += [f"{held} block(s) in RAM"] if held else []
        return " and ".join(found)


# Faults, injected in the last rank's process, since a block is good only if all ranks have it.


def _connector() -> Any:
    return own_connector("worker")


def _is_last() -> bool:
    offload = _connector().worker
    return bool(offload._rank == offload._world_size - 1)


def _has_far(worker: Any) -> bool:
    return _connector().spill_worker.far is not None


def _scramble(worker: Any) -> None:
    connector = _connector()
    buffer, spill = connector.worker.buffer, connector.spill_worker
    buffer.view(torch.uint8).fill_(_SCRAMBLED)
    if buffer.is_cuda:
        torch.cuda.synchronize()  # loads run on streams of their own and must come after
    if spill is not None and spill.arena is not None:
        spill.arena.slots[:] = _SCRAMBLED


def _watch_loads(worker: Any, failures: int) -> None:
    copier = _connector().worker._copier
    inner, most = copier.load, failures if _is_last() else 0
    copier.loaded, copier.failed = [], 0

    def load(ids: Ids, blocks: Ids) -> Transfer:
        copier.loaded.extend(ids.tolist())
        if copier.failed >= most:
            transfer: Transfer = inner(ids, blocks)
            return transfer
        copier.failed += 1
        transfer = Transfer(0)
        transfer.settle(OSError("made to fail by overspill verify"))
        return transfer

    copier.load = load


def _unwatch_loads(worker: Any) -> tuple[list[int], int]:
    copier = _connector().worker._copier
    del copier.load
    return copier.loaded, copier.failed


def _damage_slot(worker: Any, slot: int) -> None:
    if _is_last():
        _connector().worker.memory.slots[slot] ^= 0x11


def _hold_copies(worker: Any, is_held: bool) -> None:
    """Keep copies of the CPU platform in flight while held; a GPU's need no help."""
    (PlainCopier.gate.clear if is_held else PlainCopier.gate.set)()


def _tear_next_read(worker: Any) -> None:
    offload = _connector().worker
    disk, memory, rank = offload.disk, offload.memory, offload._rank
    inner, disk.torn = disk.read, 0
    if not _is_last():
        return

    def read(job: DiskReadJob) -> None:
        del disk.read
        segment, at = divmod(job.places[0], places_per_segment(memory.slot_stride))
        with segment_path(Path(job.folder), rank, segment).open("r+b") as file:
            file.seek(at * memory.slot_stride)
            damage = bytes(byte ^ 0x11 for byte in file.read(memory.slot_bytes))
            file.seek(at * memory.slot_stride)
            file.write(damage)
        disk.torn = 1
        inner(job)

    disk.read = read


def _num_torn(worker: Any) -> int:
    return int(_connector().worker.disk.torn)


# Faults, injected through the engine.


@contextmanager
def watched_loads(engine: TestedEngine, failures: int = 0) -> Iterator[list[int]]:
    """Record loads: the yielded list holds the slots loaded, once the block ends. The first `failures` loads fail."""
    slots: list[int] = []
    engine.on_workers(_watch_loads, failures)
    try:
        yield slots
        engine.drain()
    finally:
        for loaded, failed in engine.on_workers(_unwatch_loads):
            slots[:] = loaded
            engine.count("injected", failed)


def damage_loaded(engine: TestedEngine, ask: Ask, seed: int) -> None:
    """Flip bits in a slot that this prompt loads, as bad RAM or a stray write would, and send the prompt again."""
    engine.ask(ask)
    engine.forget()
    with watched_loads(engine) as slots:
        engine.ask(ask)
    engine.forget()
    if slots:
        engine.on_workers(_damage_slot, random.Random(seed).choice(slots))
        engine.count("injected")
    engine.ask(ask)


def abort_under_way(engine: TestedEngine, answer: Answer, steps: int) -> None:
    """Abort a request after `steps` steps, and count whether a load for it or a store was in flight."""
    engine.on_workers(_hold_copies, True)
    try:
        for _ in range(steps):
            if answer in engine.step():
                return
        offload = engine.offload_scheduler
        is_loading = any(load.request_id == answer.request for load in offload.loads.in_flight.values())
        engine.count("aborted_loads", int(is_loading))
        engine.count("aborted_stores", int(offload.stores.is_busy()))
        engine.count("injected")
        engine.count("caught", int(is_loading or offload.stores.is_busy()))
        engine.abort(answer)
        engine.step()
    finally:
        engine.on_workers(_hold_copies, False)


# Plays.


def returning(engine: TestedEngine, script: Script) -> None:
    """Conversations take turns, so that each returns after the others have taken its blocks."""
    for turn in zip(*script.conversations, strict=True):
        for ask in turn:
            engine.ask(ask)


def preempted(engine: TestedEngine, script: Script) -> None:
    """Requests run together until no block is left for the next token."""
    for ask in (turns[0] for turns in script.conversations):
        engine.submit(ask)
    for _ in range(2):  # prompts are in progress, and first tokens are out
        engine.step()
    before = engine.counters().get("preemptions", 0)
    with engine.pressure() as press:
        for _ in range(_PRESSED_STEPS):
            if not engine.is_busy or engine.counters().get("preemptions", 0) > before:
                break
            press()  # a sliding window frees blocks as it moves
            engine.step()
    # The preempted request's KV leaves the GPU before it resumes.
    engine.evict()
    engine.run()
    for turns in script.conversations:
        engine.evict()
        engine.ask(turns[1])


def aborted(engine: TestedEngine, script: Script) -> None:
    draw = random.Random(script.seed)
    for turns in script.conversations:
        engine.ask(turns[0])
    for turns, beside in zip(script.conversations, (*script.conversations[1:], script.conversations[0]), strict=True):
        engine.evict()
        # Abort a request while its KV is loaded, beside one that continues; then send it again.
        engine.submit(beside[0])
        for _ in range(draw.randrange(1, 4)):
            engine.step()
        abort_under_way(engine, engine.submit(turns[1]), steps=draw.randrange(1, 3))
        engine.run()
        abort_under_way(engine, engine.submit(script.fresh), steps=1)
        engine.drain()
        engine.evict()
        engine.ask(turns[1])


def damaged(engine: TestedEngine, script: Script) -> None:
    """A block that was loaded once is damaged before it is loaded again."""
    for turns in script.conversations[:2]:
        damage_loaded(engine, turns[0], script.seed)
        # The block that replaced it is good.
        engine.forget()
        engine.ask(turns[0])
    engine.faults["caught"] = engine.counters().get("corrupt_blocks", 0)


def damaged_unseen(engine: TestedEngine, script: Script) -> None:
    """A block is damaged with checks off; the last answer shows what the damage does."""
    damage_loaded(engine, script.conversations[0][0], script.seed)


def failed(engine: TestedEngine, script: Script) -> None:
    first, second, third = (turns[0] for turns in script.conversations[:3])
    for ask in (first, second, third):
        engine.ask(ask)
    engine.forget()
    with watched_loads(engine, failures=1):
        engine.ask(first)
    engine.forget()
    with watched_loads(engine, failures=1):  # beside a load that succeeds
        engine.ask(second, third)
    engine.faults["caught"] = engine.counters().get("load_failures", 0)
    engine.forget()
    for turns in script.conversations[:3]:
        engine.ask(turns[1])


def until_killed(engine: TestedEngine, script: Script) -> None:
    """Loads, stores and steps stay in flight until the process is killed."""
    for turns in script.conversations:
        engine.ask(turns[0])
    engine.evict()
    for turns in script.conversations:
        engine.submit(turns[1])
    engine.step()
    engine.say("under way")
    while True:
        engine.submit(script.fresh)
        engine.run()


def filled(engine: TestedEngine, script: Script) -> None:
    """Everything in RAM is flushed to disk, as at a stop, with a journal frame for every few blocks."""
    tier._FLUSH_BLOCKS = 4
    returning(engine, script)
    engine.drain()
    connector = engine.scheduler.connector
    if not connector.flush_disk(engine.core, _FLUSH_S):
        raise OverspillError("no block was written to disk")


def stopped(engine: TestedEngine, script: Script) -> None:
    _open_disk(engine)
    returning(engine, script)


def torn(engine: TestedEngine, script: Script) -> None:
    """A block is damaged on disk just before it is read."""
    _open_disk(engine)
    engine.on_workers(_tear_next_read)
    returning(engine, script)
    engine.count("injected", sum(engine.on_workers(_num_torn)))
    engine.faults["caught"] = engine.counters().get("disk_bad_blocks", 0)


def _open_disk(engine: TestedEngine) -> None:
    disk = engine.offload_scheduler.disk
    assert disk is not None
    disk.wait_until_open()


def store_filled(engine: TestedEngine, script: Script) -> None:
    _open_store(engine)
    returning(engine, script)
    engine.drain()
    if not engine.counters().get("remote_store_bytes"):
        raise OverspillError("no block was put into the store")


def store_killed(engine: TestedEngine, script: Script) -> None:
    """A block is damaged on its way from the store; the store is killed before the second turns."""
    worker = _open_store(engine)
    memory, inner = engine.offload_worker.memory, worker.client.get
    assert memory is not None

    def get(keys: list[str], slots: Sequence[int]) -> list[int]:
        del worker.client.get
        codes: list[int] = inner(keys, slots)
        memory.slots[slots[0]] ^= 0x11
        engine.count("injected")
        return codes

    worker.client.get = get
    for turns in script.conversations:
        engine.ask(turns[0])
    remote_tier.DEADLINE_S = _STORE_DEADLINE_S
    engine.say("kill the store")
    with suppress(ConnectionError):
        while True:
            socket.create_connection(worker.client.address, timeout=1).close()
            time.sleep(0.01)
    for turns in script.conversations:
        for ask in turns[1:]:
            engine.ask(ask)
    engine.faults["caught"] = engine.counters().get("remote_corrupt_blocks", 0)


def _open_store(engine: TestedEngine) -> Any:
    """Wait for the store without its usual deadline: a busy machine is not a hung store."""
    remote_tier.DEADLINE_S = _FLUSH_S
    tier, worker = engine.offload_scheduler.remote, engine.offload_worker.remote
    assert tier is not None and worker is not None
    tier.wait_until_open()
    worker.client.first_try.wait()
    # It tries again every few seconds: on a busy machine the master may take longer to answer than one try lasts.
    deadline = time.monotonic() + _CONNECT_S
    while not worker.client.is_connected:
        if time.monotonic() > deadline:
            raise OverspillError(f"the store cannot be reached within {_CONNECT_S:.0f} s")
        time.sleep(0.05)
    return worker


def spilled(engine: TestedEngine, script: Script) -> None:
    first, second = script.longs
    engine.ask(first[0])
    engine.ask(script.shorts[0])
    engine.ask(first[1])
    engine.ask(second[0], *script.shorts)
    engine.ask(second[1], first[0])


def lent(engine: TestedEngine, script: Script) -> None:
    """A context that arrives alone borrows the window's memory, and later ones make it give that back."""
    loan._PATIENCE_S = 0.0  # a server's patience is longer than these answers take
    first, second = script.longs
    for one, other in zip(first, second, strict=True):
        engine.submit(one)
        for _ in range(2):
            engine.step()
        engine.ask(other, *script.shorts)
    engine.ask(first[0])


def spilled_and_offloaded(engine: TestedEngine, script: Script) -> None:
    """Spilled KV is stored from RAM, and offloaded KV is loaded into RAM."""
    first, second = script.longs
    engine.ask(first[0])
    engine.forget()
    engine.ask(first[0])
    engine.ask(first[1])
    engine.ask(second[0], *script.shorts)
    engine.forget()
    engine.ask(second[1], script.shorts[0])
    engine.ask(first[1])


def shared_attention(engine: TestedEngine, script: Script) -> None:
    """Prompts run in pairs whose second prompt shares blocks with the first."""
    for first in range(0, len(script.prompts), 2):
        pair = script.prompts[first : first + 2]
        engine.ask(pair[0])
        engine.ask(*pair)


def arrivals(engine: TestedEngine, script: Script) -> None:
    """Requests arrive at random, some are aborted at any point, and blocks are evicted in between."""
    draw = random.Random(script.seed)
    groups = (*script.conversations, *script.longs, tuple(script.shorts))
    waiting = [draw.choice(group) for _ in range(4) for group in groups]
    draw.shuffle(waiting)
    live: dict[Answer, int | None] = {}
    while waiting or live:
        while waiting and len(live) < 4 and draw.random() < 0.6:
            live[engine.submit(waiting.pop())] = draw.randrange(1, 12) if draw.random() < 0.2 else None
        if draw.random() < 0.1:
            engine.evict()
        for answer in engine.step() if live else ():
            del live[answer]
        for answer, left in list(live.items()):
            if left == 1:
                engine.abort(answer)
                engine.count("injected")
                del live[answer]
            elif left is not None:
                live[answer] = left - 1


PLAYS: Mapping[str, Callable[[TestedEngine, Script], None]] = {
    "returning": returning,
    "preempted": preempted,
    "aborted": aborted,
    "damaged": damaged,
    "damaged-unseen": damaged_unseen,
    "failed-load": failed,
    "until-killed": until_killed,
    "restarted": returning,
    "stopped-filled": filled,
    "stopped": stopped,
    "torn-filled": filled,
    "torn": torn,
    "store-killed-filled": store_filled,
    "store-killed": store_killed,
    "spilled": spilled,
    "lent": lent,
    "spilled-and-offloaded": spilled_and_offloaded,
    "shared-attention": shared_attention,
    "arrivals": arrivals,
}


# Entry points of children.


def reference(spec: EngineSpec, workload: Workload, seed: int, say: Say) -> Reference:
    """Answer every prompt alone, then the last turns together."""
    engine = TestedEngine.of(spec)

    def answer(ask: Ask) -> Answer:
        engine.ask(ask)
        return engine.answers[-1]

    script = make_script(workload, answer, seed)
    answers = {given.name: given for given in engine.answers}
    engine.answers.clear()
    engine.evict()
    engine.ask(*(turns[-1] for turns in (*script.conversations, *script.longs)), *script.shorts)
    return Reference(script, answers, tuple(engine.answers))


def play(spec: EngineSpec, name: str, script: Script, say: Say) -> Played:
    engine = TestedEngine.of(spec)
    engine.say = say
    PLAYS[name](engine, script)
    left_behind = engine.left_behind()
    return Played(tuple(engine.answers), engine.awaited, {**engine.counters(), **engine.faults}, left_behind)
