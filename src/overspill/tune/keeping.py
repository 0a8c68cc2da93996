"""The best candidate as the model's settings in the registry: added, or changed if nobody else has."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overspill.registry import Edit, Model, Registry, add_model, edit_model
from overspill.settings import BY_NAME
from overspill.tune.candidates import TUNABLE, Candidate
from overspill.tune.subject import Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    model: Model
    edit: Edit | None = None
    """None if it was added."""

    def as_text(self) -> list[str]:
        name, after = self.model.name, self.model.as_json()
        if self.edit is None:
            return [f"added to the registry: {name}", *(f"  {key}: {shown(key, after[key])}" for key in _set(after))]
        if not self.edit.changed:
            return [f"{name} in the registry has these settings already"]
        before = self.edit.before.as_json()
        lines = [f"changed in the registry: {name}"]
        lines += [f"  {key}: {shown(key, before[key])} -> {shown(key, after[key])}" for key in self.edit.changed]
        if self.edit.needs_restart:
            running = ", ".join(run.process_text for run in self.edit.running)
            lines.append(f"{name} is running ({running}); after a restart only: {', '.join(self.edit.needs_restart)}")
        return lines

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model.as_json(),
            "is_added": self.edit is None,
            "changed": list(self.edit.changed) if self.edit is not None else _set(self.model.as_json()),
            "needs_restart": list(self.edit.needs_restart) if self.edit is not None else [],
        }


def keep(registry: Registry, subject: Subject, winner: Candidate, given: Mapping[str, Any]) -> Kept:
    """Raises `ChangedMeanwhile` if the model is not what it was when the tuning began."""
    changes = settings_to_keep(subject, winner, given)
    if subject.version is None:
        return Kept(model=add_model(registry, subject.name, {"source": subject.source, **changes}))
    edit = edit_model(registry, subject.name, changes, version=subject.version)
    return Kept(model=edit.after, edit=edit)


def settings_to_keep(subject: Subject, winner: Candidate, given: Mapping[str, Any]) -> dict[str, Any]:
    """What was open and is not said by the winner is taken back; the rest is as it was, whatever was kept before."""
    opened = dict.fromkeys((*TUNABLE, *subject.tuned))
    asked = {name: value for name, value in given.items() if value is not None}
    words = [*subject.vllm_args, *winner.vllm_args]
    return {**opened, **subject.settings, **asked, **winner.settings, "vllm_args": words or None}


def _set(values: Mapping[str, Any]) -> list[str]:
    told = ("name", "version", "created_at", "updated_at")
    return [name for name, value in values.items() if name not in told and value not in (None, [])]


def shown(name: str, value: Any) -> str:
    return BY_NAME[name].shown(value)
