"""The index of a disk folder: which content is at which place, and which place is reused next. No I/O."""

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from overspill.kv.disk.journal import KEY_BYTES, NO_KEY, Records, record_type


class Entry(NamedTuple):
    key: bytes
    parent: bytes | None
    num_tokens: int | None
    place: int
    digests: tuple[int, ...]  # one per rank


class DiskIndex:
    """Evicts the least recently used leaf: an entry that no other entry continues, so that a prefix loses its tail
    before its head. An entry whose last continuation is evicted becomes a leaf."""

    def __init__(self, num_places: int, world_size: int) -> None:
        self.num_places = num_places
        self._records = np.zeros(num_places, record_type(world_size))
        self._stamps = np.zeros(num_places, np.int64)  # clock at the last use of each place
        self._clock = 0
        self._places: dict[bytes, int] = {}  # key -> place
        self._continuations = np.zeros(num_places, np.int32)  # place -> entries that continue its content
        self._orphans: dict[bytes, int] = {}  # missing key -> entries that continue it
        self._leaves: list[tuple[int, int, bytes]] = []  # heap of (stamp, place, key); may hold stale entries
        self._next = 0  # places from here on were never used
        self._empty: list[int] = []
        self._held: set[int] = set()  # places being read or written
        self.gone: list[bytes] = []  # keys evicted or removed since the caller last took this list

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_used(self) -> int:
        """Number of places used so far; later ones occupy no disk space yet."""
        return self._next

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    @classmethod
    def load(cls, records: Records, num_places: int, world_size: int) -> "DiskIndex":
        """Build an index from journal records; the last one of a place or key wins. A million take a second or two."""
        index = cls(num_places, world_size)
        records = records[records["place"] < num_places]
        # Keep the last record of each place, in write order.
        _, last = np.unique(records["place"][::-1], return_index=True)
        records = records[np.sort(len(records) - 1 - last)]
        places = records["place"]
        index._clock = len(records)
        index._next = int(places.max()) + 1 if len(places) else 0
        index._records[places] = records
        index._stamps[places] = np.arange(1, len(records) + 1)
        raw = records["key"].tobytes()
        keys = [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)]
        index._places = dict(zip(keys, places.tolist(), strict=True))
        index._places.pop(NO_KEY, None)
        kept = records if len(index._places) == len(keys) else index.records()
        index._count_continuations(kept)
        leaves = kept["place"][index._continuations[kept["place"]] == 0].tolist()
        index._leaves = [(int(index._stamps[place]), place, index._records[place]["key"].tobytes()) for place in leaves]
        heapq.heapify(index._leaves)
        used = np.zeros(index._next, bool)
        used[kept["place"]] = True
        index._empty = np.flatnonzero(~used)[::-1].tolist()
        return index

    def _count_continuations(self, records: Records) -> None:
        """Match parents with keys by sorted hash prefixes: looking up a million keys one by one would take a second."""
        heads = np.ascontiguousarray(records["key"]).view("u1").reshape(-1, KEY_BYTES)
        parents = np.ascontiguousarray(records["parent"]).view("u1").reshape(-1, KEY_BYTES)
        short, wanted = (np.ascontiguousarray(keys[:, :8]).view("<u8").ravel() for keys in (heads, parents))
        order, asked = np.argsort(short), np.argsort(wanted)
        # Both sides sorted: a search in random order would miss every CPU cache.
        at = np.minimum(np.searchsorted(short[order], wanted[asked]), max(0, len(order) - 1))
        found = np.empty(len(records), np.int64)
        found[asked] = order[at]
        is_here = (heads[found] == parents).all(axis=1)
        np.add.at(self._continuations, records["place"][found[is_here]], 1)
        for record in records[~is_here & parents.any(axis=1)]:
            # The parent is missing, or another key begins with the same bytes.
            self._continue(record["parent"].tobytes(), 1)

    def _continue(self, parent: bytes, more: int) -> None:
        """Add `more` to the number of entries that continue `parent`."""
        place = self._places.get(parent)
        if place is not None:
            self._continuations[place] += more
        elif parent != NO_KEY:
            self._orphans[parent] = self._orphans.get(parent, 0) + more
            if not self._orphans[parent]:
                del self._orphans[parent]

    def find(self, keys: Sequence[bytes]) -> list[Entry]:
        """Entries of those keys that are in the index, in one array operation: a long prefix has thousands of keys."""
        here = [(key, place) for key in keys if (place := self._places.get(key)) is not None]
        records = self._records[[place for _, place in here]]
        raw = records["parent"].tobytes()
        parents = (raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES))
        more = zip(parents, records["num_tokens"].tolist(), records["digests"].tolist(), strict=True)
        return [
            Entry(key, None if parent == NO_KEY else parent, num_tokens or None, place, tuple(digests))
            for (key, place), (parent, num_tokens, digests) in zip(here, more, strict=True)
        ]

    def take(self, count: int) -> list[int]:
        """Reserve up to `count` places for writing, until `put` or `give_back`; their old content is forgotten."""
        taken: list[int] = []
        while len(taken) < count:
            if self._empty:
                taken.append(self._empty.pop())
            elif self._next < self.num_places:
                taken.append(self._next)
                self._next += 1
            elif (place := self._evict()) is not None:
                taken.append(place)
            else:
                break
        self._held.update(taken)
        return taken

    def _evict(self) -> int | None:
        in_use, found = [], None
        while self._leaves and found is None:
            leaf = heapq.heappop(self._leaves)
            if not self._is_leaf(leaf):
                continue
            if leaf[1] in self._held:
                in_use.append(leaf)
                continue
            found = leaf[1]
            self._forget(leaf[2])
        for leaf in in_use:
            heapq.heappush(self._leaves, leaf)
        return found

    def _is_leaf(self, leaf: tuple[int, int, bytes]) -> bool:
        stamp, place, key = leaf
        return self._places.get(key) == place and self._stamps[place] == stamp and not self._continuations[place]

    def put(self, entries: Sequence[Entry]) -> Records:
        """Add content written to reserved places, in prefix order; returns the records to append to the journal."""
        for key, parent, num_tokens, place, digests in entries:
            assert place in self._held and key not in self._places
            self._held.discard(place)
            self._records[place] = (key, parent or NO_KEY, num_tokens or 0, place, digests)
            self._places[key] = place
            self._continuations[place] = self._orphans.pop(key, 0)
            self._continue(parent or NO_KEY, 1)
        self.use([entry.key for entry in entries])
        return self._records[[entry.place for entry in entries]]

    def give_back(self, places: Iterable[int]) -> None:
        """Return reserved places that were not written."""
        for place in places:
            self._held.discard(place)
            if place < self.num_places:
                self._empty.append(place)

    def hold(self, places: Iterable[int]) -> None:
        """Keep content from being overwritten while it is read."""
        self._held.update(places)

    def release(self, places: Iterable[int]) -> None:
        self._held.difference_update(places)

    def use(self, keys: Sequence[bytes]) -> None:
        """Refresh content given in prefix order; the tail ends up older than the head."""
        for key in reversed(keys):
            if (place := self._places.get(key)) is not None:
                self._clock += 1
                self._stamps[place] = self._clock
                self._offer(key, place)

    def _offer(self, key: bytes, place: int) -> None:
        """Make an entry a candidate for eviction if it is a leaf."""
        if self._continuations[place]:
            return
        heapq.heappush(self._leaves, (int(self._stamps[place]), place, key))
        # Every use leaves a stale heap entry behind; bound their number.
        if len(self._leaves) > 4 * len(self._places) + 64:
            self._leaves = [leaf for leaf in self._leaves if self._is_leaf(leaf)]
            heapq.heapify(self._leaves)

    def remove(self, key: bytes) -> Records | None:
        """Forget unreadable content; returns the record to append to the journal, or None for an unknown key."""
        place = self._places.get(key)
        if place is None:
            return None
        self._forget(key)
        self._empty.append(place)
        record = np.zeros(1, self._records.dtype)
        record["place"] = place
        return record

    def limit(self, num_places: int) -> None:
        """Use only the first `num_places` places: the disk has no room for the rest."""
        self.num_places = min(self.num_places, num_places)
        self._next = min(self._next, self.num_places)
        self._empty = [place for place in self._empty if place < self.num_places]
        for key in [key for key, place in self._places.items() if place >= self.num_places]:
            self._forget(key)

    def records(self) -> Records:
        """Records of all content, least recently used first."""
        places = np.fromiter(self._places.values(), np.int64, len(self._places))
        return self._records[places[np.argsort(self._stamps[places])]]

    def _forget(self, key: bytes) -> None:
        place = self._places.pop(key)
        self.gone.append(key)
        parent: bytes = self._records[place]["parent"].tobytes()
        if self._continuations[place]:
            self._orphans[key] = int(self._continuations[place])
            self._continuations[place] = 0
        self._continue(parent, -1)
        if (above := self._places.get(parent)) is not None and not self._continuations[above]:
            # Each use of the continuation was also a use of its parent.
            self._stamps[above] = max(self._stamps[above], self._stamps[place])
            self._offer(parent, above)
