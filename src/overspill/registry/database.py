"""The database: opened, migrated, its transactions, and what it says when something is wrong."""

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

# Execution options of an engine whose transactions write.
WRITES = {"overspill_writes": True}


def set_up_sqlite(engine: Engine) -> None:
    event.listen(engine, "connect", _set_up_connection)
    event.listen(engine, "begin", _begin)


def _set_up_connection(connection: sqlite3.Connection, record: Any) -> None:
    # Python's driver would begin transactions late, and commit before DDL; `_begin` does it instead.
    connection.isolation_level = None
    connection.execute("PRAGMA foreign_keys = ON")
    # In WAL mode, less than FULL acknowledges what a power cut can take back.
    connection.execute("PRAGMA synchronous = FULL")


def _begin(connection: Connection) -> None:
    # A transaction that reads first and writes later fails at once when another one wrote in between: waiting helps
    # only those that ask for the lock from the beginning.
    writes = connection.get_execution_options().get("overspill_writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def use_wal(engine: Engine, wait_seconds: float) -> None:
    """Readers then do not wait for writers. The file remembers it, so this is needed once."""
    connection = engine.raw_connection()
    # SQLite does not always wait here: of two processes that switch at once, each may hold what the other needs.
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


# The last of migrations/versions. Here, so that a registry that is up to date opens without loading Alembic.
HEAD = "0009"
# Not Alembic's usual name: another program's migrations may live in the same PostgreSQL database.
VERSION_TABLE = "overspill_registry"
_TABLES = {
    "models", "runs", "profiles", "results", "manager_keys", "manager_passwords", "manager_sessions", "manager_audit",
    "manager_requests",
}  # fmt: skip
# Any number will do that other programs are unlikely to lock.
_POSTGRESQL_LOCK = 0x6F7665727370


def bring_up_to_date(engine: Engine, place: Place) -> None:
    with engine.connect() as connection:
        if _revision(connection) == HEAD:
            return
    with engine.execution_options(**WRITES).begin() as connection:
        # SQLite's transaction for writing is itself the lock.
        if engine.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _POSTGRESQL_LOCK})
        revision = _revision(connection)
        if revision != HEAD:  # another process may have been faster
            _refuse_others(connection, revision, place)
            migrate(connection, HEAD)


def migrate(connection: Connection, target: str) -> None:
    """Up or down to a revision, in the transaction of `connection`; "base" is before the first."""
    from alembic import command

    order = ["base", *known_revisions()]
    is_down = order.index(target) < order.index(_revision(connection) or "base")
    (command.downgrade if is_down else command.upgrade)(_config(connection), target)


def known_revisions() -> list[str]:
    """From the first to the last."""
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
    # ConfigParser reads % as the beginning of a name.
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


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
        with _explained(self.place, self.engine), Session(self.engine) as session:
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """One transaction, committed at the end, or undone. Others that write wait: for all of SQLite, for its rows in
        PostgreSQL."""
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
        # A server may be configured to acknowledge writes that are not on disk yet.
        cursor.execute("SET synchronous_commit = on")
        cursor.execute(f"SET lock_timeout = '{_WAIT_SECONDS}s'")
    connection.commit()


@contextmanager
def _explained(place: Place, engine: Engine) -> Iterator[None]:
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
