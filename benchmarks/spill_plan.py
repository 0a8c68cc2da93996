"""Engines and phases of the spill benchmark: how large they are, what fits in their time, what makes them invalid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from record import Json

# The last request's blocks are never quite full, and vLLM keeps one block for itself.
SPARE_TOKENS = 1024


# In which a spilled request can decode, one after the other: see SpillEngine.ways.
WAYS = ("shared", "graphs", "pieces")


@dataclass(frozen=True, kw_only=True)
class Load:
    """Parameters of all phases; every field is an option of the script."""

    seed: int = 0
    repeats: int = 3
    length_seconds: float = 40.0
    decode_tokens: int = 32
    longest_decode_tokens: int = 8
    longest_above: int = 200_000
    warm_up_tokens: int = 40_000
    batch_input: int = 128
    batch_output: int = 256
    batch_repeats: int = 3
    sharing_length: int = 131_072
    sharing_long_output: int = 1024
    sharing_requests: int = 16
    sharing_input: int = 256
    sharing_output: int = 256
    sharing_seconds: float = 20.0
    sharing_repeats: int = 2


LOAD_HELP = {
    "seed": "of weights and prompts",
    "repeats": "of each length, each with a prompt of its own",
    "length_seconds": "no further repeat of a length is begun that would end after so long",
    "decode_tokens": "generated after each long prompt",
    "longest_decode_tokens": "generated instead where a prompt is longer than --longest-above",
    "longest_above": "tokens from which a prompt counts as one of the longest",
    "warm_up_tokens": "length of the prompt that is not measured, if no shorter one is",
    "batch_input": "prompt tokens of each request in the batches",
    "batch_output": "tokens that each request of a batch generates",
    "batch_repeats": "of each batch size",
    "sharing_length": "the long request beside which others run: the longest of --lengths up to this",
    "sharing_long_output": "tokens that the long request may generate meanwhile",
    "sharing_requests": "short requests beside the long one",
    "sharing_input": "prompt tokens of each of them",
    "sharing_output": "tokens that each of them generates, if --sharing-seconds are enough",
    "sharing_seconds": "short requests are measured for at most so long",
    "sharing_repeats": "of each setting of spill_share",
}


@dataclass(frozen=True, kw_only=True)
class Life:
    """Everything that an engine of this benchmark needs to know."""

    name: str
    model: str
    seconds: float
    """Nothing is begun that would probably end after this."""
    lengths: Sequence[int]
    """Empty: the longest that fits."""
    phases: Sequence[str]
    batches: Sequence[int] = (1, 8, 64)
    load: Load = field(default_factory=Load)
    max_model_len: int
    """-1: the longest that fits."""
    positions: int
    """As many as the longest request of any life has, so that no life is limited by the model's own."""
    options: dict[str, Any] | None
    """Of Overspill's connector; None for vLLM alone."""
    gpu_bytes: int | None
    """GPU memory for everything; None takes the whole GPU."""
    kv_bytes: int | None = None
    """GPU memory for KV, instead of what vLLM finds free."""
    kv_cache_dtype: str = "auto"
    dtype: str = "auto"
    load_format: str = "dummy"
    block_size: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    enforce_eager: bool = False
    cudagraph_mode: str | None = None
    drafts: str = "off"
    capture_sizes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)

    def settings(self) -> Json:
        """As the result file keeps them."""
        kept = ("lengths", "phases", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "gpu_bytes", "kv_bytes",
                "options", "dtype", "load_format", "enforce_eager", "cudagraph_mode")  # fmt: skip
        return {name: getattr(self, name) for name in kept}


def decode_tokens(load: Load, length: int) -> int:
    """A token of the longest prompts takes a second and more: fewer of them say as much."""
    return load.longest_decode_tokens if length > load.longest_above else load.decode_tokens


def sharing_length(load: Load, lengths: Sequence[int]) -> int | None:
    fitting = [length for length in lengths if length <= load.sharing_length]
    return max(fitting, default=None)


def output_room(load: Load, lengths: Sequence[int], phases: Sequence[str]) -> int:
    """Tokens that requests generate beyond their prompt, at most."""
    room = len(WAYS) * max(decode_tokens(load, length) for length in lengths)
    if "sharing" in phases and sharing_length(load, lengths) == max(lengths):
        room = max(room, load.sharing_long_output)
    return room


def spill_bytes(load: Load, phases: Sequence[str], *, max_model_len: int, bytes_per_token: int) -> int:
    """RAM for the longest request, and for the short ones beside it, as if nothing were on the GPU."""
    beside = load.sharing_requests * (load.sharing_input + load.sharing_output) if "sharing" in phases else 0
    return (max_model_len + beside + SPARE_TOKENS) * bytes_per_token


def phase_order(load: Load, lengths: Sequence[int], phases: Sequence[str]) -> list[tuple[str, int | None]]:
    """Short and valuable ones first: a life that is killed has lost only its longest prompts."""
    shared = sharing_length(load, lengths)
    lengths = sorted(lengths)
    order: list[tuple[str, int | None]] = []
    if "long" in phases:
        order += [("long", length) for length in lengths if shared is not None and length <= shared]
    if "batch" in phases:
        order.append(("batch", None))
    if "sharing" in phases and shared is not None:
        order.append(("sharing", shared))
    if "long" in phases:
        order += [("long", length) for length in lengths if shared is None or length > shared]
    return order


def expected_seconds(length: int, taken: Mapping[int, float]) -> float:
    """How long a prompt will take, from others: attention grows with the square of the length. 0 if none is known."""
    if not taken:
        return 0.0
    nearest = min(taken, key=lambda known: abs(known - length))
    return taken[nearest] * max(1.0, length / nearest) ** 2


def enough_repeats(done: int, wanted: int, spent: float, last: float, limit: float) -> bool:
    """One is always made; another only while it would end within the limit."""
    return done >= wanted or (done > 0 and spent + last > limit)


def problems(phase: str, repeat: Json, resident_tokens: int | None, load: Load) -> list[str]:
    """What would make the numbers of a repeat say something else than its table claims."""
    found = []
    if phase == "long":
        if repeat["cached_tokens"]:
            found.append(f"the prompt was not cold: {repeat['cached_tokens']} tokens were cached")
        if resident_tokens is not None and repeat["length"] > resident_tokens:
            for name in ("spilled_steps", "spill_in_bytes"):
                if not repeat["decode"][name]:
                    found.append(f"{repeat['length']} tokens do not fit on the GPU, and {name} is 0 in decode")
    if phase == "batch" and resident_tokens is not None:
        tokens = repeat["batch"] * (load.batch_input + load.batch_output)
        if repeat["spill"]["spilled_steps"]:
            found.append(f"{repeat['batch']} requests, {tokens} tokens in all, spilled; {resident_tokens} fit")
    return found


def arrivals_within(arrivals: Sequence[float], start: float, end: float) -> int:
    return sum(start < at <= end for at in arrivals)
