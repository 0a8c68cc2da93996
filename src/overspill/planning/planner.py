"""Planner: all ways to serve a context on a machine, which one to take, and cards that would serve it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from overspill.figures import Known, derived
from overspill.hardware.cards import CARDS, Card
from overspill.hardware.gpu import Gpu, weakest
from overspill.hardware.stated import parse_gpu
from overspill.kv.errors import OverspillError
from overspill.model.facts import ModelFacts
from overspill.planning.attempts import (
    Attempt,
    Fit,
    attempts,
    attempts_without_ram,
    fits,
    least_ram_bytes,
    longest_context,
)
from overspill.planning.auto import AutoContext, Bound, auto_context
from overspill.planning.connector_options import options_as_flags, read_options, unused_options
from overspill.planning.memory import Budget, card_bytes
from overspill.planning.ranks import rank_facts
from overspill.planning.setup import (
    CUDA,
    NO_CPU_ATTENTION,
    Platform,
    Profiles,
    Setup,
    Wishes,
    nothing_measured,
    shares_with_cpu,
)
from overspill.planning.ways import Way, make_way


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFit:
    card: Card
    alone: bool
    """Whether everything fits on the GPU."""
    with_ram: bool
    """Whether the context fits with the RAM there is."""
    way: Way | None = None
    """The way a plan would recommend on this card; None unless requested."""


def card_fits(setup: Setup, *, with_ways: bool = False) -> tuple[CardFit, ...]:
    """Fits on all cards of the table, from the least memory to the most; `with_ways` takes a second."""
    cards = sorted(CARDS, key=lambda card: card.total_bytes)
    return tuple(_card_fit(setup, card, with_way=with_ways) for card in cards)


def smallest_card(found: tuple[CardFit, ...], *, alone: bool) -> Card | None:
    return next((one.card for one in found if (one.alone if alone else one.with_ram)), None)


def _card_fit(setup: Setup, card: Card, *, with_way: bool) -> CardFit:
    # The budget and the profiles hold only for the card at hand.
    wishes = replace(setup.wishes, gpu_memory_bytes=None)
    other = replace(setup, gpu=parse_gpu(card.key), wishes=wishes, platform=CUDA, profiles=nothing_measured)
    budget, length = other.budget(), other.max_model_len
    whole = [attempt for attempt in attempts_without_ram(other, budget) if attempt.is_exact]
    divided = [attempt for attempt in attempts(other, budget) if attempt.is_exact]
    return CardFit(
        card=card,
        alone=any(fits(other, whole, length)),
        with_ram=any(fit.ram_bytes <= other.ram_bytes.value for fit in fits(other, divided, length)),
        way=_best_at(other, divided, length) if with_way else None,
    )


# Predictions are not good enough for a smaller difference to mean anything.
_NEARLY = 1.1
_SHORT_CONTEXT = 1024
_WITHOUT = {"host_bytes": "keeps no idle KV in RAM", "spill_bytes": "spills no KV"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A context's possible ways and the chosen one; RAM is for all ranks together, GPU memory for each."""

    facts: ModelFacts
    rank: ModelFacts
    """One rank's part of the model: all of it on one GPU."""
    gpu: Gpu
    """The GPU every rank is planned for: with several GPUs, the least of each figure."""
    gpus: tuple[Gpu, ...]
    """GPU of each rank, in order."""
    platform: Platform
    wishes: Wishes
    max_model_len: int
    budget: Budget
    ram_bytes: Known[int]
    """RAM that may be taken."""
    cpu_attention: Known[int] | None
    """Bytes of KV in RAM that the CPU attends to per second; None if it must not, or cannot for this model."""
    ways: tuple[Way, ...]
    """Ways that fit, one of each kind, fastest first, including those that round KV without being requested."""
    forced: Way | None
    """Way taken by --force where no exact one fits: the best that rounds KV, or else the nearest."""
    longest_context: int
    """Longest context that fits in any exact way."""
    longest_on_gpu: int
    """Longest context without any RAM: what this GPU can do alone."""
    fitting_weights_ram: int | None
    """Nearest amount of weights in RAM that lets the context fit where the requested one does not."""
    least_ram_bytes: int | None
    """Least RAM for an exact way, the engine's process included; None if no RAM is enough."""
    need_gpu_bytes: int
    """Device memory with which the context would fit without RAM, CUDA's context included."""
    cards: tuple[CardFit, ...]
    """Fits on all known cards, where nothing fits exactly on this GPU, or on request."""
    auto: AutoContext | None = None
    """Choice of `--max-model-len auto`; None where the length is given."""
    faster: tuple[tuple[str, Way], ...] = ()
    """Divisions that beat tensor parallelism over PCIe: what to give instead, and the resulting way."""

    @property
    def usable_gpu_bytes(self) -> Known[int]:
        return self.budget.usable_bytes

    @property
    def gpu_memory_utilization(self) -> float | None:
        return self.budget.gpu_memory_utilization

    @property
    def num_ranks(self) -> int:
        return self.wishes.num_ranks

    @property
    def stand_in_bytes(self) -> int:
        """RAM of all ranks that stands in for GPU memory."""
        return self.num_ranks * self.budget.limit_bytes.value if self.platform.is_cpu else 0

    @property
    def max_num_seqs(self) -> int:
        return self.wishes.num_seqs

    @property
    def recommended(self) -> Way | None:
        """The best way that changes no token; None if there is none, even if others fit."""
        return _best([way for way in self.ways if way.is_exact])

    @property
    def lossy(self) -> Way | None:
        """The best way that rounds KV, where no exact way fits. Never started without being requested."""
        return None if any(way.is_exact for way in self.ways) else _best(self.ways)

    @property
    def chosen(self) -> Way | None:
        """The way to start: the recommended or the forced one."""
        return self.recommended or self.forced

    @property
    def warnings(self) -> tuple[str, ...]:
        found = [*_asked_warnings(self)]
        limit = self.facts.max_position_embeddings
        if self.max_model_len > limit:
            found.append(
                f"{self.max_model_len:,} tokens are more than the {limit:,} the model was made for; vLLM refuses that "
                f"unless its rope scaling allows it. Use --max-model-len {limit}"
            )
        if self.auto is not None and self.auto.bound is Bound.GPU:
            found.append(str(self.auto))
        if self.forced is not None and self.lossy is None:
            found.append("the plan finds no way that fits; with --force, the nearest one is used")
        if self.forced is not None and not self.forced.is_exact:
            found.append(
                f"no exact way fits; with --force, KV is kept in {self.forced.kv_cache_dtype}, which rounds it and so "
                "may change answers"
            )
        return tuple(found)

    @property
    def advised_context(self) -> int:
        """Longest context that fits and that the model was made for: vLLM refuses a longer one."""
        return min(self.longest_context, self.facts.max_position_embeddings)


def is_elastic(plan: Plan, way: Way) -> bool:
    """Whether the engine's KV can shrink and grow: cached KV it gives up goes to RAM, so it needs a pool there."""
    return plan.wishes.elastic and bool(plan.wishes.ledger and way.offload_bytes)


def make_plan(
    facts: ModelFacts,
    gpu: Gpu | Sequence[Gpu],
    ram_bytes: Known[int],
    wishes: Wishes,
    *,
    platform: Platform = CUDA,
    profiles: Profiles = nothing_measured,
    cpu_attention: Known[int] = NO_CPU_ATTENTION,
) -> Plan:
    """Plan a model whose `facts` were read with the dtype in `wishes`; `gpu` is one for all ranks, or one for each."""
    gpus = (gpu,) * wishes.num_ranks if isinstance(gpu, Gpu) else tuple(gpu)
    gpu, ranks = weakest(gpus), wishes.num_ranks

    def each(figure: Known[int]) -> Known[int]:
        """One rank's part: all ranks are on this machine and get the same."""
        note = f"a part for each of {ranks} ranks"
        return figure if ranks == 1 else derived(figure.value // ranks, figure, note=note)

    setup = Setup(
        facts=rank_facts(facts, wishes.tensor_parallel_size, wishes.pipeline_parallel_size),
        gpu=gpu,
        ram_bytes=each(ram_bytes),
        wishes=replace(
            wishes,
            offload_ram_bytes=None if wishes.offload_ram_bytes is None else wishes.offload_ram_bytes // ranks,
            weights_ram_bytes=None if wishes.weights_ram_bytes is None else wishes.weights_ram_bytes // ranks,
        ),
        platform=platform,
        profiles=profiles,
        cpu_attention=each(cpu_attention),
    )
    budget = setup.budget()
    whole = list(attempts_without_ram(setup, budget))
    tried = list(attempts(setup, budget))
    auto = None
    if wishes.min_speed is not None:
        limit = facts.max_position_embeddings
        auto = auto_context(facts.name, limit, wishes.min_speed, lambda length: _best_at(setup, tried, length))
        # If nothing fits, refuse a short context with what that needs.
        length = min(_SHORT_CONTEXT, limit) if auto is None else auto.max_model_len
        wishes = replace(wishes, max_model_len=length, min_speed=None)
        setup = _of_length(setup, wishes.max_model_len)
    found = list(fits(setup, tried, setup.max_model_len))
    ways = _ways_for(setup, tried)
    has_exact = any(way.is_exact for way in ways)
    is_forced = wishes.force and not has_exact
    least, fitting = least_ram_bytes(setup, tried), None if has_exact else _fitting_weights_ram(setup, budget)
    made = Plan(
        facts=facts,
        rank=setup.facts,
        gpu=gpu,
        gpus=gpus,
        platform=platform,
        wishes=wishes,
        max_model_len=setup.max_model_len,
        budget=budget,
        ram_bytes=ram_bytes,
        cpu_attention=cpu_attention if shares_with_cpu(setup, wishes.kv_cache_dtype or "auto") else None,
        ways=ways,
        forced=_best(ways) or _nearest(setup, tried, found) if is_forced else None,
        longest_context=longest_context(setup, tried),
        longest_on_gpu=longest_context(setup, whole, within_ram=False),
        fitting_weights_ram=None if fitting is None else ranks * fitting,
        least_ram_bytes=None if least is None else ranks * least,
        need_gpu_bytes=_need_gpu_bytes(setup, budget, whole),
        auto=auto,
        cards=() if not wishes.cards and (has_exact or platform.is_cpu) else card_fits(setup, with_ways=wishes.cards),
    )
    if wishes.tensor_parallel_size == 1 or gpu.nvlink is not None or platform.is_cpu or made.recommended is None:
        return made
    plan_like = partial(
        make_plan, facts, gpu, ram_bytes, platform=platform, profiles=profiles, cpu_attention=cpu_attention
    )
    return replace(made, faster=tuple(_faster(made, made.recommended, plan_like)))


def _faster(plan: Plan, way: Way, plan_like: Callable[[Wishes], Plan]) -> Iterator[tuple[str, Way]]:
    """Faster divisions, if any: all-reduces over PCIe can cost more than a second GPU gains."""
    for stages in (1, plan.num_ranks):
        wishes = replace(plan.wishes, tensor_parallel_size=1, pipeline_parallel_size=stages, cards=False)
        try:
            other = plan_like(wishes).recommended
        except OverspillError:  # layers that do not form equal stages
            continue
        if other is not None and other.request_s < way.request_s:
            yield "one GPU" if stages == 1 else f"--pipeline-parallel-size {stages}", other


def _ways_for(setup: Setup, tried: Sequence[Attempt]) -> tuple[Way, ...]:
    """Ways that work even if overheads are assumed too low; where none of these is exact, all that fit."""
    surely = list(fits(setup, tried, setup.max_model_len, surely=True))
    ways = _ways(setup, surely)
    if any(way.is_exact for way in ways):
        return ways
    return _ways(setup, [*surely, *fits(setup, tried, setup.max_model_len)])


def _best_at(setup: Setup, tried: Sequence[Attempt], length: int) -> Way | None:
    exact = [attempt for attempt in tried if attempt.is_exact]
    return _best(_ways_for(_of_length(setup, length), exact))


def _of_length(setup: Setup, length: int | None) -> Setup:
    return replace(setup, wishes=replace(setup.wishes, max_model_len=length))


def _ways(setup: Setup, found: Iterable[Fit]) -> tuple[Way, ...]:
    """The fastest way of each kind."""
    ways = [make_way(setup, fit) for fit in found if fit.ram_bytes <= setup.ram_bytes.value]
    best: dict[tuple[bool, bool, bool, bool], Way] = {}
    for way in sorted(ways, key=lambda way: (way.request_s, way.ram_bytes)):
        best.setdefault((way.weights.ram_bytes > 0, way.weights.is_uva, way.kv.spilled_bytes > 0, way.is_exact), way)
    return tuple(_sensible(list(best.values())))


def _sensible(ways: list[Way]) -> list[Way]:
    """Ways worth naming: where all fits on the GPU, moving things to RAM only loses, and two mechanisms must beat one.

    Prefetching hides the link, and the GPU's own reads in RAM (UVA) do not, so UVA is worth naming only where it wins:
    it skips experts that are not chosen, and needs no slot.
    """
    on_gpu = {way.kv_cache_dtype for way in ways if not way.num_mechanisms}
    prefetched = {
        (way.kv.spilled_bytes > 0, way.is_exact): way.request_s
        for way in ways
        if way.weights.ram_bytes and not way.weights.is_uva
    }

    def is_worth_naming(way: Way) -> bool:
        if way.num_mechanisms and way.kv_cache_dtype in on_gpu:
            return False
        if way.num_mechanisms > 1 and any(
            one.num_mechanisms < 2 and one.is_exact == way.is_exact and one.request_s <= way.request_s for one in ways
        ):
            return False
        rival = prefetched.get((way.kv.spilled_bytes > 0, way.is_exact))
        return not way.weights.is_uva or rival is None or way.request_s < rival

    return [way for way in ways if is_worth_naming(way)]


def _best(ways: Sequence[Way]) -> Way | None:
    """The fastest way at full length; among nearly as fast ones, one that leaves weights on the GPU: spilled KV slows
    long requests only, weights in RAM every one. Prefetching is preferred to UVA: with 16 requests at once it was 1.46
    times as fast."""
    if not ways:
        return None
    # UVA was seen to read only the chosen experts with one request; many requests choose nearly all. UVA must not slow
    # every request where weights can stay on the GPU. Where they cannot, it has little to lose.
    if any(not way.weights.ram_bytes for way in ways):
        ways = [way for way in ways if not way.weights.is_uva]
    enough = _NEARLY * min(way.request_s for way in ways)
    return min(
        (way for way in ways if way.request_s <= enough),
        key=lambda way: (way.weights.ram_bytes > 0, way.num_mechanisms, way.weights.is_uva, way.request_s),
    )


def _nearest(setup: Setup, tried: list[Attempt], found: list[Fit]) -> Way | None:
    """The way that lacks the least RAM; if no RAM is enough, one that would fit without overheads, which are only
    assumed. None if that does not help either."""
    if not found:
        lean = [replace(one, available_bytes=one.available_bytes + one.overheads.total.value) for one in tried]
        found = list(fits(setup, lean, setup.max_model_len))
    exact = [fit for fit in found if fit.attempt.is_exact] or found
    return make_way(setup, min(exact, key=lambda fit: fit.ram_bytes)) if exact else None


def _fitting_weights_ram(setup: Setup, budget: Budget) -> int | None:
    asked = setup.wishes.weights_ram_bytes
    if asked is None:
        return None
    free = replace(setup, wishes=replace(setup.wishes, weights_ram_bytes=None))
    found = fits(free, attempts(free, budget), free.max_model_len)
    amounts = {
        fit.attempt.weights.ram_bytes
        for fit in found
        if fit.attempt.is_exact and fit.ram_bytes <= setup.ram_bytes.value
    }
    return min(amounts, key=lambda amount: abs(amount - asked), default=None)


def _asked_warnings(plan: Plan) -> Iterator[str]:
    """Warnings about wishes that are not met, or should not be."""
    wishes, chosen = plan.wishes, plan.chosen
    if not wishes.has_bf16:
        yield "this CPU cannot compute in bfloat16, so the model is taken in float32, which needs twice the memory"
    for instead, way in plan.faster:
        assert plan.recommended is not None
        yield (
            f"tensor parallelism over PCIe is slower here: {instead} would answer at "
            f"{way.at_once_tokens_per_s.value:.1f} t/s after {way.ttft_s.value:.1f} s ({way.name}), against "
            f"{plan.recommended.at_once_tokens_per_s.value:.1f} t/s after {plan.recommended.ttft_s.value:.1f} s"
        )
    share, planned = wishes.gpu_memory_utilization, plan.gpu_memory_utilization
    if share is not None and planned is None:
        yield (
            "--gpu-memory-utilization does nothing on a CPU, and is left out: --gpu-memory sets the RAM in place of a "
            "GPU's memory"
        )
    elif share is not None and planned is not None and planned < share:
        yield (
            f"--gpu-memory-utilization {share:g} is more than is free beside CUDA's context; planned with {planned:g}"
        )
    if chosen is not None and (unused := unused_options(read_options(wishes.kv_options), chosen.connector_sizes)):
        yield (
            f"{options_as_flags(unused)} would do nothing here and is left out: the plan "
            f"{' and '.join(words for size, words in _WITHOUT.items() if size not in chosen.connector_sizes)}"
        )
    if wishes.elastic and chosen is not None and not is_elastic(plan, chosen):
        why = "the plan keeps no idle KV in RAM" if wishes.ledger else "only a server's KV grows and shrinks"
        yield f"--elastic would do nothing here and is left out: {why}"
    is_asked = wishes.weights_ram_bytes is not None or wishes.offload_groups is not None
    moves = chosen is not None and bool(chosen.weights.ram_bytes)
    if is_asked and moves and plan.longest_on_gpu >= plan.max_model_len:
        yield (
            "weights go to RAM as requested, although all of them and this context fit on the GPU: every step then "
            "reads them over the link, which made decoding up to 19 times slower"
        )


def _need_gpu_bytes(setup: Setup, budget: Budget, whole: Iterable[Attempt]) -> int:
    """Memory of a card that holds weights, overheads and all of the requests' KV."""
    counted = min(
        setup.facts.weights.total_bytes
        + one.overheads.total.value
        + setup.wishes.at_once * one.geometry.request_bytes(setup.max_model_len)
        + one.geometry.bytes_per_block
        for one in whole
        if one.is_exact
    )
    if budget.gpu_memory_utilization is None:
        return counted + budget.context_bytes.value
    return card_bytes(counted, budget.context_bytes.value, setup.wishes.gpu_memory_utilization)
