"""Rounds of a soak, put together."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from overspill.verify.comparison import Compared
from overspill.verify.outcome import Outcome


def merged(before: Sequence[Outcome], more: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """One for each scenario, in the order in which they were first tried."""
    found = {outcome.scenario.name: outcome for outcome in before}
    for outcome in more:
        known = found.get(outcome.scenario.name)
        found[outcome.scenario.name] = outcome if known is None else _added(known, outcome)
    return tuple(found.values())


def _added(one: Outcome, other: Outcome) -> Outcome:
    if other.skipped:
        return one
    return replace(
        other,
        seconds=one.seconds + other.seconds,
        awaited=one.awaited + other.awaited,
        compared=_compared(one.compared, other.compared),
        figures=_figures(one.figures, other.figures),
        # A model that could tell once can tell.
        sensitive=other.sensitive if one.sensitive is None else one.sensitive or other.sensitive,
    )


def _compared(one: Compared, other: Compared) -> Compared:
    return Compared(
        one.requests + other.requests, one.tokens + other.tokens, one.logprobs + other.logprobs,
        one.identical_logprobs + other.identical_logprobs, one.mismatches + other.mismatches, one.ties + other.ties,
    )  # fmt: skip


def _figures(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in one.keys() | other.keys()}
