"""Blocks without memory, which vLLM neither hands out nor hits."""

from collections.abc import Iterable

from overspill.kv.vllm_api import BlockPool, KVCacheBlock


class HeldOut:
    """The blocks that the scheduler keeps out of vLLM's block pool, by id."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.ids: set[int] = set()

    def take(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Remove free blocks from vLLM's free queue and its prefix cache."""
        taken = list(blocks)
        self.forget(taken)
        for block in taken:
            self._pool.free_block_queue.remove(block)
            self.ids.add(block.block_id)
        # vLLM counts all blocks that are not free as held by requests.
        self._pool.num_gpu_blocks -= len(taken)

    def forget(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Drop the blocks' hashes, so that no request hits them; the blocks may be free or in use."""
        self._pool.evict_blocks({block.block_id for block in blocks if block.block_hash is not None})

    def give(self, numbers: Iterable[int]) -> None:
        """Return blocks to vLLM, empty; skip blocks that are not held out."""
        blocks = [self._pool.blocks[number] for number in numbers if number in self.ids]
        self.ids.difference_update(block.block_id for block in blocks)
        self._pool.num_gpu_blocks += len(blocks)
        self._pool.free_block_queue.prepend_n(blocks)
