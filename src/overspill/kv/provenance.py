"""Provenance of cached KV: which content a GPU block holds, and whether its hash still stands for it."""

import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from overspill.kv.vllm_api import (
    MEDIUM_CPU,
    BlockHashWithGroupId,
    BlockPool,
    BlockStored,
    KVCacheBlock,
    LoRARequest,
    Request,
    Scheduler,
    after_engine_calls,
    connectors_of,
    generate_block_hash_extra_keys,
    make_block_hash_with_group_id,
    maybe_convert_block_hash,
    to_event_extra_keys,
    watch_full_blocks,
    watch_partial_blocks,
)

# RPCs from vLLM's own front ends to workers that leave weights unchanged. Any other RPC, sent by name or as a function,
# may do anything.
_HARMLESS_RPCS = frozenset(
    {
        "check_health", "compute_weight_checksums", "get_model_inspection", "init_weight_transfer_engine", "profile",
        "save_sharded_state", "shutdown_weight_transfer_engine", "synchronize_device", "update_max_model_len",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Origin:
    """Identity of a GPU block's content, and of the block before it in the prefix."""

    key: BlockHashWithGroupId
    parent: BlockHashWithGroupId | None
    event: BlockStored | None
    # Digest of the LoRA adapter the KV was computed with; None where KV must not outlive the process.
    adapter: bytes | None = None


# Makes a block's event from the request, the block's index, the block size in tokens, and the group.
EventOf = Callable[[Request, int, int, int], BlockStored | None]


class Origins:
    """Origins of all full blocks, by GPU block id."""

    def __init__(
        self,
        groups: Collection[int],
        hash_block_size: int,
        *,
        with_events: bool,
        adapter_of: Callable[[Request], bytes | None] | None = None,
    ) -> None:
        self._adapter_of = adapter_of
        self._groups = groups
        self._hash_block_size = hash_block_size
        self._with_events = with_events
        self._by_block: dict[int, Origin] = {}

    def watch(self, pool: BlockPool, on_full: Callable[[KVCacheBlock, BlockHashWithGroupId, str], None]) -> None:
        """Record each block that becomes full, and report it with its key and request id."""

        def note(
            request: Request, blocks: list[KVCacheBlock], first: int, end: int, block_size: int, group: int
        ) -> None:
            if group not in self._groups:
                return
            adapter = self._adapter_of(request) if self._adapter_of is not None else None
            for i in range(first, end):
                block = blocks[i]
                key = block.block_hash
                # A hash that ends inside the block names a recurrent state, which the next step overwrites.
                if block.is_null or key is None or block.block_hash_num_tokens != (i + 1) * block_size:
                    continue
                parent = self._parent(request, blocks, i, block_size, group)
                event = self.event(request, i, block_size, group)
                self._by_block[block.block_id] = Origin(key, parent, event, adapter)
                on_full(block, key, request.request_id)

        watch_full_blocks(pool, note)

    def _parent(
        self, request: Request, blocks: list[KVCacheBlock], index: int, block_size: int, group: int
    ) -> BlockHashWithGroupId | None:
        if index == 0 or blocks[index - 1].is_null:
            return None
        key = blocks[index - 1].block_hash
        if key is not None:
            return key
        # The parent's hash was evicted while the request runs on; the content is the same.
        per_block = block_size // self._hash_block_size
        return make_block_hash_with_group_id(request.block_hashes[index * per_block - 1], group)

    def of(self, block: KVCacheBlock) -> Origin | None:
        """Origin of the block's content, or None if it was not recorded or has been evicted."""
        origin = self._by_block.get(block.block_id)
        return origin if origin is not None and origin.key == block.block_hash else None

    def event(self, request: Request, index: int, block_size: int, group: int) -> BlockStored | None:
        """Event to publish once the block is in RAM, when its request may have ended; None if events are off."""
        if not self._with_events:
            return None
        start, end = index * block_size, (index + 1) * block_size
        hashes, per_block = request.block_hashes, block_size // self._hash_block_size
        extra_keys, _ = generate_block_hash_extra_keys(request, start, end, 0)
        lora = request.lora_request
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(hashes[(index + 1) * per_block - 1])],
            parent_block_hash=maybe_convert_block_hash(hashes[index * per_block - 1]) if index else None,
            token_ids=list(request.all_token_ids[start:end]),
            block_size=block_size,
            lora_id=lora.adapter_id if lora else None,
            medium=MEDIUM_CPU,
            lora_name=lora.name if lora else None,
            extra_keys=to_event_extra_keys([extra_keys]),
            group_idx=group,
            locality="LOCAL",
        )


class StaleHashes:
    """Removes two kinds of hashes that vLLM leaves behind.

    Uncomputed blocks: vLLM hashes a block when it schedules the step that fills it. With `--scheduling-policy priority`
    a request that is already part of the pass may still be preempted for another one. Its blocks cannot have been hit
    by the end of the pass: vLLM looks up hits only while it admits waiting requests, and admits none in a pass that has
    preempted a request.

    Old weights: KV computed before the weights changed, and KV that requests running then compute on top of it.
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
        # KV of an earlier step may be hashed late: after a load, or once a sampled token is known.
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
        """Remove hashes of requests that are not in `scheduled`, because the step does not compute them. Requests in
        `preempted` start again, with KV of the current weights."""
        if self._owners:
            self._evict(block_id for block_id, owner in self._owners.items() if owner not in scheduled)
            self._owners.clear()
        if preempted:
            self._mixed.difference_update(preempted)

    def weights_changed(self, request_ids: Iterable[str]) -> None:
        """Evict the whole cache. The given requests have KV of the old weights, and continue with it."""
        assert self._pool is not None
        self._mixed.update(request_ids)
        if len(self._pool.cached_block_hash_to_block):
            self._evict(range(len(self._pool.blocks)))

    def finished(self, request_id: str) -> None:
        self._mixed.discard(request_id)

    def _evict(self, block_ids: Iterable[int]) -> None:
        assert self._pool is not None
        self._pool.evict_blocks({block_id for block_id in block_ids if not self._pool.blocks[block_id].is_null})


def watch_engine_core() -> None:
    """Report to an engine's connectors every call that may have changed its weights.

    After new weights, or another LoRA adapter under the same name, KV in RAM belongs to another model. vLLM leaves
    resetting its caches to the caller, and a reset spares connectors unless the caller says otherwise.
    """

    def on_rpc(core: Any, method: Any) -> None:
        if method in _HARMLESS_RPCS:
            return
        name = method if isinstance(method, str) else getattr(method, "__name__", "a function")
        for connector in connectors_of(core, "weights_changed"):
            connector.weights_changed(f"the RPC {name}", requests_with_kv(core.scheduler))

    def on_adapter(core: Any, adapter: LoRARequest) -> None:
        for connector in connectors_of(core, "weights_changed"):
            if connector.adapters.is_known(adapter):
                what = f"loading adapter {adapter.lora_name} again"
                connector.adapter_changed(adapter, what, requests_with_kv(core.scheduler))
            connector.adapters.is_replaced(adapter)

    after_engine_calls(on_rpc, on_adapter)


def requests_with_kv(scheduler: Scheduler) -> list[str]:
    """Unfinished requests that have computed or loaded KV; vLLM lists finished ones until their last step."""
    return [r.request_id for r in scheduler.requests.values() if r.num_computed_tokens and not r.is_finished()]


class Adapters:
    """LoRA adapters by name and path: vLLM hashes nothing else, and both stay when the content is replaced."""

    def __init__(self) -> None:
        self._identities: dict[tuple[str, str], tuple[Any, ...]] = {}

    def is_known(self, adapter: LoRARequest) -> bool:
        return (adapter.lora_name, adapter.lora_path) in self._identities

    def is_replaced(self, adapter: LoRARequest) -> bool:
        """Record the adapter; True if it differs from the last one under the same name and path."""
        identity = (adapter.lora_int_id, _files(adapter.lora_path))
        before = self._identities.get((adapter.lora_name, adapter.lora_path), identity)
        self._identities[adapter.lora_name, adapter.lora_path] = identity
        return before != identity


def _files(path: str) -> tuple[tuple[str, int, int], ...]:
    """Names, modification times and sizes of an adapter's files; empty unless the path is a local folder."""
    try:
        with os.scandir(path) as entries:
            stats = [(entry.name, entry.stat()) for entry in entries if entry.is_file()]
    except OSError:
        return ()
    return tuple(sorted((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats))
