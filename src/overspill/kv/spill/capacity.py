"""Capacity for spill: how many blocks fit on the GPU and in RAM, and which models can spill."""

from collections.abc import Sequence

from vllm.config import VllmConfig
from vllm.logger import init_logger

from overspill.kv.buffer import block_regions, granularity
from overspill.kv.errors import OverspillError
from overspill.kv.options import Options
from overspill.kv.sizes import KiB, format_size
from overspill.kv.spill.geometry import (
    Geometry,
    LentUnits,
    block_step,
    least_spilled_blocks,
    lent_blocks,
    lent_units_of,
    most_spilled_blocks,
    num_resident_blocks,
    num_spilled_blocks,
    window_bytes,
)
from overspill.kv.vllm_api import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    bytes_of_block,
    bytes_of_longest,
    get_kv_cache_groups,
    longest_that_fits,
)

_LAYOUTS = ("LBNHC", "LBHNC")
# With these specs, block n of a request's table holds its tokens from n * block_size on, and a step writes nothing
# before the tokens it computes. `group_step` relies on both. Subclasses may break either, so only exact types count.
_SPILLED_SPECS = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)

logger = init_logger(f"vllm.{__name__}")  # vLLM formats and shows its own loggers only


def spill_geometry(options: Options, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Geometry:
    """Geometry for a model and its options; the scheduler and every worker compute the same one."""
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


def lends(options: Options, vllm_config: VllmConfig) -> bool:
    """Whether the window lends memory that it does not need to GPU blocks. Not if a ledger moves the GPU's blocks, or
    if vLLM sets max_model_len to the longest context that all blocks together, lent ones included, would hold."""
    return options.spill_lends and not options.ledger and vllm_config.model_config.original_max_model_len != -1


def lent_units(options: Options, vllm_config: VllmConfig, geometry: Geometry) -> LentUnits | None:
    return lent_units_of(geometry, granularity()) if lends(options, vllm_config) else None


def check_spilled(options: Options, num_spilled: int, least_bytes: int) -> None:
    if num_spilled == 0:
        raise OverspillError(
            f"spill_bytes is {format_size(options.spill_bytes)}, and the least that can be spilled of this model is "
            f"{format_size(least_bytes)}; give at least that"
        )


def is_state(spec: KVCacheSpec) -> bool:
    """Whether the group's blocks hold recurrent states, which are used outside attention and so stay on the GPU."""
    return type(spec) is MambaSpec


def far_groups(kv_cache_config: KVCacheConfig) -> frozenset[int]:
    """Cache groups for which the CPU may attend, judging by their KV: every token attends to all tokens before it."""
    return frozenset(
        index
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
        if type(spec := group.kv_cache_spec) is FullAttentionSpec
        and spec.sliding_window is None
        and spec.attention_chunk_size is None
        and not spec.non_causal
    )


def check_groups(groups: Sequence[KVCacheGroupSpec]) -> None:
    for group in groups:
        spec = group.kv_cache_spec
        if not is_state(spec) and not _is_spillable(spec):
            raise OverspillError(
                f"spill does not support KV of type {type(spec).__name__}, which {group.layer_names[0]} has: remove "
                "spill_bytes"
            )
    if all(is_state(group.kv_cache_spec) for group in groups):
        raise OverspillError(
            "this model has no attention layers, whose KV could spill: recurrent states do not grow. Remove spill_bytes"
        )


def _is_spillable(spec: KVCacheSpec) -> bool:
    return type(spec) in _SPILLED_SPECS and spec.tokens_per_state == 1 and not spec.prefix_replay_tokens


def states_per_request(vllm_config: VllmConfig, groups: Sequence[KVCacheGroupSpec]) -> int:
    """Upper bound of the blocks for one request's recurrent states, over all groups."""
    specs = [group.kv_cache_spec for group in groups if is_state(group.kv_cache_spec)]
    return sum(-(-spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes) for spec in specs)


def _pages(kv_cache_config: KVCacheConfig) -> tuple[int, int]:
    """Page size in bytes, and number of regions; raise if spill cannot handle the model's layout."""
    if kv_cache_config.has_mixed_precision_kv_cache:
        raise OverspillError(
            "spill needs KV of one precision: a window that held one layer's would be read as another's. Remove "
            "spill_bytes, or give one --kv-cache-dtype for all layers"
        )
    regions = block_regions(kv_cache_config)
    num_layers = max(len(group.layer_names) for group in kv_cache_config.kv_cache_groups)
    layout = kv_cache_config.kv_cache_layout
    # With heads outside blocks there are more regions than layers, and only part of a layer would be streamed.
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


def kv_bytes_with_spill(
    options: Options, vllm_config: VllmConfig, kv_cache_spec: dict[str, KVCacheSpec], available_bytes: int
) -> int:
    """Bytes of KV, resident and spilled, for a worker with `available_bytes` of GPU memory for KV.

    Reported to vLLM as available memory: vLLM then makes that many blocks, and accepts contexts that need them.
    """
    groups = get_kv_cache_groups(vllm_config, dict(kv_cache_spec))
    check_groups(groups)
    block_bytes = bytes_of_block(vllm_config, groups)
    num_regions = max(len(group.layer_names) for group in groups)
    page_bytes = block_bytes // num_regions
    world_size = vllm_config.parallel_config.world_size
    step = block_step(page_bytes, granularity())
    spilled = num_spilled_blocks(options.spill_bytes // world_size, block_bytes, step)
    check_spilled(options, spilled, step * block_bytes * world_size)
    available_bytes -= _block_table_bytes(vllm_config, groups)
    if options.resident_bytes:
        if (limit := options.resident_bytes // world_size) > available_bytes:
            raise OverspillError(
                f"resident_bytes is {format_size(limit)}, and {format_size(available_bytes)} of GPU memory is left for "
                "KV: lower it, or raise --gpu-memory-utilization"
            )
        available_bytes = limit
    resident = num_resident_blocks(available_bytes, spilled, page_bytes, num_regions, granularity())
    window = window_bytes(spilled, page_bytes, num_regions)
    states = states_per_request(vllm_config, groups)
    if resident <= states:  # one block is vLLM's null block
        most = most_spilled_blocks(available_bytes, page_bytes, num_regions, granularity(), num_resident=states + 1)
        beside = f", and {format_size(states * block_bytes)} for a request's recurrent states" if states else ""
        raise OverspillError(
            f"spill_bytes {format_size(options.spill_bytes)} needs a window of {format_size(window)} on each GPU"
            f"{beside}; {format_size(available_bytes)} is free for KV. {_advice(most * block_bytes * world_size)}, "
            "raise --gpu-memory-utilization or resident_bytes, or use a smaller model."
        )
    total = resident + spilled
    # The longest context (nothing if vLLM chooses it to fit), and vLLM's null block.
    is_given = vllm_config.model_config.original_max_model_len != -1
    need = -(-bytes_of_longest(vllm_config, groups) // block_bytes) + 1 if is_given else 1
    if need > total:
        longest = longest_that_fits(vllm_config, groups, (total - 1) * block_bytes)
        least = least_spilled_blocks(need, available_bytes, page_bytes, num_regions, granularity())
        raise OverspillError(
            f"a context of {vllm_config.model_config.max_model_len} tokens needs {format_size(need * block_bytes)} of "
            f"KV; GPU and spill_bytes hold {format_size(total * block_bytes)}. Longest that fits: --max-model-len "
            f"{longest}. "
            f"{_advice(least * block_bytes * world_size) if least else 'No spill_bytes is enough on this GPU'}."
        )
    logger.info(
        "Overspill: %s of GPU memory for KV: %s resident and a window of %s; %s more spills to RAM",
        format_size(available_bytes), format_size(resident * block_bytes), format_size(window),
        format_size(spilled * block_bytes),
    )  # fmt: skip
    if lends(options, vllm_config):
        unit, count = lent_blocks(spilled, page_bytes, num_regions, granularity())
        total += unit * count
    return total * block_bytes


def _block_table_bytes(vllm_config: VllmConfig, groups: list[KVCacheGroupSpec]) -> int:
    """Bytes of the block tables, which vLLM allocates after measuring free memory; they matter with long contexts."""
    longest, sequences = vllm_config.model_config.max_model_len, vllm_config.scheduler_config.max_num_seqs
    entries = sum(-(-longest // group.kv_cache_spec.block_size) for group in groups)
    return 2 * 4 * sequences * entries  # two copies of 32-bit block ids


def _advice(spill_bytes: int) -> str:
    if not spill_bytes:
        return "Remove spill_bytes: even the smallest window does not fit"
    return f'Use "spill_bytes": "{-(-spill_bytes // KiB)}KiB"'
