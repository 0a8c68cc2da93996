"""Comparison of two engines' answers: exact for the same pieces, else as close as rounding or other kernels allow."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from overspill.verify.workload import Answer

# Logits of 16 to 32, as models have, are rounded by half a step, of 2**-3 in bfloat16 and 2**-6 in float16; the
# likeliest two may move apart by one step each. In float32 intermediate rounding counts, not the step.
_ROUNDING = {"bfloat16": 0.25, "float16": 0.03, "float32": 1e-3}
# A prompt computed in other pieces on the same engine shows what rounding does; up to twice that passes as rounding.
_MARGIN = 2.0
# An engine that differs from itself by more than this many times `_ROUNDING` would excuse wrong KV too.
_MOST_NOISE = 4.0
# Share of answers that may diverge at a tie: nothing after a tie is compared, so each of them proves less. Without
# batch-invariant kernels vLLM diverges from itself too; where it was seen to, half of the answers may, so that half of
# the tokens are still compared.
_TIES, _TIES_OF_ITS_OWN = 0.25, 0.5


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far two answers may differ that were computed in different pieces."""

    logprob: float
    """Largest difference in a token's log-probability."""
    tie: float
    """Largest gap between the log-probabilities of two tokens that may swap places; in float32 rounding alone."""
    same_pieces: bool
    """Whether answers computed in the same pieces must agree bit by bit."""
    tied_share: float = _TIES
    """Share of a scenario's answers that may diverge at a tie."""


def tolerance(dtype: str, noise: float, *, is_deterministic: bool, parts_from_itself: bool = False) -> Tolerance:
    """Tolerance for vLLM's measured `noise` against itself, and for whether its own tokens diverged."""
    rounding = max(_ROUNDING[dtype], _MARGIN * noise)
    return Tolerance(
        logprob=rounding, tie=_ROUNDING[dtype] if dtype == "float32" else rounding, same_pieces=is_deterministic,
        tied_share=_TIES_OF_ITS_OWN if parts_from_itself else _TIES,
    )  # fmt: skip


def most_noise(dtype: str) -> float:
    """Noise beyond which vLLM differs from itself too much for any comparison to prove something."""
    return _MOST_NOISE * _ROUNDING[dtype]


@dataclass(frozen=True, slots=True)
class Difference:
    """A mismatch, or a tie: two tokens of so similar likelihood that rounding may decide between them."""

    request: str
    position: int
    """Index of the first token that differs, from 0."""
    token: int
    expected_token: int
    reason: str
    logprob: float | None = None
    expected_logprob: float | None = None
    gap: float | None = None
    """Gap between the log-probabilities of a tie's two tokens."""


@dataclass(slots=True)
class Compared:
    """Result of comparing a list of answers."""

    requests: int = 0
    tokens: int = 0
    logprobs: int = 0
    identical_logprobs: int = 0
    mismatches: list[Difference] = field(default_factory=list)
    ties: list[Difference] = field(default_factory=list)

    def __add__(self, other: "Compared") -> "Compared":
        return Compared(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


def compare(got: Sequence[Answer], expected: Mapping[str, Answer], allowed: Tolerance) -> Compared:
    """Compare answers in the order given: after one in other pieces, its conversation builds on different bits."""
    result = Compared()
    other_pieces: set[str] = set()
    for answer in got:
        reference = expected[answer.name]
        conversation = answer.name.partition("/")[0]
        if not answer.alone or answer.cached_tokens != reference.cached_tokens:
            other_pieces.add(conversation)
        strict = allowed.same_pieces and conversation not in other_pieces
        result.requests += 1
        _compare_one(answer, reference, allowed, strict=strict, result=result)
    return result


def _compare_one(mine: Answer, theirs: Answer, allowed: Tolerance, *, strict: bool, result: Compared) -> None:
    def differs(position: int, reason: str, gap: float | None = None) -> Difference:
        token, other = (one.tokens[position] if position < len(one.tokens) else -1 for one in (mine, theirs))
        here, there = (one.logprobs[position] if position < len(one.logprobs) else {} for one in (mine, theirs))
        return Difference(mine.name, position, token, other, reason, here.get(token), there.get(other), gap)

    if len(mine.tokens) != len(theirs.tokens):
        short = min(len(mine.tokens), len(theirs.tokens))
        result.mismatches.append(differs(short, f"{len(mine.tokens)} tokens instead of {len(theirs.tokens)}"))
        return
    for position, (token, other) in enumerate(zip(mine.tokens, theirs.tokens, strict=True)):
        here, there = mine.logprobs[position], theirs.logprobs[position]
        if token != other:
            gap = _gap(here, there, token, other)
            if strict or gap is None or gap > allowed.tie:
                result.mismatches.append(differs(position, "another token"))
            else:
                result.ties.append(differs(position, "a tie", gap))
            return  # the rest continues a different text
        result.tokens += 1
        gaps = [abs(here[key] - there[key]) for key in here.keys() & there.keys()]
        result.logprobs += len(gaps)
        result.identical_logprobs += gaps.count(0.0)
        limit = 0.0 if strict else allowed.logprob
        if not math.isfinite(here[token]) or not all(gap <= limit for gap in gaps):  # a NaN fails too
            worst = f"log-probabilities differ by {max(gaps):.3g}, and rounding explains {limit:.3g}"
            result.mismatches.append(differs(position, worst))
            return


def _gap(here: Mapping[int, float], there: Mapping[int, float], token: int, other: int) -> float | None:
    """The larger of both engines' gaps between the two tokens; None if one of them did not rank both."""
    if not all(key in seen for key in (token, other) for seen in (here, there)):
        return None
    return max(abs(seen[token] - seen[other]) for seen in (here, there))


def _least_gap(here: Mapping[int, float], there: Mapping[int, float], token: int) -> float:
    """How far a token's log-probabilities are apart at least, where only one engine ranked it: in the other one it is
    less likely than all ranked ones."""
    return max(0.0, here[token] - min(there.values()))


def noise(first: Iterable[Answer], again: Iterable[Answer]) -> float:
    """Largest difference between one engine's answers to the same prompts in other pieces; infinite where it chose a
    token that was not among the likeliest before."""
    known = {answer.name: answer for answer in first}
    worst = 0.0
    for answer in again:
        before = known[answer.name]
        for position, (token, other) in enumerate(zip(answer.tokens, before.tokens)):
            here, there = answer.logprobs[position], before.logprobs[position]
            if token != other:
                gap = _gap(here, there, token, other)
                worst = math.inf if gap is None else max(worst, gap)
                break
            worst = max([worst, *(abs(here[key] - there[key]) for key in here.keys() & there.keys())])
    return worst


def parted(first: Iterable[Answer], again: Iterable[Answer]) -> int:
    """Number of one engine's answers whose tokens changed when it computed the same prompts in other pieces."""
    known = {answer.name: answer.tokens for answer in first}
    return sum(answer.tokens != known[answer.name] for answer in again)


@dataclass(frozen=True, slots=True)
class Distance:
    """Distance between two engines' log-probabilities of tokens that both rank. Covers decode steps (an answer's first
    token comes from prefill), up to and including the first token that differs."""

    tokens: int = 0
    differing: int = 0
    """Tokens that differ from the other engine's: at most one per answer, since the rest continues another text."""
    logprobs: int = 0
    total: float = 0.0
    largest: float = 0.0
    """Largest difference. Where an engine chose a token that the other did not rank, the least that it can be."""

    @property
    def mean(self) -> float:
        return self.total / self.logprobs if self.logprobs else 0.0

    def __add__(self, other: "Distance") -> "Distance":
        return Distance(
            self.tokens + other.tokens, self.differing + other.differing, self.logprobs + other.logprobs,
            self.total + other.total, max(self.largest, other.largest),
        )  # fmt: skip

    def __str__(self) -> str:
        return f"{self.mean:.2g} on average, {self.largest:.2g} at most, {self.differing:,} of {self.tokens:,} tokens"


def distance(got: Iterable[Answer], expected: Mapping[str, Answer]) -> Distance:
    result = Distance()
    for answer in got:
        reference = expected[answer.name]
        for position, (token, other) in enumerate(zip(answer.tokens, reference.tokens)):
            here, there = answer.logprobs[position], reference.logprobs[position]
            if position or token != other:
                gaps = [abs(here[key] - there[key]) for key in here.keys() & there.keys()]
                gaps += [_least_gap(here, there, token)] if token not in there else []
                gaps += [_least_gap(there, here, other)] if other not in here else []
                # A NaN counts as infinitely far, and max() would miss it.
                gaps = [gap if math.isfinite(gap) else math.inf for gap in gaps]
                result += Distance(1, int(token != other), len(gaps), sum(gaps), max(gaps, default=0.0))
            if token != other:
                break
    return result


def too_far(own: Distance, yardstick: Distance, name: str) -> str:
    """Why answers with attention on the CPU are further from the GPU's than another kernel's are; empty if not.

    Two kernels that round alike differ by chance. Distances vary by about their mean, so the mean may be larger by two
    standard errors, and the largest, a single number, twice as large.
    """
    if not own.logprobs or not yardstick.logprobs:
        return "no log-probability of a decode step was compared, so nothing is proven"
    # Where another kernel changes every other token, hardly any error would be larger.
    if not 0 < yardstick.mean < math.inf or 2 * yardstick.differing > yardstick.tokens:
        return f"log-probabilities with {name} differ by {yardstick}, which is no valid yardstick"
    if own.mean > yardstick.mean * (1 + 2 / math.sqrt(own.tokens)) or own.largest > _MARGIN * yardstick.largest:
        return f"log-probabilities are too far from those of the GPU alone: {own}; with {name}: {yardstick}"
    return ""


def bounded(allowed: Tolerance, yardstick: Distance) -> Tolerance:
    """Tolerance for answers judged by the yardstick's distance: as wide as that, with any number of ties."""
    furthest = max(allowed.logprob, _MARGIN * yardstick.largest)
    # Two tokens swap places if each moves by this much.
    return Tolerance(logprob=furthest, tie=max(allowed.tie, 2 * furthest), same_pieces=False, tied_share=1.0)
