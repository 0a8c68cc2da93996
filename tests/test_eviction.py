"""What leaves RAM first, seen through the pool that vLLM's own code drives."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashWithGroupId, KVCacheBlock, make_block_hash_with_group_id

from overspill.kv.eviction import ArcOrder, LruOrder
from overspill.kv.host_cache import HostCache, HostPool, Stored


class Cache(HostCache):
    """The host cache without a model: content is named, and a name's parent is the name without its last letter."""

    def __init__(self, num_slots: int, order: type[LruOrder] = LruOrder) -> None:
        self.pool = HostPool(num_slots + 1, 16, False, order)
        self.num_slots = num_slots

    def store(self, *names: str) -> None:
        """As the scheduler does: one job, parents held while room is made, content findable when it is over."""
        parents = [block for name in names if (block := self.find(key(name[:-1]))) is not None]
        self.pin(parents)
        blocks = self.allocate(len(names))
        self.release(parents)
        pairs = zip(blocks, names, strict=False)
        self.insert([Stored(block, key(name), 16, key(name[:-1]) if len(name) > 1 else None) for block, name in pairs])

    def hit(self, *names: str) -> None:
        self.use([block for name in names if (block := self.find(key(name))) is not None])

    def names(self) -> set[str]:
        return {name(block) for block in self.pool.blocks if block.block_hash is not None}


def key(name: str) -> BlockHashWithGroupId:
    return make_block_hash_with_group_id(BlockHash(name.encode()), 0)


def name(block: KVCacheBlock) -> str:
    assert block.block_hash is not None
    return bytes(block.block_hash)[:-4].decode()


def prefixes(word: str) -> list[str]:
    return [word[: i + 1] for i in range(len(word))]


both = pytest.mark.parametrize("order", [LruOrder, ArcOrder])


@both
def test_a_conversation_grown_by_blocks_evicts_its_tail_first(order: type[LruOrder]) -> None:
    cache = Cache(4, order)
    for part in prefixes("abcd"):
        cache.store(part)
    for newcomer, left in (("x", {"a", "ab", "abc"}), ("y", {"a", "ab"}), ("z", {"a"})):
        cache.hit("x", "y")  # so that the newcomers are not the older ones
        cache.store(newcomer)
        assert cache.names() & set(prefixes("abcd")) == left


@both
def test_a_shared_prefix_outlives_its_tails(order: type[LruOrder]) -> None:
    cache = Cache(6, order)
    cache.store("s", "st")
    cache.store("sta")
    cache.store("stb")
    cache.store("x")
    cache.store("y")
    cache.store("p", "q")
    assert {"s", "st"} <= cache.names()
    assert not {"sta", "stb"} & cache.names()


def test_a_use_of_the_gpu_copy_keeps_the_ram_copy() -> None:
    cache = Cache(2)
    cache.store("a")
    cache.store("b")
    cache.hit("a")
    cache.store("c")
    assert cache.names() == {"a", "c"}


@both
def test_a_prefix_longer_than_the_pool_keeps_its_head(order: type[LruOrder]) -> None:
    cache = Cache(3, order)
    for part in prefixes("abcdefgh"):
        if len(part) == 1 or cache.find(key(part[:-1])) is not None:  # the scheduler stores nothing beyond a hole
            cache.store(part)
    assert cache.names() == {"a", "ab", "abc"}
    cache = Cache(3, order)
    cache.store(*prefixes("abcdefgh"))
    assert cache.names() == {"a", "ab", "abc"}


@both
def test_a_head_stored_after_its_tail_still_outlives_it(order: type[LruOrder]) -> None:
    cache = Cache(3, order)
    cache.store("abc")
    cache.store("ab")
    cache.store("a")
    cache.store("x")
    assert cache.names() == {"a", "ab", "x"}
    cache.hit("x")
    cache.store("y")
    assert cache.names() == {"a", "x", "y"}


@both
def test_a_dropped_block_is_not_found_and_its_slot_is_used_next(order: type[LruOrder]) -> None:
    cache = Cache(3, order)
    cache.store("a", "ab", "abc")
    middle = cache.find(key("ab"))
    assert middle is not None
    assert cache.drop([middle]) == 1
    assert cache.drop([middle]) == 0
    assert cache.find(key("ab")) is None
    cache.store("x")
    assert cache.names() == {"a", "abc", "x"}
    assert cache.find(key("x")) is middle


@both
def test_a_block_dropped_while_pinned_is_reused_after_release(order: type[LruOrder]) -> None:
    cache = Cache(2, order)
    cache.store("a", "b")
    block = cache.find(key("a"))
    assert block is not None
    cache.pin([block])
    cache.drop([block])
    cache.store("c")
    assert cache.find(key("c")) is not block
    cache.release([block])
    cache.store("d")
    assert cache.find(key("d")) is block


@both
def test_a_pinned_block_and_its_prefix_are_never_evicted(order: type[LruOrder]) -> None:
    cache = Cache(2, order)
    cache.store("a", "ab")
    tail = cache.find(key("ab"))
    assert tail is not None
    cache.pin([tail])
    assert cache.pool.get_num_free_blocks() == 1
    assert cache.allocate(1) == []
    cache.release([tail])
    assert len(cache.allocate(2)) == 2


@both
def test_clearing_frees_every_slot(order: type[LruOrder]) -> None:
    cache = Cache(5, order)
    cache.store(*prefixes("abc"), "x", "y")
    assert cache.clear() == 5
    assert cache.num_cached == 0
    assert len(cache.allocate(6)) == 5


def scan_after_a_second_use(order: type[LruOrder]) -> set[str]:
    cache = Cache(4, order)
    cache.store("h")
    cache.hit("h")
    for i in range(12):
        cache.store(chr(ord("k") + i))
    return cache.names()


def test_a_scan_evicts_a_twice_used_block_from_lru_not_from_arc() -> None:
    assert "h" in scan_after_a_second_use(ArcOrder)
    assert "h" not in scan_after_a_second_use(LruOrder)


def test_arc_adapts_its_target_to_misses_of_evicted_blocks() -> None:
    cache = Cache(4, ArcOrder)
    order = cache.pool.order
    assert isinstance(order, ArcOrder)
    cache.store("h", "i")
    cache.hit("h", "i")
    for newcomer in "klmn":
        cache.store(newcomer)
    assert "k" not in cache.names() and order._target_once == 0
    cache.store("k")
    assert order._target_once >= 1
    for newcomer in "pqrst":
        cache.store(newcomer)
    lost = {"h", "i"} - cache.names()
    assert lost, "what was used twice should now make room for new content"
    target = order._target_once
    cache.store(*lost)
    assert order._target_once < target


@both
def test_endless_hits_and_orphaned_tails_take_bounded_memory(order: type[LruOrder]) -> None:
    cache = Cache(8, order)
    cache.store(*"abcdefgh")
    for _ in range(5_000):
        cache.hit(*"abcdefgh")
    queue = cache.pool.order
    assert len(queue._heap) + len(getattr(queue, "_again_heap", ())) < 300
    for i in range(500):  # tails whose heads never come
        cache.store(f"{i}-tail")
    assert len(queue._orphans) <= 9


# Against a model that keeps everything in one list.

_words = [w for tree in ("abc", "abd", "xy") for w in prefixes(tree)]
_operation = st.tuples(st.sampled_from(["store", "store", "hit", "pin", "release", "drop"]), st.sampled_from(_words))


class Naive:
    """LRU over leaves, by looking at everything every time."""

    def __init__(self, size: int) -> None:
        self.size, self.clock = size, 0
        self.used: dict[str, int] = {}
        self.pinned: set[str] = set()
        self.parent: dict[str, str | None] = {}

    def touch(self, word: str) -> None:
        self.clock += 1
        self.used[word] = self.clock

    def leave(self, word: str) -> None:
        parent = self.parent.pop(word)
        stamp = self.used.pop(word)
        for child, its in self.parent.items():
            if its == word:
                self.parent[child] = None
        if parent is not None:
            self.used[parent] = max(self.used[parent], stamp)

    def store(self, word: str) -> None:
        if len(self.used) == self.size:
            leaves = [w for w in self.used if w not in self.parent.values() and w not in self.pinned | {word[:-1]}]
            if not leaves:
                return
            self.leave(min(leaves, key=self.used.__getitem__))
        self.parent[word] = word[:-1] if word[:-1] in self.used else None
        for child in self.used:
            if child[:-1] == word and child in self.waiting:
                self.parent[child] = word
        self.touch(word)

    @property
    def waiting(self) -> set[str]:
        return {child for child, parent in self.parent.items() if parent is None}


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(size=st.integers(1, 6), operations=st.lists(_operation, max_size=40))
def test_lru_keeps_what_a_naive_model_keeps(size: int, operations: list[tuple[str, str]]) -> None:
    cache, naive = Cache(size), Naive(size)
    for what, word in operations:
        block = cache.find(key(word))
        if what == "store" and block is None:
            cache.store(word)
            naive.store(word)
        elif what == "hit" and block is not None:
            cache.hit(word)
            naive.touch(word)
        elif what == "pin" and block is not None and word not in naive.pinned:
            cache.pin([block])
            naive.pinned.add(word)
        elif what == "release" and block is not None and word in naive.pinned:
            cache.release([block])
            naive.pinned.discard(word)
            naive.touch(word)
        elif what == "drop" and block is not None and word not in naive.pinned:
            cache.drop([block])
            naive.leave(word)
        assert cache.names() == set(naive.used)
        assert cache.pool.get_num_free_blocks() == size - len(naive.pinned)


@both
def test_using_the_tail_keeps_the_whole_prefix(order: type[LruOrder]) -> None:
    """An admission stamps the deepest copy only; the rest of a long prefix must live as long."""
    cache = Cache(6, order)
    cache.store(*prefixes("abc"))
    cache.store(*prefixes("xyz"))
    cache.hit("abc")
    cache.store("p")
    cache.store("q")
    assert set(prefixes("abc")) <= cache.names()


@both
def test_a_copy_beyond_a_hole_does_not_stand_for_its_prefix(order: type[LruOrder]) -> None:
    cache = Cache(8, order)
    cache.store("ab")  # lazy stores bring the tail first
    cache.store("abc")

    def stands(name: str) -> bool:
        block = cache.find(key(name))
        assert block is not None
        cache.use([block])  # ARC counts what was used again
        return cache.has_whole_prefix(block)

    assert not stands("abc")
    cache.store("a")
    assert stands("abc") and stands("a")
    cache.store("abcd")
    assert stands("abcd")
    middle = cache.find(key("ab"))
    assert middle is not None
    cache.drop([middle])
    assert not stands("abc") and not stands("abcd") and stands("a")
    cache.store("ab")
    assert not stands("abcd"), "it continues a block that is gone, and its place is not known"
