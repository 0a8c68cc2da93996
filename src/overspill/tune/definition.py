"""What is tuned, complete: kept with every result, so that it can be repeated and gone on with."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any

from overspill.registry import Registry, Result, UnknownRecord, list_results
from overspill.tune.candidates import Candidate
from overspill.tune.errors import TuneError
from overspill.tune.goals import Goal
from overspill.tune.subject import Subject

_MOST_REPEATS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    model: str
    """As it was named."""
    name: str
    """In the registry, now or once it is kept."""
    goal: Goal
    workload: str
    """As `overspill bench` takes it; of `context` it follows from the length."""
    seed: int = 0
    repeats: int = 3
    given: Mapping[str, Any] = field(default_factory=dict)
    """Settings that were asked for: not varied, and kept."""
    pinned: Mapping[str, Any] = field(default_factory=dict)
    """Memory as it was when candidates were planned, so that all are planned alike; not kept."""
    candidates: tuple[Candidate, ...] = ()
    """Empty of `context`."""
    longest: int = 0
    """Of `context`: where it begins."""
    least_tokens_per_s: float = 0.0
    kv_cache_dtype: str | None = None
    """Of `context`, where it was allowed to be a smaller one."""
    subject: Subject | None = None
    """The model as it was; None of tunings that were begun before this was kept."""

    def __post_init__(self) -> None:
        if not 1 <= self.repeats <= _MOST_REPEATS:
            raise TuneError(f"--repeats {self.repeats} is not possible; give 1 to {_MOST_REPEATS}")
        if self.seed < 0:
            raise TuneError(f"--seed {self.seed} is negative; give 0 or more")

    def seed_of(self, repeat: int) -> int:
        """Other requests in every repeat, the same for all candidates."""
        return self.seed + repeat - 1

    def of_length(self, length: int) -> Candidate:
        settings: dict[str, Any] = {"max_model_len": length}
        if self.kv_cache_dtype is not None:
            settings["kv_cache_dtype"] = self.kv_cache_dtype
        return Candidate(label=f"{length} tokens", settings=settings, is_exact=self.kv_cache_dtype is None)

    def as_json(self) -> dict[str, Any]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            **values, "goal": str(self.goal), "given": dict(self.given), "pinned": dict(self.pinned),
            "candidates": [each.as_json() for each in self.candidates],
            "subject": self.subject.as_json() if self.subject is not None else None,
        }  # fmt: skip

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Definition":
        known = {each.name: values[each.name] for each in fields(cls) if each.name in values}
        try:
            candidates = tuple(Candidate.from_json(each) for each in known["candidates"])
            subject = Subject.from_json(known["subject"]) if known.get("subject") is not None else None
            return cls(**{**known, "goal": Goal(known["goal"]), "candidates": candidates, "subject": subject})
        except (KeyError, TypeError, ValueError) as error:
            raise TuneError("what is stored of this tuning cannot be read; start it anew") from error


def load(registry: Registry, experiment: str) -> tuple[Definition, list[Result]]:
    """And the results so far, in the order in which they were saved."""
    results = list_results(registry, experiment=experiment)[::-1]
    defined = next((one.config["tuning"] for one in results if "tuning" in one.config), None)
    if defined is None:
        raise UnknownRecord(f"there is no tuning {experiment!r:.80} in the registry; overspill results list names them")
    return Definition.from_json(defined), results


def new_name(now: datetime | None = None) -> str:
    """By time, so that a list of them is in order; the end keeps two of the same second apart."""
    return f"tune-{now or datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
