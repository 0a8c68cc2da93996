"""Two ranks end to end on vLLM's CPU build: a server that offloads, spills and keeps KV on disk, and a proof."""

import json
import signal
from pathlib import Path

from tests.command import run_overspill
from tests.engine import random_prompt
from tests.test_serve import ASKED, environment, expected, model, serving, words  # noqa: F401
from tests.test_verify import SETTINGS, verify

PROMPT = random_prompt(1, 3200)  # as in test_serve


def test_a_server_of_two_ranks_spills_and_finds_its_kv_again(
    model: Path,  # noqa: F811
    expected: list[int],  # noqa: F811
    tmp_path: Path,
) -> None:
    """Each rank has 4 MiB as GPU memory: half of the weights, and a part of its 4 MiB of KV."""
    ranks = ["--tensor-parallel-size", "2", "--gpu-memory", "4MiB"]
    flags = [*ranks, "--disk", "256MiB", "--disk-path", str(tmp_path / "kv"), "--kv-options", "load=always"]
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        with serving(model, *flags, folder=folder) as running:
            running.wait_for("/v1 serves")
            status = running.status()
            assert status is not None and len(status.plan["ranks"]) == 2 and status.plan["spilled_kv_bytes"] > 0
            assert "as planned: spill" in running.told
            answer = running.client().completions.create(model="tiny", prompt=words(PROMPT), **ASKED)
            assert answer.choices[0].text.split() == words(expected).split()
            assert running.metric("spill_in_bytes") > 0
            hits = running.metric("disk_hit_tokens")
            assert hits == 0 if number == 0 else hits >= 0.9 * len(PROMPT)
            running.process.send_signal(signal.SIGTERM)
            assert running.process.wait(timeout=120) == 0
            running.assert_nothing_is_left()
    assert sorted(path.name for path in (tmp_path / "kv").glob("*/rank-*")) == ["rank-0", "rank-1"]


def test_two_ranks_are_verified(llama: Path) -> None:
    """Damage to what one rank has, in RAM and on disk, is found, and the block computed again."""
    scenarios = ("damaged", "killed", "torn", "spilled-and-offloaded")
    answer = verify(
        str(llama), *SETTINGS, "--gpu-memory", "8MiB", "--max-model-len", "2k", "--tensor-parallel-size", "2", "--json",
        *(word for name in scenarios for word in ("--scenario", name)),
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr + answer.stdout
    told = json.loads(answer.stdout)
    assert told["verified"] and [one["name"] for one in told["scenarios"]] == list(scenarios)
    for one in told["scenarios"]:
        assert one["ram_tokens"] > 0 and not one["mismatches"] and not one["failure"] and not one["left_behind"]
    damaged, _, torn, _ = told["scenarios"]
    assert damaged["faults_injected"] == damaged["faults_caught"] == 2 and damaged["sensitive"] is True
    assert torn["faults_injected"] == torn["faults_caught"] == 1 and torn["figures"]["disk_hit_tokens"] > 0


def test_a_size_that_does_not_divide_is_refused_before_anything_starts(model: Path) -> None:  # noqa: F811
    for command in ("plan", "serve"):
        answer = run_overspill(command, str(model), "--device", "cpu", "--tensor-parallel-size", "3", env=environment())
        assert answer.returncode != 0 and "use one of 1, 2" in answer.stderr and "Traceback" not in answer.stderr
