"""From the words of a command to what is to be tuned: a new tuning, or one that goes on."""

from collections.abc import Mapping, Sequence
from typing import Any

from overspill.kv.errors import OverspillError
from overspill.registry import Registry, Result
from overspill.settings import parse_duration, parse_settings
from overspill.tune.definition import Definition, load
from overspill.tune.errors import TuneError
from overspill.tune.goals import Goal, parse_goal
from overspill.tune.planned import define
from overspill.tune.report import candidates_of
from overspill.tune.resumed import resumed
from overspill.tune.subject import Subject, find_subject, registered_subject

_NOT_OF_CONTEXT = {
    "workload": "sends one prompt of the length that is tried; leave out --workload",
    "repeats": "tries each length once; leave out --repeats",
    "most": "tries lengths, each chosen by what the last one came to; leave out --candidates, and give --budget to "
    "end it in time",
}


def parse_budget(text: str) -> float:
    try:
        return float(parse_duration(text))
    except OverspillError as error:
        raise TuneError(f"--budget: {error}") from error


def prepare(
    registry: Registry, resume: str | None, *, model: str | None, name: str | None, goal: str | None,
    given: Mapping[str, Any], **how: Any,
) -> tuple[Definition, Subject]:  # fmt: skip
    """What is to be tried, and the model as the registry has it now. None for what was not given."""
    asked = {key: value for key, value in given.items() if value is not None}
    how = {key: value for key, value in how.items() if value is not None}
    if resume is not None:
        stored, results = load(registry, resume)
        if extra := [*asked, *how, *(key for key, value in (("name", name), ("goal", goal)) if value is not None)]:
            flag = {"most": "candidates"}.get(extra[0], extra[0]).replace("_", "-")
            raise TuneError(f"--{flag} cannot be given with --resume: it is that of {resume}; leave it out")
        if model not in (None, stored.model):
            raise TuneError(f"{resume} is a tuning of {stored.model}, and not of {model}; leave out the model")
        return stored, _subject_again(registry, stored, results)
    if model is None:
        raise TuneError("name a model: overspill tune MODEL --goal throughput")
    if model.startswith("-"):
        raise TuneError(f"the model comes first; {model!r:.60} is a flag")
    aim = parse_goal(goal or Goal.THROUGHPUT)
    if "least_tokens_per_s" in how and aim is not Goal.CONTEXT:
        raise TuneError("--least-tokens-per-s is for --goal context; leave it out")
    if aim is Goal.CONTEXT and (extra := [key for key in _NOT_OF_CONTEXT if key in how]):
        raise TuneError(f"--goal context {_NOT_OF_CONTEXT[extra[0]]}")
    parse_settings(asked)
    subject = find_subject(registry, model, name, opens=_opens(aim))
    return define(subject, model=model, goal=aim, given=asked, **how), subject


def _subject_again(registry: Registry, stored: Definition, results: Sequence[Result]) -> Subject:
    if stored.subject is None:
        return find_subject(registry, stored.model, stored.name, opens=_opens(stored.goal))
    now = registered_subject(registry, stored.name)
    return resumed(stored.subject, now, stored.given, candidates_of(stored, results))


def _opens(goal: Goal) -> tuple[str, ...]:
    return ("max_model_len",) if goal is Goal.CONTEXT else ()
