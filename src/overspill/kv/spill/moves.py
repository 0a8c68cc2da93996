"""Cached KV that lies in RAM moves to the GPU when a request that fits there asks for it.

Otherwise a prefix that was cached while the GPU was full would be streamed in every step of every request that uses it,
for as long as it is popular, beside an empty GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from overspill.kv.vllm_api import BlockPool, KVCacheBlock, KVCacheBlocks, Request, forget_hashes, watch_full_blocks


@dataclass(slots=True)
class Move:
    """Spilled blocks of a prefix that was found, and where they go once their request has its blocks."""

    num_local_tokens: int
    sources: list[KVCacheBlock]
    targets: list[KVCacheBlock]

    @property
    def is_admitted(self) -> bool:
        return bool(self.targets)


class Moves:
    """From the lookup of a request to the step that copies, all within one pass of the scheduler."""

    def __init__(self, block_size: int, num_resident: int) -> None:
        self._block_size = block_size
        self._num_resident = num_resident
        self._pool: BlockPool | None = None
        self._moves: dict[str, Move] = {}
        self._written: set[int] = set()
        self._declined: set[str] = set()

    def bind(self, pool: BlockPool) -> None:
        """Watch which blocks are filled: vLLM hashes them when it schedules the step that writes them, so they can be
        found before there is anything to copy."""
        self._pool = pool
        watch_full_blocks(pool, self._on_full)

    def _on_full(
        self, request: Request, blocks: list[KVCacheBlock], first: int, end: int, block_size: int, group: int
    ) -> None:
        self._written.update(block.block_id for block in blocks[first:end])

    @property
    def pool(self) -> BlockPool:
        assert self._pool is not None, "the block pool is not bound yet"
        return self._pool

    def may_propose(self, request_id: str) -> bool:
        """A request that was not admitted with a move is admitted without: it would be offered the same for ever."""
        return request_id not in self._declined

    def sources(self, blocks: Sequence[KVCacheBlock]) -> Sequence[KVCacheBlock]:
        """The part of a found prefix that would move: from the first spilled block on. None if nothing is spilled, or
        if some of it is only written in the step that is being scheduled."""
        for i, block in enumerate(blocks):
            if block.block_id >= self._num_resident:
                return [] if any(later.block_id in self._written for later in blocks[i:]) else blocks[i:]
        return []

    def propose(self, request_id: str, blocks: Sequence[KVCacheBlock]) -> int:
        """A found prefix's spilled part is to be moved; how many of its tokens are left where they are.

        They are held meanwhile: they are free, and the request's new blocks could be taken from among them.
        """
        self.cancel(request_id)
        sources = list(self.sources(blocks))
        kept = len(blocks) - len(sources)
        move = self._moves[request_id] = Move(kept * self._block_size, sources, [])
        self.pool.touch(move.sources)
        return move.num_local_tokens

    def offered_tokens(self, request_id: str) -> int:
        """Tokens that vLLM should take as loaded, as if from elsewhere."""
        move = self._moves.get(request_id)
        return len(move.sources) * self._block_size if move is not None and not move.is_admitted else 0

    def admit(self, request_id: str, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """The request has its blocks. The old ones are forgotten, so that the next one finds the new."""
        move = self._moves.get(request_id)
        if move is None or move.is_admitted:
            return
        if num_external_tokens != len(move.sources) * self._block_size:
            self.cancel(request_id)
            return
        first = move.num_local_tokens // self._block_size
        move.targets = list(blocks.blocks[0][first : first + len(move.sources)])
        for block in move.sources:
            forget_hashes(self.pool, block)

    def take(self) -> list[tuple[int, int]]:
        """(block, block) ids of this step's copies, from and to; a spilled block may be followed by ones on the GPU.

        The sources may be handed out again at once: what a later step writes to them comes after this step's compute,
        which waits for the copies. Loads need not wait for it by themselves, and are told to.
        """
        pairs = []
        for request_id, move in list(self._moves.items()):
            if move.is_admitted:
                pairs += [(a.block_id, b.block_id) for a, b in zip(move.sources, move.targets, strict=True)]
            else:
                self._declined.add(request_id)
            self.cancel(request_id)
        self._written.clear()
        return pairs

    def finished(self, request_id: str) -> None:
        self.cancel(request_id)
        self._declined.discard(request_id)

    def cancel(self, request_id: str) -> None:
        """Let go of what is held."""
        move = self._moves.pop(request_id, None)
        if move is not None:
            self.pool.free_blocks(reversed(move.sources))
