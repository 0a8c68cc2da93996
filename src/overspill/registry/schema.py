"""What the registry's tables have in common: constraint names, times in UTC, JSON."""

import json
import re
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, DateTime, Dialect, MetaData
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase
from sqlalchemy.types import TypeDecorator

from overspill.registry.errors import RegistryError

Json = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


class UtcTime(TypeDecorator[datetime]):
    """Aware going in and coming out; SQLite keeps no time zone."""

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


class Base(DeclarativeBase):
    # With names, a later migration can change a constraint on either database.
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_name)s",
            "uq": "uq_%(table_name)s_%(column_0_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    # Bytes outgrow 32 bits.
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
    """Whether a row can have it; the databases answer a larger one with an error, each with its own."""
    return 0 < number < 1 << 31


# An even number of backslashes before it: otherwise it is the text `\\u0000`, and harmless.
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


def storable(value: Any, what: str) -> Any:
    """`value` as it comes back from a JSON column. Refuses what one of the two databases would refuse."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        text.encode()  # PostgreSQL keeps no half of a surrogate pair,
    except (TypeError, ValueError, RecursionError) as error:
        raise RegistryError(f"{what} cannot be kept as JSON: {error}") from error
    if _NUL.search(text):  # and no NUL
        raise RegistryError(f"{what} cannot be kept: a text in it holds a NUL character; leave it out")
    return json.loads(text)
