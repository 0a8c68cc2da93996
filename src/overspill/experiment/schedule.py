"""In which order configurations are measured, and which measurements are missing."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Step:
    repeat: int
    """From 1 on."""
    label: str


def steps(labels: Sequence[str], repeats: int, *, keeps_engines: bool) -> list[Step]:
    """Interleaved: A B, B A, A B. A machine that becomes slower with time, as a card that becomes warm, then does so
    for all alike. An engine that is kept has its repeats one after the other: two do not fit the GPU."""
    if keeps_engines:
        return [Step(repeat, label) for label in labels for repeat in range(1, repeats + 1)]
    return [
        Step(repeat, label)
        for repeat in range(1, repeats + 1)
        for label in (labels if repeat % 2 else list(reversed(labels)))
    ]


def remaining(planned: Sequence[Step], done: Collection[Step]) -> list[Step]:
    return [step for step in planned if step not in done]


def is_last_of_life(planned: Sequence[Step], index: int, *, keeps_engines: bool) -> bool:
    """Whether the engine of a step has nothing to do after it."""
    if not keeps_engines or index + 1 == len(planned):
        return True
    return planned[index + 1].label != planned[index].label
