"""Sizes at which a model is verified, so small that KV must leave the GPU and a minute is enough, and its engines."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from overspill.kv.sizes import format_size
from overspill.kv.spill.geometry import block_step, window_bytes
from overspill.model.kv import KVGeometry
from overspill.planning.arguments import vllm_args
from overspill.planning.connector_options import read_options
from overspill.planning.memory import KvSplit, table_bytes
from overspill.planning.planner import Plan
from overspill.planning.setup import can_spill
from overspill.verify import CannotVerify
from overspill.verify.scenarios import Scenario, Tier

ANSWER = 16
"""Tokens per answer."""
CONVERSATION_UNITS = 6
"""Length of a conversation in units, its last answer included."""
_LONG_UNITS = 12
# Much shorter prompts would be all edge cases, and a block may have as few as 16 tokens.
_LEAST_UNIT = 128
# A prompt is computed in several chunks, so that later ones read what earlier ones left in RAM.
_CHUNK_UNITS = 4
# Blocks on the GPU with spill: for each group of layers, and vLLM's null block plus one.
_RESIDENT_BLOCKS, _NULL_BLOCKS = 2, 2
_FAR_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class SpillSizes:
    """Sizes that leave so little on the GPU that long prompts spill; for all ranks, as the connector takes them."""

    resident_bytes: int
    """GPU memory for KV, the window included."""
    spill_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    unit: int
    """Tokens per unit of length: some whole blocks."""
    units: int
    """Longest context of any prompt, in units."""
    max_num_batched_tokens: int
    pool_blocks: int
    """KV blocks on the GPU: room for one longest context."""
    work_blocks: int
    """KV blocks left to conversations: room for one of them."""
    reference_blocks: int
    """KV blocks of the engine without Overspill: room for everything, as far as GPU memory goes."""
    block_bytes: int
    bytes_per_token: int
    host_bytes: int
    spill: SpillSizes | None
    no_spill: str
    """Why the model cannot be verified with spill; empty if it can."""
    no_sharing: str
    """Why the settings rule out attention on the CPU; empty if they do not."""
    table_bytes: int
    token_ids: tuple[int, int]
    """Range to draw tokens from, without the ends of the vocabulary, where special tokens are."""
    is_whole: bool
    """Whether the settings' longest context fits the reference."""
    reference_tokens: int
    """Longest context that the reference could hold."""

    @property
    def max_model_len(self) -> int:
        return self.unit * self.units

    def skips(self, scenario: Scenario) -> str:
        """Why the scenario cannot be tried; empty if it can."""
        if scenario.shares_attention and self.no_sharing:
            return self.no_sharing
        return self.no_spill if scenario.tier is not Tier.OFFLOAD and not scenario.soak_only else ""


def make_stage(plan: Plan) -> Stage:
    way = plan.chosen
    assert way is not None
    geometry = way.geometry
    unit = geometry.block_size * -(-_LEAST_UNIT // geometry.block_size)
    longest = geometry.longest_context(way.kv.device_bytes, plan.max_model_len)
    most_units = longest // unit
    if most_units < CONVERSATION_UNITS:
        raise CannotVerify(_too_short(plan, unit, longest))
    units, spill, no_spill = _spilled(plan, geometry, unit, most_units)
    units = max(units, min(_LONG_UNITS, most_units))
    pool_blocks = geometry.blocks_per_request(unit * units) + 1  # vLLM's null block
    work_blocks = geometry.blocks_per_request(unit * CONVERSATION_UNITS)
    device_blocks = geometry.num_blocks(way.kv.device_bytes)
    everything = 6 * work_blocks + 3 * pool_blocks
    return Stage(
        unit=unit,
        units=units,
        max_num_batched_tokens=_chunk(plan, way.max_num_batched_tokens, unit),
        pool_blocks=min(pool_blocks, device_blocks),
        work_blocks=work_blocks,
        reference_blocks=min(everything, device_blocks),
        block_bytes=geometry.bytes_per_block,
        bytes_per_token=plan.num_ranks * max(1, geometry.kv_bytes_per_token),
        # Slots are aligned to pages, and stored KV must not be evicted before it is needed again.
        host_bytes=plan.num_ranks * 2 * everything * (geometry.bytes_per_block + 4096),
        spill=spill,
        no_spill=no_spill,
        no_sharing="spill_compute is gpu" if read_options(plan.wishes.kv_options).get("spill_compute") == "gpu" else "",
        table_bytes=table_bytes(geometry, unit * units, plan.max_num_seqs),
        token_ids=(plan.facts.vocab_size // 8, plan.facts.vocab_size * 3 // 4),
        is_whole=longest >= plan.max_model_len,
        reference_tokens=longest,
    )


def _too_short(plan: Plan, unit: int, longest: int) -> str:
    need = unit * CONVERSATION_UNITS
    if plan.max_model_len < need:
        return (
            f"the conversations that are compared need a context of {need} tokens, {CONVERSATION_UNITS} times "
            f"{unit}, and --max-model-len is {plan.max_model_len}; give --max-model-len {need} or more"
        )
    return (
        f"the reference, vLLM without Overspill, needs room for {need} tokens of KV on the GPU, and there is room for "
        f"{longest}; free GPU memory, or give more with --gpu-memory"
    )


def _chunk(plan: Plan, planned: int, unit: int) -> int:
    """Tokens per chunk; vLLM demands at least one for every request that may run."""
    if plan.wishes.max_num_batched_tokens is not None:
        return planned
    return min(planned, max(_CHUNK_UNITS * unit, plan.max_num_seqs))


def _spilled(plan: Plan, geometry: KVGeometry, unit: int, most_units: int) -> tuple[int, SpillSizes | None, str]:
    """Length in units of a context that spills, and sizes for it, or why there are none."""
    if not can_spill(plan.rank, geometry, plan.wishes):
        return 0, None, "spill does not work with this model's layers"
    page = geometry.page_size_bytes
    step = block_step(page, plan.platform.granularity)
    least = max(_RESIDENT_BLOCKS * len(geometry.groups), geometry.states_per_request)
    resident = _round_up(least + _NULL_BLOCKS, step)
    units = next((n for n in range(_LONG_UNITS, most_units + 1) if _growing(geometry, unit * n) >= 2 * resident), None)
    if units is None and _growing(geometry, unit * most_units) >= resident + 2:
        units = most_units
    if units is None:
        least = resident * geometry.bytes_per_block
        return 0, None, (
            f"the least that stays on the GPU with spill is {format_size(least)}, more than the longest context that "
            f"fits the reference ({unit * most_units} tokens)"
        )  # fmt: skip
    spilled = _round_up(2 * geometry.blocks_per_request(unit * units) + 2, step)
    window = window_bytes(spilled, page, geometry.num_regions)
    resident_bytes, spilled_bytes = (blocks * geometry.bytes_per_block for blocks in (resident, spilled))
    sizes = SpillSizes(plan.num_ranks * (resident_bytes + window), plan.num_ranks * spilled_bytes)
    return units, sizes, ""


def _growing(geometry: KVGeometry, tokens: int) -> int:
    """Blocks of layers that keep all tokens: sliding windows free theirs."""
    return sum(-(-tokens // group.block_size) for group in geometry.groups if group.members[0].page.grows)


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Everything an engine is started with."""

    model: str
    flags: tuple[str, ...]
    """Flags as `vllm serve` takes them."""
    options: Mapping[str, Any] | None
    """Options of Overspill's connector; None without it."""
    keep_blocks: int | None = None
    """KV blocks that requests may use; all others are taken away before the first request."""
    random_weights: bool = False
    """Whether random weights replace the model's."""
    far_share: float = 0.0
    """Share of spilled KV for the CPU to attend to, whether or not that saves time."""
    attention: tuple[str, str] | None = None
    """An attention backend of vLLM's, and the class that replaces it."""


def engine_spec(plan: Plan, stage: Stage, model: str, tier: Tier | None, options: Mapping[str, Any]) -> EngineSpec:
    """Engine for scenarios of a tier; without one the reference, vLLM with the same settings and no connector."""
    if tier is None:
        return EngineSpec(model=model, flags=_flags(plan, stage, blocks=stage.reference_blocks), options=None)
    # Every hit is loaded, even where recomputing is faster, and every block is checked.
    pool = {"load": "always", "verify": "all", "reserve_bytes": 0, "host_bytes": stage.host_bytes, **options}
    if tier is Tier.OFFLOAD or stage.spill is None:
        flags = _flags(plan, stage, blocks=stage.pool_blocks)
        return EngineSpec(model=model, flags=flags, options=pool, keep_blocks=stage.work_blocks)
    flags = _flags(plan, stage, memory_bytes=stage.spill.resident_bytes // plan.num_ranks + stage.table_bytes)
    beside = pool if tier is Tier.BOTH else {"reserve_bytes": 0}
    # If the window's memory were lent, some models' contexts would not spill.
    fixed = {"spill_compute": "gpu", "spill_lends": False}
    return EngineSpec(model=model, flags=flags, options=beside | fixed | asdict(stage.spill))


def sharing(plan: Plan, spec: EngineSpec) -> EngineSpec:
    """A spill engine's spec with a part of attention moved to the CPU.

    On a GPU this needs FULL graphs. Where the reference has none, they are captured without the compiler, so that
    nothing but attention differs.
    """
    flags = spec.flags
    if "--enforce-eager" in flags and not plan.platform.is_cpu:
        graphs = json.dumps({"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]})
        flags = (*(flag for flag in flags if flag != "--enforce-eager"), "--compilation-config", graphs)
    assert spec.options is not None
    return replace(spec, flags=flags, options={**spec.options, "spill_compute": "auto"}, far_share=_FAR_SHARE)


def other_attention(plan: Plan, reference: EngineSpec) -> tuple[str, EngineSpec]:
    """Name of another attention kernel, and the reference with it. Where the CPU shares attention, the GPU's kernel is
    FlashAttention; the CPU platform has one backend, and torch's attention stands in for a second."""
    if plan.platform.is_cpu:
        torchs = "CPU_ATTN", "overspill.verify.yardstick.TorchBackend"
        return "torch's attention", replace(reference, attention=torchs)
    return "TRITON_ATTN", replace(reference, flags=(*reference.flags, "--attention-backend", "TRITON_ATTN"))


def _flags(plan: Plan, stage: Stage, *, blocks: int | None = None, memory_bytes: int = 0) -> tuple[str, ...]:
    """The plan's flags, except for the size of the KV cache and the lengths."""
    assert plan.chosen is not None
    if blocks is not None:
        memory_bytes = blocks * stage.block_bytes
    way = replace(
        plan.chosen,
        max_num_batched_tokens=stage.max_num_batched_tokens,
        offload_bytes=0,
        kv=KvSplit(resident_bytes=memory_bytes, window_bytes=0, spilled_bytes=0),
    )
    flags = vllm_args(replace(plan, max_model_len=stage.max_model_len), way)
    return (*flags, *(("--num-gpu-blocks-override", str(blocks)) if blocks is not None else ()))
