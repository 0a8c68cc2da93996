"""Things that go wrong, made to go wrong. Runs in a child only."""

from collections.abc import Iterator
from contextlib import contextmanager

from overspill.kv.copies import Copier, Ids, PlainCopier, Transfer
from overspill.verify.answers import Ask
from overspill.verify.engine import Engine


class WatchedCopier(Copier):
    """Notes what is loaded, and lets the first loads fail; everything else is done by another one."""

    def __init__(self, copier: Copier, failures: int = 0) -> None:
        self._copier = copier
        self._failures = failures
        self.num_failed = 0
        self.slots: list[int] = []

    def load(self, slots: Ids, blocks: Ids) -> Transfer:
        self.slots += slots.tolist()
        if self.num_failed >= self._failures:
            return self._copier.load(slots, blocks)
        self.num_failed += 1
        failed = Transfer(0)
        failed.settle(OSError("made to fail by overspill verify"))
        return failed

    def store(self, blocks: Ids, slots: Ids) -> Transfer:
        return self._copier.store(blocks, slots)

    def end_step(self) -> None:
        self._copier.end_step()

    def reused_early(self) -> None:
        self._copier.reused_early()

    def close(self) -> None:
        self._copier.close()


@contextmanager
def watched_loads(engine: Engine, failures: int = 0) -> Iterator[WatchedCopier]:
    worker = engine.offload_worker
    copier = worker._copier
    assert copier is not None
    watched = WatchedCopier(copier, failures)
    worker._copier = watched
    try:
        yield watched
        engine.drain()
    finally:
        worker._copier = copier
        engine.count("injected", watched.num_failed)


def loaded_slots(engine: Engine, ask: Ask) -> list[int]:
    """Ask, and see which slots of the pool are loaded for it."""
    with watched_loads(engine) as watched:
        engine.ask(ask)
    return watched.slots


def damage(engine: Engine, slot: int) -> None:
    """Flip bits of what a slot holds, as bad RAM or a stray write would."""
    memory = engine.offload_worker.memory
    assert memory is not None
    memory.slots[slot] ^= 0x11
    engine.count("injected")


@contextmanager
def held_copies() -> Iterator[None]:
    """Copies of the CPU platform stay under way meanwhile; a GPU's do so by themselves."""
    PlainCopier.gate.clear()
    try:
        yield
    finally:
        PlainCopier.gate.set()


def abort_under_way(engine: Engine, request: str, steps: int) -> None:
    """Abort a request after so many steps, and note what was being copied for it or from it."""
    with held_copies():
        for _ in range(steps):
            if request in engine.step():
                return
        offload = engine.offload_scheduler
        is_loading = any(load.request_id.startswith(request) for load in offload.loads.in_flight.values())
        engine.count("aborted_loads", int(is_loading))
        engine.count("aborted_stores", int(offload.stores.is_busy()))
        engine.count("injected")
        engine.count("caught", int(is_loading or offload.stores.is_busy()))
        engine.abort(request)
        engine.step()
