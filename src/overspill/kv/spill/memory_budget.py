"""How much KV memory to tell vLLM of, so that its own checks see both tiers."""

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import (
    _estimate_max_model_len_from_groups,
    _max_memory_usage_bytes_from_groups,
    _pool_bytes_per_block,
    get_kv_cache_groups,
)
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec

from overspill.kv.errors import OverspillError
from overspill.kv.options import Options
from overspill.kv.sizes import GiB, format_size
from overspill.kv.spill.geometry import block_step, num_resident_blocks, num_spilled_blocks, window_bytes
from overspill.kv.spill.layers import check_groups, check_spilled, granularity

logger = init_logger(f"vllm.{__name__}")  # vLLM formats and shows its own loggers only


def kv_bytes_with_spill(
    options: Options, vllm_config: VllmConfig, kv_cache_spec: dict[str, KVCacheSpec], available_bytes: int
) -> int:
    """Bytes of KV, resident and spilled, for a worker with `available_bytes` of GPU memory for it.

    The caller returns it to vLLM as memory: vLLM then makes so many blocks and accepts contexts as long as that.
    """
    groups = get_kv_cache_groups(vllm_config, dict(kv_cache_spec))
    check_groups(groups)
    block_bytes = _pool_bytes_per_block(vllm_config, groups)
    num_regions = max(len(group.layer_names) for group in groups)
    page_bytes = block_bytes // num_regions
    world_size = vllm_config.parallel_config.world_size
    step = block_step(page_bytes, granularity())
    spilled = num_spilled_blocks(options.spill_bytes // world_size, block_bytes, step)
    check_spilled(options, spilled, step * block_bytes * world_size)
    if options.resident_bytes:
        available_bytes = _limited(options.resident_bytes // world_size, available_bytes)
    resident = num_resident_blocks(available_bytes, spilled, page_bytes, num_regions, granularity())
    total = (resident + spilled) * block_bytes
    _check_longest(vllm_config, total - block_bytes, groups, spilled * block_bytes, world_size)
    window = window_bytes(spilled, page_bytes, num_regions)
    logger.info(
        "Overspill: %s of GPU memory for KV: %s resident and a window of %s; %s more spills to RAM",
        format_size(available_bytes), format_size(resident * block_bytes), format_size(window),
        format_size(spilled * block_bytes),
    )  # fmt: skip
    return total


def _limited(resident_bytes: int, available_bytes: int) -> int:
    if resident_bytes > available_bytes:
        raise OverspillError(
            f"resident_bytes is {format_size(resident_bytes)}, and {format_size(available_bytes)} of GPU memory is "
            "left for KV: lower it, or raise --gpu-memory-utilization"
        )
    return resident_bytes


def _check_longest(
    vllm_config: VllmConfig, total_bytes: int, groups: list[KVCacheGroupSpec], spilled_bytes: int, world_size: int
) -> None:
    """vLLM makes the same check, but would advise to raise what it cannot have."""
    model = vllm_config.model_config
    if model.original_max_model_len == -1:
        return  # vLLM chooses the longest that fits
    need = _max_memory_usage_bytes_from_groups(vllm_config, groups)
    if need <= total_bytes:
        return
    longest = _estimate_max_model_len_from_groups(vllm_config, groups, total_bytes)
    more = -(-(spilled_bytes + need - total_bytes) * world_size // GiB)
    raise OverspillError(
        f"a context of {model.max_model_len} tokens needs {format_size(need)} of KV; the GPU and spill_bytes hold "
        f"{format_size(total_bytes)}. Longest that fits: --max-model-len {longest}. Or give more RAM: about "
        f'"spill_bytes": "{more}GiB", and somewhat more for the window, which takes GPU memory.'
    )
