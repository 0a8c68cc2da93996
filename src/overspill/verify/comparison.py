"""Whether two engines gave the same answer: bit by bit where they computed it in the same pieces, and otherwise no
further apart than rounding, or another attention kernel, puts them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from overspill.verify.workload import Answer

# A logit of 16 to 32, as models have, is rounded by half of a step of 2**-3 in bfloat16, of 2**-6 in float16; the
# likeliest two may move apart by one step each. In float32 what is rounded on the way counts, not the step.
_ROUNDING = {"bfloat16": 0.25, "float16": 0.03, "float32": 1e-3}
# A prompt computed in other pieces on the same engine shows how much rounding does there; twice that is still it.
_MARGIN = 2.0
# An engine further apart from itself than so many steps of rounding would excuse KV gone wrong too.
_MOST_NOISE = 4.0
# Answers that may part at a tie: what follows a tie is not compared, so each of them proves less. Without
# batch-invariant kernels vLLM parts from itself too; where it was seen to, as many may as leave half of the tokens.
_TIES, _TIES_OF_ITS_OWN = 0.25, 0.5


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far two answers may be apart that were computed in other pieces."""

    logprob: float
    """Of a token's log-probability."""
    tie: float
    """Of the log-probabilities of two tokens that may change places; nothing but rounding in float32."""
    same_pieces: bool
    """Whether answers that were computed in the same pieces must be the same bit by bit."""
    tied_share: float = _TIES
    """Of a scenario's answers: so many may part at a tie."""


def tolerance(dtype: str, noise: float, *, is_deterministic: bool, parts_from_itself: bool = False) -> Tolerance:
    """`noise` is what was seen between vLLM and itself, and whether its own tokens parted."""
    rounding = max(_ROUNDING[dtype], _MARGIN * noise)
    return Tolerance(
        logprob=rounding, tie=_ROUNDING[dtype] if dtype == "float32" else rounding, same_pieces=is_deterministic,
        tied_share=_TIES_OF_ITS_OWN if parts_from_itself else _TIES,
    )  # fmt: skip


def most_noise(dtype: str) -> float:
    """Beyond it vLLM differs from itself too much for any comparison to prove something."""
    return _MOST_NOISE * _ROUNDING[dtype]


@dataclass(frozen=True, slots=True)
class Difference:
    """A mismatch, or a tie: two tokens so nearly as likely that rounding may decide between them."""

    request: str
    position: int
    """Of the first token that differs, from 0."""
    token: int
    expected_token: int
    reason: str
    logprob: float | None = None
    expected_logprob: float | None = None
    gap: float | None = None
    """Between the log-probabilities of a tie's two tokens."""


@dataclass(slots=True)
class Compared:
    """What a list of answers came to."""

    requests: int = 0
    tokens: int = 0
    logprobs: int = 0
    identical_logprobs: int = 0
    mismatches: list[Difference] = field(default_factory=list)
    ties: list[Difference] = field(default_factory=list)

    def __add__(self, other: "Compared") -> "Compared":
        return Compared(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


def compare(got: Sequence[Answer], expected: Mapping[str, Answer], allowed: Tolerance) -> Compared:
    """In the order in which they were answered: what follows an answer in other pieces builds on other bits."""
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
            return  # what follows answers another text
        result.tokens += 1
        gaps = [abs(here[key] - there[key]) for key in here.keys() & there.keys()]
        result.logprobs += len(gaps)
        result.identical_logprobs += gaps.count(0.0)
        limit = 0.0 if strict else allowed.logprob
        if not math.isfinite(here[token]) or not all(gap <= limit for gap in gaps):  # a NaN is not equal either
            worst = f"log-probabilities apart by {max(gaps):.3g}, and {limit:.3g} is rounding"
            result.mismatches.append(differs(position, worst))
            return


def _gap(here: Mapping[int, float], there: Mapping[int, float], token: int, other: int) -> float | None:
    """How far apart both engines saw the two tokens; None if one of them did not take both into account."""
    if not all(key in seen for key in (token, other) for seen in (here, there)):
        return None
    return max(abs(seen[token] - seen[other]) for seen in (here, there))


def noise(first: Iterable[Answer], again: Iterable[Answer]) -> float:
    """The furthest that one engine's answers are apart when it computes the same prompts in other pieces; without end
    where it answered with a token that was not among the likeliest before."""
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
    """How many of one engine's answers had other tokens when it computed the same prompts in other pieces."""
    known = {answer.name: answer.tokens for answer in first}
    return sum(answer.tokens != known[answer.name] for answer in again)


@dataclass(frozen=True, slots=True)
class Distance:
    """How far one engine's log-probabilities are from another's: of the likeliest tokens of both, at the tokens that
    decode steps yield (an answer's first one comes from prefill), up to the first that differs, and with it."""

    tokens: int = 0
    differing: int = 0
    """Tokens that are not the other engine's: at most one of an answer, since what follows answers another text."""
    logprobs: int = 0
    total: float = 0.0
    largest: float = 0.0
    """Without end where a token differs that the other engine did not rank."""

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
                # A NaN is as far as can be, and max() would not see it.
                gaps = [gap if math.isfinite(gap) else math.inf for gap in gaps]
                if token != other and _gap(here, there, token, other) is None:
                    gaps.append(math.inf)
                result += Distance(1, int(token != other), len(gaps), sum(gaps), max(gaps, default=0.0))
            if token != other:
                break
    return result


def too_far(own: Distance, yardstick: Distance, name: str) -> str:
    """Why answers with attention on the CPU are further from the GPU's than those of another kernel; empty if not.

    A mean is over hundreds of numbers or more, and must not be larger. The largest of them is a single one, which
    varies by chance with kernels that round alike: twice the other's is still rounding, as elsewhere.
    """
    if not own.logprobs or not yardstick.logprobs:
        return "no log-probability of a decode step was compared, so nothing is proven"
    if not 0 < yardstick.mean < math.inf:
        return f"with {name} log-probabilities are apart by {yardstick}, which is not a yardstick"
    if own.mean > yardstick.mean or own.largest > _MARGIN * yardstick.largest:
        return f"log-probabilities are too far from those of the GPU alone: {own}; with {name}: {yardstick}"
    return ""


def bounded(allowed: Tolerance, yardstick: Distance) -> Tolerance:
    """For answers that need not be nearer than the yardstick's, whose distance decides: ties excuse any number."""
    furthest = max(allowed.logprob, _MARGIN * yardstick.largest)
    # Two tokens change places if each moves by as much.
    return Tolerance(logprob=furthest, tie=max(allowed.tie, 2 * furthest), same_pieces=False, tied_share=1.0)
