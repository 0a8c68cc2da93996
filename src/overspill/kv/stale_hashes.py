"""Keeps GPU blocks out of vLLM's prefix cache that do not hold what their hash promises."""

from collections.abc import Collection, Iterable
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request


class StaleHashes:
    """Removes two kinds of hashes that vLLM leaves behind.

    Uncomputed: vLLM hashes a block when it schedules the step that fills it. With `--scheduling-policy priority` a
    request that is already part of the pass may still be preempted for another one. Nobody can have hit its blocks by
    the end of the pass: vLLM looks for hits only while it admits waiting requests, and admits none in a pass that has
    preempted one.

    Old weights: what was computed before the weights changed, and what requests that were running then compute on top
    of it.
    """

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._owners: dict[int, str] = {}  # GPU block id -> the request that hashed it last, in this pass
        self._mixed: set[str] = set()  # requests with KV of old weights

    def bind(self, pool: BlockPool) -> None:
        self._pool = pool
        cache_full_blocks, cache_partial_block = pool.cache_full_blocks, pool.cache_partial_block

        def observed_cache_full_blocks(
            request: Request,
            blocks: list[KVCacheBlock],
            num_cached_blocks: int,
            num_full_blocks: int,
            block_size: int,
            **kwargs: Any,
        ) -> None:
            cache_full_blocks(
                request=request,
                blocks=blocks,
                num_cached_blocks=num_cached_blocks,
                num_full_blocks=num_full_blocks,
                block_size=block_size,
                **kwargs,
            )
            # What an earlier step computes is hashed late at times: after a load, or once a sampled token is known.
            first = max(num_cached_blocks, request.num_computed_tokens // block_size)
            self._hashed(request, blocks[num_cached_blocks:num_full_blocks], blocks[first:num_full_blocks])

        def observed_cache_partial_block(request: Request, block: KVCacheBlock, num_tokens: int, **kwargs: Any) -> Any:
            key = cache_partial_block(request=request, block=block, num_tokens=num_tokens, **kwargs)
            self._hashed(request, [block], [block] if num_tokens > request.num_computed_tokens else [])
            return key

        pool.cache_full_blocks = observed_cache_full_blocks
        pool.cache_partial_block = observed_cache_partial_block

    def _hashed(self, request: Request, blocks: Iterable[KVCacheBlock], uncomputed: Iterable[KVCacheBlock]) -> None:
        if request.request_id in self._mixed:
            self._evict(block.block_id for block in blocks)
            return
        for block in uncomputed:
            self._owners[block.block_id] = request.request_id

    def end_pass(self, scheduled: Collection[str], preempted: Collection[str]) -> None:
        """`scheduled` are the requests that the step computes: what the others have hashed must not be found.
        `preempted` ones start again, with KV of the present weights."""
        if self._owners:
            self._evict(block_id for block_id, owner in self._owners.items() if owner not in scheduled)
            self._owners.clear()
        if preempted:
            self._mixed.difference_update(preempted)

    def weights_changed(self, request_ids: Iterable[str]) -> None:
        """Nothing that is cached holds any more; the requests have KV already, and go on with it."""
        assert self._pool is not None
        self._mixed.update(request_ids)
        if len(self._pool.cached_block_hash_to_block):
            self._evict(range(len(self._pool.blocks)))

    def finished(self, request_id: str) -> None:
        self._mixed.discard(request_id)

    def _evict(self, block_ids: Iterable[int]) -> None:
        assert self._pool is not None
        self._pool.evict_blocks({block_id for block_id in block_ids if not self._pool.blocks[block_id].is_null})
