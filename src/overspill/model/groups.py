"""Which layers share a block table (mirrors vllm/v1/core/kv_cache_utils.py, get_kv_cache_groups and what it calls)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from overspill.model.errors import BadSettings
from overspill.model.pages import Kind, Page, ceil_div


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
