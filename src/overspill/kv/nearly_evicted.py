"""Which cached GPU blocks come near eviction: a walk along vLLM's free queue that remembers where it was."""

from collections.abc import Callable, Iterator
from typing import Protocol

from overspill.kv.vllm_api import KVCacheBlock

# Hits take blocks out of the middle of the queue unseen; walking anew now and then keeps the count honest.
_STEPS_BETWEEN_FULL_WALKS = 16
# A thousand blocks in one step hold the scheduler up for 10 ms. Twice as many as were taken keeps ahead of eviction.
_FEW = 64


class FreeQueue(Protocol):
    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]: ...


class EvictionFront:
    """Keeps the next `depth` blocks of the GPU's free queue seen.

    A block is visited about once on its way to the head, so a step costs as much as the queue has moved since the
    last one, whatever the number of running requests.
    """

    def __init__(self, queue: FreeQueue, depth: int) -> None:
        self._queue = queue
        self._depth = depth
        self._cursor: KVCacheBlock | None = None
        self._ahead = 0  # visited blocks between the head and the cursor, at most
        self._taken = 0  # since the last step
        self._steps = 0
        self._num_found = 0  # since blocks were taken

    def taken(self, count: int) -> None:
        """`count` blocks were allocated from the head."""
        self._ahead -= count
        self._taken += count
        self._num_found = 0

    def advance(self, wanted: Callable[[KVCacheBlock], bool], limit: int) -> list[KVCacheBlock]:
        """Visit blocks until `depth` of them are ahead; return at most `limit` wanted ones, nearest eviction first, and
        few of them unless many blocks are being taken.

        While none is taken, none comes nearer: `depth` of them are found then, and no more. Else an engine with nothing
        to do would go on copying, and never sleep if copies push each other out of RAM.
        """
        self._steps += 1
        limit = min(limit, self._depth - self._num_found, max(_FEW, 2 * self._taken))
        self._taken = 0
        cursor = self._cursor
        if cursor is None or cursor.ref_cnt > 0 or self._ahead <= 0 or self._steps >= _STEPS_BETWEEN_FULL_WALKS:
            cursor, self._ahead, self._steps = None, 0, 0
        found: list[KVCacheBlock] = []
        if self._ahead < self._depth:
            for block in self._queue.iter_blocks_after(cursor):
                if self._ahead >= self._depth or len(found) >= limit:
                    break
                if block.block_hash is not None and wanted(block):
                    found.append(block)  # the caller pins it, which takes it out of the queue
                else:
                    cursor = block
                    self._ahead += 1
        self._cursor = cursor
        self._num_found += len(found)
        return found
