"""`overspill verify` on the real CPU engine: it passes on models that are served right, and fails on every planted bug.

Bugs are planted by a `sitecustomize` on the path of the child processes; the product has no hook for them.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from overspill.launch.launch import Launch
from overspill.processes import in_session
from overspill.verify import children
from overspill.verify.children import ChildDied, Children
from overspill.verify.mooncake import missing
from overspill.verify.run import prove
from overspill.verify.scenarios import read_request
from tests.command import run_overspill

SETTINGS = ("--device", "cpu", "--dtype", "float32", "--ram", "6GiB", "--enforce-eager")
OFFLOAD = ("returning", "preempted", "aborted", "damaged", "failed-load", "killed", "stopped", "torn", "store-killed")
SPILL = ("spilled", "lent", "spilled-and-offloaded", "shared-attention")


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OVERSPILL_")}
    # What the other tests need would contradict a plan.
    kept.pop("VLLM_CPU_KVCACHE_SPACE", None)
    return {**kept, "XDG_CONFIG_HOME": "/nonexistent", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **more}


def verify(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "overspill", "verify", *arguments],
        capture_output=True, text=True, timeout=900, check=False, env=environment(**more),
    )  # fmt: skip


def first_on_path(folder: Path) -> str:
    """Where Python looks for `sitecustomize` before it looks where it did."""
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


def test_a_llama_is_verified_and_everything_is_told_as_json(llama: Path) -> None:
    """With 8 MiB as GPU memory a context of 4,096 tokens spills by the plan itself, and does not fit the reference."""
    answer = verify(str(llama), *SETTINGS, "--gpu-memory", "8MiB", "--max-model-len", "4k", "--seed", "3", "--json")
    assert answer.returncode == 0, answer.stderr + answer.stdout
    told = json.loads(answer.stdout)
    assert told["verified"] and told["verdict"].startswith("Verified: ") and told["seed"] == 3
    assert told["versions"]["overspill"] and told["hardware"]["device"] == "cpu"
    assert told["settings"]["max_model_len"] == 4096 and told["plan"]["spilled_kv_bytes"] > 0
    assert not told["stage"]["is_whole"] and told["stage"]["max_model_len"] <= told["stage"]["reference_tokens"] < 4096
    scenarios = {one["name"]: one for one in told["scenarios"]}
    assert tuple(scenarios) == (*OFFLOAD, *SPILL)
    if missing():
        assert missing() in scenarios.pop("store-killed")["skipped"]
    for name, one in scenarios.items():
        assert one["ram_tokens"] > 0 and one["ram_bytes"] > 0 and one["tokens"] > 0, name
        assert one["awaited"] == one["requests"] > 0, name
        assert not one["mismatches"] and not one["failure"] and not one["skipped"] and not one["left_behind"], name
    assert scenarios["damaged"]["faults_injected"] == scenarios["damaged"]["faults_caught"] == 2
    assert scenarios["lent"]["figures"]["window_preemptions"] > 0, "memory goes to the GPU's blocks, and back"
    assert scenarios["damaged"]["sensitive"] is True, "the model does not notice damage, so it proves nothing"
    assert scenarios["failed-load"]["faults_injected"] == scenarios["failed-load"]["faults_caught"] == 2
    assert scenarios["torn"]["faults_injected"] == scenarios["torn"]["faults_caught"] == 1
    if not missing():
        shared = scenarios["store-killed"]
        assert shared["faults_injected"] == shared["faults_caught"] == 1
        assert all(shared["figures"][name] > 0 for name in ("remote_hit_tokens", "remote_failures"))
    assert all(scenarios[name]["figures"]["disk_hit_tokens"] > 0 for name in ("stopped", "torn"))
    assert scenarios["preempted"]["figures"]["preemptions"] > 0
    assert (
        scenarios["aborted"]["figures"]["aborted_loads"] > 0 and scenarios["aborted"]["figures"]["aborted_stores"] > 0
    )
    shared = scenarios["shared-attention"]
    assert shared["figures"]["spill_far_bytes"] > 0 and shared["yardstick"] == "torch's attention"
    assert 0 < shared["distance"]["mean"] <= shared["yardstick_distance"]["mean"]
    assert shared["distance"]["tokens"] == 12 * 15 and shared["distance"]["differing_tokens"] == 0
    for name in ("spilled", "spilled-and-offloaded"):
        assert not scenarios[name]["figures"]["spill_far_bytes"], "the CPU took part where all is to be streamed"
    assert "left)" in answer.stderr and "reference" in answer.stderr


@pytest.mark.soak
def test_a_sliding_window_model_is_verified_in_every_scenario(
    models: Callable[[str], Path],
) -> None:
    answer = verify(str(models("gemma3")), *SETTINGS)
    assert answer.returncode == 0, answer.stderr + answer.stdout
    lines = answer.stdout.splitlines()
    assert lines[0].split() == [
        "scenario",
        "requests",
        "tokens",
        "from",
        "RAM",
        "bytes",
        "faults",
        "ties",
        "mismatches",
    ]
    rows = {line.split()[0]: line.split() for line in lines[1 : 1 + len(OFFLOAD + SPILL)]}
    assert tuple(rows) == (*OFFLOAD, *SPILL)
    for name, row in rows.items():
        requests, tokens, from_ram = (int(cell.replace(",", "")) for cell in row[1:4])
        assert requests and tokens and from_ram, name
        assert row[-2:] == ["0", "0"], name
    assert lines[-1].startswith("Verified: ") and "offload and spill" in lines[-1]
    assert "Undetected damage changed the answer" in answer.stdout


DROPPED_BLOCK = """
    from overspill.kv.copies import PlainCopier
    load = PlainCopier.load
    PlainCopier.load = lambda self, slots, blocks: load(self, slots[1:], blocks[1:])
"""
FLIPPED_BYTE = """
    from overspill.kv.copies import PlainCopier
    load = PlainCopier.load
    def flipped(self, slots, blocks):
        transfer = load(self, slots, blocks)
        self._thread.submit(lambda: None).result()
        self._pairs[0][0][blocks[0], 3] ^= 0x20
        return transfer
    PlainCopier.load = flipped
"""
SKIPPED_WAIT = """
    import time
    from overspill.kv import copies
    timed = copies.PlainCopier._timed
    def late(self, transfer, run):
        def delayed():
            time.sleep(0.3)
            run()
        timed(self, transfer, delayed)
    copies.PlainCopier._timed = late
    copies.Transfer.done = lambda self: True
"""
NOT_WRITTEN_BACK = """
    from overspill.kv.spill.streams import HostStreams
    HostStreams._save = lambda self, region, runs: None
"""
NEVER_LOADED = """
    from overspill.kv.loads import Loads
    Loads.match = lambda self, request, num_local_tokens: (0, False)
"""
WRONG_FAR_BLOCKS = """
    from overspill.kv.spill import far
    right = far.shared_parts
    far.shared_parts = lambda parts: [(blocks[::-1] // 2, queries) for blocks, queries in right(parts)]
"""
WRONG_FAR_WEIGHT = """
    from overspill.kv.spill.far import FarAttention
    attend = FarAttention.attend
    def wrong(self, *args):
        output, lse = attend(self, *args)
        return output, lse + 1e-4
    FarAttention.attend = wrong
"""
NEVER_FAR = """
    from overspill.kv.spill.scheduler import SpillScheduler
    SpillScheduler._split = lambda self, *args: 0
"""
UNCHECKED_DISK = """
    from overspill.kv.disk.segments import DiskWorker
    read = DiskWorker._read
    def unchecked(self, segments, call, positions, digests):
        part = read(self, segments, call, positions, digests)
        part.bad = []
        for _, slot in call:
            self._checksums.note(slot, self._checksums.digest(slot))
        return part
    DiskWorker._read = unchecked
"""
UNCHECKED_STORE = """
    from overspill.kv.remote.worker import RemoteWorker
    def unchecked(self, name, slot):
        self._checksums.note(slot, self._checksums.digest(slot))
        return True
    RemoteWorker._is_intact = unchecked
"""
BUGS = {
    "a store whose checksums are skipped": (UNCHECKED_STORE, "store-killed", "answers differ"),
    "a disk whose checksums are skipped": (UNCHECKED_DISK, "torn", "answers differ"),
    "a dropped block": (DROPPED_BLOCK, "returning", "answers differ"),
    "a flipped byte": (FLIPPED_BYTE, "returning", "answers differ"),
    "a skipped wait": (SKIPPED_WAIT, "returning", "answers differ"),
    "spilled KV that is not written back": (NOT_WRITTEN_BACK, "spilled", "answers differ"),
    "a wrong block in the CPU's list": (WRONG_FAR_BLOCKS, "shared-attention", "answers differ"),
    "a log-sum-exp off by 0.0001": (WRONG_FAR_WEIGHT, "shared-attention", "answers differ"),
    "a CPU that attends to nothing": (NEVER_FAR, "shared-attention", "the CPU attended to nothing"),
    "a tier that is not used": (NEVER_LOADED, "returning", "no token came from RAM, so equal answers prove nothing"),
}
# In-process tests plant more of them; here it is the command that has to notice.
MORE_BUGS = (
    "a flipped byte",
    "spilled KV that is not written back",
    "a wrong block in the CPU's list",
    "a CPU that attends to nothing",
    "a tier that is not used",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] if name in MORE_BUGS else []) for name in BUGS]
)
def test_a_planted_bug_is_found(llama: Path, tmp_path: Path, name: str) -> None:
    bug, scenario, said = BUGS[name]
    if scenario == "store-killed" and missing():
        pytest.skip(missing())
    (tmp_path / "sitecustomize.py").write_text(planted(bug))
    answer = verify(str(llama), *SETTINGS, "--scenario", scenario, "--seed", "5", PYTHONPATH=first_on_path(tmp_path))
    assert answer.returncode == 1, answer.stderr + answer.stdout
    verdict = answer.stdout.splitlines()[-1]
    assert verdict.startswith(f"NOT VERIFIED: {scenario}: ") and said in verdict
    assert f"--seed 5 --scenario {scenario}" in answer.stdout
    if said == "answers differ":
        mismatch = next(line for line in answer.stdout.splitlines() if line.startswith("MISMATCH"))
        for part in ("seed 5", f"scenario {scenario}", "request ", "token ", "instead of"):
            assert part in mismatch


def planted(bug: str) -> str:
    """In the process that engines are forked from, and not in the command's own, which loads no vLLM."""
    return "import sys\nif 'forkserver' in ' '.join(sys.orig_argv):\n" + textwrap.indent(textwrap.dedent(bug), "    ")


# An engine's end that nobody made: before it says that it is under way, and after.
ENDED = """
    import os, signal
    from overspill.verify import plays
    def end(how, say):
        print("about to end", flush=True)
        if how != "early":
            say("under way")
        if how == "told":
            raise RuntimeError("out of luck")
        if how == "late":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)  # as for want of memory
    plays.play = end
"""


def test_an_engine_that_ended_by_itself_was_not_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that ends was taken for a kill that left nothing behind."""

    def once_it_is_gone(session: int) -> list[int]:
        """As where it ends between its word and the kill."""
        while in_session(session):
            time.sleep(0.01)
        return []

    (tmp_path / "sitecustomize.py").write_text(planted(ENDED))
    monkeypatch.setattr(children, "in_session", once_it_is_gone)
    ends = {}
    with Children("overspill.verify.plays", {**environment(), "PYTHONPATH": first_on_path(tmp_path)}) as engines:
        for how in ("early", "late", "told"):
            with pytest.raises(ChildDied) as raised:
                engines.kill_under_way("play", how)
            ends[how] = str(raised.value)
    for how in ("early", "late"):
        assert ends[how].startswith("its process ended; its last output: ") and ends[how].endswith("about to end")
    assert ends["told"] == "out of luck"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_leaves_no_engine_behind(llama: Path, tmp_path: Path, how: signal.Signals) -> None:
    words = [sys.executable, "-m", "overspill", "verify", str(llama), *SETTINGS]
    running = subprocess.Popen(
        words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment(), cwd=tmp_path
    )
    with running:
        assert running.stderr is not None and "reference" in running.stderr.readline()
        deadline = time.monotonic() + 120
        while not leaders(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.1)
        # Itself, what tracks its resources, what engines are forked from, and an engine.
        assert leaders(tmp_path) and len(started_in(tmp_path)) >= 4
        running.send_signal(how)
        running.wait(60)
    deadline = time.monotonic() + 60
    while started_in(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not started_in(tmp_path)
    assert running.returncode != 0


def leaders(folder: Path) -> list[int]:
    """Engines have sessions of their own; what they are forked from has none, and may still be loading vLLM."""
    return [pid for pid in started_in(folder) if pid in in_session(pid)]


def started_in(folder: Path) -> list[int]:
    """Every process inherits the folder that the command was started in."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if path.readlink() == folder:
                found.append(int(path.parent.name))
    return found


def test_a_soak_goes_on_with_other_seeds_until_its_time_is_up(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    given = {"device": "cpu", "dtype": "float32", "ram": "6GiB", "enforce_eager": True}
    asked = read_request(quick=False, soak=True, minutes="1", seed="11", scenarios=["returning", "arrivals"])
    said: list[str] = []
    # Long enough for a second round to begin, and no longer.
    proof = prove(Launch.of(str(llama), given), replace(asked, seconds=12.0), said.append)
    assert proof.exit_code == 0, proof.as_text()
    told = proof.as_json()
    assert told["seconds"] >= 12 and told["rounds"] >= 1 and told["seed"] == 11 + told["rounds"] - 1
    assert sum(one["ram_tokens"] for one in told["scenarios"]) > 0
    assert "--soak --minutes 1" in told["command"] and any(line.endswith("s left)") for line in said)


# What cannot be verified, and mistakes.


BAD = {
    "no model": ((), 2, "Missing argument"),
    "a model that is not there": (("/nonexistent/model",), 2, "/nonexistent/model"),
    "a flag for a model": (("--soak",), 2, "Missing argument"),
    "an unknown flag": (("MODEL", "--sok"), 2, "No such option: --sok"),
    "quick and soak": (("MODEL", "--quick", "--soak"), 2, "--quick and --soak exclude each other"),
    "minutes without soak": (("MODEL", "--minutes", "5"), 2, "--minutes sets how long --soak runs"),
    "no minutes": (("MODEL", "--soak", "--minutes", "0"), 2, "--minutes: '0' is not a whole number from 1"),
    "half a minute": (("MODEL", "--soak", "--minutes", "0.5"), 2, "--minutes: '0.5' is not a whole number"),
    "a seed in words": (("MODEL", "--seed", "seven"), 2, "--seed: 'seven' is not a whole number from 0"),
    "a negative seed": (("MODEL", "--seed=-1"), 2, "--seed: '-1' is not a whole number"),
    "a load format that is none": (("MODEL", "--load-format", "gguf"), 2, "--load-format: 'gguf' is neither auto nor"),
    "an unknown scenario": (("MODEL", "--scenario", "spiled"), 2, "there is no 'spiled'; did you mean spilled?"),
    "a soak's scenario": (("MODEL", "--scenario", "arrivals"), 2, "--scenario arrivals is part of --soak"),
    "prompts for nothing": (("MODEL", "--scenario", "spilled", "--prompts", "9"), 2, "--prompts is for --scen"),
    "one prompt": (("MODEL", "--prompts", "1"), 2, "--prompts: '1' is not a whole number from 2"),
    "a device that is none": (("MODEL", "--device", "tpu"), 2, "--device: 'tpu' is none of auto, cuda, cpu"),
    "a card that is not here": (("MODEL", "--device", "cuda", "--gpu", "24GiB", "--ram", "64GiB"), 2, "--gpu names a"),
    "a size that is none": (("MODEL", *SETTINGS, "--gpu-memory", "much"), 2, "--gpu-memory: 'much' is not a size"),
    "a short context": (("MODEL", *SETTINGS, "--max-model-len", "512"), 1, "give --max-model-len 768 or more"),
    "a context that does not fit": (
        ("MODEL", "--device", "cpu", "--ram", "1GiB", "--gpu-memory", "4MiB"), 1, "does not fit with 32768 tokens",
    ),
    "no room for a reference": (
        ("MODEL", *SETTINGS, "--gpu-memory", "4400KiB", "--max-model-len", "1k"), 1, "there is room for 640",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_told_in_a_sentence(llama: Path, name: str) -> None:
    given, code, said = BAD[name]
    words = (str(llama) if word == "MODEL" else word for word in given)
    answer = run_overspill("verify", *words, env=environment(COLUMNS="200"))
    assert answer.returncode == code, answer.stderr + answer.stdout
    assert said in answer.stderr and "Traceback" not in answer.stderr


@pytest.fixture
def shape(tmp_path: Path, llama: Path) -> Path:
    """A model of which only the configuration is here."""
    folder = tmp_path / "shape"
    folder.mkdir()
    (folder / "config.json").write_text((llama / "config.json").read_text())
    return folder


def test_a_model_that_vllm_cannot_load_is_told_with_its_reason(shape: Path) -> None:
    answer = verify(str(shape), *SETTINGS, "--scenario", "returning")
    assert answer.returncode == 1
    assert "vLLM cannot run the model even without Overspill: " in answer.stderr and "Traceback" not in answer.stderr
    assert "--load-format dummy" in answer.stderr


# As vLLM makes them: so small that the answer depends on the last token alone.
INSENSITIVE = """
    from overspill.verify import inprocess
    inprocess.redraw = lambda model, seed=0: 0
"""


@pytest.mark.parametrize("is_sensitive", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_only_sensitive_random_weights_verify_a_shape(shape: Path, tmp_path: Path, is_sensitive: bool) -> None:
    """Also where vLLM loads no plugin, as where Overspill is only on the path."""
    if not is_sensitive:
        (tmp_path / "sitecustomize.py").write_text(planted(INSENSITIVE))
    answer = verify(
        str(shape), *SETTINGS, "--load-format", "dummy", "--scenario", "damaged", VLLM_PLUGINS="none",
        PYTHONPATH=first_on_path(tmp_path),
    )  # fmt: skip
    assert answer.returncode == int(not is_sensitive), answer.stderr + answer.stdout
    verdict = answer.stdout.splitlines()[-1]
    assert "random weights, " in answer.stdout
    if is_sensitive:
        assert verdict.startswith("Verified: ") and "Undetected damage changed the answer" in answer.stdout
    else:
        assert verdict.startswith("NOT VERIFIED: damaged: undetected damage did not change the answer")
        assert "--load-format dummy" in answer.stdout.splitlines()[-2]


def test_the_help_has_an_example() -> None:
    answer = run_overspill("verify", "--help", env=environment(COLUMNS="200"))
    assert answer.returncode == 0 and "Example: overspill verify" in answer.stdout
