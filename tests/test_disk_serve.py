"""A disk below `overspill serve`: vLLM's real server is stopped and started, and finds its KV again."""

import json
import signal
from pathlib import Path

from overspill.kv.disk.folder import kept_in
from tests.command import run_overspill
from tests.engine import random_prompt
from tests.test_serve import ASKED, environment, expected, model, serving, words  # noqa: F401

PROMPT = random_prompt(1, 3200)  # as in test_serve


def test_a_stopped_server_finds_its_kv_again(model: Path, expected: list[int], tmp_path: Path) -> None:  # noqa: F811
    disk = tmp_path / "kv"
    flags = ["--disk", "256MiB", "--disk-path", str(disk), "--kv-options", "load=always"]
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        with serving(model, *flags, folder=folder) as running:
            running.wait_for("/v1 serves")
            client = running.client()
            answer = client.completions.create(model="tiny", prompt=words(PROMPT), **ASKED)
            assert answer.choices[0].text.split() == words(expected).split()
            hits = running.metric("disk_hit_tokens")
            assert hits == 0 if number == 0 else hits >= 0.95 * (len(PROMPT) - 128)
            refused = run_overspill("cache", "clear", "--disk-path", str(disk), env=environment())
            assert refused.returncode == 1 and "in use by another server" in refused.stderr
            running.process.send_signal(signal.SIGTERM)
            assert running.process.wait(timeout=120) == 0
        assert "written to disk" in (folder / "vllm.log").read_text() or number
    (kept,) = kept_in(disk)
    shown = run_overspill("cache", "show", "--disk-path", str(disk), "--json", env=environment())
    assert json.loads(shown.stdout)["kept"][0]["bytes"] == kept.num_bytes > 0
    cleared = run_overspill("cache", "clear", "--disk-path", str(disk), env=environment())
    assert cleared.returncode == 0 and "deleted from" in cleared.stdout
    assert kept_in(disk) == []
    assert "no KV is on disk" in run_overspill("cache", "show", "--disk-path", str(disk), env=environment()).stdout
