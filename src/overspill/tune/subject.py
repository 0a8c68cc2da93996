"""The model that is tuned: what the registry has of it, and what of that is open to be changed."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from overspill.flags import Flag, read_flags
from overspill.launch.reference import ModelRef
from overspill.registry import Model, Registry, UnknownModel, get_model
from overspill.registry.models import parse_name
from overspill.settings import parse_settings
from overspill.tune.candidates import CONNECTOR, TRANSFER, TUNABLE, TUNABLE_FLAGS, Candidate, Replan
from overspill.tune.errors import TuneError


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    name: str
    """In the registry, now or once the best is kept."""
    source: str
    version: int | None = None
    """At which it was read; None if it is not there yet."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of `overspill serve`, that stay as they are."""
    vllm_args: tuple[str, ...] = ()
    """That stay as they are."""
    tuned: Mapping[str, Any] = field(default_factory=dict)
    """Settings that are open to be changed, as they are now."""
    tuned_args: tuple[str, ...] = ()
    """The same of vLLM's own flags."""

    @property
    def named(self) -> ModelRef:
        """For plans and servers; the candidates say the rest."""
        return ModelRef(
            name=self.name, source=self.source, is_registered=True, settings=self.settings, vllm_args=self.vllm_args
        )

    @property
    def fixed(self) -> frozenset[str]:
        """Another connector than Overspill's is somebody's choice, and there can be one only."""
        return frozenset(["kv_transfer_config"] if TRANSFER in self.vllm_args else [])

    def as_json(self) -> dict[str, Any]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            **values, "settings": dict(self.settings), "tuned": dict(self.tuned), "vllm_args": list(self.vllm_args),
            "tuned_args": list(self.tuned_args),
        }  # fmt: skip

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Subject":
        known = {each.name: values[each.name] for each in fields(cls) if each.name in values}
        return cls(**{**known, "vllm_args": tuple(known["vllm_args"]), "tuned_args": tuple(known["tuned_args"])})


def find_subject(registry: Registry, model: str, name: str | None, *, opens: tuple[str, ...] = ()) -> Subject:
    """`model` is what the command was given; `opens` are settings that are open beside the usual ones."""
    is_folder = model.startswith(("/", ".", "~")) or os.path.isfile(os.path.join(model, "config.json"))
    found = None if is_folder else _registered(registry, model)
    if found is not None:
        if name not in (None, model):
            raise TuneError(f"{model} is a model of the registry already; leave out --name {name}")
        return _subject(found, opens)
    source = parse_settings({"source": model})["source"]
    new = parse_name(name or (Path(source).name if is_folder else source))
    there = _registered(registry, new)
    if there is None:
        return Subject(name=new, source=source)
    if there.settings.source != source:
        raise TuneError(
            f"there is a model {new} in the registry, and it is {there.settings.source}; give this one another name "
            "with --name"
        )
    return _subject(there, opens)


def registered_subject(registry: Registry, name: str) -> Subject | None:
    """None if the registry has no model of that name."""
    found = _registered(registry, name)
    return _subject(found, ()) if found is not None else None


def current_candidate(subject: Subject, replan: Replan, given: Mapping[str, Any], length: int) -> Candidate | None:
    """What is set now, if something is and it still fits."""
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
    offloads = "--offload-group-size" in subject.tuned_args
    things = bool(way.weights.ram_bytes or offloads) + bool(way.kv.spilled_bytes) + bool(way.offload_bytes)
    return Candidate(
        label="as it is", settings=settings, vllm_args=subject.tuned_args, things_in_ram=things,
        ram_bytes=way.ram_bytes, is_exact=way.is_exact,
    )  # fmt: skip


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
    return flag.name in TUNABLE_FLAGS and (flag.name != TRANSFER or _is_ours(flag.value))


def _is_ours(transfer: str) -> bool:
    try:
        return bool(json.loads(transfer).get("kv_connector") == CONNECTOR)
    except (ValueError, AttributeError):
        return False
