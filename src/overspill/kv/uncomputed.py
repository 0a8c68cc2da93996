"""Un-hashes GPU blocks whose request was preempted in the pass that scheduled it, before anything was computed.

vLLM hashes a block when it schedules the step that fills it. With `--scheduling-policy priority` a request that is
already part of the pass may still be preempted for another one. Its blocks stay in the prefix cache and hold whatever
was there before: another request would hit them, and lazy stores would copy them to RAM.
"""

from collections.abc import Collection
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request


class Uncomputed:
    """Blocks hashed in the current pass, and the request that is to compute each of them.

    Nobody can have hit such a block by the end of the pass: vLLM looks for hits only while it admits waiting requests,
    and admits none in a pass that has preempted one.
    """

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._owners: dict[int, str] = {}  # GPU block id -> the request that hashed it last

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
            for block in blocks[first:num_full_blocks]:
                if not block.is_null:
                    self._owners[block.block_id] = request.request_id

        def observed_cache_partial_block(request: Request, block: KVCacheBlock, num_tokens: int, **kwargs: Any) -> Any:
            if num_tokens > request.num_computed_tokens:
                self._owners[block.block_id] = request.request_id
            return cache_partial_block(request=request, block=block, num_tokens=num_tokens, **kwargs)

        pool.cache_full_blocks = observed_cache_full_blocks
        pool.cache_partial_block = observed_cache_partial_block

    def end_pass(self, scheduled: Collection[str]) -> None:
        """`scheduled` are the requests that the step computes: what the others have hashed must not be found."""
        assert self._pool is not None
        if self._owners:
            self._pool.evict_blocks({block for block, owner in self._owners.items() if owner not in scheduled})
            self._owners.clear()
