"""Import of models from a YAML or JSON file, or from the cache of Hugging Face's tools."""

import json
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from overspill.kv.errors import OverspillError
from overspill.registry.database import Registry
from overspill.registry.errors import CannotNow, DuplicateModel, RegistryError, UnknownModel
from overspill.registry.models import add_model, edit_model, get_model, parse_name
from overspill.settings import parse_settings

_LARGEST_FILE_BYTES = 16 << 20
# Printed by `overspill models list --json` beside the settings; ignored, so its output can be imported elsewhere.
_BESIDE = {"name", "version", "created_at", "updated_at", "running"}
_SHAPE = "write `models:`, and below it each model's name with its settings"


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    settings: Mapping[str, object]
    where: str
    is_from_cache: bool = False
    problem: str = ""
    """Why the entry cannot be imported, if already known."""


def read_models_file(path: Path) -> list[Entry]:
    """Entries under `models:`, either a mapping of names to settings or a list of settings that include a name."""
    written = _parse(path, _read(path))
    if not isinstance(written, dict) or "models" not in written:
        raise RegistryError(f"{path} has no `models`; {_SHAPE}")
    if others := [key for key in written if key != "models"]:
        raise RegistryError(f"{path}: {str(others[0])[:80]!r} is not known beside `models`; {_SHAPE}")
    models = written["models"]
    if isinstance(models, dict):
        return [_entry(path, f"models.{name}", name, settings) for name, settings in models.items()]
    if isinstance(models, list):
        return [
            _entry(path, f"models[{number}]", each.get("name") if isinstance(each, dict) else None, each)
            for number, each in enumerate(models)
        ]
    raise RegistryError(f"{path}: `models` is neither a mapping nor a list; {_SHAPE}")


def _entry(path: Path, where: str, name: object, settings: object) -> Entry:
    shown = name if isinstance(name, str) else where
    where = f"{path}: {where[:220]}"
    if not isinstance(name, str):
        return Entry(shown, {}, where, problem=f"{where}: the name is not a text; give it one, in quotes if need be")
    if settings is None:
        return Entry(name, {}, where)
    if not isinstance(settings, dict):
        return Entry(name, {}, where, problem=f"{where}: a mapping of settings is needed here")
    return Entry(name, {key: value for key, value in settings.items() if key not in _BESIDE}, where)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_FILE_BYTES + 1)
    except OSError as error:
        raise RegistryError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > _LARGEST_FILE_BYTES:
        raise RegistryError(f"{path} is larger than {_LARGEST_FILE_BYTES >> 20} MiB, too large for a list of models")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise RegistryError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _parse(path: Path, text: str) -> Any:
    is_json = path.suffix == ".json"
    try:
        return json.loads(text, object_pairs_hook=_unique) if is_json else yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark is not None else ""
        raise RegistryError(f"{path} is not YAML: {line}{error.problem}") from error
    except RecursionError as error:
        raise RegistryError(f"{path} is nested too deeply; {_SHAPE}") from error
    except (ValueError, yaml.YAMLError) as error:
        kind = "JSON" if is_json else "YAML"
        raise RegistryError(f"{path} is not {kind}: {' '.join(str(error).split())[:200]}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dict, refusing duplicate keys, of which Python would silently take the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r:.80} is there twice")
    return found


class _Loader(yaml.SafeLoader):
    """Loader of YAML without objects; refuses duplicate keys, of which PyYAML would silently take the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":  # `<<`, which may occur twice
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable):
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{str(key)[:80]!r} is there twice", key_node.start_mark
                    )
                seen.add(key)
        return super().construct_mapping(node, deep)


def scan_hub_cache(cache: Path) -> list[Entry]:
    """Entries for all cached repositories; one without a config.json cannot be served and is marked with a problem."""
    try:
        folders = sorted(folder for folder in cache.iterdir() if folder.name.startswith("models--"))
    except OSError as error:
        raise RegistryError(
            f"Hugging Face's cache {cache} cannot be read: {error.strerror}; set HF_HOME or HF_HUB_CACHE, or name a "
            "file of models"
        ) from error
    return [_cached(folder) for folder in folders]


def _cached(folder: Path) -> Entry:
    parts = folder.name.split("--")[1:]
    name = "/".join(parts)
    problem = ""
    if len(parts) > 2 or not all(parts):
        problem = f"{folder.name} is not a folder that Hugging Face's tools make"
    elif not any(folder.glob("snapshots/*/config.json")):
        problem = f"{folder} holds no config.json; fetch the model again"
    return Entry(name, {"source": name}, str(folder), is_from_cache=True, problem=problem)


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
    """Source of an added model, changed settings, or the problem."""


def import_models(registry: Registry, entries: Iterable[Entry]) -> list[Imported]:
    """Add or change models; an existing model keeps the settings that its entry does not name."""
    return [_import_one(registry, entry) for entry in entries]


def _import_one(registry: Registry, entry: Entry) -> Imported:
    if entry.problem:
        return Imported(entry.name, Outcome.INVALID, entry.problem)
    try:
        name = parse_name(entry.name)
        settings = parse_settings(entry.settings, entry.where)
        while True:
            # Another process may add or remove the model between the two attempts.
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
        # The user's own model of that name takes precedence over the cache.
        get_model(registry, name)
        return Imported(name, Outcome.UNCHANGED, "")
    edit = edit_model(registry, name, settings)
    return Imported(name, Outcome.CHANGED if edit.changed else Outcome.UNCHANGED, ", ".join(edit.changed))
