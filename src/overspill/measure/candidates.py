"""Candidates for `overspill tune`: the plan's ways, and variations of the recommended one."""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from overspill.figures import as_json
from overspill.flags import read_flags
from overspill.kv.options import Options
from overspill.kv.sizes import GiB, format_size
from overspill.model.facts import pinned_share
from overspill.planning.arguments import kv_transfer_config, vllm_args
from overspill.planning.connector_options import read_options
from overspill.planning.planner import Plan
from overspill.planning.ways import Way, stores_lazily
from overspill.planning.weights import WeightOffload, groupings, uva_offloads
from overspill.settings import as_flags

Replan = Callable[[Mapping[str, Any]], Plan]
"""Returns the plan that `overspill serve` would make with these settings added."""

AS_IT_IS = "as it is"
"""Label of the candidate with a model's current settings."""
CONNECTOR = "OverspillConnector"
TRANSFER = "--kv-transfer-config"
TUNABLE = ("max_num_batched_tokens", "offload_ram", "weights_ram")
TUNABLE_FLAGS = (
    TRANSFER, "--cpu-offload-gb", "--offload-backend", "--offload-group-size", "--offload-num-in-group",
    "--offload-prefetch-step",
)  # fmt: skip
_LEAST_CHUNK, _MOST_CHUNK = 512, 16384
# Multiples of the planned weights in RAM: slower steps, but more KV on the GPU. The nearest amount below, which the
# plan considers too little, is tried as well.
_MORE_WEIGHTS = (1.25, 1.5, 2, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    label: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a registered model, kept there if this candidate is the best."""
    vllm_args: tuple[str, ...] = ()
    """Flags for what only vLLM's own flags can express."""
    things_in_ram: int = 0
    """How many of weights, spilled KV and idle KV are in RAM."""
    ram_bytes: int = 0
    is_exact: bool = True
    is_planned: bool = False
    """Whether the plan recommends this candidate."""

    @classmethod
    def of(
        cls, way: Way, label: str, settings: Mapping[str, Any], words: tuple[str, ...], *, is_planned: bool = False
    ) -> "Candidate":
        has_weights = way.weights.ram_bytes or "--offload-group-size" in words
        things = bool(has_weights) + bool(way.kv.spilled_bytes) + bool(way.offload_bytes)
        return cls(
            label=label, settings=settings, vllm_args=words, things_in_ram=things, ram_bytes=way.ram_bytes,
            is_exact=way.is_exact, is_planned=is_planned,
        )  # fmt: skip

    @property
    def rank(self) -> tuple[bool, int, bool, int]:
        """Sort key, simplest first; decides between equally good candidates."""
        return not self.is_exact, self.things_in_ram, not self.is_planned, self.ram_bytes

    def text(self, given: Mapping[str, Any]) -> str:
        """The candidate as a configuration of `overspill ab`; `given` are settings of all candidates."""
        return shlex.join(["overspill", *as_flags({**given, **self.settings}), *self.vllm_args])

    def as_json(self) -> dict[str, Any]:
        return dict(as_json(self))


def find_candidates(
    plan: Plan,
    replan: Replan,
    *,
    fixed: frozenset[str] = frozenset(),
    returns: bool = True,
    allow_fp8: bool = False,
    current: Candidate | None = None,
) -> tuple[Candidate, ...]:
    """Distinct candidates: the plan's own choice first, then the rest, most promising first.

    `fixed` settings (and `kv_transfer_config`) are not varied. Where nothing `returns`, nothing can be learned about
    RAM for idle KV, so the plan's amount stays. `current` is the candidate with the model's current settings.
    """
    own = plan.chosen or (plan.lossy if allow_fp8 else None)
    assert own is not None, "what does not fit is refused before"
    maker = _Maker(plan, replan, own)
    found = [maker.make("plan", own, is_planned=True), current]
    found += maker.ways(allow_fp8=allow_fp8)
    if "weights_ram" not in fixed:
        found += maker.weights()
    if returns and "kv_transfer_config" not in fixed:
        found += maker.pools() if "offload_ram" not in fixed else ()
        found += maker.stores()
    if "max_num_batched_tokens" not in fixed:
        found += maker.chunks()
    if "kv_transfer_config" not in fixed:
        found += maker.spill_shares()
    return tuple(_unique(each for each in found if each is not None))


def _unique(candidates: Iterator[Candidate]) -> Iterator[Candidate]:
    seen = []
    labels: set[str] = set()
    for each in candidates:
        what = ({**each.settings}, each.vllm_args)
        if what not in seen and each.label not in labels:
            seen.append(what)
            labels.add(each.label)
            yield each


class _Maker:
    def __init__(self, plan: Plan, replan: Replan, own: Way) -> None:
        self._plan, self._replan, self._own = plan, replan, own

    def make(
        self, label: str, way: Way, *, is_planned: bool = False, options: Mapping[str, Any] | None = None, **also: Any
    ) -> Candidate | None:
        """A candidate with the fewest settings that make `overspill serve` take this way; None if none can."""
        settings = {
            "max_model_len": self._plan.max_model_len, "max_num_batched_tokens": way.max_num_batched_tokens, **also,
        }  # fmt: skip
        if not way.is_exact:
            settings["kv_cache_dtype"] = way.kv_cache_dtype
        chosen = self._replan(settings).chosen
        if chosen is None:
            return None
        if way.weights != chosen.weights:
            settings["weights_ram"] = way.num_ranks * way.weights.ram_bytes
            if (chosen := self._replan(settings).chosen) is None:
                return None
        words: list[str] = []
        if way.weights != chosen.weights:
            del settings["weights_ram"]  # the plan would choose the other offloader
            flags = [flag for flag in read_flags(vllm_args(self._plan, way)) if flag.name in TUNABLE_FLAGS]
            words += [word for flag in flags if flag.name != TRANSFER for word in flag.words]
        kv_options = self._plan.wishes.kv_options
        transfer: Mapping[str, Any] | None = kv_transfer_config(way, kv_options)
        if options or transfer != kv_transfer_config(chosen, kv_options):
            if transfer is None:
                return None  # no flag removes a connector
            extra = {**transfer["kv_connector_extra_config"], **(options or {})}
            words += [TRANSFER, json.dumps({**transfer, "kv_connector_extra_config": extra})]
        return Candidate.of(way, label, settings, tuple(words), is_planned=is_planned)

    def ways(self, *, allow_fp8: bool) -> Iterator[Candidate | None]:
        for way in self._plan.ways:
            if way is not self._own and (way.is_exact or allow_fp8):
                yield self.make(way.name, way)

    def weights(self) -> Iterator[Candidate | None]:
        """Other amounts of weights in RAM; the plan then redivides what they leave, GPU memory to KV and RAM to idle
        KV."""
        own = self._own.weights
        for weights in nearby_weights(self._plan, own) if own.ram_bytes else ():
            if (way := self._alike(weights_ram=self._own.num_ranks * weights.ram_bytes)) is not None:
                yield self.make(f"{format_size(way.num_ranks * way.weights.ram_bytes)} of weights in RAM", way)

    def pools(self) -> Iterator[Candidate | None]:
        """No RAM for idle KV, and half of the plan's; a plan without any could not use more."""
        own = self._own
        for size in (0, own.offload_bytes // 2 // GiB * GiB) if own.offload_bytes else ():
            total = own.num_ranks * size
            label = f"{format_size(total)} for idle KV" if size else "no RAM for idle KV"
            yield self.make(label, replace(own, offload_bytes=size), offload_ram=total)

    def stores(self) -> Iterator[Candidate | None]:
        if self._own.offload_bytes and "store" not in self._given_options:
            is_lazy = stores_lazily(self._own, self._given_options)
            how = ("stored eagerly", "eager") if is_lazy else ("stored lazily", "lazy")
            yield self.make(how[0], self._own, options={"store": how[1]})

    def chunks(self) -> Iterator[Candidate | None]:
        planned = self._own.max_num_batched_tokens
        for chunk in (2 * planned, planned // 2):
            is_possible = _LEAST_CHUNK <= chunk <= _MOST_CHUNK and chunk >= self._plan.max_num_seqs
            if is_possible and (way := self._alike(max_num_batched_tokens=chunk)) is not None:
                yield self.make(f"chunks of {chunk}", way)

    def spill_shares(self) -> Iterator[Candidate | None]:
        if self._own.kv.spilled_bytes and "spill_share" not in self._given_options:
            for share in (1.0, Options.spill_share / 2):
                yield self.make(f"spill share {share:g}", self._own, options={"spill_share": share})

    @property
    def _given_options(self) -> Mapping[str, Any]:
        return read_options(self._plan.wishes.kv_options)

    def _alike(self, **settings: int) -> Way | None:
        """The plan's choice with these settings; None if just one of it and the varied way rounds KV."""
        length, chunk = self._plan.max_model_len, self._own.max_num_batched_tokens
        plan = self._replan({"max_model_len": length, "max_num_batched_tokens": chunk, **settings})
        way = plan.recommended or plan.lossy
        return way if way is not None and way.is_exact == self._own.is_exact else None


def nearby_weights(plan: Plan, planned: WeightOffload) -> list[WeightOffload]:
    """Possible amounts of weights in RAM near the planned one: the next smaller, and some larger."""
    layers, pinning = plan.rank.weights.layer_bytes, pinned_share(plan.rank)
    amounts = list(uva_offloads(layers, pinning) if planned.is_uva else groupings(layers, pinning))
    less = [each for each in amounts if each.ram_bytes < planned.ram_bytes][-1:]
    larger = [each for each in amounts if each.ram_bytes > planned.ram_bytes]
    more = [
        min(larger, key=lambda each: abs(each.ram_bytes - share * planned.ram_bytes))
        for share in _MORE_WEIGHTS
        if larger and share * planned.ram_bytes <= larger[-1].ram_bytes
    ]
    return [*less, *dict.fromkeys(more)]
