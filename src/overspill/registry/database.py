"""The registry's database: opening, migrating, transactions, and messages for its errors."""

import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from sqlalchemy import Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session
from sqlalchemy.orm.exc import StaleDataError

from overspill.registry.errors import ChangedMeanwhile, RegistryError, RegistryUnavailable
from overspill.registry.place import VARIABLE, Place, find_place, prepare_file

if TYPE_CHECKING:
    from alembic.config import Config

# Execution options that mark an engine's transactions as writing.
WRITES = {"overspill_writes": True}


def set_up_sqlite(engine: Engine) -> None:
    event.listen(engine, "connect", _set_up_connection)
    event.listen(engine, "begin", _begin)


def _set_up_connection(connection: sqlite3.Connection, record: Any) -> None:
    # Python's driver would begin transactions late and commit before DDL; `_begin` begins them instead.
    connection.isolation_level = None
    connection.execute("PRAGMA foreign_keys = ON")
    # In WAL mode, anything less than FULL acknowledges commits that a power cut can undo.
    connection.execute("PRAGMA synchronous = FULL")


def _begin(connection: Connection) -> None:
    # A transaction that reads first and writes later fails at once if another one wrote in between: SQLite waits only
    # for a lock that is requested at the beginning.
    writes = connection.get_execution_options().get("overspill_writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def use_wal(engine: Engine, wait_seconds: float) -> None:
    """Switch to WAL mode, so that readers do not wait for writers. The file remembers the mode."""
    connection = engine.raw_connection()
    # SQLite does not always wait here: two processes that switch at once may each hold a lock the other needs.
    deadline = time.monotonic() + wait_seconds
    try:
        while True:
            try:
                _switch_to_wal(connection.driver_connection)
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
    finally:
        connection.close()


def _switch_to_wal(connection: Any) -> None:
    if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        connection.execute("PRAGMA journal_mode = WAL")


# Latest revision in migrations/versions, repeated here so that an up-to-date registry opens without loading Alembic.
HEAD = "0009"
# Not Alembic's usual name: another program's migrations may live in the same PostgreSQL database.
VERSION_TABLE = "overspill_registry"
_TABLES = {
    "models", "runs", "profiles", "results", "manager_keys", "manager_passwords", "manager_sessions", "manager_audit",
    "manager_requests",
}  # fmt: skip
# An arbitrary number that other programs are unlikely to lock.
_POSTGRESQL_LOCK = 0x6F7665727370


def bring_up_to_date(engine: Engine, place: Place) -> None:
    with engine.connect() as connection:
        if _revision(connection) == HEAD:
            return
    with engine.execution_options(**WRITES).begin() as connection:
        # In SQLite the writing transaction is itself the lock.
        if engine.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _POSTGRESQL_LOCK})
        revision = _revision(connection)
        if revision != HEAD:  # another process may have been faster
            _refuse_others(connection, revision, place)
            migrate(connection, HEAD)


def migrate(connection: Connection, target: str) -> None:
    """Migrate up or down to a revision, in the transaction of `connection`; "base" is before the first revision."""
    from alembic import command

    order = ["base", *known_revisions()]
    is_down = order.index(target) < order.index(_revision(connection) or "base")
    (command.downgrade if is_down else command.upgrade)(_config(connection), target)


def known_revisions() -> list[str]:
    """All revisions, first to last."""
    from alembic.script import ScriptDirectory

    scripts = ScriptDirectory.from_config(_config()).walk_revisions()
    return [script.revision for script in scripts][::-1]


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    return connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()


def _refuse_others(connection: Connection, revision: str | None, place: Place) -> None:
    if revision is None:
        if theirs := sorted(_TABLES & set(inspect(connection).get_table_names())):
            raise RegistryUnavailable(
                f"the database at {place} has a table {theirs[0]!r} that is not Overspill's; give the registry a "
                f"database of its own with {VARIABLE}"
            )
    elif revision not in (known := known_revisions()):
        raise RegistryUnavailable(
            f"the registry at {place} was written by a newer Overspill (revision {revision}; this one knows {known[0]} "
            f"to {known[-1]}); upgrade Overspill, or name another registry with {VARIABLE}"
        )


def _config(connection: Connection | None = None) -> "Config":
    from alembic.config import Config

    config = Config()
    # ConfigParser reads % as the start of an interpolation.
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


_WAIT_SECONDS = 15
BRIEFLY = 2.0
"""Seconds to wait where the registry is useful but not required."""


@dataclass(frozen=True, slots=True)
class Registry:
    """An open registry. Safe to share between threads; a forked process opens its own."""

    place: Place
    engine: Engine

    @contextmanager
    def reading(self) -> Iterator[Session]:
        with _explained(self.place, self.engine), Session(self.engine) as session:
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """Open one transaction, committed at the end or rolled back. Other writers wait: in SQLite for the whole
        database, in PostgreSQL for the same rows."""
        engine = self.engine.execution_options(**WRITES)
        with _explained(self.place, self.engine), Session(engine, expire_on_commit=False) as session, session.begin():
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
    """Open the registry at `url`, else OVERSPILL_DATABASE_URL, else the user's own; create or migrate it if needed.

    `wait_seconds` limits the wait for other programs, or for a server that does not answer, for callers that can do
    without the registry.
    """
    place = find_place(url, environ)
    if wait_seconds is not None:
        place = place.with_wait(wait_seconds)
    prepare_file(place)
    return _opened(place)


def open_existing(environ: Mapping[str, str] | None = None, *, wait_seconds: float = BRIEFLY) -> Registry | None:
    """Open the registry that commands use, for a lookup; None if it does not exist yet, without creating it."""
    place = find_place(None, environ)
    if place.file is not None and not place.file.exists():
        return None
    return open_registry(None, environ, wait_seconds=wait_seconds)


def _opened(place: Place) -> Registry:
    engine = _engine(place)
    try:
        with _explained(place, engine):
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
        # A pooled connection may be older than the server's last restart.
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
        # A server may be configured to acknowledge writes that are not on disk yet.
        cursor.execute("SET synchronous_commit = on")
        cursor.execute(f"SET lock_timeout = '{_WAIT_SECONDS}s'")
    connection.commit()


@contextmanager
def _explained(place: Place, engine: Engine) -> Iterator[None]:
    """Turn errors of the database into messages that say what to do."""
    # While a connection is being set up, SQLAlchemy does not wrap the driver's errors.
    drivers: type[Exception] = engine.dialect.loaded_dbapi.Error
    try:
        yield
    except StaleDataError as error:
        raise ChangedMeanwhile(
            f"somebody else changed the same record of the registry at {place}; nothing was written, try again"
        ) from error
    except (UnicodeEncodeError, OverflowError) as error:  # raised by Python before the statement is sent
        raise RegistryError(f"the registry could not save this: {error}") from error
    except (SQLAlchemyError, drivers) as error:
        cause = error.orig if isinstance(error, DBAPIError) else error
        said = place.without_password(" ".join(str(cause).split()))
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
