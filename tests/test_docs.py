"""The documentation names every option, series and message, and its commands and examples work."""

import ast
import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from overspill.kv.options import Options
from overspill.kv.plugin import CONNECTOR

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = {page: page.read_text() for page in PAGES}


class Block(NamedTuple):
    page: str
    line: int
    text: str


def blocks(language: str) -> list[Block]:
    found = []
    for page, text in TEXT.items():
        for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            found.append(Block(page.name, text[: match.start()].count("\n") + 1, match[1]))
    return found


def name_of(block: Block) -> str:
    return f"{block.page}:{block.line}"


def commands() -> list[str]:
    joined = "\n".join(block.text for block in blocks("bash")).replace("\\\n", " ")
    return [line.strip() for line in joined.splitlines() if line.strip()]


def page(name: str) -> str:
    return TEXT[ROOT / "docs" / name]


# Reference.


@pytest.mark.parametrize("option", [field.name for field in dataclasses.fields(Options)])
def test_every_option_is_documented_and_used_in_an_example(option: str) -> None:
    assert f"| `{option}` |" in page("options.md")
    assert any(f'"{option}"' in block.text for block in blocks("json"))


def test_every_series_is_documented() -> None:
    from overspill.kv.metrics import COUNTERS, GAUGES

    for series in [*(f"overspill_{name}_total" for name in COUNTERS), *(f"overspill_{name}" for name in GAUGES)]:
        assert f"| `{series}` |" in page("metrics.md")


def test_no_page_names_a_series_that_is_not_there() -> None:
    from overspill.kv.metrics import COUNTERS, GAUGES
    from overspill.launch.vllm import PLUGINS

    known = {*(f"overspill_{name}_total" for name in COUNTERS), *(f"overspill_{name}" for name in GAUGES), *PLUGINS}
    for text in TEXT.values():
        assert set(re.findall(r"\boverspill_\w+[a-z]\b", text)) <= known


def messages() -> list[str]:
    """What a user can be told: the longest fixed piece of every refusal and every warning in the code."""
    found = []
    for path in sorted((ROOT / "src/overspill/kv").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            is_refusal = isinstance(node.func, ast.Name) and node.func.id == "OverspillError"
            is_warning = isinstance(node.func, ast.Attribute) and node.func.attr in ("warning", "error")
            if is_refusal or is_warning:
                constants = [c.value for c in ast.walk(node.args[0]) if isinstance(c, ast.Constant)]
                pieces = [p for c in constants if isinstance(c, str) for p in re.split(r"%[\d.]*[sdf]", c)]
                found.append(max(pieces, key=len).strip())
    return found


@pytest.mark.parametrize("message", messages())
def test_every_refusal_and_warning_is_in_troubleshooting(message: str) -> None:
    assert message in page("troubleshooting.md")


def test_the_messages_were_found() -> None:
    assert len(messages()) > 20


def section(name: str, title: str) -> str:
    return page(name).split(f"\n## {title}\n")[1].split("\n## ")[0]


def said_by_vllm() -> str:
    """Every message in vLLM's modules that start an engine, with … for each value."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    found = []
    for file in ("core/kv_cache_utils", "worker/utils", "worker/cpu_worker", "worker/gpu_worker",
                 "worker/gpu_model_runner", "engine/utils", "executor/multiproc_executor"):  # fmt: skip
        for node in ast.walk(ast.parse((root / "v1" / f"{file}.py").read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[sdf]", "…", node.value))
    return "\n".join(found)


def test_messages_quoted_from_vllm_are_in_its_code() -> None:
    """In the version that is installed. PyTorch's and argparse's own words are not in its code."""
    quoted = re.findall(
        r"`([^`]+)`", "\n".join(re.findall(r"^\| ([^|]+) \|", section("troubleshooting.md", "vLLM says"), re.M))
    )
    others = ("CUDA out of memory. Tried to allocate …", "error: unrecognized arguments: --swap-space …")
    assert set(others) <= set(quoted) and len(quoted) > 10
    vllm = said_by_vllm()
    for message in quoted:
        plain = message.replace("-…", "…").replace("{…}", "…").replace("-9", "…")
        assert message in others or plain in vllm, message


def test_commands_answering_vllm_messages_use_known_flags() -> None:
    from overspill.settings import SETTINGS

    known = {setting.flag for setting in SETTINGS}
    answers = re.findall(r"`overspill (?:plan|serve) MODEL([^`]*)`", section("troubleshooting.md", "vLLM says"))
    assert len(answers) > 6
    for answer in answers:
        assert set(re.findall(r"--[a-z-]+", answer)) <= known


# Generated parts.


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / f"docs/{name}.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_generated_reference_is_fresh() -> None:
    generate = script("generate")
    for path in generate.PAGES:
        text = path.read_text()
        assert generate.MARKED.search(text), f"{path.name} has no generated part"
        assert generate.refresh(text) == text, f"{path.name} is stale; run: python docs/generate.py"


PUBLISHED_GB = {  # of the files on the hub, rounded
    "LLAMA_8B": 16.06, "LLAMA_8B_4": 5.73, "QWEN_4B": 8.04, "QWEN_8B": 16.38, "OLMO_7B": 14.6, "GEMMA_4B": 8.6,
    "GEMMA_12B": 24.37, "GPT_OSS": 13.76, "MISTRAL": 47.14, "CODER": 61.06, "CODER_8": 31.2, "LLAMA_70B": 141.1,
    "LLAMA_70B_4": 39.77,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED_GB)
def test_recipes_are_of_models_as_they_are_published(name: str) -> None:
    from docs import recipes

    weights = recipes.facts_of(getattr(recipes, name)).weights
    assert weights.checkpoint_bytes == pytest.approx(PUBLISHED_GB[name] * 1e9, rel=0.005)


def test_recipes_name_the_longest_context() -> None:
    """On the GPU alone: with one block more, the plan takes RAM. With RAM: with one more, there is none."""
    from docs import recipes

    for model in (recipes.LLAMA_8B, recipes.CODER_4):
        alone = recipes.longest_alone(model, recipes.MEDIUM)
        for length, way in ((alone, "everything on the GPU"), (alone + 16, "KV spilled to RAM")):
            recommended = recipes.plan_of(model, recipes.MEDIUM, length).recommended
            assert recommended is not None and recommended.name == way
    longest = recipes.longest_with_ram(recipes.QWEN_4B, recipes.SMALL)
    assert recipes.plan_of(recipes.QWEN_4B, recipes.SMALL, longest).recommended is not None
    assert recipes.plan_of(recipes.QWEN_4B, recipes.SMALL, longest + 64).recommended is None


def test_speeds_in_recipes_are_called_assumed_and_are() -> None:
    from docs import recipes
    from overspill.figures import Origin

    assert "every one of them is *assumed*" in page("recipes.md")
    for machine, models in recipes.MACHINES.items():
        for model in models:
            way = recipes.plan_of(model, machine, 8192).recommended
            assert way is not None and way.decode_tokens_per_s.origin is way.ttft_s.origin is Origin.ASSUMED


def test_a_pool_size_in_blocks_converts_to_the_same_bytes() -> None:
    assert "50,000 blocks x 16 tokens x 98,304 bytes = 78,643,200,000 bytes = 78.6 GB" in page("recipes.md")
    assert Options.parse({"host_bytes": "78.6432GB"}).host_bytes == 50_000 * 16 * 2 * 48 * 4 * 128 * 2


def test_tables_of_measurements_are_fresh() -> None:
    table = [sys.executable, "benchmarks/results_table.py", "--check", "README.md", "docs/benchmarks.md"]
    answer = subprocess.run(table, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 0, answer.stderr
    for path in (ROOT / "README.md", ROOT / "docs/benchmarks.md"):
        assert "<!-- table:" in TEXT[path]


def test_numbers_stand_only_in_generated_tables() -> None:
    """A measured number typed by hand would outlive its measurement."""
    for path in (ROOT / "README.md", ROOT / "docs/benchmarks.md"):
        typed = re.sub(r"<!-- table:.*?<!-- /table -->", "", TEXT[path], flags=re.DOTALL)
        assert not re.findall(r"\d[\d.,]* ?(?:ms|GB/s|tok/s|req/s|×|%)(?!\w)", typed)


# Examples.


def transfer_configs() -> list[tuple[str, dict[str, Any]]]:
    found = [(name_of(block), json.loads(block.text)) for block in blocks("json")]
    for block in blocks("bash"):
        for match in re.finditer(r"--kv-transfer-config '([^']*)'", block.text):
            found.append((name_of(block), json.loads(match[1])))
    return found


@pytest.mark.parametrize(("place", "config"), transfer_configs(), ids=[place for place, _ in transfer_configs()])
def test_configurations_are_accepted(place: str, config: dict[str, Any]) -> None:
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(**config)
    ours = config
    if transfer.kv_connector == "MultiConnector":
        assert transfer.kv_load_failure_policy == "recompute"
        ours = next(c for c in config["kv_connector_extra_config"]["connectors"] if c["kv_connector"] == CONNECTOR)
    assert ours["kv_connector"] == CONNECTOR and ours["kv_role"] == "kv_both"
    assert Options.parse(ours["kv_connector_extra_config"])


def test_docs_configure_both_serve_and_multiconnector() -> None:
    names = [config["kv_connector"] for _, config in transfer_configs()]
    assert names.count(CONNECTOR) >= 3 and "MultiConnector" in names


@pytest.mark.parametrize(("host", "spill"), [(True, False), (False, True), (True, True)])
def test_there_are_commands_for_offload_for_spill_and_for_both(host: bool, spill: bool) -> None:
    served = [json.loads(found) for found in re.findall(r"--kv-transfer-config '([^']*)'", "\n".join(TEXT.values()))]
    given = [config["kv_connector_extra_config"].keys() for config in served]
    assert any(("host_bytes" in options, "spill_bytes" in options) == (host, spill) for options in given)


def test_classes_named_in_commands_exist() -> None:
    from importlib import import_module

    named = re.findall(r"--(?:worker|scheduler)-cls (overspill\.[\w.]+)", "\n".join(TEXT.values()))
    assert len(named) >= 2
    for place in named:
        module, _, name = place.rpartition(".")
        assert hasattr(import_module(module), name), place


@pytest.mark.parametrize("block", blocks("python"), ids=name_of)
def test_python_examples_run(block: Block, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(block.text)
    answer = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr[-3000:]


# Commands.


def test_every_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    mentioned = {
        word
        for text in ["\n".join(commands()), *re.findall(r"`(make [^`]+)`", "\n".join(TEXT.values()))]
        for line in re.findall(r"^make (.+)$", text, re.MULTILINE)
        for word in line.split()
        if "=" not in word
    }
    assert {"demo", "test", "install"} <= mentioned <= targets


@cache
def help_of(script: str) -> str:
    answer = subprocess.run(
        [sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    return answer.stdout


SCRIPTS = [line for line in commands() if re.match(r"python \S+\.py", line)]


@pytest.mark.parametrize("command", SCRIPTS)
def test_scripts_and_their_flags_exist(command: str) -> None:
    _, script, *rest = command.split()
    assert (ROOT / script).is_file()
    flags = [word for word in rest if word.startswith("--")]
    for flag in flags:
        assert re.search(rf"{flag}\b", help_of(script)), f"{script} has no {flag}"


def test_every_benchmark_has_a_command() -> None:
    named = {Path(command.split()[1]).name for command in SCRIPTS}
    measured = {"offload.py", "spill.py", "startup.py", "park.py", "gpu.py", "scheduler_cost.py", "attention_kernel.py"}
    assert measured | {"experiments.py", "results_table.py"} <= named


# Links.


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXT[path]):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), f"{path.name} links to {target}"
        if anchor:
            assert anchor in anchors(there.read_text()), f"{path.name} links to {target}"


def test_the_readme_links_to_every_page() -> None:
    for other in PAGES[1:]:
        assert f"](docs/{other.name})" in TEXT[ROOT / "README.md"]


def test_pictures_are_taken_of_every_page_and_kept_if_shown() -> None:
    pictures = script("pictures")
    templates = (ROOT / "src/overspill/manager/web/templates").glob("*.html")
    whole = {path.stem for path in templates if '{% extends "base.html" %}' in path.read_text()}
    assert len(whole) > 10 and whole <= set(pictures.PAGES), whole - set(pictures.PAGES)
    assert {path.name for path in (ROOT / "docs/pictures").iterdir()} == pictures.shown_in_docs()


def test_the_recording_names_nothing_of_the_machine_it_was_made_on() -> None:
    recording, text = script("recording"), (ROOT / "docs/pictures/first-minute.svg").read_text()
    assert recording.COMMAND in text and recording.ANSWER.partition(",")[0] in text.replace("&#x27;", "'")
    for word in ("/tmp", "/root", "/home", "/work", "file:", "<script", "@import", "url("):
        assert word not in text
    assert set(re.findall(r"https?://[^\s\"<:/]+", text)) == {"http://127.0.0.1", "http://www.w3.org"}
