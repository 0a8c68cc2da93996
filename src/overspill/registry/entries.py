"""Models to import: from a YAML or JSON file, or from what Hugging Face's tools have fetched."""

import json
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from overspill.registry.errors import BadModelsFile

_LARGEST_FILE_BYTES = 16 << 20
# What `overspill models list --json` tells beside the settings, so that its output can be imported elsewhere.
_TOLD = {"name", "version", "created_at", "updated_at", "running"}
_SHAPE = "write `models:`, and below it each model's name with its settings"


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    settings: Mapping[str, object]
    where: str
    is_from_cache: bool = False
    problem: str = ""
    """Why it cannot be imported, if that is known already."""


def read_models_file(path: Path) -> list[Entry]:
    """`models:` with a mapping of names to settings, or with a list of settings that hold a name."""
    written = _parse(path, _read(path))
    if not isinstance(written, dict) or "models" not in written:
        raise BadModelsFile(f"{path} has no `models`; {_SHAPE}")
    if others := [key for key in written if key != "models"]:
        raise BadModelsFile(f"{path}: {str(others[0])[:80]!r} is not known beside `models`; {_SHAPE}")
    models = written["models"]
    if isinstance(models, dict):
        return [_entry(path, f"models.{name}", name, settings) for name, settings in models.items()]
    if isinstance(models, list):
        return [
            _entry(path, f"models[{number}]", each.get("name") if isinstance(each, dict) else None, each)
            for number, each in enumerate(models)
        ]
    raise BadModelsFile(f"{path}: `models` is neither a mapping nor a list; {_SHAPE}")


def _entry(path: Path, where: str, name: object, settings: object) -> Entry:
    shown = name if isinstance(name, str) else where
    where = f"{path}: {where[:220]}"
    if not isinstance(name, str):
        return Entry(shown, {}, where, problem=f"{where}: the name is not a text; give it one, in quotes if need be")
    if settings is None:
        return Entry(name, {}, where)
    if not isinstance(settings, dict):
        return Entry(name, {}, where, problem=f"{where}: a mapping of settings is needed here")
    return Entry(name, {key: value for key, value in settings.items() if key not in _TOLD}, where)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_FILE_BYTES + 1)
    except OSError as error:
        raise BadModelsFile(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > _LARGEST_FILE_BYTES:
        raise BadModelsFile(f"{path} is larger than {_LARGEST_FILE_BYTES >> 20} MiB, which no list of models is")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise BadModelsFile(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _parse(path: Path, text: str) -> Any:
    is_json = path.suffix == ".json"
    try:
        return json.loads(text, object_pairs_hook=_unique) if is_json else yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark is not None else ""
        raise BadModelsFile(f"{path} is not YAML: {line}{error.problem}") from error
    except RecursionError as error:
        raise BadModelsFile(f"{path} is nested too deeply; {_SHAPE}") from error
    except (ValueError, yaml.YAMLError) as error:
        kind = "JSON" if is_json else "YAML"
        raise BadModelsFile(f"{path} is not {kind}: {' '.join(str(error).split())[:200]}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Python would take the last of two in silence."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r:.80} is there twice")
    return found


class _Loader(yaml.SafeLoader):
    """YAML without objects, and without the same key twice, of which PyYAML would take the last in silence."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":  # `<<`, which may be there twice
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
    """A repository with a config is a model that can be served; a part of one is named, and not imported."""
    try:
        folders = sorted(folder for folder in cache.iterdir() if folder.name.startswith("models--"))
    except OSError as error:
        raise BadModelsFile(
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
