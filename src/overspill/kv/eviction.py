"""Eviction order of host blocks: LRU or ARC, always the tail of a prefix before its head.

Both replace vLLM's `FreeKVCacheBlockQueue` inside the host `BlockPool`: a block is in the queue while it has no
references. A plain queue cannot keep "tail before head" cheaply: a growing conversation puts its newest block behind
its oldest, so the head would be evicted first and strand the rest. So only *leaves* (blocks that no cached block
continues) are candidates, ordered by last use; evicting a leaf may make its parent a leaf.
"""

import heapq
from collections import OrderedDict
from collections.abc import Sequence

from overspill.kv.vllm_api import BlockHashWithGroupId, KVCacheBlock


class LruOrder:
    """Leaf-first LRU. Costs O(log blocks) per evicted block and O(1) per block used."""

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        """`blocks` are all blocks of the pool in id order, all empty and free except the first, vLLM's null block."""
        count = len(blocks)
        self._blocks = blocks
        # Lowest id first: low slots are registered for DMA first.
        self._empty = list(reversed(blocks[1:]))
        self._is_free = [False] + [True] * (count - 1)
        self._clock = 0
        self._stamp = [0] * count
        # A link to a parent includes its generation, so that a block whose slot was reused after eviction is not
        # mistaken for the old parent.
        self._generation = [0] * count
        self._parent: list[tuple[int, int] | None] = [None] * count
        self._children = [0] * count
        # Children by the key of a parent not cached (yet): lazy stores bring the tail of a prefix before its head.
        self._orphans: dict[BlockHashWithGroupId, list[tuple[int, int]]] = {}
        self._heap: list[tuple[int, int]] = []
        # A block's prefix is known to be cached from its first block on while `_whole` equals `_num_voided`, which
        # grows when a block that others continue loses its content.
        self._is_first = [False] * count
        self._whole = [0] * count
        self._num_voided = 1
        self.num_free_blocks = count - 1

    # Called by vLLM's BlockPool.

    def remove(self, block: KVCacheBlock) -> None:
        """Take out a free cached block that was hit and is referenced again."""
        assert block.block_hash is not None, "only cached host blocks can be hit"
        self._is_free[block.block_id] = False
        self.num_free_blocks -= 1

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add cached blocks whose last references were dropped, least recently used first."""
        for block in blocks:
            self._is_free[block.block_id] = True
        self.num_free_blocks += len(blocks)
        self._stamp_in_order(blocks)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Return blocks without content."""
        for block in blocks:
            self._is_free[block.block_id] = True
            self.num_free_blocks += 1
            self._empty.append(block)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        return [b for b in self._blocks if self._is_free[b.block_id]]

    # Called by the host cache.

    def take(self) -> KVCacheBlock | None:
        """Take the next block to reuse; None if evicting would strand a block in use."""
        block = self._empty.pop() if self._empty else self._evict_leaf()
        if block is not None:
            self._is_free[block.block_id] = False
            self.num_free_blocks -= 1
        return block

    def insert(self, block: KVCacheBlock, parent: KVCacheBlock | None, parent_key: BlockHashWithGroupId | None) -> None:
        """Record that `block` now continues the content of `parent`, or of `parent_key` if that is not cached."""
        assert block.block_hash is not None
        child = (block.block_id, self._generation[block.block_id])
        if parent is not None:
            self._adopt(parent.block_id, child)
            self._whole[block.block_id] = self._whole[parent.block_id]
        elif parent_key is None:
            self._is_first[block.block_id] = True
        else:
            self._orphans.setdefault(parent_key, []).append(child)
            if len(self._orphans) > len(self._blocks):
                self._orphans = {k: alive for k, v in self._orphans.items() if (alive := self._alive(v))}
        for orphan in self._orphans.pop(block.block_hash, ()):
            self._adopt(block.block_id, orphan)

    def use(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Refresh content that was hit in RAM or on the GPU; the last block becomes the most recently used."""
        self._stamp_in_order(blocks)

    def last_use(self, block: KVCacheBlock) -> int:
        return self._stamp[block.block_id]

    def has_whole_prefix(self, block: KVCacheBlock) -> bool:
        """Whether the block's whole prefix is cached, so that refreshing the block refreshes all of the prefix: only
        leaves are evicted, and pass their last use on to their parents. Costs O(1) after the first call."""
        path, block_id = [], block.block_id
        while self._whole[block_id] != self._num_voided:
            path.append(block_id)
            if self._is_first[block_id]:
                break
            link = self._parent[block_id]
            if link is None or self._generation[link[0]] != link[1]:
                return False
            block_id = link[0]
        for block_id in path:
            self._whole[block_id] = self._num_voided
        return True

    def read(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Note that blocks were hit and are referenced; a no-op in LRU, which refreshes blocks on release."""

    def forget(self, block: KVCacheBlock) -> None:
        """Drop a block's content; a free block becomes the next to be allocated."""
        block_id = block.block_id
        if self._children[block_id]:
            self._num_voided += 1  # prefixes through this block are no longer whole
        self._unlink(block_id)
        if self._is_free[block_id]:
            self._empty.append(block)

    # Internals.

    def _alive(self, children: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return [(child, generation) for child, generation in children if self._generation[child] == generation]

    def _adopt(self, parent_id: int, child: tuple[int, int]) -> None:
        child_id, generation = child
        if self._generation[child_id] == generation:
            self._parent[child_id] = (parent_id, self._generation[parent_id])
            self._children[parent_id] += 1

    def _stamp_in_order(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Stamp blocks in one inlined loop: a long prefix has thousands of blocks, and its request waits."""
        stamps, is_free, children = self._stamp, self._is_free, self._children
        clock = self._clock
        for block in blocks:
            block_id = block.block_id
            clock += 1
            stamps[block_id] = clock
            if is_free[block_id] and not children[block_id]:
                self._push(block_id)
        self._clock = clock

    def _offer(self, block_id: int) -> None:
        """Make the block a candidate if it is a free leaf."""
        if self._is_free[block_id] and self._children[block_id] == 0:
            self._push(block_id)

    def _push(self, block_id: int) -> None:
        self._push_on(self._heap, block_id)

    def _push_on(self, heap: list[tuple[int, int]], block_id: int) -> None:
        heapq.heappush(heap, (self._stamp[block_id], block_id))
        # Every use leaves a stale entry in the heap; bound their number.
        if len(heap) > 4 * len(self._blocks) + 64:
            heap[:] = [entry for entry in heap if self._is_current(entry)]
            heapq.heapify(heap)

    def _is_current(self, entry: tuple[int, int]) -> bool:
        stamp, block_id = entry
        return (
            self._stamp[block_id] == stamp
            and self._is_free[block_id]
            and self._children[block_id] == 0
            and self._blocks[block_id].block_hash is not None
        )

    def _pop_leaf(self, heap: list[tuple[int, int]]) -> int | None:
        while heap:
            entry = heapq.heappop(heap)
            if self._is_current(entry):
                return entry[1]
        return None

    def _candidate(self) -> int | None:
        return self._pop_leaf(self._heap)

    def _evict_leaf(self) -> KVCacheBlock | None:
        block_id = self._candidate()
        if block_id is None:
            return None
        self._unlink(block_id)
        return self._blocks[block_id]

    def _unlink(self, block_id: int) -> None:
        self._generation[block_id] += 1
        self._children[block_id] = 0
        self._is_first[block_id], self._whole[block_id] = False, 0
        link, self._parent[block_id] = self._parent[block_id], None
        if link is None:
            return
        parent, generation = link
        if self._generation[parent] == generation:
            self._children[parent] -= 1
            # The parent was as useful as its child.
            self._stamp[parent] = max(self._stamp[parent], self._stamp[block_id])
            self._offer(parent)


class ArcOrder(LruOrder):
    """Adaptive replacement cache (Megiddo and Modha, FAST 2003), leaf-first: blocks used once compete with blocks used
    again, and a miss on a recently evicted block shifts the balance towards its side."""

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        super().__init__(blocks)
        self._capacity = len(blocks)
        self._again = [False] * len(blocks)
        self._again_heap: list[tuple[int, int]] = []
        self._cached_once = 0
        self._target_once = 0.0
        self._ghosts_once: OrderedDict[BlockHashWithGroupId, None] = OrderedDict()
        self._ghosts_again: OrderedDict[BlockHashWithGroupId, None] = OrderedDict()

    def insert(self, block: KVCacheBlock, parent: KVCacheBlock | None, parent_key: BlockHashWithGroupId | None) -> None:
        super().insert(block, parent, parent_key)
        key = block.block_hash
        assert key is not None
        once, again = len(self._ghosts_once), len(self._ghosts_again)
        seen = True
        if key in self._ghosts_once:
            del self._ghosts_once[key]
            self._target_once = min(self._capacity, self._target_once + max(1.0, again / once))
        elif key in self._ghosts_again:
            del self._ghosts_again[key]
            self._target_once = max(0.0, self._target_once - max(1.0, once / again))
        else:
            seen = False
        self._again[block.block_id] = seen
        self._cached_once += not seen

    def use(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.read(blocks)
        super().use(blocks)

    def has_whole_prefix(self, block: KVCacheBlock) -> bool:
        # ARC marks reuse per block: while this block is unmarked, its prefix may hold unmarked blocks, too.
        return self._again[block.block_id] and super().has_whole_prefix(block)

    def read(self, blocks: Sequence[KVCacheBlock]) -> None:
        for block in blocks:
            if not self._again[block.block_id]:
                self._again[block.block_id] = True
                self._cached_once -= 1

    def forget(self, block: KVCacheBlock) -> None:
        self._leave(block.block_id)
        super().forget(block)

    def _push(self, block_id: int) -> None:
        self._push_on(self._again_heap if self._again[block_id] else self._heap, block_id)

    def _candidate(self) -> int | None:
        first, second = self._heap, self._again_heap
        if self._cached_once <= self._target_once:
            first, second = second, first
        block_id = self._pop_leaf(first)
        return self._pop_leaf(second) if block_id is None else block_id

    def _evict_leaf(self) -> KVCacheBlock | None:
        block = super()._evict_leaf()
        if block is None:
            return None
        if block.block_hash is not None:
            ghosts = self._ghosts_again if self._again[block.block_id] else self._ghosts_once
            ghosts[block.block_hash] = None
            if len(ghosts) > self._capacity:
                ghosts.popitem(last=False)
        self._leave(block.block_id)
        return block

    def _leave(self, block_id: int) -> None:
        """Update the counts for a block whose content leaves the cache."""
        if self._blocks[block_id].block_hash is not None and not self._again[block_id]:
            self._cached_once -= 1
        self._again[block_id] = False
