"""Attempts to divide a device's memory between weights and KV, and which of them hold a context."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from overspill.kv.sizes import GiB
from overspill.model.kv import CacheSettings, KVGeometry, kv_geometry
from overspill.planning.memory import Budget, KvSplit, Overheads, split_kv
from overspill.planning.setup import Setup, can_spill
from overspill.planning.weights import NONE, WeightOffload, weight_offloads

# RAM that an engine process takes besides pools: libraries, the tokenizer, buffers.
PROCESS_RAM_BYTES = 3 * GiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    kv_cache_dtype: str
    is_exact: bool
    """Whether tokens are those of the unchanged model: a smaller KV dtype rounds."""
    max_num_batched_tokens: int
    geometry: KVGeometry
    overheads: Overheads
    weights: WeightOffload
    available_bytes: int
    """Device memory left for KV; may be negative."""
    spills: bool
    """Whether this model's KV can spill."""
    parked_bytes: int = 0
    """RAM for a copy of the device's weights; 0 unless the engine is to be parked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """An attempt that holds the requested context, given enough RAM."""

    attempt: Attempt
    kv: KvSplit
    ram_bytes: int
    """RAM that the attempt needs, the engine's process included."""


def attempts(setup: Setup, budget: Budget) -> Iterator[Attempt]:
    offloads = weight_offloads(setup, budget)
    for one in attempts_without_ram(setup, budget):
        spills = can_spill(setup.facts, one.geometry, setup.wishes)
        for weights in offloads:
            available_bytes = one.available_bytes + weights.saved_bytes
            parked_bytes = setup.facts.weights.total_bytes - weights.saved_bytes if setup.wishes.parks else 0
            yield replace(
                one, weights=weights, available_bytes=available_bytes, spills=spills, parked_bytes=parked_bytes
            )


def attempts_without_ram(setup: Setup, budget: Budget) -> Iterator[Attempt]:
    """Attempts with everything on the device, even if the user wants weights in RAM."""
    facts, platform = setup.facts, setup.platform
    for dtype, is_exact in setup.kv_cache_dtypes:
        for chunk in setup.chunks:
            geometry = kv_geometry(
                facts,
                CacheSettings(
                    block_size=platform.block_size_of(facts),
                    kv_cache_dtype=dtype,
                    max_num_batched_tokens=chunk,
                    max_concurrent_batches=platform.max_concurrent_batches,
                    kernel_block_multiple=platform.kernel_block_multiple,
                    state_dtype=platform.state_dtype,
                ),
            )
            overheads = setup.overheads(chunk, dtype)
            yield Attempt(
                kv_cache_dtype=dtype,
                is_exact=is_exact,
                max_num_batched_tokens=chunk,
                geometry=geometry,
                overheads=overheads,
                weights=NONE,
                available_bytes=budget.usable_bytes.value - facts.weights.total_bytes - overheads.total.value,
                spills=False,
            )


def fits(setup: Setup, tried: Iterable[Attempt], max_model_len: int, *, surely: bool = False) -> Iterator[Fit]:
    """Attempts that hold the context, at any need of RAM; `surely` also if assumed overheads turn out larger."""
    for attempt in tried:
        if attempt.available_bytes <= 0:
            continue
        kv = split_kv(
            attempt.geometry, max_model_len, attempt.available_bytes, spill=attempt.spills,
            granularity=setup.platform.granularity, max_num_seqs=setup.wishes.num_seqs, at_once=setup.wishes.at_once,
            doubt_bytes=attempt.overheads.doubt_bytes if surely else 0,
        )  # fmt: skip
        if kv is not None:
            later_bytes = kv.spilled_bytes + (setup.wishes.offload_ram_bytes or 0) + attempt.parked_bytes
            yield Fit(attempt=attempt, kv=kv, ram_bytes=peak_ram_bytes(attempt.weights, later_bytes))


def peak_ram_bytes(weights: WeightOffload, later_bytes: int) -> int:
    """Peak RAM of an engine that takes `later_bytes`, for KV and parked weights, after loading its weights in RAM."""
    return max(weights.pinned_bytes + later_bytes, weights.loading_bytes) + PROCESS_RAM_BYTES


def longest_context(setup: Setup, tried: Iterable[Attempt], *, within_ram: bool = True) -> int:
    """Longest context that any exact attempt holds with the RAM there is; 0 if none fits."""
    exact = [attempt for attempt in tried if attempt.is_exact and attempt.available_bytes > 0]

    def is_too_long(length: int) -> bool:
        found = fits(setup, exact, length)
        return not any(not within_ram or fit.ram_bytes <= setup.ram_bytes.value for fit in found)

    longest = max(setup.max_model_len, setup.facts.max_position_embeddings)
    return bisect_left(range(1, longest + 1), True, key=is_too_long)


def least_ram_bytes(setup: Setup, tried: Iterable[Attempt]) -> int | None:
    """Least RAM with which an exact attempt holds the requested context; None if no RAM is enough."""
    needs = (fit.ram_bytes for fit in fits(setup, tried, setup.max_model_len) if fit.attempt.is_exact)
    return min(needs, default=None)
