"""`overspill models`: what it prints, its exit codes, and one sentence for every mistake."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from overspill.kv.sizes import GiB
from overspill.registry import RunEnd, edit_model, end_run, open_registry, start_run
from tests.command import run_overspill
from tests.postgresql import new_database

Answer = subprocess.CompletedProcess[str]
Overspill = Callable[..., Answer]


@pytest.fixture
def overspill(tmp_path: Path) -> Overspill:
    """The command, with a registry of its own."""

    def run(*arguments: str, **environment: str) -> Answer:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("OVERSPILL_")}
        own = {"XDG_STATE_HOME": str(tmp_path / "state"), "XDG_CONFIG_HOME": "/nonexistent", "COLUMNS": "200"}
        return run_overspill("models", *arguments, env={**clean, **own, **environment}, cwd=tmp_path)

    return run


def ok(answer: Answer) -> str:
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stderr == ""
    return answer.stdout


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_a_model_from_add_to_rm(overspill: Overspill, database: str) -> None:
    where = {"OVERSPILL_DATABASE_URL": new_database()} if database == "postgresql" else {}
    assert ok(overspill("list", **where)) == "no models yet; add one with: overspill models add\n"
    added = overspill(
        "add", "qwen", "--source", "Qwen/Qwen3-8B", "--max-model-len", "128k", "--ram", "64GiB", "--ttl", "10m",
        "--no-enforce-eager", "--", "--seed", "1", **where,
    )  # fmt: skip
    assert ok(added) == "added qwen: Qwen/Qwen3-8B\n"
    assert re.search(r"^qwen +Qwen/Qwen3-8B +131072 +64 GiB +600 s$", ok(overspill("list", **where)), re.MULTILINE)
    told = json.loads(ok(overspill("show", "qwen", "--json", **where)))
    assert (told["ram"], told["vllm_args"], told["enforce_eager"], told["version"], told["running"]) == (
        64 * GiB, ["--seed", "1"], False, 1, False,
    )  # fmt: skip
    edited = ok(overspill("edit", "qwen", "--ram", "96GiB", "--unset", "ttl", "--unset", "vllm-args", **where))
    assert edited == "ram: 64 GiB -> 96 GiB\nvllm_args: --seed 1 -> -\nttl: 600 s -> -\n"
    assert ok(overspill("edit", "qwen", "--ram", "96GiB", **where)) == "qwen is unchanged\n"
    shown = ok(overspill("show", "qwen", **where))
    assert re.search(r"^ram +96 GiB$", shown, re.MULTILINE) and re.search(r"^version +2$", shown, re.MULTILINE)
    assert json.loads(ok(overspill("list", "--json", **where)))["models"][0]["name"] == "qwen"
    assert ok(overspill("rm", "qwen", **where)) == "removed qwen\n"
    assert json.loads(ok(overspill("list", "--json", **where))) == {"models": []}


def test_undo_restores_the_settings_before_a_tuning(overspill: Overspill, tmp_path: Path) -> None:
    ok(overspill("add", "qwen", "--source", "gpt2", "--ram", "8GiB", "--offload-ram", "64MiB"))
    refused = overspill("undo", "qwen")
    assert refused.returncode == 2 and "was not made by overspill tune" in refused.stderr
    with open_registry(f"sqlite:///{tmp_path}/state/overspill/registry.db") as registry:
        changes = {"offload_ram": None, "max_num_batched_tokens": 2048}
        edit_model(registry, "qwen", changes, by_tune=True)
        assert "before" not in ok(overspill("show", "qwen"))
        assert ok(overspill("undo", "qwen")) == "offload_ram: - -> 64 MiB\nmax_num_batched_tokens: 2048 -> -\n"
        assert overspill("undo", "qwen").returncode == 2
        edit_model(registry, "qwen", changes, by_tune=True)
    ok(overspill("edit", "qwen", "--ram", "9GiB"))
    assert overspill("undo", "qwen").returncode == 2, "it would take back the user's own change too"


def test_editing_a_running_model_says_what_needs_a_restart(overspill: Overspill, tmp_path: Path) -> None:
    ok(overspill("add", "qwen", "--source", "gpt2", "--ram", "8GiB"))
    with open_registry(f"sqlite:///{tmp_path}/state/overspill/registry.db") as registry:
        run = start_run(registry, "qwen", ["vllm"], pid=os.getpid())
        edited = ok(overspill("edit", "qwen", "--ram", "16GiB", "--ttl", "5m"))
        assert edited.endswith(f"qwen is running (process {os.getpid()}); these changes need a restart: ram\n")
        assert "need a restart" not in ok(overspill("edit", "qwen", "--ram", "8GiB", "--notes", "x"))
        assert ok(overspill("list")).rstrip().endswith("running")
        assert f"running                 process {os.getpid()}, started " in ok(overspill("show", "qwen"))
        refused = overspill("rm", "qwen")
        assert refused.returncode == 1 and "stop it first, or use --force" in refused.stderr
        end_run(registry, run.id, RunEnd.FAILED, exit_code=3)
    assert re.search(r"last run .* failed with 3 ", ok(overspill("show", "qwen")))
    ok(overspill("rm", "qwen"))


def test_a_change_of_what_somebody_else_changed_exits_with_one(overspill: Overspill) -> None:
    ok(overspill("add", "qwen", "--source", "gpt2"))
    ok(overspill("edit", "qwen", "--ram", "8GiB", "--if-version", "1"))
    for command in (("edit", "qwen", "--ram", "4GiB"), ("rm", "qwen")):
        answer = overspill(*command, "--if-version", "1")
        assert answer.returncode == 1 and "was changed meanwhile: it is at version 2" in answer.stderr


def test_an_import_reports_line_by_line(overspill: Overspill, tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text("models:\n  good: {source: gpt2, ram: 8GiB}\n  bad: {ram: lots}\n")
    answer = overspill("import", "m.yaml")
    assert answer.returncode == 1 and answer.stderr == ""
    good, bad = answer.stdout.splitlines()
    assert good == "added      good: gpt2"
    assert bad.startswith("invalid    bad: m.yaml: models.bad: ram: 'lots' is not a size")
    (tmp_path / "m.yaml").write_text("models:\n  good: {source: gpt2, ram: 9GiB}\n")
    assert ok(overspill("import", "m.yaml")) == "changed    good: ram\n"
    assert json.loads(ok(overspill("import", "m.yaml", "--json"))) == [
        {"name": "good", "outcome": "unchanged", "detail": ""}
    ]


def test_hugging_faces_cache_is_imported(overspill: Overspill, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub/models--Qwen--Qwen3-8B/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    here = {"HF_HUB_CACHE": str(tmp_path / "hub")}
    assert ok(overspill("import", **here)) == "added      Qwen/Qwen3-8B: Qwen/Qwen3-8B\n"
    assert ok(overspill("import", **here)) == "unchanged  Qwen/Qwen3-8B\n"
    (tmp_path / "empty").mkdir()
    assert ok(overspill("import", HF_HUB_CACHE=str(tmp_path / "empty"))) == f"no models in {tmp_path}/empty\n"


# Mistakes: arguments, what is said, exit code.

MISTAKES: dict[str, tuple[list[str], str, int]] = {
    "a name with a space": (["add", "a b"], "is not a name for a model: letters, digits", 2),
    "a name that climbs": (["add", "../../etc/passwd"], "is not a name for a model", 2),
    "a long name": (["add", "x" * 300], "has 300 characters; a model's name has at most 200", 2),
    "an empty name": (["add", ""], "a model needs a name", 2),
    "a name twice": (["add", "old"], "change it with: overspill models edit old", 2),
    "an unknown model to show": (["show", "olt"], "no model 'olt' in the registry; did you mean old?", 2),
    "an unknown model to edit": (["edit", "olt", "--ram", "1GiB"], "did you mean old?", 2),
    "an unknown model to remove": (["rm", "olt"], "did you mean old?", 2),
    "not a size": (["add", "new", "--ram", "lots"], "--ram: 'lots' is not a size; write for example", 2),
    "a negative size": (["edit", "old", "--gpu-memory", "-5"], "--gpu-memory", 2),
    "no share of the GPU": (["add", "new", "--gpu-memory-utilization", "85"], "above 0 and at most 1", 2),
    "none at once": (["edit", "old", "--at-once", "0"], "--at-once: '0' is not a whole number above 0", 2),
    "weights that are no size": (["add", "new", "--weights-ram", "half"], "--weights-ram: 'half' is not a size", 2),
    "no tokens": (["add", "new", "--max-model-len", "0"], "--max-model-len: '0' is not a number of tokens", 2),
    "an unknown dtype": (["add", "new", "--dtype", "int8"], "--dtype: 'int8' is none of auto", 2),
    "an unknown KV dtype": (["add", "new", "--kv-cache-dtype", "fp7"], "--kv-cache-dtype: 'fp7' is none of", 2),
    "no requests": (["edit", "old", "--max-num-seqs", "none"], "--max-num-seqs: 'none' is not a whole number", 2),
    "not a duration": (["edit", "old", "--ttl", "soon"], "--ttl: 'soon' is not a duration; write seconds", 2),
    "no such folder": (["add", "new", "--source", "./missing"], "--source: ./missing is not a model's folder", 2),
    "a source without its flag": (["add", "new", "./model"], "overspill models add new --source ./model", 2),
    "not a repository": (["add", "new", "--source", "a/b/c"], "--source: 'a/b/c' is neither a folder here", 2),
    "a secret": (["add", "new", "--", "--api-key", "x"], "set VLLM_API_KEY in the environment", 2),
    "an address": (["add", "new", "--", "--host", "0.0.0.0"], "--host is not a model's: give it to the command", 2),
    "a port with an underscore": (["edit", "old", "--", "--por=9000"], "as in overspill serve NAME --por 9000", 2),
    "half a byte": (["add", "new", "--ram", "7.5"], "--ram: 7.5 without a unit is 7 bytes; write for example", 2),
    "a flag with a setting": (["add", "new", "--", "--dtype", "half"], "Overspill has its own setting for --dtype", 2),
    "nothing to edit": (["edit", "old"], "nothing to change was given", 2),
    "an unknown setting taken back": (["edit", "old", "--unset", "rams"], "no setting 'rams'; did you mean ram?", 2),
    "the source taken back": (["edit", "old", "--unset", "source"], "a model needs a source", 2),
    "given and taken back": (["edit", "old", "--ram", "1", "--unset", "ram"], "leave one of the two out", 2),
    "a missing file": (["import", "missing.yaml"], "missing.yaml cannot be read: No such file", 2),
    "a folder for a file": (["import", "."], "cannot be read: Is a directory", 2),
    "broken YAML": (["import", "broken.yaml"], "broken.yaml is not YAML: line 1", 2),
    "broken JSON": (["import", "broken.json"], "broken.json is not JSON: ", 2),
    "a file of something else": (["import", "other.yaml"], "has no `models`", 2),
    "no cache": (["import"], "Hugging Face's cache /nonexistent/hub cannot be read", 2),
}  # fmt: skip


def one_sentence(answer: Answer, said: str, code: int) -> None:
    assert answer.returncode == code, answer.stdout + answer.stderr
    assert answer.stderr.startswith("error: ") and said in answer.stderr, answer.stderr
    assert "Traceback" not in answer.stderr and len(answer.stderr.strip().splitlines()) == 1
    assert "hush" not in answer.stderr


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_sentence(overspill: Overspill, tmp_path: Path, case: str) -> None:
    with registry_of(tmp_path) as file:
        (tmp_path / "broken.yaml").write_text("models: [")
        (tmp_path / "broken.json").write_text('{"models"')
        (tmp_path / "other.yaml").write_text("services: {}")
        arguments, said, code = MISTAKES[case]
        one_sentence(overspill(*arguments, HF_HUB_CACHE="/nonexistent/hub"), said, code)
        with closing(sqlite3.connect(file)) as connection:
            assert connection.execute("SELECT name, version FROM models").fetchall() == [("old", 1)]


@contextmanager
def registry_of(tmp_path: Path) -> Iterator[Path]:
    from overspill.registry import add_model

    with open_registry(environ={"XDG_STATE_HOME": str(tmp_path / "state")}) as registry:
        add_model(registry, "old", {"source": "gpt2"})
        assert registry.place.file is not None
        yield registry.place.file


DATABASES: dict[str, tuple[str, str, int]] = {
    "not a URL": ("hush", "OVERSPILL_DATABASE_URL is not a database's URL; accepted are", 2),
    "another database": ("mysql://me:hush@host/db", "which the registry does not support; accepted are", 2),
    "relative": ("sqlite:///registry.db", "is a relative path", 2),
    "unreachable": ("postgresql://me:hush@127.0.0.1:1/db", "postgresql://me:***@127.0.0.1:1/db refused: ", 1),
    "unwritable": ("sqlite:////proc/registry.db", "cannot be opened for writing at /proc/registry.db", 1),
    "no folder": ("sqlite:////nonexistent/registry.db", "No such file or directory", 1),
    "no database": ("sqlite:///{tmp}/other.db", "is not a registry, or is damaged", 1),
    "newer": ("sqlite:///{tmp}/state/overspill/registry.db", "written by a newer Overspill (revision 9999", 1),
    "locked": ("sqlite:///{tmp}/state/overspill/registry.db?timeout=0.2", "another program has been writing", 1),
}


@pytest.mark.parametrize("case", DATABASES)
def test_a_database_that_cannot_be_used_is_one_sentence(overspill: Overspill, tmp_path: Path, case: str) -> None:
    (tmp_path / "other.db").write_text("no database " * 100)
    url, said, code = DATABASES[case]
    with registry_of(tmp_path) as file, closing(sqlite3.connect(file, isolation_level=None)) as connection:
        if case == "newer":
            connection.execute("UPDATE overspill_registry SET version_num = '9999'")
        if case == "locked":
            connection.execute("BEGIN IMMEDIATE")
        answer = overspill("add", "new", "--source", "gpt2", OVERSPILL_DATABASE_URL=url.format(tmp=tmp_path))
    one_sentence(answer, said, code)


def test_a_full_disk_is_one_sentence(overspill: Overspill, tmp_path: Path) -> None:
    """Where files may not grow, which SQLite sees as it sees a full disk."""
    import resource

    with registry_of(tmp_path):
        pass
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        answer = overspill("add", "new", "--source", "gpt2", "--notes", "x" * 9000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    one_sentence(answer, "Make room on the disk", 1)


# Help and documentation.

COMMANDS = ("add", "list", "show", "edit", "rm", "import")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example_in_its_help(overspill: Overspill, command: str) -> None:
    assert f"Example: overspill models {command}" in ok(overspill(command, "--help"))


def test_documented_flags_match_the_help(overspill: Overspill) -> None:
    page = (Path(__file__).parents[1] / "docs/models.md").read_text()
    flags = {
        flag for command in COMMANDS for flag in re.findall(r"--[a-z][a-z-]+", ok(overspill(command, "--help")))
    } - {"--help"}
    documented = {
        flag for row in re.findall(r"^\| (`--[^|]+)\|", page, re.MULTILINE) for flag in re.findall(r"--[a-z-]+", row)
    }
    assert documented == flags


def test_every_setting_has_a_flag_in_add_and_edit(overspill: Overspill) -> None:
    from overspill.settings import MODEL_SETTINGS

    for command in ("add", "edit"):
        text = ok(overspill(command, "--help"))
        for setting in MODEL_SETTINGS:
            assert setting.name == "vllm_args" or re.search(rf"{setting.flag}\b", text), setting
            assert setting.help in " ".join(text.split()), "one help for pages and commands"


def test_the_file_of_the_documentation_can_be_imported(overspill: Overspill, tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs/models.md").read_text()
    (written,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "models.yaml").write_text(written)
    told = ok(overspill("import", "models.yaml"))
    assert told.count("added") == len(told.splitlines()) >= 2


def test_other_commands_do_not_load_the_database(tmp_path: Path) -> None:
    code = "import sys, overspill.cli; print([m for m in ('sqlalchemy', 'alembic', 'yaml') if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.strip() == "[]"
