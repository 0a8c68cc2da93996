"""What differs between repeats that are done and those to come: a comparison needs all of them to be of the same."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from overspill.experiment.errors import ExperimentError
from overspill.flags import without_secrets
from overspill.registry import Result, environment_that_matters

_SHOWN_CHARACTERS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """With what a configuration is measured now."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    """All of it; only what matters is compared, and no secrets."""
    versions: Mapping[str, str]
    gpu: str | None
    driver: str | None
    cpu: str | None


def changes(results: Sequence[Result], now: Mapping[str, Setup]) -> dict[str, list[str]]:
    """By label: how what is finished of it was measured otherwise than it would be now, in words."""
    found: dict[str, dict[str, None]] = {}
    for one in results:
        setup = now.get(one.label or "")
        if one.is_complete and setup is not None:
            found.setdefault(one.label or "", {}).update(dict.fromkeys(_changes(one, setup)))
    return {label: list(told) for label, told in found.items() if told}


def require_same_model(results: Sequence[Result], source: str, experiment: str) -> None:
    """A folder named without its whole path, or a name of the registry, may be another model by now."""
    for one in results:
        if isinstance(was := one.config.get("source"), str) and was != source:
            raise ExperimentError(
                f"experiment {experiment} measured {was}, and {one.model} is {source} here. Resume it where "
                f"{one.model} is the same, or start a new one without --resume"
            )


def _changes(before: Result, now: Setup) -> list[str]:
    told = _command_changes(_without_port(before.argv), _without_port(without_secrets(now.command)))
    told += _value_changes("", before.versions, now.versions, absent="not installed")
    environment = environment_that_matters(now.environment)
    told += _value_changes("variable ", before.environment, environment, absent="not set")
    machine = before.config.get("machine")
    cpu = machine.get("cpu") if isinstance(machine, dict) else None
    pairs = {"GPU": (before.gpu, now.gpu), "driver": (before.driver, now.driver), "CPU": (cpu, now.cpu)}
    told += [f"{name} is {new or 'none'}, was {old or 'none'}" for name, (old, new) in pairs.items() if old != new]
    return told


def _command_changes(before: Sequence[str], now: Sequence[str]) -> list[str]:
    if list(before) == list(now):
        return []
    new = [word for word in now if word not in before]
    gone = [word for word in before if word not in now]
    parts = [f"{what} {_shown(' '.join(words))}" for what, words in (("with", new), ("without", gone)) if words]
    return [f"its command is another one, {' and '.join(parts) or 'in another order'}"]


def _value_changes(kind: str, before: Mapping[str, Any], now: Mapping[str, Any], *, absent: str) -> list[str]:
    return [
        f"{kind}{name} is {_shown(now.get(name, absent))}, was {_shown(before.get(name, absent))}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]


def _without_port(command: Sequence[str]) -> list[str]:
    """And without the interpreter, which may lie elsewhere."""
    words = list(command[1:])
    place = words.index("--port") if "--port" in words else len(words)
    return words[:place] + words[place + 2 :]


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"
