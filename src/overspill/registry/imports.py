"""Importing models: each on its own, so that one mistake does not keep the others out; twice is as once."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from overspill.kv.errors import OverspillError
from overspill.registry.database import Registry
from overspill.registry.entries import Entry
from overspill.registry.errors import CannotNow, DuplicateModel, UnknownModel
from overspill.registry.model_settings import parse_settings
from overspill.registry.models import add_model, edit_model, get_model
from overspill.registry.names import parse_name


class Outcome(StrEnum):
    ADDED = "added"
    CHANGED = "changed"
    UNCHANGED = "unchanged"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True)
class Imported:
    name: str
    outcome: Outcome
    detail: str
    """What changed, or what is wrong."""


def import_models(registry: Registry, entries: Iterable[Entry]) -> list[Imported]:
    """A model that is there keeps the settings that an entry does not name."""
    return [_import_one(registry, entry) for entry in entries]


def _import_one(registry: Registry, entry: Entry) -> Imported:
    if entry.problem:
        return Imported(entry.name, Outcome.INVALID, entry.problem)
    try:
        name = parse_name(entry.name)
        settings = parse_settings(entry.settings, entry.where)
        while True:
            # Another process may add or remove it between the two.
            try:
                return _edit(registry, entry, name, settings)
            except UnknownModel:
                pass
            try:
                model = add_model(registry, name, settings)
                return Imported(name, Outcome.ADDED, model.settings.source)
            except DuplicateModel:
                pass
    except CannotNow:
        raise
    except OverspillError as error:
        where = "" if entry.where in str(error) else f"{entry.where}: "
        return Imported(entry.name, Outcome.INVALID, f"{where}{error}")


def _edit(registry: Registry, entry: Entry, name: str, settings: dict[str, object]) -> Imported:
    if entry.is_from_cache:
        # What the user made of that name counts more than where the cache has it.
        get_model(registry, name)
        return Imported(name, Outcome.UNCHANGED, "")
    edit = edit_model(registry, name, settings)
    return Imported(name, Outcome.CHANGED if edit.changed else Outcome.UNCHANGED, ", ".join(edit.changed))
