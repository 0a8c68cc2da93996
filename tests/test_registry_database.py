"""Where the registry is kept, who may read it, and what is said when the database is the problem."""

import os
import resource
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import event

from overspill.registry import RegistryError, RegistryUnavailable, add_model, get_model, list_models, open_registry
from overspill.registry.place import find_place


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_without_a_url_the_registry_is_in_the_state_folder(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path / "state"), "HOME": str(tmp_path)}
    assert find_place(environ=environ).file == tmp_path / "state/overspill/registry.db"
    assert find_place(environ={"HOME": "/home/me"}).file == Path("/home/me/.local/state/overspill/registry.db")
    ignored = {"XDG_STATE_HOME": "relative", "HOME": "/home/me"}
    assert find_place(environ=ignored).file == Path("/home/me/.local/state/overspill/registry.db")
    given = {**environ, "OVERSPILL_DATABASE_URL": "sqlite:////srv/models.db"}
    assert find_place(environ=given).file == Path("/srv/models.db")
    assert find_place(environ={**environ, "OVERSPILL_DATABASE_URL": ""}).is_default, "empty is as not set"


def test_nobody_else_can_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "state/overspill"
    folder.mkdir(parents=True, mode=0o755)
    before = os.umask(0)
    try:
        with open_registry(environ={"XDG_STATE_HOME": str(tmp_path / "state")}) as registry:
            add_model(registry, "qwen", {"source": "gpt2"})
            assert mode(folder) == 0o700
            files = {path.name: mode(path) for path in folder.iterdir()}
    finally:
        os.umask(before)
    assert set(files.values()) == {0o600} and {"registry.db", "registry.db-wal"} <= files.keys()


def test_a_folder_that_was_given_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    open_registry(f"sqlite:///{tmp_path}/registry.db").close()
    assert mode(tmp_path) == 0o755 and mode(tmp_path / "registry.db") == 0o600


def test_opening_it_twice_keeps_the_locks_of_the_first(tmp_path: Path) -> None:
    """A file that is opened and closed beside SQLite takes SQLite's locks away: another process then believes to be
    the last one, and removes the log that this one still writes to."""
    url = f"sqlite:///{tmp_path}/registry.db"
    code = (
        f"from overspill.registry import *\nwith open_registry({url!r}) as r: add_model(r, 'b', {{'source': 'gpt2'}})"
    )
    with open_registry(url) as registry, registry.reading() as session:
        session.connection()
        open_registry(url).close()
        subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
        assert (tmp_path / "registry.db-wal").exists()
        add_model(registry, "a", {"source": "gpt2"})
    with open_registry(url) as registry:
        assert [model.name for model in list_models(registry)] == ["a", "b"]


BAD_URLS = {
    "no URL": ("models.db", "is not a database's URL; accepted are sqlite:////absolute/path.db and postgresql://"),
    "a port that is none": ("postgresql://u:hush@host:port/db", "is not a database's URL"),
    "another database": ("mysql://root:hush@host/db", "is for 'mysql', which the registry does not support"),
    "another driver": ("postgresql+psycopg2://u:hush@host/db", "is for 'postgresql+psycopg2'"),
    "no database": ("postgresql://u:hush@host", "names no database"),
    "memory": ("sqlite://", "names no file"),
    "memory by name": ("sqlite:///:memory:", "names no file"),
    "relative": ("sqlite:///models.db", "models.db is a relative path"),
    "a host": ("sqlite://models.db", "names no file"),
    "an option": ("sqlite:////tmp/x.db?mode=ro", "has the option 'mode'"),
    "a timeout": ("sqlite:////tmp/x.db?timeout=long", "the timeout 'long' is not a number of seconds"),
}


@pytest.mark.parametrize("case", BAD_URLS)
def test_a_bad_url_is_refused_without_repeating_a_password(case: str) -> None:
    url, said = BAD_URLS[case]
    with pytest.raises(RegistryError) as told:
        open_registry(environ={"OVERSPILL_DATABASE_URL": url})
    assert str(told.value).startswith("OVERSPILL_DATABASE_URL") and said in str(told.value)
    assert "hush" not in str(told.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:hush@127.0.0.1:1/registry",
        "postgres://me:hush@127.0.0.1:1/registry",
        "postgresql+psycopg://me@127.0.0.1:1/registry?password=hush",
        "postgresql://me:hush@/registry?host=/nonexistent",
        "postgresql://me:hush@no-such-host.invalid/registry",
    ],
)
def test_an_unreachable_server_is_reported_without_the_password(url: str) -> None:
    place = find_place(url)
    assert "hush" not in str(place)
    with pytest.raises(RegistryUnavailable, match="check OVERSPILL_DATABASE_URL and the server") as told:
        open_registry(url)
    assert "hush" not in str(told.value) and "\n" not in str(told.value) and str(place) in str(told.value)


@pytest.mark.parametrize("path", ["{tmp}/missing/registry.db", "{tmp}/file/registry.db", "{tmp}", "/proc/registry.db"])
def test_a_place_that_cannot_be_written_is_told_of(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RegistryUnavailable, match=r"cannot be opened for writing at .*OVERSPILL_DATABASE_URL"):
        open_registry("sqlite:///" + path.format(tmp=tmp_path))


def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "registry.db"
    file.write_text("my diary, " * 200)
    with pytest.raises(RegistryUnavailable, match="is not a registry, or is damaged"):
        open_registry(f"sqlite:///{file}")
    assert file.read_text() == "my diary, " * 200


def test_a_damaged_database_is_told_of(tmp_path: Path) -> None:
    file = tmp_path / "registry.db"
    with open_registry(f"sqlite:///{file}") as registry:
        for number in range(50):
            add_model(registry, f"m{number}", {"source": "gpt2", "notes": "x" * 1000})
    content = bytearray(file.read_bytes())
    content[8192:] = b"\xa5" * (len(content) - 8192)
    file.write_bytes(content)
    with pytest.raises(RegistryUnavailable, match="damaged"), open_registry(f"sqlite:///{file}") as registry:
        list_models(registry)


def test_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    """SQLite's own limit of pages answers as a full disk does: SQLITE_FULL."""
    with open_registry(f"sqlite:///{tmp_path}/registry.db") as registry:
        first = add_model(registry, "first", {"source": "gpt2"})

        def limit(connection: sqlite3.Connection, record: object, proxy: object) -> None:
            pages = connection.execute("PRAGMA page_count").fetchone()[0]
            connection.execute(f"PRAGMA max_page_count = {pages}")

        event.listen(registry.engine, "checkout", limit)
        with pytest.raises(
            RegistryUnavailable, match=r"could not be written \(database or disk is full\); nothing was"
        ):
            add_model(registry, "second", {"source": "gpt2", "notes": "x" * 9000})
        event.remove(registry.engine, "checkout", limit)
    with open_registry(f"sqlite:///{tmp_path}/registry.db") as registry:
        assert list_models(registry) == [first]


def test_a_file_that_cannot_grow_changes_nothing(tmp_path: Path) -> None:
    """Writes fail in the operating system, in a process that may not make files longer than 100 kB."""
    url = f"sqlite:///{tmp_path}/registry.db"
    with open_registry(url) as registry:
        first = add_model(registry, "first", {"source": "gpt2"})
    code = (
        "import sys\nfrom overspill.registry import *\n"
        f"with open_registry({url!r}) as registry:\n"
        "    try:\n"
        "        for n in range(100): add_model(registry, f'm{n}', {'source': 'gpt2', 'notes': 'x' * 9000})\n"
        "    except RegistryUnavailable as error: print(n, error)\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
    )  # fmt: skip
    number, _, said = answer.stdout.partition(" ")
    assert "could not be written" in said and "nothing was changed" in said
    with open_registry(url) as registry:
        assert len(list_models(registry)) == 1 + int(number) and get_model(registry, "first") == first


def test_without_psycopg_a_command_says_how_to_install_it() -> None:
    code = (
        "import sys; sys.modules['psycopg'] = None\nfrom overspill.registry import *\n"
        "try: open_registry('postgresql://me@host/db')\nexcept RegistryUnavailable as error: print(error)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "pip install 'overspill[postgres]'" in answer.stdout
