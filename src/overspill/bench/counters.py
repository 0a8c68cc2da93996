"""The server's own counters: which tier served how many tokens, told by /metrics before and after."""

import re
from collections.abc import Mapping

from overspill.bench.errors import CannotBench
from overspill.bench.target import Target, ask

Counters = Mapping[str, float]

_VLLM = {
    "vllm:external_prefix_cache_hits_total": "tokens_from_ram",
    "vllm:prefix_cache_hits_total": "tokens_from_gpu_cache",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:num_preemptions_total": "preemptions",
}
TIERS = tuple(_VLLM.values())
SPILL = ("spilled_steps", "spill_in_bytes", "spill_out_bytes")
_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\d+)?$", re.MULTILINE)
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")
# The manager's page has those of all its engines, told apart by this label; vLLM's own has none of that name.
_MODEL = "model"
_OF_THE_MANAGER = "overspill_manager_"


def read_counters(target: Target) -> Counters | None:
    """None if the server has none, or is gone."""
    try:
        answer = ask(target, "/metrics")
    except CannotBench:
        return None
    return parse_counters(answer.text, target.model) if answer.status_code == 200 else None


def parse_counters(text: str, model: str) -> Counters | None:
    """vLLM's and Overspill's, by the names they have in results; of all engines of a server together, and of a
    manager's servers of the one that serves this model."""
    found: dict[str, float] = {}
    for series, labels, value in _LINE.findall(text):
        name = _VLLM.get(series)
        if name is None and series.startswith("overspill_") and series.endswith("_total"):
            name = series.removeprefix("overspill_").removesuffix("_total")
        if name is None or series.startswith(_OF_THE_MANAGER) or _model_of(labels) not in (None, model):
            continue
        found[name] = found.get(name, 0.0) + float(value)
    return found or None


def _model_of(labels: str) -> str | None:
    value = dict(_LABEL.findall(labels)).get(_MODEL)
    return None if value is None else _ESCAPED.sub(lambda match: "\n" if match[1] == "n" else match[1], value)


def difference(before: Counters | None, after: Counters | None) -> dict[str, int | float | None]:
    """What was counted in between; None for what was not, or began anew."""
    names = dict.fromkeys((*TIERS, *SPILL, *(after or {})))
    if before is None or after is None:
        return dict.fromkeys(names)
    return {name: _less(after.get(name), before.get(name, 0.0)) for name in names}


def _less(after: float | None, before: float) -> int | float | None:
    if after is None or after < before:
        return None
    left = after - before
    return int(left) if left.is_integer() else left


def total(
    one: Mapping[str, int | float | None], other: Mapping[str, int | float | None]
) -> dict[str, int | float | None]:
    """Of two parts of a measurement; unknown where it is unknown of one."""
    known: dict[str, int | float | None] = {}
    for name in dict.fromkeys((*one, *other)):
        first, second = one.get(name), other.get(name)
        known[name] = None if first is None or second is None else first + second
    return known
