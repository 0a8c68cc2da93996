"""Which layers spill, in which order they run, and where their KV lies; what cannot spill is refused here."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform

from overspill.kv.errors import OverspillError
from overspill.kv.layout import block_regions
from overspill.kv.options import Options
from overspill.kv.sizes import format_size
from overspill.kv.spill import aliased_memory
from overspill.kv.spill.geometry import CUDA_GRANULARITY, Geometry, block_step, num_spilled_blocks
from overspill.kv.spill.window import Layer
from overspill.kv.vllm_api import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    calls_connector,
    kv_owner,
)

_LAYOUTS = ("LBNHC", "LBHNC")
# In these, block n of a request's table holds its tokens from n * block_size on, and a step writes nothing before the
# tokens it computes. `group_step` rests on both. Subclasses may break either, so the type must be one of these.
_SPILLED_SPECS = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)


def granularity() -> int:
    """How finely memory is mapped. The scheduler has no GPU to ask; workers check that theirs is no coarser."""
    return aliased_memory.GRANULARITY if current_platform.is_cpu() else CUDA_GRANULARITY


def spill_geometry(options: Options, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Geometry:
    """The same on the scheduler's side and on every worker's."""
    check_groups(kv_cache_config.kv_cache_groups)
    page_bytes, num_regions = _pages(kv_cache_config)
    step = block_step(page_bytes, granularity())
    per_rank = options.spill_bytes // vllm_config.parallel_config.world_size
    num_spilled = num_spilled_blocks(per_rank, page_bytes * num_regions, step)
    check_spilled(options, num_spilled, step * page_bytes * num_regions * vllm_config.parallel_config.world_size)
    return Geometry(
        num_blocks=kv_cache_config.num_blocks,
        num_spilled=num_spilled,
        num_regions=num_regions,
        page_bytes=page_bytes,
    )


def check_spilled(options: Options, num_spilled: int, least_bytes: int) -> None:
    if num_spilled == 0:
        raise OverspillError(
            f"spill_bytes is {format_size(options.spill_bytes)}, and the least that can be spilled of this model is "
            f"{format_size(least_bytes)}; give at least that"
        )


def is_state(spec: KVCacheSpec) -> bool:
    """Whether blocks hold recurrent states. They are read and written outside attention, so they stay on the GPU."""
    return type(spec) is MambaSpec


def check_groups(groups: Sequence[KVCacheGroupSpec]) -> None:
    for group in groups:
        spec = group.kv_cache_spec
        if not is_state(spec) and not _is_spillable(spec):
            raise OverspillError(
                f"spill does not know KV of type {type(spec).__name__}, which {group.layer_names[0]} has: remove "
                "spill_bytes"
            )
    if all(is_state(group.kv_cache_spec) for group in groups):
        raise OverspillError(
            "this model has no attention layers, whose KV could spill: recurrent states do not grow. Remove spill_bytes"
        )


def _is_spillable(spec: KVCacheSpec) -> bool:
    return type(spec) in _SPILLED_SPECS and spec.tokens_per_state == 1 and not spec.prefix_replay_tokens


def states_per_request(vllm_config: VllmConfig, groups: Sequence[KVCacheGroupSpec]) -> int:
    """Blocks that one request's recurrent states take at most, in all groups."""
    specs = [group.kv_cache_spec for group in groups if is_state(group.kv_cache_spec)]
    return sum(-(-spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes) for spec in specs)


def _pages(kv_cache_config: KVCacheConfig) -> tuple[int, int]:
    """Page size and number of regions."""
    if kv_cache_config.has_mixed_precision_kv_cache:
        raise OverspillError(
            "spill needs KV of one precision: a window that held one layer's would be read as another's. Remove "
            "spill_bytes, or give one --kv-cache-dtype for all layers"
        )
    regions = block_regions(kv_cache_config)
    num_layers = max(len(group.layer_names) for group in kv_cache_config.kv_cache_groups)
    layout = kv_cache_config.kv_cache_layout
    # With heads outside of blocks there are more regions than layers, and a layer would be streamed in part.
    if len(regions) != num_layers or layout not in _LAYOUTS:
        raise OverspillError(
            f"spill needs each layer's KV in one piece, block by block, and the layout is {layout}: unset "
            "VLLM_KV_CACHE_LAYOUT, or set it to LBNHC"
        )
    sizes = {region.block_bytes for region in regions}
    if len(sizes) > 1:
        raise OverspillError(
            f"spill needs all layers' KV pages to have one size, and this model's have {sorted(sizes)} bytes. "
            "Remove spill_bytes"
        )
    return sizes.pop(), len(regions)


def attention_layers(modules: Mapping[str, Any], kv_cache_config: KVCacheConfig, geometry: Geometry) -> list[Layer]:
    """Attention layers in the order in which the model was built, which is that of execution; `Window` checks it.

    `modules` is vLLM's static forward context.
    """
    groups = {
        name: i
        for i, group in enumerate(kv_cache_config.kv_cache_groups)
        for name in group.layer_names
        if not is_state(group.kv_cache_spec)
    }
    regions = {
        name: (tensor.offset + index * tensor.layer_stride) // geometry.region_bytes
        for tensor in kv_cache_config.kv_cache_tensors
        for index, name in enumerate(tensor.layers)
        if name in groups
    }
    layers = []
    for name, module in modules.items():
        owner = kv_owner(module, name)
        if owner in regions:
            layers.append(Layer(name, groups[owner], regions[owner], is_owner=owner == name))
    missing = regions.keys() - {layer.name for layer in layers}
    unhooked = [layer.name for layer in layers if not calls_connector(modules[layer.name])]
    if missing or unhooked:
        name = next(iter(missing or unhooked))
        raise OverspillError(f"spill does not know when layer {name} reads its KV cache. Remove spill_bytes")
    return layers
