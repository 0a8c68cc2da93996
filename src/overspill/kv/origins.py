"""Where cached GPU blocks come from, seen as vLLM's own pool fills them."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from overspill.kv.vllm_api import (
    MEDIUM_CPU,
    BlockHashWithGroupId,
    BlockPool,
    BlockStored,
    KVCacheBlock,
    Request,
    generate_block_hash_extra_keys,
    make_block_hash_with_group_id,
    maybe_convert_block_hash,
    to_event_extra_keys,
    watch_full_blocks,
)


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
        """Note each block that becomes full, and report it with the request that filled it."""

        def note(
            request: Request, blocks: list[KVCacheBlock], first: int, end: int, block_size: int, group: int
        ) -> None:
            if group not in self._groups:
                return
            for i in range(first, end):
                block = blocks[i]
                key = block.block_hash
                # A hash that ends inside the block is a state the next step overwrites.
                if block.is_null or key is None or block.block_hash_num_tokens != (i + 1) * block_size:
                    continue
                parent = self._parent(request, blocks, i, block_size, group)
                event = self._event(request, i, block_size, group) if self._with_events else None
                self._by_block[block.block_id] = Origin(key, parent, event)
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
