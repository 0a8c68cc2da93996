"""Keeps GPU blocks out of vLLM's prefix cache that do not hold what their hash promises."""

from collections.abc import Collection, Iterable

from overspill.kv.vllm_api import BlockPool, KVCacheBlock, Request, watch_full_blocks, watch_partial_blocks


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
        watch_full_blocks(pool, self._full)
        watch_partial_blocks(pool, self._partial)

    def _full(
        self, request: Request, blocks: list[KVCacheBlock], first: int, end: int, block_size: int, group: int
    ) -> None:
        # What an earlier step computes is hashed late at times: after a load, or once a sampled token is known.
        uncomputed = max(first, request.num_computed_tokens // block_size)
        self._hashed(request, blocks[first:end], blocks[uncomputed:end])

    def _partial(self, request: Request, block: KVCacheBlock, num_tokens: int) -> None:
        self._hashed(request, [block], [block] if num_tokens > request.num_computed_tokens else [])

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
