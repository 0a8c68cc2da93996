"""Migrations: run when a registry is opened, by one process at a time, all or nothing."""

from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Engine, inspect, text

from overspill.registry.errors import RegistryUnavailable
from overspill.registry.place import VARIABLE, Place
from overspill.registry.sqlite import WRITES

if TYPE_CHECKING:
    from alembic.config import Config

# The last of migrations/versions. Here, so that a registry that is up to date opens without loading Alembic.
HEAD = "0006"
# Not Alembic's usual name: another program's migrations may live in the same PostgreSQL database.
VERSION_TABLE = "overspill_registry"
_TABLES = {
    "models", "runs", "profiles", "results", "manager_keys", "manager_passwords", "manager_sessions", "manager_audit",
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
