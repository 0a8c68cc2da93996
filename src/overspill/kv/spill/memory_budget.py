"""How much KV memory to tell vLLM of, so that its own checks see both tiers."""

from vllm.config import VllmConfig
from vllm.logger import init_logger

from overspill.kv.errors import OverspillError
from overspill.kv.options import Options
from overspill.kv.sizes import KiB, format_size
from overspill.kv.spill.geometry import (
    block_step,
    least_spilled_blocks,
    most_spilled_blocks,
    num_resident_blocks,
    num_spilled_blocks,
    window_bytes,
)
from overspill.kv.spill.layers import check_groups, check_spilled, granularity, states_per_request
from overspill.kv.vllm_api import (
    KVCacheGroupSpec,
    KVCacheSpec,
    bytes_of_block,
    bytes_of_longest,
    get_kv_cache_groups,
    longest_that_fits,
)

logger = init_logger(f"vllm.{__name__}")  # vLLM formats and shows its own loggers only


def kv_bytes_with_spill(
    options: Options, vllm_config: VllmConfig, kv_cache_spec: dict[str, KVCacheSpec], available_bytes: int
) -> int:
    """Bytes of KV, resident and spilled, for a worker with `available_bytes` of GPU memory for it.

    The caller returns it to vLLM as memory: vLLM then makes so many blocks and accepts contexts as long as that.
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
        available_bytes = _limited(options.resident_bytes // world_size, available_bytes)
    resident = num_resident_blocks(available_bytes, spilled, page_bytes, num_regions, granularity())
    window = window_bytes(spilled, page_bytes, num_regions)
    states = states_per_request(vllm_config, groups)
    if resident <= states:  # one block is vLLM's null block
        most = most_spilled_blocks(available_bytes, page_bytes, num_regions, granularity(), num_resident=states + 1)
        beside = f", beside {format_size(states * block_bytes)} for a request's recurrent states" if states else ""
        raise OverspillError(
            f"spill_bytes {format_size(options.spill_bytes)} needs a window of {format_size(window)} on each GPU"
            f"{beside}; {format_size(available_bytes)} is there for KV. {_advice(most * block_bytes * world_size)}, "
            "raise --gpu-memory-utilization or resident_bytes, or use a smaller model."
        )
    total = resident + spilled
    need = -(-_bytes_of_longest(vllm_config, groups) // block_bytes) + 1  # and vLLM's null block
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
    return total * block_bytes


def _block_table_bytes(vllm_config: VllmConfig, groups: list[KVCacheGroupSpec]) -> int:
    """vLLM makes them after it has looked how much memory is free; with long contexts they count."""
    longest, sequences = vllm_config.model_config.max_model_len, vllm_config.scheduler_config.max_num_seqs
    entries = sum(-(-longest // group.kv_cache_spec.block_size) for group in groups)
    return 2 * 4 * sequences * entries  # two copies of 32-bit block ids


def _advice(spill_bytes: int) -> str:
    if not spill_bytes:
        return "Remove spill_bytes: even the smallest window does not fit"
    return f'Use "spill_bytes": "{-(-spill_bytes // KiB)}KiB"'


def _bytes_of_longest(vllm_config: VllmConfig, groups: list[KVCacheGroupSpec]) -> int:
    """KV of one request of `max_model_len`; nothing if vLLM chooses the longest that fits."""
    if vllm_config.model_config.original_max_model_len == -1:
        return 0
    return bytes_of_longest(vllm_config, groups)


def _limited(resident_bytes: int, available_bytes: int) -> int:
    if resident_bytes > available_bytes:
        raise OverspillError(
            f"resident_bytes is {format_size(resident_bytes)}, and {format_size(available_bytes)} of GPU memory is "
            "left for KV: lower it, or raise --gpu-memory-utilization"
        )
    return resident_bytes
