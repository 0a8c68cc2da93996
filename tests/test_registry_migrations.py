"""Migrations agree with the tables, go up and down with data in them, and run once when many open at once."""

import json
import multiprocessing
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, inspect, text

from overspill.registry import (  # noqa: F401 (their tables)
    ModelSettings,
    RegistryUnavailable,
    access,
    activity,
    add_model,
    audit,
    get_model,
    list_runs,
    open_registry,
)
from overspill.registry.database import HEAD, VERSION_TABLE, WRITES, known_revisions, migrate, set_up_sqlite, use_wal
from overspill.registry.place import find_place
from overspill.registry.tables import Base
from tests.postgresql import new_database


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/registry.db" if request.param == "sqlite" else new_database()


@pytest.fixture
def connection(url: str) -> Iterator[Connection]:
    """Of an empty database, in a transaction."""
    engine = create_engine(find_place(url).url)
    if engine.dialect.name == "sqlite":
        set_up_sqlite(engine)
    with engine.execution_options(**WRITES).begin() as connection:
        yield connection
    engine.dispose()


TABLES = {
    "models", "runs", "profiles", "results", "manager_keys", "manager_passwords", "manager_sessions", "manager_audit",
    "manager_requests",
}  # fmt: skip


def tables(connection: Connection) -> set[str]:
    return set(inspect(connection).get_table_names()) - {VERSION_TABLE}


def test_the_tables_are_those_that_migrations_make(connection: Connection) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    migrate(connection, HEAD)
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE, "compare_type": True})
    assert compare_metadata(context, Base.metadata) == []
    assert tables(connection) == TABLES


def test_a_table_that_differs_is_noticed(connection: Connection) -> None:
    """The comparison above would be worth nothing if it found no difference."""
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    migrate(connection, HEAD)
    connection.execute(text("ALTER TABLE models ADD COLUMN extra INTEGER"))
    connection.execute(text("DROP INDEX ix_runs_model"))
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
    assert {difference[0] for difference in compare_metadata(context, Base.metadata)} == {"remove_column", "add_index"}


def test_the_last_revision_is_the_one_that_is_expected() -> None:
    assert known_revisions()[-1] == HEAD


@pytest.mark.parametrize("revision", ["base", *known_revisions()])
def test_every_revision_goes_up_and_down(connection: Connection, revision: str) -> None:
    migrate(connection, revision)
    before = tables(connection)
    migrate(connection, HEAD)
    migrate(connection, revision)
    assert tables(connection) == before
    migrate(connection, "base")
    assert tables(connection) == set()


TIME = "2026-01-02 03:04:05.000000"


def rows_of_the_first_revision(connection: Connection) -> None:
    """As SQL: the package's classes are those of the last."""
    model = {"name": "qwen", "source": "Qwen/Qwen3-8B", "ram": 64 << 30, "vllm_args": json.dumps(["--seed", "1"])}
    connection.execute(
        text(
            "INSERT INTO models (name, source, ram, vllm_args, version, created_at, updated_at) "
            f"VALUES (:name, :source, :ram, :vllm_args, 3, '{TIME}', '{TIME}')"
        ),
        model,
    )
    connection.execute(
        text(
            "INSERT INTO runs (model_id, model, argv, environment, versions, host, started_at) "
            f"SELECT id, name, :argv, '{{}}', '{{}}', 'elsewhere', '{TIME}' FROM models"
        ),
        {"argv": json.dumps(["vllm", "serve"])},
    )


def test_first_revision_data_survives_migrating_up_and_down(url: str, connection: Connection) -> None:
    migrate(connection, known_revisions()[0])
    rows_of_the_first_revision(connection)
    connection.commit()
    for _ in range(2):
        with open_registry(url) as registry:
            model, (run,) = get_model(registry, "qwen"), list_runs(registry)
            assert (model.settings.ram, model.settings.vllm_args, model.version) == (64 << 30, ("--seed", "1"), 3)
            assert model.created_at.isoformat() == "2026-01-02T03:04:05+00:00"
            assert run.argv == ["vllm", "serve"] and run.model == "qwen"
            with registry.engine.execution_options(**WRITES).begin() as down:
                migrate(down, known_revisions()[0])
                assert "results" not in tables(down)


SETTINGS_OF_THE_SIXTH: dict[str, Any] = {
    "source": "Qwen/Qwen3-8B", "max_model_len": 131072, "gpu_memory": 24 << 30, "gpu_memory_utilization": 0.85,
    "ram": 64 << 30, "offload_ram": 0, "weights_ram": 1 << 40, "dtype": "bfloat16", "kv_cache_dtype": "fp8",
    "kv_options": "store=lazy", "at_once": 2, "max_num_seqs": 8, "max_num_batched_tokens": 2048,
    "enforce_eager": False, "ttl": 600, "keep": True, "preload": False, "notes": "größer \"a\"",
}  # fmt: skip


def test_settings_in_columns_become_one_value_and_columns_again(url: str, connection: Connection) -> None:
    migrate(connection, "0006")
    names = ", ".join(SETTINGS_OF_THE_SIXTH)
    values = ", ".join(f":{name}" for name in SETTINGS_OF_THE_SIXTH)
    insert = f"INSERT INTO models (name, vllm_args, version, created_at, updated_at, {names}) "
    connection.execute(
        text(f"{insert} VALUES ('full', '[\"--seed\", \"1\"]', 5, '{TIME}', '{TIME}', {values})"), SETTINGS_OF_THE_SIXTH
    )
    connection.execute(
        text(
            "INSERT INTO models (name, source, vllm_args, version, created_at, updated_at) "
            f"VALUES ('bare', 'gpt2', '[]', 1, '{TIME}', '{TIME}')"
        )
    )
    connection.commit()
    for _ in range(2):  # up, down, and up again
        with open_registry(url) as registry:
            full, bare = get_model(registry, "full"), get_model(registry, "bare")
            assert full.settings == ModelSettings(**SETTINGS_OF_THE_SIXTH, vllm_args=("--seed", "1"))
            assert full.settings.enforce_eager is False and full.settings.keep is True and full.version == 5
            assert bare.settings == ModelSettings(source="gpt2")
            with registry.engine.execution_options(**WRITES).begin() as down:
                migrate(down, "0006")
                row = down.execute(text(f"SELECT {names}, version FROM models WHERE name = 'full'")).mappings().one()
                assert dict(row) == {**SETTINGS_OF_THE_SIXTH, "version": 5}


def test_a_migration_that_fails_leaves_nothing_behind(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from overspill.registry import database as module

    def fail(connection: Connection, target: str) -> None:
        migrate(connection, known_revisions()[0])
        raise OSError("the power went out")

    with monkeypatch.context() as patched:
        patched.setattr(module, "migrate", fail)
        with pytest.raises(OSError, match="power"):
            open_registry(url)
    with open_registry(url) as registry, registry.engine.connect() as connection:
        assert tables(connection) == TABLES


def test_a_newer_database_is_refused_and_left_alone(url: str) -> None:
    with open_registry(url) as registry, registry.writing() as session:
        session.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '0042'"))
    with pytest.raises(RegistryUnavailable, match=rf"newer Overspill \(revision 0042; this one knows 0001 to {HEAD}\)"):
        open_registry(url)


def test_a_database_of_another_program_is_refused(url: str, connection: Connection) -> None:
    connection.execute(text("CREATE TABLE models (id INTEGER)"))
    connection.commit()
    with pytest.raises(RegistryUnavailable, match=r"table 'models' that is not Overspill's; .* OVERSPILL_DATABASE_URL"):
        open_registry(url)


def _open_and_add(urls: list[str], number: int, start: Any, told: Any) -> None:
    try:
        for url in urls:
            start.wait()
            with open_registry(url) as registry:
                add_model(registry, f"m{number}", {"source": "gpt2"})
        told.put("")
    except BaseException as error:
        start.abort()
        told.put(repr(error))


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_processes_that_open_a_new_registry_at_once_all_succeed(tmp_path: Path, database: str) -> None:
    """Ten times: who comes first differs."""
    is_file = database == "sqlite"
    urls = [f"sqlite:///{tmp_path}/{number}.db" if is_file else new_database() for number in range(10)]
    spawn = multiprocessing.get_context("spawn")
    start, told = spawn.Barrier(4), spawn.Queue()
    children = [spawn.Process(target=_open_and_add, args=(urls, number, start, told)) for number in range(4)]
    for child in children:
        child.start()
    assert [told.get(timeout=120) for _ in children] == [""] * 4
    for child in children:
        child.join()
    for url in urls:
        with open_registry(url) as registry, registry.engine.connect() as connection:
            assert connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).all() == [(HEAD,)]
            assert connection.execute(text("SELECT count(*) FROM models")).scalar() == 4


def test_switching_to_wal_retries_while_the_file_is_locked(tmp_path: Path) -> None:
    """Of four processes that switched 300 new files at once, one failed twice with a locked database."""
    file = tmp_path / "registry.db"
    engine = create_engine(f"sqlite:///{file}", connect_args={"timeout": 0})
    with closing(sqlite3.connect(file, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN EXCLUSIVE")
        release = threading.Timer(0.3, other.execute, ["COMMIT"])
        release.start()
        use_wal(engine, wait_seconds=30)
        release.join()
        assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    engine.dispose()


def test_a_registry_that_is_up_to_date_opens_without_alembic(tmp_path: Path) -> None:
    """It is opened by every command."""
    import subprocess
    import sys

    url = f"sqlite:///{tmp_path}/registry.db"
    open_registry(url).close()
    code = f"import sys; from overspill.registry import open_registry as o; o({url!r}); print('alembic' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.strip() == "False"


def test_sqlite_is_set_up_for_crashes_and_for_several_processes(tmp_path: Path) -> None:
    with open_registry(f"sqlite:///{tmp_path}/registry.db") as registry, registry.engine.connect() as connection:
        read = {name: connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in _PRAGMAS}
    assert read == _PRAGMAS
    with closing(sqlite3.connect(tmp_path / "registry.db")) as plain:
        assert plain.execute("PRAGMA journal_mode").fetchone() == ("wal",)


_PRAGMAS: dict[str, Any] = {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 15000}


def test_postgresql_acknowledges_only_what_is_written() -> None:
    with open_registry(new_database()) as registry, registry.engine.connect() as connection:
        assert connection.execute(text("SHOW synchronous_commit")).scalar() == "on"
