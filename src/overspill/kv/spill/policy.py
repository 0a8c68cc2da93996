"""Decisions, as pure functions: where a request's blocks come from, what moves, and who runs how often."""

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCosts:
    """What is known when a request asks for a block and no GPU block is empty."""

    block_bytes: int
    block_size: int
    link_bytes_per_s: float
    prefill_tokens_per_s: float
    # Steps in which the request will still read the block.
    expected_steps: float
    # Blocks that it asks for.
    num_blocks: int
    # What a step costs more as soon as it streams at all: it then runs without FULL graphs. Zero if it already does.
    step_overhead_s: float
    # How likely the cached GPU block that would be given up is to be asked for again.
    reuse_probability: float


def take_spilled(costs: TierCosts) -> bool:
    """Whether to take an empty spilled block and leave a cached GPU block where it is.

    The spilled block is streamed in every step of the request; the cached one, once given up, may be recomputed.
    """
    overhead_s = costs.step_overhead_s / costs.num_blocks
    streaming_s = costs.expected_steps * (overhead_s + costs.block_bytes / costs.link_bytes_per_s)
    recompute_s = costs.reuse_probability * costs.block_size / costs.prefill_tokens_per_s
    return streaming_s < recompute_s


def move_to_gpu(costs: TierCosts, *, num_spilled_hits: int, num_free_resident: int) -> bool:
    """Whether a request should get its cached prefix on the GPU, copied once, rather than stream it in every step.

    `costs.num_blocks` is what it needs in all; `num_spilled_hits` of them were found in RAM.
    """
    if costs.num_blocks > num_free_resident:
        return False  # it streams anyway
    block_s = costs.block_bytes / costs.link_bytes_per_s
    stay_s = costs.expected_steps * (costs.step_overhead_s + num_spilled_hits * block_s)
    given_up_s = costs.num_blocks * costs.reuse_probability * costs.block_size / costs.prefill_tokens_per_s
    return num_spilled_hits * block_s + given_up_s < stay_s


def left_to_others(*, most: int, now: int, num_resident: int) -> int:
    """GPU blocks that a request which spills anyway leaves alone: as many as the requests that fit have needed at once
    lately, less what they have now.

    A block more to stream costs a long request little; a short one without a GPU block gives up FULL graphs. But those
    who are gone may stay away, so never more than a quarter of the GPU.
    """
    return max(0, min(most, num_resident // 4) - max(0, now))


def heavy_requests(streaming_s: Mapping[str, float], *, plain_step_s: float, others_run: bool) -> set[str]:
    """Requests that would make the steps of those that stream less three times as long, or longer; `others_run` if
    some stream nothing.

    A short request that found no GPU block streams a little, and is held up by a long one like any other.
    """
    step_s = plain_step_s
    lightest_first = sorted(streaming_s, key=lambda name: streaming_s[name])
    for position, name in enumerate(lightest_first):
        if (others_run or position) and streaming_s[name] > 2 * step_s:
            return set(lightest_first[position:])
        step_s += streaming_s[name]
    return set()


def steps_apart(*, spilled_step_s: float, plain_step_s: float, share: float, most: int) -> int:
    """Every how many steps a spilled request takes part while others run, so that it takes at most `share` of the time.

    In a round of k steps one is spilled: k - 1 plain steps take (1 - share) of it at least.
    """
    if share >= 1 or spilled_step_s <= plain_step_s:
        return 1
    plain_steps = spilled_step_s * (1 - share) / share / plain_step_s
    return min(most, 1 + math.ceil(plain_steps - 1e-9))
