"""Where cached GPU blocks come from, seen as vLLM's own pool fills them."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from vllm.distributed.kv_events import MEDIUM_CPU, BlockStored
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    KVCacheBlock,
    generate_block_hash_extra_keys,
    make_block_hash_with_group_id,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class Origin:
    """What a GPU block holds and what it continues."""

    key: BlockHashWithGroupId
    parent: BlockHashWithGroupId | None
    event: BlockStored | None


class Origins:
    """The origin of every full block, by GPU block id."""

    def __init__(self, groups: Collection[int], hash_block_size: int, *, with_events: bool) -> None:
        self._groups = groups
        self._hash_block_size = hash_block_size
        self._with_events = with_events
        self._by_block: dict[int, Origin] = {}

    def watch(self, pool: BlockPool, on_full: Callable[[KVCacheBlock, BlockHashWithGroupId, str], None]) -> None:
        """Note each block that becomes full, and tell of it with the request that filled it.

        Hooking the method where it happens makes a step cost what it fills, not what it runs.
        """
        cache_full_blocks = pool.cache_full_blocks

        def observed_cache_full_blocks(
            request: Request,
            blocks: list[KVCacheBlock],
            num_cached_blocks: int,
            num_full_blocks: int,
            block_size: int,
            kv_cache_group_id: int,
            block_mask: list[bool] | None = None,
        ) -> None:
            cache_full_blocks(
                request=request,
                blocks=blocks,
                num_cached_blocks=num_cached_blocks,
                num_full_blocks=num_full_blocks,
                block_size=block_size,
                kv_cache_group_id=kv_cache_group_id,
                block_mask=block_mask,
            )
            if kv_cache_group_id not in self._groups:
                return
            for i in range(num_cached_blocks, num_full_blocks):
                block = blocks[i]
                key = block.block_hash
                # A hash that ends inside the block is a state the next step overwrites.
                if block.is_null or key is None or block.block_hash_num_tokens != (i + 1) * block_size:
                    continue
                parent = self._parent(request, blocks, i, block_size, kv_cache_group_id)
                event = self._event(request, i, block_size, kv_cache_group_id) if self._with_events else None
                self._by_block[block.block_id] = Origin(key, parent, event)
                on_full(block, key, request.request_id)

        pool.cache_full_blocks = observed_cache_full_blocks

    def _parent(
        self, request: Request, blocks: list[KVCacheBlock], index: int, block_size: int, group: int
    ) -> BlockHashWithGroupId | None:
        if index == 0 or blocks[index - 1].is_null:
            return None
        key = blocks[index - 1].block_hash
        if key is not None:
            return key
        # What the block before holds was moved, and is found elsewhere now.
        per_block = block_size // self._hash_block_size
        return make_block_hash_with_group_id(request.block_hashes[index * per_block - 1], group)

    def of(self, block: KVCacheBlock) -> Origin | None:
        """None if what the block holds was not seen, or is no longer there."""
        origin = self._by_block.get(block.block_id)
        return origin if origin is not None and origin.key == block.block_hash else None

    def _event(self, request: Request, index: int, block_size: int, group: int) -> BlockStored:
        """What to publish once the block is in RAM; its request may be gone by then."""
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
