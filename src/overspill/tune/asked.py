"""From the words of a command to what is to be tuned: a new tuning, or one that goes on."""

from collections.abc import Mapping
from typing import Any

from overspill.kv.errors import OverspillError
from overspill.registry import MODEL_SETTINGS, Registry
from overspill.registry.model_settings import parse_settings
from overspill.tune.definition import Definition, load
from overspill.tune.errors import TuneError
from overspill.tune.goals import Goal, parse_goal
from overspill.tune.planned import define
from overspill.tune.subject import Subject, find_subject

_DURATION = next(setting for setting in MODEL_SETTINGS if setting.name == "ttl")


def parse_budget(text: str) -> float:
    try:
        return float(_DURATION.parse(text))
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
        stored = load(registry, resume)[0]
        if extra := [*asked, *how, *(key for key, value in (("name", name), ("goal", goal)) if value is not None)]:
            flag = {"most": "candidates"}.get(extra[0], extra[0]).replace("_", "-")
            raise TuneError(f"--{flag} cannot be given with --resume: it is that of {resume}; leave it out")
        if model not in (None, stored.model):
            raise TuneError(f"{resume} is a tuning of {stored.model}, and not of {model}; leave out the model")
        return stored, _subject(registry, stored.model, stored.name, stored.goal)
    if model is None:
        raise TuneError("name a model: overspill tune MODEL --goal throughput")
    if model.startswith("-"):
        raise TuneError(f"the model comes first; {model!r:.60} is a flag")
    aim = parse_goal(goal or Goal.THROUGHPUT)
    if "least_tokens_per_s" in how and aim is not Goal.CONTEXT:
        raise TuneError("--least-tokens-per-s is for --goal context; leave it out")
    if "workload" in how and aim is Goal.CONTEXT:
        raise TuneError("--goal context sends one prompt of the length that is tried; leave out --workload")
    parse_settings(asked)
    subject = _subject(registry, model, name, aim)
    return define(subject, model=model, goal=aim, given=asked, **how), subject


def _subject(registry: Registry, model: str, name: str | None, goal: Goal) -> Subject:
    return find_subject(registry, model, name, opens=("max_model_len",) if goal is Goal.CONTEXT else ())
