"""The scheduler's cache of blocks in RAM: vLLM's own BlockPool and KVCacheCoordinator over host slots.

Reusing these makes prefix hashes, hybrid groups, sliding windows and state groups work exactly as in vLLM itself.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm.config import VllmConfig

from overspill.kv.eviction import ArcOrder, LruOrder
from overspill.kv.options import Eviction
from overspill.kv.vllm_api import (
    MEDIUM_CPU,
    BlockHash,
    BlockHashWithGroupId,
    BlockPool,
    BlockStored,
    FullAttentionManager,
    KVCacheBlock,
    KVCacheConfig,
    evict_content,
    host_coordinator,
    insert_hash,
    make_block_hash_with_group_id,
    resolve_kv_cache_block_sizes,
)

_Found = tuple[tuple[list[KVCacheBlock], ...], int]  # blocks per group, and tokens

_ORDERS: dict[Eviction, type[LruOrder]] = {"lru": LruOrder, "arc": ArcOrder}


class BelowRam(KVCacheBlock):
    """Placeholder in a lookup for a block that is not in RAM but below it: on disk or in the store."""

    def __init__(self, key: BlockHashWithGroupId, content: bytes) -> None:
        super().__init__(block_id=-1)
        self.key = key
        self.content = content  # key on disk or in the store


FindBelow = Callable[[BlockHashWithGroupId], BelowRam | None]


class HostPool(BlockPool):
    """BlockPool of host blocks. Lookups return null blocks for the part of a prefix that the GPU already holds."""

    def __init__(self, num_blocks: int, hash_block_size: int, events: bool, order: type[LruOrder]) -> None:
        super().__init__(
            num_gpu_blocks=num_blocks,
            enable_caching=True,
            hash_block_size=hash_block_size,
            enable_kv_cache_events=events,
            medium=MEDIUM_CPU,
        )
        self.order = order(self.blocks)
        self.free_block_queue = self.order
        # Hashes of the prefix that the current lookup's request hits on the GPU. Lookups must see the whole prefix, not
        # only the part beyond the GPU's: chunked attention counts positions from the start.
        self.on_gpu: frozenset[BlockHash] = frozenset()
        self.find_below: FindBelow | None = None  # set during lookups that include disk or store
        # By block id: the stored content, and whether it was used after it was stored.
        self.items: list[Stored | None] = [None] * num_blocks
        self.used_again = bytearray(num_blocks)

    def get_cached_block(self, block_hash: BlockHash, kv_cache_group_ids: list[int]) -> list[KVCacheBlock] | None:
        if block_hash in self.on_gpu:
            return [self.null_block] * len(kv_cache_group_ids)
        if self.find_below is None:
            return super().get_cached_block(block_hash, kv_cache_group_ids)
        found = [self._find(make_block_hash_with_group_id(block_hash, group)) for group in kv_cache_group_ids]
        blocks = [block for block in found if block is not None]
        return blocks if len(blocks) == len(found) else None

    def _find(self, key: BlockHashWithGroupId) -> KVCacheBlock | None:
        assert self.find_below is not None
        return self.cached_block_hash_to_block.get_one_block(key) or self.find_below(key)


class Stored(NamedTuple):
    """A host block that now holds the content of `key`, which continues `parent`."""

    block: KVCacheBlock
    key: BlockHashWithGroupId
    num_tokens: int | None
    parent: BlockHashWithGroupId | None
    # Digest of the adapter that computed the KV, empty without one; None if the KV must not be written to disk.
    adapter: bytes | None = None
    event: BlockStored | None = None  # published once the block is in RAM


# Called with a block whose content leaves RAM, that content, and whether it was used again; returns a block to reuse,
# if any.
OnEvict = Callable[[KVCacheBlock, Stored, bool], KVCacheBlock | None]


@dataclass(frozen=True, slots=True)
class Hit:
    """Blocks in RAM that continue the part of a request's prefix held by the GPU."""

    # Per group, by position from the start of the prefix; null blocks where nothing has to be loaded.
    blocks: tuple[list[KVCacheBlock], ...]
    num_local_tokens: int
    num_tokens: int  # beyond the local tokens

    def in_ram(self) -> list[KVCacheBlock]:
        return [b for group in self.blocks for b in group if not isinstance(b, BelowRam) and not b.is_null]


def heads_first(
    blocks: Iterable[KVCacheBlock], above: Callable[[KVCacheBlock], KVCacheBlock | None]
) -> list[KVCacheBlock]:
    """The blocks in the given order, but each behind the block that it continues (its parent, by `above`)."""
    found: dict[int, KVCacheBlock] = {}
    for block in blocks:
        prefix: list[KVCacheBlock] = []
        at: KVCacheBlock | None = block
        while at is not None and at.block_id not in found:
            prefix.append(at)
            at = above(at)
        found |= {one.block_id: one for one in reversed(prefix)}
    return list(found.values())


class HostCache:
    """Host blocks by content. Block id n is host slot n - 1, since id 0 is vLLM's null block and has no memory."""

    on_evict: OnEvict | None = None
    events_enabled = False

    def __init__(
        self, *, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, num_slots: int, eviction: Eviction
    ) -> None:
        block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        events = vllm_config.kv_events_config
        self.events_enabled = bool(events is not None and events.enable_kv_cache_events)
        self.block_size = block_size
        self.hash_block_size = hash_block_size
        self.pool = HostPool(num_slots + 1, hash_block_size, self.events_enabled, _ORDERS[eviction])
        self.coordinator = host_coordinator(vllm_config, kv_cache_config, block_size, hash_block_size, self.pool)
        self.group_block_sizes = self.coordinator.group_block_sizes
        groups = kv_cache_config.kv_cache_groups
        self._is_plain = (
            len(groups) == 1
            and type(self.coordinator.single_type_managers[0]) is FullAttentionManager
            and not self.coordinator.eagle_group_ids
        )
        self.num_slots = num_slots

    @property
    def num_cached(self) -> int:
        return len(self.pool.cached_block_hash_to_block)

    def find(self, key: BlockHashWithGroupId) -> KVCacheBlock | None:
        return self.pool.cached_block_hash_to_block.get_one_block(key)

    def lookup(
        self,
        block_hashes: Sequence[BlockHash],
        num_local_tokens: int,
        max_tokens: int,
        find_below: FindBelow | None = None,
    ) -> Hit | None:
        """Longest prefix of up to `max_tokens` held by GPU and RAM together, or None if RAM adds nothing to the GPU's.
        Blocks that `find_below` knows count as if in RAM.

        `max_tokens` bounds the search itself: with a sliding window, a hit of n tokens does not imply one of n - 1.
        """
        self.pool.find_below = find_below
        look_up = self._lookup_plain if self._is_plain else self._lookup_any
        try:
            blocks, num_tokens = look_up(block_hashes, num_local_tokens, max_tokens)
        finally:
            self.pool.find_below = None
        if num_tokens <= num_local_tokens:
            return None
        return Hit(blocks, num_local_tokens, num_tokens - num_local_tokens)

    def _lookup_any(self, block_hashes: Sequence[BlockHash], num_local_tokens: int, max_tokens: int) -> _Found:
        self.pool.on_gpu = frozenset(block_hashes[: num_local_tokens // self.hash_block_size])
        try:
            blocks, num_tokens, _ = self.coordinator.find_longest_cache_hit(list(block_hashes), max_tokens)
        finally:
            self.pool.on_gpu = frozenset()
        return blocks, num_tokens

    def _lookup_plain(self, block_hashes: Sequence[BlockHash], num_local_tokens: int, max_tokens: int) -> _Found:
        """Look up a prefix in a single full-attention group: takes a third of `_lookup_any`'s time, and the request
        waits while its long prefix is looked up."""
        first, last = num_local_tokens // self.block_size, max_tokens // self.block_size
        blocks = [self.pool.null_block] * first
        below = self.pool.find_below
        for block_hash in block_hashes[first:last]:
            key = make_block_hash_with_group_id(block_hash, 0)
            block = self.find(key)
            if block is None and below is not None:
                block = below(key)
            if block is None:
                break
            blocks.append(block)
        return (blocks,), len(blocks) * self.block_size

    def lookup_below(
        self, block_hashes: Sequence[BlockHash], num_local_tokens: int, max_tokens: int, find: FindBelow, most: int
    ) -> Hit | None:
        """Longest prefix that needs at least one and at most `most` blocks that RAM lacks and `find` knows: blocks read
        into RAM must not evict the head of their own prefix."""
        while max_tokens > num_local_tokens:
            found = self.lookup(block_hashes, num_local_tokens, max_tokens, find)
            if found is None:
                return None
            count = sum(isinstance(block, BelowRam) for group in found.blocks for block in group)
            if count <= most:
                return found if count else None
            max_tokens = num_local_tokens + found.num_tokens // 2
        return None

    def allocate_beside(self, found: Hit, count: int) -> list[KVCacheBlock]:
        """Allocate `count` blocks to read into, or none, without evicting the hit's blocks in RAM."""
        in_ram = found.in_ram()
        self.read(in_ram)
        blocks = self.allocate(count)
        self.release(in_ram)
        if len(blocks) == count:
            return blocks
        self.release(blocks)
        return []

    def allocate(self, count: int) -> list[KVCacheBlock]:
        """Allocate up to `count` blocks to store into; evicts cached blocks once no empty ones are left."""
        blocks: list[KVCacheBlock] = []
        while len(blocks) < count and (block := self.pool.order.take()) is not None:
            item, used_again = self._forget(block)
            evict_content(self.pool, block)
            block.ref_cnt = 1
            reusable: KVCacheBlock | None = block
            if item is not None and self.on_evict is not None:
                reusable = self.on_evict(block, item, used_again)
            if reusable is not None:
                blocks.append(reusable)
        return blocks

    def _forget(self, block: KVCacheBlock) -> tuple[Stored | None, bool]:
        """Clear and return an evicted block's content, and whether it was used after it was stored. If so, its parent
        counts as used, too: refreshing the tail of a prefix refreshes all of it."""
        item, used_again = self.pool.items[block.block_id], bool(self.pool.used_again[block.block_id])
        self.pool.items[block.block_id] = None
        self.pool.used_again[block.block_id] = 0
        if used_again and item is not None and item.parent is not None:
            self._mark_used([parent] if (parent := self.find(item.parent)) is not None else ())
        return item, used_again

    def _mark_used(self, blocks: Iterable[KVCacheBlock]) -> None:
        for block in blocks:
            self.pool.used_again[block.block_id] = 1

    def by_last_use(self) -> list[tuple[KVCacheBlock, Stored]]:
        """All content in RAM, most recently used prefixes first, each prefix from its head."""
        items = self.pool.items
        held = [block for block in self.pool.blocks if items[block.block_id] is not None]
        held.sort(key=self.pool.order.last_use, reverse=True)

        def above(block: KVCacheBlock) -> KVCacheBlock | None:
            item = items[block.block_id]
            parent = self.find(item.parent) if item is not None and item.parent is not None else None
            return parent if parent is not None and items[parent.block_id] is not None else None

        ordered = heads_first(held, above)
        return [(block, item) for block in ordered if (item := items[block.block_id]) is not None]

    def insert(self, stored: Sequence[Stored]) -> None:
        """Make stored content available to lookups, and drop the stores' references."""
        order = self.pool.order
        for item in stored:
            block, key, num_tokens, parent = item.block, item.key, item.num_tokens, item.parent
            self.pool.items[block.block_id] = item
            insert_hash(self.pool, key, block, num_tokens)
            order.insert(block, self.find(parent) if parent is not None else None, parent)
        if self.events_enabled:
            # In one queue with the removals: subscribers must see events in the order in which they happened.
            self.pool.kv_event_queue += [item.event for item in stored if item.event is not None]
        # Released together, so that only tails become leaves.
        self.release([item.block for item in stored])

    def pin(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.pool.touch(blocks)

    def read(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Pin blocks that a request hit, and note their use."""
        self.pin(blocks)
        self._mark_used(blocks)
        self.pool.order.read(blocks)

    def release(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Unpin blocks, given in prefix order; the tail will count as older than the head."""
        self.pool.free_blocks(reversed(list(blocks)))

    def use(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Refresh blocks hit on the GPU, given in prefix order; the tail will count as older than the head."""
        self._mark_used(blocks)
        self.pool.order.use(blocks[::-1])

    def has_whole_prefix(self, block: KVCacheBlock) -> bool:
        """Whether the block's whole prefix is cached, and refreshing the block refreshes all of it."""
        return self.pool.order.has_whole_prefix(block)

    def drop(self, blocks: Iterable[KVCacheBlock]) -> int:
        """Remove content from the cache at once; returns the count. Blocks in use stay referenced until released."""
        dropped = 0
        for block in blocks:
            if block.block_hash is not None:
                self.pool.items[block.block_id] = None
                self.pool.used_again[block.block_id] = 0
                self.pool.order.forget(block)
                self.pool.evict_blocks({block.block_id})
                dropped += 1
        return dropped

    def clear(self) -> int:
        return self.drop(self.pool.blocks) if self.num_cached else 0
