"""vLLM's free queue in two tiers: GPU blocks first, then spilled ones."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from overspill.kv.vllm_api import FreeKVCacheBlockQueue, KVCacheBlock, first_free

# The estimate of reuse forgets: it should follow what the server does now.
_MEMORY = 4096


class Choice(NamedTuple):
    """For the request that asks for blocks."""

    # Whether to take an empty spilled block rather than a GPU block that caches something.
    take_spilled: bool = False
    # So many come from RAM before anything else.
    num_spilled_first: int = 0
    # GPU blocks to leave while there are spilled ones: recurrent states have no other place.
    num_kept_resident: int = 0


class TieredQueue:
    """Stands in for `FreeKVCacheBlockQueue` in vLLM's block pool.

    Empty GPU blocks go first. Then it is either the GPU block that was not used for longest, which gives up what it
    caches, or an empty spilled one: `choose` says which, and is asked when blocks are taken, not in every step.

    A request that does not fit on the GPU anyway begins in spilled blocks and ends in GPU ones. It streams the same
    either way, but when others push out its GPU blocks later, it loses its tail and not its head, without which
    nothing of it could be found again.
    """

    def __init__(
        self, blocks: Sequence[KVCacheBlock], num_resident: int, choose: Callable[[], Choice] = Choice
    ) -> None:
        """`blocks` are free, in eviction order."""
        self._num_resident = num_resident
        self._resident = FreeKVCacheBlockQueue([b for b in blocks if b.block_id < num_resident])
        self._spilled = FreeKVCacheBlockQueue([b for b in blocks if b.block_id >= num_resident])
        self._choose = choose
        self._is_resident_only = False  # whoever asks cannot use a spilled block
        self.num_taken = 0  # of either tier, since whoever asks began to
        self._hits = 1.0
        self._evictions = 1.0

    # What vLLM's BlockPool calls.

    @property
    def num_free_blocks(self) -> int:
        return self._resident.num_free_blocks + self._spilled.num_free_blocks

    def popleft(self) -> KVCacheBlock:
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        if self._is_resident_only:
            return self._resident.popleft_n(n)
        assert n <= self.num_free_blocks
        choice = self._choose()
        taken: list[KVCacheBlock] = []
        for _ in range(n):
            if self._next_is_resident(choice, is_first=len(taken) < choice.num_spilled_first):
                block = self._resident.popleft()
                if block.block_hash is not None:
                    self._count(evictions=1)
            else:
                block = self._spilled.popleft()
            taken.append(block)
        self.num_taken += n
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        self._tier(block).remove(block)

    def append(self, block: KVCacheBlock) -> None:
        self._tier(block).append(block)

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        for queue, part in self._split(blocks):
            queue.append_n(part)

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        for queue, part in self._split(blocks):
            queue.prepend_n(part)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        return self._resident.get_all_free_blocks() + self._spilled.get_all_free_blocks()

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        if cursor is None or cursor.block_id < self._num_resident:
            yield from self._resident.iter_blocks_after(cursor)
            cursor = None
        yield from self._spilled.iter_blocks_after(cursor)

    # What spill asks and tells.

    @contextmanager
    def resident_only(self) -> Iterator[None]:
        """Inside, GPU blocks are taken whatever `choose` says."""
        self._is_resident_only = True
        try:
            yield
        finally:
            self._is_resident_only = False

    @property
    def tiers(self) -> tuple[FreeKVCacheBlockQueue, FreeKVCacheBlockQueue]:
        """Blocks leave each from its own head."""
        return self._resident, self._spilled

    def found(self, num_blocks: int) -> None:
        """So many cached blocks were asked for again."""
        self._count(hits=num_blocks)

    @property
    def num_free_resident(self) -> int:
        return self._resident.num_free_blocks

    @property
    def num_free_spilled(self) -> int:
        return self._spilled.num_free_blocks

    @property
    def reuse_probability(self) -> float:
        """Of cached blocks, those that were asked for again rather than given up."""
        return self._hits / (self._hits + self._evictions)

    def _next_is_resident(self, choice: Choice, *, is_first: bool) -> bool:
        resident, spilled = first_free(self._resident), first_free(self._spilled)
        if resident is None or spilled is None:
            return spilled is None
        if is_first or self._resident.num_free_blocks <= choice.num_kept_resident:
            return False
        if resident.block_hash is None or spilled.block_hash is not None:
            return True
        return not choice.take_spilled

    def _count(self, hits: int = 0, evictions: int = 0) -> None:
        self._hits += hits
        self._evictions += evictions
        if self._hits + self._evictions > _MEMORY:
            self._hits /= 2
            self._evictions /= 2

    def _tier(self, block: KVCacheBlock) -> FreeKVCacheBlockQueue:
        return self._resident if block.block_id < self._num_resident else self._spilled

    def _split(self, blocks: list[KVCacheBlock]) -> Iterator[tuple[FreeKVCacheBlockQueue, list[KVCacheBlock]]]:
        yield self._resident, [b for b in blocks if b.block_id < self._num_resident]
        yield self._spilled, [b for b in blocks if b.block_id >= self._num_resident]
