"""Common parts of the registry's tables: constraint names, times in UTC, JSON; and a model's row and settings."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TypeVar

from sqlalchemy import JSON, BigInteger, DateTime, Dialect, Integer, MetaData, String, Text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, mapped_column
from sqlalchemy.types import TypeDecorator

from overspill.registry.errors import RegistryError
from overspill.settings import MODEL_SETTINGS, Scope

T = TypeVar("T")
W = TypeVar("W", bound=StrEnum)
Json = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


class UtcTime(TypeDecorator[datetime]):
    """A column of datetimes with a time zone, also on SQLite, which itself stores none."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is not None and value.tzinfo is None:
            raise ValueError(f"{value} has no time zone")
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Word(TypeDecorator[W]):
    """A member of a StrEnum, stored as its text."""

    impl = Text
    cache_ok = True

    def __init__(self, kind: type[W]) -> None:
        super().__init__()
        self.kind = kind

    def process_result_value(self, value: str | None, dialect: Dialect) -> W | None:
        return None if value is None else self.kind(value)


class Base(MappedAsDataclass, DeclarativeBase):
    """Base of all rows, which are records as well: they outlive the session that read them."""

    # A named constraint can be changed by a later migration on either database.
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_name)s",
            "uq": "uq_%(table_name)s_%(column_0_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    # Byte counts outgrow 32 bits.
    type_annotation_map = {  # noqa: RUF012 (SQLAlchemy's own declaration)
        int: BigInteger,
        datetime: UtcTime,
        list[str]: Json,
        dict[str, Any]: Json,
        dict[str, str]: Json,
    }


def now() -> datetime:
    return datetime.now(UTC)


def is_key(number: int) -> bool:
    """Whether a row can have this id; the databases answer a larger one with an error, each with its own."""
    return 0 < number < 1 << 31


# NUL in JSON follows an even number of backslashes; otherwise it is the text `\\u0000`, and harmless.
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


def copied(kind: type[T], row: Base, **changed: Any) -> T:
    """Copy a row into a record that outlives its session; `changed` gives fields that differ from the row's."""
    kept = [each.name for each in fields(kind) if each.name not in changed]  # type: ignore[arg-type]
    return kind(**{name: getattr(row, name) for name in kept}, **changed)


def storable(value: Any, what: str) -> Any:
    """The value as it comes back from a JSON column. Raises RegistryError if either database would refuse it."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        text.encode()  # PostgreSQL stores neither lone surrogates
    except (TypeError, ValueError, RecursionError) as error:
        raise RegistryError(f"{what} cannot be kept as JSON: {error}") from error
    if _NUL.search(text):  # nor NUL
        raise RegistryError(f"{what} cannot be kept: a text in it holds a NUL character; leave it out")
    return json.loads(text)


@dataclass(frozen=True, slots=True, init=False)
class ModelSettings:
    """A model's settings, as attributes named as in `overspill.settings`. A setting that is None is left to the
    environment, config.toml and the plan. Sizes are in bytes, times in seconds."""

    values: Mapping[str, Any]

    def __init__(self, *, source: str, **values: Any) -> None:
        values = {"source": source, **values}
        if unknown := values.keys() - _DEFAULTS.keys():
            raise TypeError(f"a model has no setting {sorted(unknown)[0]}")
        given = {name: values.get(name, default) for name, default in _DEFAULTS.items()}
        object.__setattr__(self, "values", {**given, "vllm_args": tuple(given["vllm_args"] or ())})

    def __getattr__(self, name: str) -> Any:
        if name in _DEFAULTS:
            return self.values[name]
        raise AttributeError(f"a model has no setting {name!r}")

    @property
    def for_commands(self) -> dict[str, Any]:
        """Settings that are set and that `overspill serve` takes as well."""
        return {one.name: self.values[one.name] for one in _COMMON if self.values[one.name] is not None}

    def changed(self, changes: Mapping[str, Any]) -> "ModelSettings":
        """A copy with parsed values changed; None takes a setting back."""
        return ModelSettings(**{**self.values, **changes})

    def as_json(self) -> dict[str, Any]:
        return {**self.values, "vllm_args": list(self.vllm_args)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "ModelSettings":
        """Settings from a row, ignoring names that only later versions know."""
        return cls(**{name: value for name, value in values.items() if name in _DEFAULTS})


_DEFAULTS = {setting.name: None for setting in MODEL_SETTINGS}
_COMMON = [setting for setting in MODEL_SETTINGS if setting.scope is Scope.EVERYWHERE]


def needs_restart(before: ModelSettings, after: ModelSettings) -> list[str]:
    """Changed settings that a running server applies only after a restart."""
    return [
        one.name for one in MODEL_SETTINGS if one.takes_restart and before.values[one.name] != after.values[one.name]
    ]


class ModelRow(Base, kw_only=True):
    __tablename__ = "models"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, init=False)
    name: Mapped[str] = mapped_column(String(200), unique=True)
    # One column for all settings: a new setting needs no migration.
    settings: Mapped[dict[str, Any]]
    version: Mapped[int] = mapped_column(init=False)
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]

    # Every UPDATE and DELETE then requires the version that was read; an UPDATE increments it.
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012 (SQLAlchemy's own declaration)
