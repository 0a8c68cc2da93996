"""Which layers spill, in which order they run, and where their KV lies; what cannot spill is refused here."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

from overspill.kv.errors import OverspillError
from overspill.kv.layout import block_regions
from overspill.kv.options import Options
from overspill.kv.sizes import format_size
from overspill.kv.spill import aliased_memory
from overspill.kv.spill.geometry import CUDA_GRANULARITY, Geometry, block_step, num_spilled_blocks
from overspill.kv.spill.window import Layer

_LAYOUTS = ("LBNHC", "LBHNC")


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


def check_groups(groups: Sequence[KVCacheGroupSpec]) -> None:
    if any(isinstance(group.kv_cache_spec, MambaSpec) for group in groups):
        raise OverspillError(
            "spill does not work with Mamba and linear-attention layers yet: their state is read outside attention. "
            "Remove spill_bytes; offload (host_bytes) works"
        )


def _pages(kv_cache_config: KVCacheConfig) -> tuple[int, int]:
    """Page size and number of regions."""
    if kv_cache_config.needs_kv_cache_zeroing:
        raise OverspillError(
            "spill does not work where vLLM zeroes new KV blocks, as it does for groups of different precision. "
            "Remove spill_bytes"
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
    groups = {name: i for i, group in enumerate(kv_cache_config.kv_cache_groups) for name in group.layer_names}
    regions = {
        name: (tensor.offset + index * tensor.layer_stride) // geometry.region_bytes
        for tensor in kv_cache_config.kv_cache_tensors
        for index, name in enumerate(tensor.layers)
    }
    layers = []
    for name, module in modules.items():
        owner = getattr(module, "kv_sharing_target_layer_name", None) or name
        if owner in regions:
            layers.append(Layer(name, groups[owner], regions[owner], is_owner=owner == name))
    missing = regions.keys() - {layer.name for layer in layers}
    unhooked = [layer.name for layer in layers if not _calls_hooks(modules[layer.name])]
    if missing or unhooked:
        name = next(iter(missing or unhooked))
        raise OverspillError(f"spill does not know when layer {name} reads its KV cache. Remove spill_bytes")
    return layers


def _calls_hooks(module: Any) -> bool:
    """vLLM calls a connector around these layers' attention."""
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    return isinstance(module, Attention | MLAAttention)
