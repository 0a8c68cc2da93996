"""Models in the registry: their names, sources and settings."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from overspill.registry.database import Registry
from overspill.registry.errors import ChangedMeanwhile, DuplicateModel, RegistryError, StillRunning, UnknownModel
from overspill.registry.runs import Run, running_in
from overspill.registry.tables import ModelRow, ModelSettings, copied, needs_restart, now, storable
from overspill.settings import MAX_NAME_LENGTH, among, is_name, parse_settings

# Key next to the settings in a model's row; no setting has this name.
_BEFORE_TUNE = "before_tune"


def parse_name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise RegistryError(f"a model needs a name, got {name!r:.80}; write for example qwen or Qwen/Qwen3-8B")
    if len(name) > MAX_NAME_LENGTH:
        raise RegistryError(
            f"the name {name[:40]!r}… has {len(name)} characters; a model's name has at most {MAX_NAME_LENGTH}"
        )
    if not is_name(name):
        raise RegistryError(
            f"{name!r} is not a name for a model: letters, digits and . _ : - are accepted, with / between parts that "
            "begin with a letter or a digit; write for example qwen3:8b or Qwen/Qwen3-8B"
        )
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    name: str
    settings: ModelSettings
    version: int
    """Change counter; pass it to `edit_model` to refuse the edit if the model changed meanwhile."""
    created_at: datetime
    updated_at: datetime

    @property
    def names(self) -> dict[str, dict[str, Any]]:
        """Names under which clients may call the model, and what each name changes in a request."""
        return _names(self.name, self.settings)

    def as_json(self) -> dict[str, Any]:
        times = {"created_at": self.created_at.isoformat(), "updated_at": self.updated_at.isoformat()}
        return {"name": self.name, **self.settings.as_json(), "version": self.version, **times}


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    before: Model
    after: Model
    running: tuple[Run, ...]
    """Runs of the model that have not ended."""
    needs_restart: tuple[str, ...]
    """Changed settings that at least one of these runs applies only after a restart."""

    @property
    def changed(self) -> list[str]:
        old, new = self.before.settings.values, self.after.settings.values
        return [name for name in new if new[name] != old[name]]


def add_model(registry: Registry, name: str, settings: Mapping[str, object]) -> Model:
    """Add a model; without a `source`, the name is the source: a repository of the hub."""
    name = parse_name(name)
    parsed = parse_settings({"source": name, **{key: value for key, value in settings.items() if value is not None}})
    at = now()
    row = ModelRow(name=name, settings=_kept(ModelSettings(**parsed)), created_at=at, updated_at=at)
    with registry.writing() as session:
        _refuse_taken_names(session, name, ModelSettings(**parsed))
        session.add(row)
        try:
            session.flush()
        except IntegrityError as error:
            raise DuplicateModel(
                f"there is a model {name} already; change it with: overspill models edit {name}"
            ) from error
        return _model(row)


def list_models(registry: Registry) -> list[Model]:
    """All models, sorted by name."""
    with registry.reading() as session:
        # Sorted here: collations differ between databases.
        return sorted(map(_model, session.scalars(select(ModelRow))), key=lambda model: model.name)


def get_model(registry: Registry, name: str) -> Model:
    with registry.reading() as session:
        return _model(_row(session, name))


def edit_model(
    registry: Registry, name: str, changes: Mapping[str, object], *, version: int | None = None, by_tune: bool = False
) -> Edit:
    """Change the named settings; None takes a setting back. With `version`, refuse if the model changed since. A change
    `by_tune` keeps the previous settings for `undo_tune`, until the next change."""
    parsed = parse_settings(changes)

    def change(_: ModelRow, before: ModelSettings) -> dict[str, Any]:
        return {**_kept(before.changed(parsed)), **({_BEFORE_TUNE: _kept(before)} if by_tune else {})}

    return _edit(registry, name, change, version=version)


def undo_tune(registry: Registry, name: str) -> Edit:
    """Restore the settings from before the last change, which must have been made by tune."""

    def change(row: ModelRow, _: ModelSettings) -> dict[str, Any]:
        if (before := row.settings.get(_BEFORE_TUNE)) is None:
            raise RegistryError(
                f"the last change of {name} was not made by overspill tune; change it with: overspill models edit "
                f"{name}"
            )
        return dict(before)

    return _edit(registry, name, change)


def _edit(
    registry: Registry, name: str, change: Callable[[ModelRow, ModelSettings], dict[str, Any]],
    *, version: int | None = None,
) -> Edit:  # fmt: skip
    with registry.writing() as session:
        row = _row(session, name)
        before = _model(row)
        _refuse_other_version(before, version)
        changed = change(row, before.settings)
        if (settings := ModelSettings.from_json(changed)) != before.settings:
            _refuse_taken_names(session, name, settings)
            row.settings, row.updated_at = changed, now()
        session.flush()
        after, running = _model(row), running_in(session, row.id)
    started = [ModelSettings.from_json(run.settings) if run.settings else before.settings for run in running]
    restart = {setting for settings in started for setting in needs_restart(settings, after.settings)}
    in_order = (name for name in after.settings.values if name in restart)
    return Edit(before=before, after=after, running=tuple(running), needs_restart=tuple(in_order))


def remove_model(registry: Registry, name: str, *, version: int | None = None, force: bool = False) -> Model:
    """Remove a model but keep its runs and results. A running model needs `force`, and goes on running."""
    with registry.writing() as session:
        row = _row(session, name)
        model = _model(row)
        _refuse_other_version(model, version)
        running = running_in(session, row.id)
        if running and not force:
            raise StillRunning(f"{name} is running ({running[0].process_text}); stop it first, or use --force")
        session.delete(row)
    return model


def _row(session: Session, name: str) -> ModelRow:
    # PostgreSQL needs the row lock; SQLite locks the whole database for a transaction that writes.
    writes = session.get_bind().get_execution_options().get("overspill_writes")
    query = select(ModelRow).where(ModelRow.name == name)
    # An invalid name is not looked up: the database may refuse its text.
    row = session.scalar(query.with_for_update() if writes else query) if is_name(name) else None
    if row is None:
        known = session.scalars(select(ModelRow.name)).all()
        hint = among(name, known, "there are none yet; add it with: overspill models add")
        raise UnknownModel(f"there is no model {name!r:.220} in the registry; {hint}")
    return row


def _names(name: str, settings: ModelSettings) -> dict[str, dict[str, Any]]:
    plain = [name, *(settings.aliases.split(",") if settings.aliases else ())]
    variants = json.loads(settings.variants) if settings.variants else {}
    changed = {f"{one}:{variant}": changes for one in plain for variant, changes in variants.items()}
    return {**changed, **{one: {} for one in plain}}


def _refuse_taken_names(session: Session, name: str, settings: ModelSettings) -> None:
    own = _names(name, settings)
    for row in session.scalars(select(ModelRow).where(ModelRow.name != name)):
        if taken := sorted(own.keys() & _names(row.name, ModelSettings.from_json(row.settings)).keys()):
            what = "a model of its own" if taken[0] == row.name else f"another name of {row.name}"
            free = "" if taken[0] == row.name else f", or give that model others with: overspill models edit {row.name}"
            raise DuplicateModel(f"{taken[0]} is {what} already; choose another name{free}")


def _refuse_other_version(model: Model, version: int | None) -> None:
    if version is not None and version != model.version:
        raise ChangedMeanwhile(
            f"{model.name} was changed meanwhile: it is at version {model.version}, and this change was for version "
            f"{version}. Nothing was written; look at it again with: overspill models show {model.name}"
        )


def _kept(settings: ModelSettings) -> dict[str, Any]:
    """Settings that are set, as stored in the row; they must suit both databases."""
    values = {name: value for name, value in settings.as_json().items() if value not in (None, [])}
    return dict(storable(values, "a model's settings"))


def _model(row: ModelRow) -> Model:
    return copied(Model, row, settings=ModelSettings.from_json(row.settings))
