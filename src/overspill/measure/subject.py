"""The model being tuned: its state in the registry, which settings are open to change, and how the best are kept.

A tuning is resumed only if the model is unchanged: measurements of another source or with other flags cannot be ranked
with the old ones, and keeping the best would overwrite somebody's change. Settings that the tuning itself kept, when
its time was over, are not such a change.
"""

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from overspill.flags import Flag, read_flags
from overspill.launch.reference import ModelRef
from overspill.measure import MeasureError
from overspill.measure.candidates import AS_IT_IS, CONNECTOR, TRANSFER, TUNABLE, TUNABLE_FLAGS, Candidate, Replan
from overspill.registry import (
    ChangedMeanwhile,
    Edit,
    Model,
    Registry,
    UnknownModel,
    add_model,
    edit_model,
    get_model,
)
from overspill.registry.models import parse_name
from overspill.settings import BY_NAME, as_flags, parse_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    name: str
    """Name in the registry, now or once the best is kept."""
    source: str
    version: int | None = None
    """Version in the registry when read; None if the model is not there yet."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `overspill serve` that stay as they are."""
    vllm_args: tuple[str, ...] = ()
    """vLLM's own flags that stay as they are."""
    tuned: Mapping[str, Any] = field(default_factory=dict)
    """Current values of the settings that are open to change."""
    tuned_args: tuple[str, ...] = ()
    """Current words of vLLM's own flags that are open to change."""

    @property
    def named(self) -> ModelRef:
        """Model with its fixed settings, for plans and servers; candidates add the rest."""
        return ModelRef(
            name=self.name, source=self.source, is_registered=True, settings=self.settings, vllm_args=self.vllm_args
        )

    @property
    def fixed(self) -> frozenset[str]:
        """Settings not to vary: a connector other than Overspill's is somebody's choice, and vLLM takes only one."""
        return frozenset(["kv_transfer_config"] if TRANSFER in self.vllm_args else [])


def find_subject(registry: Registry, model: str, name: str | None, *, opens: tuple[str, ...] = ()) -> Subject:
    """Look up the model as the command names it; `opens` are settings open to change besides the usual ones."""
    is_folder = model.startswith(("/", ".", "~")) or os.path.isfile(os.path.join(model, "config.json"))
    found = None if is_folder else _registered(registry, model)
    if found is not None:
        if name not in (None, model):
            raise MeasureError(f"{model} is a model of the registry already; leave out --name {name}")
        return _subject(found, opens)
    source = parse_settings({"source": model})["source"]
    new = parse_name(name or (Path(source).name if is_folder else source))
    there = _registered(registry, new)
    if there is None:
        return Subject(name=new, source=source)
    if there.settings.source != source:
        raise MeasureError(
            f"there is a model {new} in the registry, and it is {there.settings.source}; give this one another name "
            "with --name"
        )
    return _subject(there, opens)


def registered_subject(registry: Registry, name: str) -> Subject | None:
    """The registry's model of that name, or None."""
    found = _registered(registry, name)
    return _subject(found, ()) if found is not None else None


def current_candidate(subject: Subject, replan: Replan, given: Mapping[str, Any], length: int) -> Candidate | None:
    """Candidate with the model's current settings; None if nothing is set or the settings no longer fit."""
    settings = {name: value for name, value in subject.tuned.items() if name not in given}
    if not settings and not subject.tuned_args:
        return None
    settings["max_model_len"] = length
    way = replan(settings).chosen
    if way is None:
        return None
    settings.setdefault("max_num_batched_tokens", way.max_num_batched_tokens)
    if given.get("max_num_batched_tokens") is not None:
        settings.pop("max_num_batched_tokens")
    return Candidate.of(way, AS_IT_IS, settings, subject.tuned_args)


def _registered(registry: Registry, name: str) -> Model | None:
    try:
        return get_model(registry, name)
    except UnknownModel:
        return None


def _subject(model: Model, opens: tuple[str, ...]) -> Subject:
    settings, flags = model.settings.for_commands, read_flags(model.settings.vllm_args)
    opened = (*TUNABLE, *opens)
    tuned = {name: settings[name] for name in opened if name in settings}
    kept = [word for flag in flags if not _is_tunable(flag) for word in flag.words]
    moved = [word for flag in flags if _is_tunable(flag) for word in flag.words]
    return Subject(
        name=model.name, source=model.settings.source, version=model.version,
        settings={name: value for name, value in settings.items() if name not in opened},
        vllm_args=tuple(kept), tuned=tuned, tuned_args=tuple(moved),
    )  # fmt: skip


def _is_tunable(flag: Flag) -> bool:
    if flag.name != TRANSFER:
        return flag.name in TUNABLE_FLAGS
    try:
        return bool(json.loads(flag.value).get("kv_connector") == CONNECTOR)
    except (ValueError, AttributeError):
        return False


def resumed(began: Subject, now: Subject | None, given: Mapping[str, Any], candidates: Sequence[Candidate]) -> Subject:
    """The subject of a resumed tuning: the model as it was, at its current version. `now` is None if the registry has
    no such model. Raises `ChangedMeanwhile` if the model is neither as it was nor as keeping a candidate leaves it."""
    if now is None:
        if began.version is None:
            return began
        raise ChangedMeanwhile(
            f"{began.name} was removed from the registry since this tuning began. Add it again as it was, with: "
            f"{_command('add', began.name, _state(began))}; or start anew, without --resume"
        )
    before, after = _state(began), _state(now)
    kept = [{**before, **parse_settings(settings_to_keep(began, each, given))} for each in candidates]
    # If a candidate was kept, compare with that state: only a person's changes have to be undone.
    if changes := min((_changes(one, after) for one in (before, *kept)), key=len):
        raise ChangedMeanwhile(_refusal(began, now, changes))
    # Settings that a kept candidate added are open too: keeping another candidate without them unsets them.
    added = {name: value for name, value in {**now.settings, **now.tuned}.items() if before.get(name) is None}
    return replace(began, version=now.version, tuned={**added, **began.tuned})


def _state(subject: Subject) -> dict[str, Any]:
    """Everything a server of the model is started with."""
    words = (*subject.vllm_args, *subject.tuned_args)
    return {"source": subject.source, **subject.settings, **subject.tuned, "vllm_args": words}


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {
        name: (before.get(name), after.get(name))
        for name in dict.fromkeys((*before, *after))
        if before.get(name) != after.get(name)
    }


def _refusal(began: Subject, now: Subject, changes: Mapping[str, tuple[Any, Any]]) -> str:
    words = ", ".join(f"{name}: {_shown(name, old)} -> {_shown(name, new)}" for name, (old, new) in changes.items())
    if began.version is None and now.source != began.source:
        return (
            f"another model was added to the registry as {began.name} since this tuning began: {now.source}, and not "
            f"{began.source}. Start anew, without --resume and with another --name"
        )
    was = "added to the registry" if began.version is None else f"changed (version {began.version} to {now.version})"
    back = _command("edit", began.name, {name: old for name, (old, _) in changes.items()})
    return (
        f"{began.name} was {was} since this tuning began, and differs in {words}: new measurements could not be "
        "compared with the earlier ones, and saving the best settings would overwrite that change. Undo it with: "
        f"{back}; or start anew, without --resume"
    )


def _command(verb: str, name: str, settings: Mapping[str, Any]) -> str:
    """Command line of `overspill models` that adds or edits a model."""
    values = {key: value for key, value in settings.items() if value not in (None, ())}
    unset = [word for key in settings if key not in values for word in ("--unset", key)] if verb == "edit" else []
    own = values.pop("vllm_args", ())
    words = [*as_flags(values), *unset, *(["--", *own] if own else [])]
    return shlex.join(["overspill", "models", verb, name, *words])


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    model: Model
    edit: Edit | None = None
    """The change to a registered model; None if the model was added."""

    def as_text(self) -> list[str]:
        name, after = self.model.name, self.model.as_json()
        if self.edit is None:
            return [
                f"added to the registry: {name}",
                *(f"  {key}: {_shown(key, after[key])}" for key in _set(after)),
                f"to undo: overspill models rm {name}",
            ]
        if not self.edit.changed:
            return [f"{name} in the registry has these settings already"]
        before = self.edit.before.as_json()
        lines = [f"changed in the registry: {name}"]
        lines += [f"  {key}: {_shown(key, before[key])} -> {_shown(key, after[key])}" for key in self.edit.changed]
        lines.append(f"to undo: overspill models undo {name}")
        if self.edit.needs_restart:
            running = ", ".join(run.process_text for run in self.edit.running)
            lines.append(
                f"{name} is running ({running}); these changes need a restart: {', '.join(self.edit.needs_restart)}"
            )
        return lines

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model.as_json(),
            "is_added": self.edit is None,
            "changed": list(self.edit.changed) if self.edit is not None else _set(self.model.as_json()),
            "needs_restart": list(self.edit.needs_restart) if self.edit is not None else [],
        }


def keep(registry: Registry, subject: Subject, winner: Candidate, given: Mapping[str, Any]) -> Kept:
    """Save the winner in the registry; raises `ChangedMeanwhile` if the model changed since the tuning began."""
    changes = settings_to_keep(subject, winner, given)
    if subject.version is None:
        return Kept(model=add_model(registry, subject.name, {"source": subject.source, **changes}))
    edit = edit_model(registry, subject.name, changes, version=subject.version, by_tune=True)
    return Kept(model=edit.after, edit=edit)


def settings_to_keep(subject: Subject, winner: Candidate, given: Mapping[str, Any]) -> dict[str, Any]:
    """Registry changes for the winner: its own settings, unset open ones, and the rest as when the tuning began."""
    opened = dict.fromkeys((*TUNABLE, *subject.tuned))
    fixed = {name: value for name, value in given.items() if value is not None}
    words = [*subject.vllm_args, *winner.vllm_args]
    return {**opened, **subject.settings, **fixed, **winner.settings, "vllm_args": words or None}


def _set(values: Mapping[str, Any]) -> list[str]:
    kept_by_registry = ("name", "version", "created_at", "updated_at")
    return [name for name, value in values.items() if name not in kept_by_registry and value not in (None, [])]


def _shown(name: str, value: Any) -> str:
    return BY_NAME[name].shown(value)
