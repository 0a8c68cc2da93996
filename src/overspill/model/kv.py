"""What vLLM makes of a model's caches under given settings: groups, pages, blocks, and how many tokens fit."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from overspill.model.errors import BadSettings
from overspill.model.facts import ModelFacts
from overspill.model.pages import KV_CACHE_DTYPE_BYTES, CacheSettings, Kind, Page, ceil_div, page_of


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPage:
    layer: int
    page: Page


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheGroup:
    """Layers whose blocks are handed out together: one block id holds a page of each of them."""

    members: tuple[LayerPage, ...]

    @property
    def kind(self) -> Kind:
        return self.members[0].page.kind

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(member.layer for member in self.members)

    @property
    def block_size(self) -> int:
        return self.members[0].page.block_size

    @property
    def bytes_per_block(self) -> int:
        return sum(member.page.page_size_bytes for member in self.members)

    def blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        return max(member.page.blocks_per_request(max_model_len, max_in_flight_tokens) for member in self.members)


def group_layers(members: Sequence[LayerPage], *, hybrid: bool, block_outermost: bool) -> tuple[CacheGroup, ...]:
    """`hybrid` is false where vLLM's hybrid KV cache manager is disabled: windows are then kept in full."""
    if not hybrid:
        members = _promoted(members)
    if _one_type(members):
        return (CacheGroup(members=tuple(members)),)
    if block_outermost and len({member.page.page_size_bytes for member in members}) > 1:
        return _packed(members)
    return _equal_groups(_unified(members))


def _one_type(members: Iterable[LayerPage]) -> bool:
    """Whether all layers need the same number of blocks, whatever their pages' sizes (UniformTypeKVCacheSpecs)."""

    def needs(page: Page) -> tuple[object, ...]:
        full = Kind.FULL if page.grows else page.kind
        size = page.page_size_bytes if page.kind is Kind.MAMBA else 0
        return full, page.block_size, page.window, page.states_per_request, size

    return len({needs(member.page) for member in members}) <= 1


def _promoted(members: Sequence[LayerPage]) -> Sequence[LayerPage]:
    if _one_type(members):
        return members
    # A window's block may have been smaller than the others'.
    block_size = next((member.page.block_size for member in members if member.page.grows), 0)
    promoted = [replace(member, page=replace(member.page.as_full(), block_size=block_size)) for member in members]
    if not block_size or not _one_type(promoted):
        raise BadSettings(
            "vLLM cannot make one group of this model's layers, as it must without its hybrid KV cache manager; "
            "leave disable_hybrid_kv_cache_manager off"
        )
    return promoted


def _unified(members: Sequence[LayerPage]) -> list[LayerPage]:
    """Pages of one size: smaller ones get more tokens, or, where that comes out uneven, padding."""
    largest = max(member.page.page_size_bytes for member in members)

    def unify(page: Page) -> Page:
        if page.page_size_bytes == largest:
            return page
        if page.kind is not Kind.MAMBA and largest % page.page_size_bytes == 0:
            return replace(page, block_size=page.block_size * (largest // page.page_size_bytes))
        if page.kind is Kind.MLA:
            raise BadSettings(
                f"a page of latent attention takes {page.page_size_bytes} bytes and must be padded to {largest}, which "
                "vLLM does not do; choose another block_size"
            )
        return page.padded_to(largest)

    return [replace(member, page=unify(member.page)) for member in members]


def _equal_groups(members: Sequence[LayerPage]) -> tuple[CacheGroup, ...]:
    """Groups of equally many layers, so that a block of any group takes the same bytes; the last may fall short."""
    alike: dict[Page, list[LayerPage]] = {}
    for member in members:
        alike.setdefault(member.page, []).append(member)
    fewest, most = min(map(len, alike.values())), max(map(len, alike.values()))
    size = most if most < fewest * 1.5 else fewest
    groups = []
    for bucket in alike.values():
        count = ceil_div(len(bucket), size)
        groups += [CacheGroup(members=tuple(bucket[i::count])) for i in range(count)]
    return tuple(groups)


def _packed(members: Sequence[LayerPage]) -> tuple[CacheGroup, ...]:
    """Groups whose pages differ in size, side by side in blocks that hold the widest of them.

    Only block-outermost layouts can do that. Windows and states are cut into as many groups as it takes for each to
    fit into a block that the others need anyway (_get_packed_kv_cache_groups).
    """
    buckets: list[list[LayerPage]] = []
    for member in members:
        bucket = next((bucket for bucket in buckets if _one_type([*bucket, member])), None)
        if bucket is None:
            buckets.append([member])
        else:
            bucket.append(member)
    if any(len({member.page.page_size_bytes for member in bucket}) > 1 for bucket in buckets):
        raise BadSettings(
            "layers of one kind keep pages of several sizes, which vLLM packs in ways that are not described here; "
            "choose a layout with layers outermost"
        )

    def can_be_cut(bucket: Sequence[LayerPage]) -> bool:
        return bucket[0].page.kind in (Kind.MAMBA, Kind.SLIDING)

    block = max(bucket[0].page.page_size_bytes * (1 if can_be_cut(bucket) else len(bucket)) for bucket in buckets)
    groups = []
    for bucket in buckets:
        fitting = max(block // bucket[0].page.page_size_bytes, 1)
        count = ceil_div(len(bucket), fitting) if can_be_cut(bucket) else 1
        groups += [CacheGroup(members=tuple(bucket[i::count])) for i in range(count)]
    return tuple(groups)


@dataclass(frozen=True, kw_only=True, slots=True)
class KVGeometry:
    """The KV cache of one rank, up to the number of its blocks. Bytes are exact: they are vLLM's own sums."""

    groups: tuple[CacheGroup, ...]
    settings: CacheSettings
    """As vLLM changes them: a recurrent state makes blocks larger."""

    @property
    def block_size(self) -> int:
        return self.settings.block_size

    @property
    def bytes_per_block(self) -> int:
        """What one block takes of the pool, whichever group it is handed to (_pool_bytes_per_block)."""
        return max((group.bytes_per_block for group in self.groups), default=0)

    @property
    def page_size_bytes(self) -> int:
        """Of the largest page; all are equal unless a single group, or a block-outermost layout, mixes sizes."""
        return max((m.page.page_size_bytes for group in self.groups for m in group.members), default=0)

    @property
    def num_regions(self) -> int:
        """Contiguous ranges of the buffer: with layers outermost one per layer of the largest group, else one."""
        return 1 if self.settings.block_outermost else max((len(group.members) for group in self.groups), default=0)

    @property
    def kv_bytes_per_token(self) -> int:
        """What one more token costs a request that is longer than every window; states and windows cost no more."""
        blocks = sum(Fraction(1, group.block_size) for group in self.groups if group.members[0].page.grows)
        return math.ceil(blocks * self.bytes_per_block)

    def blocks_per_request(self, max_model_len: int) -> int:
        """Most blocks that one request of so many tokens holds at a time, in all groups."""
        in_flight = self.settings.max_in_flight_tokens
        return sum(group.blocks_per_request(max_model_len, in_flight) for group in self.groups)

    @property
    def states_per_request(self) -> int:
        """Blocks of a request that hold recurrent states, whatever its length."""
        return sum(group.members[0].page.states_per_request for group in self.groups)

    def request_bytes(self, max_model_len: int) -> int:
        """What vLLM demands for one such request before it starts (_max_memory_usage_bytes_from_groups)."""
        return self.bytes_per_block * self.blocks_per_request(max_model_len)

    def num_blocks(self, kv_cache_memory_bytes: int) -> int:
        """The first of them, the null block, is never handed out."""
        return kv_cache_memory_bytes // self.bytes_per_block if self.groups else 0

    def fits(self, max_model_len: int, kv_cache_memory_bytes: int) -> bool:
        """Whether vLLM would start (_check_enough_kv_cache_memory, which sets the null block aside)."""
        return self.request_bytes(max_model_len) <= kv_cache_memory_bytes - self.bytes_per_block

    def longest_context(self, kv_cache_memory_bytes: int, limit: int) -> int:
        """The most tokens, up to `limit`, of which one request fits; 0 if not even one does."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits(middle, kv_cache_memory_bytes) else (low, middle - 1)
        return low

    def num_tokens(self, kv_cache_memory_bytes: int, max_model_len: int) -> int:
        """What vLLM logs as "GPU KV cache size": requests of `max_model_len` tokens that fit, in tokens."""
        concurrency = self.num_blocks(kv_cache_memory_bytes) / self.blocks_per_request(max_model_len)
        return int(concurrency * max_model_len)


def kv_geometry(facts: ModelFacts, settings: CacheSettings | None = None) -> KVGeometry:
    settings = settings or CacheSettings()
    if facts.num_heads % settings.tensor_parallel_size:
        raise BadSettings(
            f"tensor_parallel_size {settings.tensor_parallel_size} does not divide the model's {facts.num_heads} "
            "attention heads; choose one that does"
        )
    settings = replace(settings, block_size=_block_size(facts, settings))
    pages = _pages(facts, settings)
    attention_bytes = max((page.page_size_bytes for page in pages if page.kind is not Kind.MAMBA), default=None)
    members = [
        LayerPage(layer=entry.layer, page=page.padded_to(attention_bytes) if page.kind is Kind.MAMBA else page)
        for entry, page in zip(facts.caches, pages, strict=True)
    ]
    hybrid = not settings.disable_hybrid_kv_cache_manager
    groups = group_layers(members, hybrid=hybrid, block_outermost=settings.block_outermost)
    return KVGeometry(groups=groups, settings=settings)


def _pages(facts: ModelFacts, settings: CacheSettings) -> list[Page]:
    kv_cache_dtype = facts.kv_cache_dtype if settings.kv_cache_dtype == "auto" else settings.kv_cache_dtype
    if kv_cache_dtype not in ("auto", *KV_CACHE_DTYPE_BYTES):
        raise BadSettings(
            f"the checkpoint asks for a KV cache in {kv_cache_dtype}, whose size is not known here; "
            "set kv_cache_dtype to fp8 or bfloat16"
        )
    return [page_of(c.cache, settings, dtype=facts.dtype, kv_cache_dtype=kv_cache_dtype) for c in facts.caches]


def _block_size(facts: ModelFacts, settings: CacheSettings) -> int:
    """Raised until a page of attention can hold a layer's state, which is padded to it (_align_hybrid_block_size)."""
    pages = _pages(facts, settings)
    state_bytes = max((page.state_bytes for page in pages), default=0)
    token_bytes = max((page.token_bytes for page in pages), default=0)
    if not state_bytes or not token_bytes:
        return settings.block_size
    multiple = settings.kernel_block_multiple
    step = max(settings.block_size, multiple)
    block_size = step * ceil_div(state_bytes, step * token_bytes)
    return multiple * ceil_div(block_size, multiple)
