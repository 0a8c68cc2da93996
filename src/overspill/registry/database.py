"""The database: opened, brought up to date, its transactions, and what it says when something is wrong."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session
from sqlalchemy.orm.exc import StaleDataError

from overspill.registry.errors import ChangedMeanwhile, RegistryError, RegistryUnavailable
from overspill.registry.migrate import bring_up_to_date
from overspill.registry.place import VARIABLE, Place, find_place, prepare_file
from overspill.registry.sqlite import WRITES, set_up_sqlite, use_wal

_WAIT_SECONDS = 15
BRIEFLY = 2.0
"""Seconds to wait where the registry is of use, and not needed."""


@dataclass(frozen=True, slots=True)
class Registry:
    """An open registry. Safe to share between threads; a forked process opens its own."""

    place: Place
    engine: Engine

    @contextmanager
    def reading(self) -> Iterator[Session]:
        with _told(self.place, self.engine), Session(self.engine) as session:
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """One transaction, committed at the end, or undone. Others that write wait: for all of SQLite, for its rows in
        PostgreSQL."""
        engine = self.engine.execution_options(**WRITES)
        with _told(self.place, self.engine), Session(engine, expire_on_commit=False) as session, session.begin():
            yield session

    def close(self) -> None:
        self.engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def open_registry(
    url: str | None = None, environ: Mapping[str, str] | None = None, *, wait_seconds: float | None = None
) -> Registry:
    """The registry of `url`, else of OVERSPILL_DATABASE_URL, else the user's own; made or migrated if need be.

    With `wait_seconds`, no longer for other programs, or for a server that does not answer: for those who can go on
    without it.
    """
    place = find_place(url, environ)
    if wait_seconds is not None:
        place = place.with_wait(wait_seconds)
    prepare_file(place)
    return _opened(place)


def open_existing(environ: Mapping[str, str] | None = None, *, wait_seconds: float = BRIEFLY) -> Registry | None:
    """The registry that commands use, to look something up; None if there is none, and none is made."""
    place = find_place(None, environ)
    if place.file is not None and not place.file.exists():
        return None
    return open_registry(None, environ, wait_seconds=wait_seconds)


def _opened(place: Place) -> Registry:
    engine = _engine(place)
    try:
        with _told(place, engine):
            if place.file is not None:
                use_wal(engine, _wait_seconds(place))
            bring_up_to_date(engine, place)
    except BaseException:
        engine.dispose()
        raise
    return Registry(place, engine)


def _wait_seconds(place: Place) -> float:
    return float(str(place.url.query.get("timeout", _WAIT_SECONDS)))


def _engine(place: Place) -> Engine:
    if place.file is not None:
        engine = create_engine(place.url, connect_args={"timeout": _wait_seconds(place)})
        set_up_sqlite(engine)
        return engine
    try:
        # A connection of the pool may be older than the server's last restart.
        waits = {} if "connect_timeout" in place.url.query else {"connect_timeout": _WAIT_SECONDS}
        engine = create_engine(place.url, pool_pre_ping=True, connect_args=waits)
    except ImportError as error:
        raise RegistryUnavailable(
            "the registry is to be kept in PostgreSQL, and psycopg is not installed; "
            f"run: pip install 'overspill[postgres]', or unset {VARIABLE}"
        ) from error
    event.listen(engine, "connect", _set_up_postgresql)
    return engine


def _set_up_postgresql(connection: Any, record: object) -> None:
    with connection.cursor() as cursor:
        # A server may be told to acknowledge what is not on disk yet.
        cursor.execute("SET synchronous_commit = on")
        cursor.execute(f"SET lock_timeout = '{_WAIT_SECONDS}s'")
    connection.commit()


@contextmanager
def _told(place: Place, engine: Engine) -> Iterator[None]:
    """What a database says, as a sentence that says what to do."""
    # While a connection is being set up, errors come as the driver's own.
    drivers: type[Exception] = engine.dialect.loaded_dbapi.Error
    try:
        yield
    except StaleDataError as error:
        raise ChangedMeanwhile(
            f"somebody else changed the same record of the registry at {place}; nothing was written, try again"
        ) from error
    except (UnicodeEncodeError, OverflowError) as error:  # before a statement is sent, and so nobody's but Python's
        raise RegistryError(f"the registry cannot keep this, and so does not have it: {error}") from error
    except (SQLAlchemyError, drivers) as error:
        told = error.orig if isinstance(error, DBAPIError) else error
        said = place.without_password(" ".join(str(told).split()))
        raise RegistryUnavailable(_sentence(place, said)) from error


def _sentence(place: Place, said: str) -> str:
    if "database is locked" in said or "lock timeout" in said:
        return (
            f"another program has been writing to the registry at {place} for {_wait_seconds(place):g} s; "
            "wait until it has ended, and try again"
        )
    if "disk is full" in said or "disk I/O error" in said or "No space left" in said:
        return f"the registry at {place} could not be written ({said}); nothing was changed. Make room on the disk"
    if "not a database" in said or "malformed" in said:
        return (
            f"{place} is not a registry, or is damaged ({said}); put a backup in its place, or name another file "
            f"with {VARIABLE}"
        )
    if "readonly" in said or "unable to open" in said:
        return f"the registry at {place} cannot be written ({said}); allow it, or name another one with {VARIABLE}"
    if place.file is None:
        return f"the registry's database at {place} refused: {said}; check {VARIABLE} and the server"
    return f"the registry at {place} failed: {said}"
