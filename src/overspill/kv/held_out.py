"""Blocks that vLLM neither hands out nor hits: those that have no memory."""

from collections.abc import Iterable

from overspill.kv.vllm_api import BlockPool, KVCacheBlock


class HeldOut:
    """In the scheduler, beside vLLM's block pool."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.ids: set[int] = set()

    def take(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Free blocks, out of vLLM's sight from now on."""
        taken = list(blocks)
        self.forget(taken)
        for block in taken:
            self._pool.free_block_queue.remove(block)
            self.ids.add(block.block_id)
        # vLLM takes what is not free for held.
        self._pool.num_gpu_blocks -= len(taken)

    def forget(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Let nobody hit them, free or in use."""
        self._pool.evict_blocks({block.block_id for block in blocks if block.block_hash is not None})

    def give(self, numbers: Iterable[int]) -> None:
        """Back to vLLM, empty; those that it has are left alone."""
        blocks = [self._pool.blocks[number] for number in numbers if number in self.ids]
        self.ids.difference_update(block.block_id for block in blocks)
        self._pool.num_gpu_blocks += len(blocks)
        self._pool.free_block_queue.prepend_n(blocks)
