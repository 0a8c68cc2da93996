"""What `overspill serve` decides, and what it does with engines that misbehave: small programs stand in for vLLM."""

import dataclasses
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from overspill.address import free_port, require_free
from overspill.errors import CannotServe
from overspill.figures import assumed, measured
from overspill.flags import read_flags
from overspill.kv.errors import OverspillError
from overspill.launch import vllm as plugins
from overspill.launch.arguments import adopt, combine
from overspill.launch.launch import Prepared, prepare
from overspill.launch.machine import plan_for
from overspill.launch.traps import check
from overspill.launch.vllm import Vllm, server_command
from overspill.planning.attempts import PROCESS_RAM_BYTES
from overspill.planning.memory import Overheads
from overspill.planning.planner import Plan, make_plan
from overspill.planning.setup import Wishes
from overspill.planning.ways import Way
from overspill.processes import identity
from overspill.registry import RunEnd, add_model, list_runs, open_registry, running_runs, start_run
from overspill.serve import reporter
from overspill.serve.differences import differences, profile_of
from overspill.serve.engine_report import HostMemoryReport, Phase, Report, earliest, read, write
from overspill.serve.reporter import notify
from overspill.serve.run import run_server
from overspill.serve.status import Status, leave_reason, memory_of, read_statuses, take_reason, write_status
from overspill.settings import resolve, with_registered

MIB = 2**20
CPU_BUILD = Vllm("0.32.0", is_cpu=True)
PLANNED = ["--max-model-len", "4096", "--gpu-memory-utilization", "0.9000", "--kv-cache-memory-bytes", "4096",
           "--max-num-seqs", "64", "--enforce-eager", "--kv-transfer-config",
           '{"kv_connector": "OverspillConnector"}']  # fmt: skip
PREFETCH = ["--offload-backend", "prefetch", "--offload-group-size", "4", "--offload-num-in-group", "1"]


# Flags.


@pytest.mark.parametrize(
    ("written", "name", "value"),
    [
        (["--max-model-len", "10"], "--max-model-len", "10"),
        (["--max_model_len=10"], "--max-model-len", "10"),
        (["--max-model-len", "-1"], "--max-model-len", "-1"),
        (["-tp", "2"], "--tensor-parallel-size", "2"),
        (["-tp=2"], "--tensor-parallel-size", "2"),
        (["--kv_transfer_config.kv_role", "kv_both"], "--kv-transfer-config", "kv_both"),
        (["--api-key", "a", "b"], "--api-key", "a b"),
        (["--enable-lora"], "--enable-lora", ""),
    ],
)
def test_flags_are_read_as_vllm_reads_them(written: list[str], name: str, value: str) -> None:
    (flag,) = read_flags(written)
    assert (flag.name, flag.value, list(flag.words)) == (name, value, written)


@pytest.mark.parametrize(
    ("given", "replaced"),
    [
        (["--max-model-len", "1000"], ["--max-model-len"]),
        (["--max_model_len=1000"], ["--max-model-len"]),
        (["--max-model", "1000"], ["--max-model-len"]),  # argparse completes it
        (["--no-enforce-eager"], ["--enforce-eager"]),
        (["--kv-cache-memory-bytes", "1G"], ["--kv-cache-memory-bytes"]),
        (["--kv-cache-mem", "1G"], ["--kv-cache-memory-bytes"]),
        (["--kv-transfer-config.kv_connector", "Other"], ["--kv-transfer-config"]),
        (["--kv-offloading-size", "4"], ["--kv-transfer-config"]),
        (["--trust-remote-code"], []),
        (["--max-num-seqs", "64"], []),  # as planned
    ],
)
def test_a_flag_of_the_users_replaces_the_plans(given: list[str], replaced: list[str]) -> None:
    combined = combine(PLANNED, given)
    assert [sentence.split("the plan's ")[1].split()[0] for sentence in combined.contradictions] == replaced
    names = [flag.name for flag in combined.flags]
    own = [flag.name for flag in combined.flags if flag not in combined.given]
    assert not set(replaced) & set(own) and len(names) == len(set(names))
    assert list(combined.words[-len(given) :]) == given
    assert combined.follows_plan == (not replaced)


def test_user_weight_offload_replaces_all_planned_offload_flags() -> None:
    combined = combine([*PLANNED, *PREFETCH], ["--cpu-offload-gb", "4"])
    assert not [word for word in combined.words if word.startswith("--offload")]
    assert len(combined.contradictions) == 3


def test_flags_that_change_what_the_plan_was_made_for_are_told() -> None:
    assert not combine(PLANNED, ["-dp", "1"]).changes
    assert "-dp 2 changes what the plan was made for" in combine(PLANNED, ["-dp", "2"]).changes[0]


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [
        (["-dp", "1"], True),
        (["-dp", "2"], False),
        (["--speculative-config", "{}"], False),
        (["--quantization", "fp8"], False),
        (["--num-gpu-blocks-override", "100"], True),
        (["--max-num-seqs", "8"], True),
    ],
)
def test_another_engine_than_planned_lets_vllm_size_its_kv(given: list[str], is_kept: bool) -> None:
    """Engines may share experts, and a draft model adds weights: the plan's KV would be too little, or too much."""
    combined = combine(PLANNED, given)
    assert combined.has_planned_kv == is_kept == (combined.value("--kv-cache-memory-bytes") is not None)
    assert combined.value("--gpu-memory-utilization") == "0.9000"
    # Where there is no fraction, as on a CPU, nothing else would give the engine its size.
    on_cpu = combine(["--kv-cache-memory-bytes", "4096"], given)
    assert on_cpu.value("--kv-cache-memory-bytes") == "4096"
    assert not combine(PLANNED, [*given, "--kv-cache-memory-bytes", "1G"]).has_planned_kv


def test_the_command_works_with_either_build_of_vllm() -> None:
    assert server_command("m", CPU_BUILD)[-3:] == ["vllm.entrypoints.openai.api_server", "--model", "m"]
    assert server_command("m", Vllm("0.32.0", is_cpu=False))[-3:] == ["vllm.entrypoints.cli.main", "serve", "m"]


# Traps. What is refused is tried in test_serve.py, from outside.


@pytest.fixture(scope="module")
def on_gpu(llama: Path) -> Plan:
    """Everything fits."""
    return plan_for(str(llama), {"gpu": "24GiB", "ram": 64 * 2**30})


def test_offloaded_weights_that_would_fit_are_warned_of(llama: Path) -> None:
    values = resolve({"gpu": "24GiB", "ram": "64GiB"}, {})
    moved = plan_for(str(llama), adopt(values, ["--cpu-offload-gb", "0.0001"]).settings)
    assert chosen(moved).weights.ram_bytes and len(moved.warnings) == 1 and "19 times" in moved.warnings[0]
    left = plan_for(str(llama), adopt(values, ["--cpu-offload-gb", "0"]).settings)
    assert not chosen(left).weights.ram_bytes and not left.warnings


def test_prefetching_layers_that_vllm_does_not_make_is_refused(on_gpu: Plan) -> None:
    ram, wishes = on_gpu.ram_bytes, Wishes(offload_groups=(1, 1))
    assert chosen(make_plan(on_gpu.facts, on_gpu.gpu, ram, wishes)).weights.group_size == 1
    olmo = dataclasses.replace(on_gpu.facts, architecture="Olmo2ForCausalLM")
    with pytest.raises(OverspillError, match=r"Olmo2ForCausalLM through Transformers.*--cpu-offload-gb"):
        make_plan(olmo, on_gpu.gpu, ram, wishes)
    assert chosen(make_plan(olmo, on_gpu.gpu, ram, Wishes(weights_ram_bytes=1))).weights.is_uva


# vLLM's own flags that are settings here.


@pytest.mark.parametrize(
    ("typed", "name", "value", "left"),
    [
        (["--cpu-offload-gb", "8"], "weights_ram", 8 * 2**30, []),
        (["--offload-backend=uva", "--cpu_offload_gb=0.5", "--seed", "1"], "weights_ram", 2**29, ["--seed", "1"]),
        (["--cpu-offload-gb", "0"], "weights_ram", 0, []),
        (["--offload-group-size", "0"], "weights_ram", 0, []),
        (["--offload-backend", "prefetch", "--offload-group-size", "4"], "offload_groups", (4, 1), []),
        (["--offload-group-size", "4", "--offload-num-in-group", "3"], "offload_groups", (4, 3), []),
        (["--gpu_memory_utilization=0.85"], "gpu_memory_utilization", 0.85, []),
        (["--gpu-memory-util", "0.5"], "gpu_memory_utilization", 0.5, []),
        (["-tp", "2"], "tensor_parallel_size", 2, []),
        (["--pipeline-parallel", "2", "--seed", "1"], "pipeline_parallel_size", 2, ["--seed", "1"]),
        (["-tp", "2", "--cpu-offload-gb", "4"], "weights_ram", 8 * 2**30, []),
        (["--max_model_len", "16k"], "max_model_len", 16384, []),
        (["--max-num-seqs=4", "--max_num_batched_tokens", "512"], "max_num_batched_tokens", 512, []),
        (["--kv_cache_dtype", "fp8", "--seed", "1"], "kv_cache_dtype", "fp8", ["--seed", "1"]),
        (["--enforce_eager"], "enforce_eager", True, []),
        (["--enforce-eager", "--no-enforce-eager"], "enforce_eager", False, []),
        # Of these an abbreviation is refused, with the setting's name.
        (["--max-model", "8192"], "max_model_len", None, ["--max-model", "8192"]),
        # Of two offloaders at once nothing is taken: traps refuses them.
        (["--cpu-offload-gb", "4", "--offload-group-size", "2"], "weights_ram", None,
         ["--cpu-offload-gb", "4", "--offload-group-size", "2"]),
        (["--offload-backend", "uva"], "weights_ram", None, ["--offload-backend", "uva"]),
    ],
)  # fmt: skip
def test_a_flag_of_vllms_that_a_setting_says_becomes_the_setting(
    typed: list[str], name: str, value: object, left: list[str]
) -> None:
    for adopted in (adopt(resolve({}, {}), typed), adopt(resolve({}, {}), registered=typed)):
        assert adopted.settings[name] == value and list(adopted.vllm_args) == left


def test_typed_flags_override_the_registry_and_may_not_conflict() -> None:
    registered = with_registered(resolve({}, {}), "m", {"weights_ram": 2**30})
    assert adopt(registered, ["--cpu-offload-gb", "2"]).values["weights_ram"].value == 2**31
    assert adopt(registered, ["--offload-group-size", "4"]).settings["weights_ram"] is None
    typed = resolve({"weights_ram": "1GiB"}, {})
    groups = ["--offload-group-size", "4"]
    assert adopt(typed, registered=groups).offload_groups is None, "the flag of the command wins"
    assert adopt(resolve({}, {}), ["--cpu-offload-gb", "1"], registered=groups).offload_groups is None
    with pytest.raises(OverspillError, match="--weights-ram and vLLM's --cpu-offload-gb 2 say the same thing twice"):
        adopt(typed, ["--cpu-offload-gb", "2"])
    for wrong in (["--cpu-offload-gb", "all"], ["--cpu-offload-gb", "-1"], ["--gpu_memory_utilization", "1.5"],
                  ["--offload-group-size", "two"], ["-tp", "x"], ["--cpu-offload-gb", "inf"]):  # fmt: skip
        with pytest.raises(OverspillError, match=wrong[0]):
            adopt(resolve({}, {}), wrong)


def test_typed_weight_offload_is_part_of_the_plan_and_command(tmp_path: Path) -> None:
    """The weights were added to a plan that had already given the RAM away."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    values = resolve({"gpu": "24GiB", "ram": "32GiB", "max_model_len": "128k"}, {})
    adopted = adopt(values, ["--cpu-offload-gb", "8", "--seed", "1"])
    plan = plan_for(str(tmp_path), adopted.settings)
    prepared = prepare(str(tmp_path), plan, adopted.settings, adopted.vllm_args, vllm=Vllm("0.32.0", is_cpu=False))
    way = chosen(plan)
    assert 8 * 2**30 <= way.weights.ram_bytes < 9 * 2**30
    assert way.weights.pinned_bytes + way.kv.spilled_bytes + way.offload_bytes + PROCESS_RAM_BYTES <= 32 * 2**30
    offload = [word for word in prepared.command if word.startswith(("--offload-group-size", "--cpu-offload-gb"))]
    assert len(offload) == 1 and prepared.command[-2:] == ("--seed", "1")
    assert prepared.combined.follows_plan and not prepared.warnings


GONE = ("--swap-space", "--preemption-mode", "--disable-log-requests")


@pytest.mark.parametrize("flag", GONE)
def test_a_flag_removed_from_vllm_is_refused_with_a_replacement(flag: str) -> None:
    """A dry run passed --swap-space on without a warning, and vLLM refused it at the start."""
    for written in (flag, "--" + flag.removeprefix("--").replace("-", "_")):
        with pytest.raises(OverspillError, match=f"vLLM 0.32 no longer has {flag}; .*--"):
            check(combine(PLANNED, [written, "4"]), {}, on_cpu=False)


def test_flags_listed_as_removed_are_unknown_to_vllm() -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    known = {name for action in parser._actions for name in action.option_strings}
    assert {"--cpu-offload-gb", "--no-enable-log-requests"} <= known and known.isdisjoint(GONE)


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_taken_out_and_the_rest_stays(variable: str) -> None:
    local = combine(PLANNED, ["--host", "127.0.0.1"])
    given = {variable: "max_split_size_mb:512,expandable_segments:True"}
    checked = check(local, given, on_cpu=False)
    assert checked.environment == {variable: "max_split_size_mb:512"} and variable in checked.warnings[0]
    assert check(local, {variable: "expandable_segments:True"}, on_cpu=False).environment == {variable: None}
    assert not check(local, {variable: "expandable_segments:False"}, on_cpu=False).environment
    without = combine(["--max-model-len", "1"], ["--host", "127.0.0.1"])
    assert not check(without, given, on_cpu=False).environment


def test_our_plugins_are_added_to_those_vllm_is_told_to_load() -> None:
    local = combine(PLANNED, ["--host", "localhost"])
    checked = check(local, {"VLLM_PLUGINS": "mine,overspill"}, on_cpu=False)
    added = "mine,overspill,overspill_report,overspill_weights"
    assert checked.environment == {"VLLM_PLUGINS": added} and len(checked.warnings) == 1


@pytest.mark.parametrize(("flags", "is_told"), [([], True), (["--api-key", "k"], False)])
def test_a_server_open_to_all_without_a_key_is_warned_of(flags: list[str], is_told: bool) -> None:
    checked = check(combine(PLANNED, ["--host", "0.0.0.0", *flags]), {}, on_cpu=False)
    assert bool(checked.warnings) == is_told


# Differences.


@pytest.fixture(scope="module")
def spilling(llama: Path) -> Plan:
    settings = {"device": "cpu", "gpu_memory": 8 * MIB, "ram": 12 * 2**30, "offload_ram": 64 * MIB, "dtype": "float32",
                "max_model_len": 4096, "max_num_seqs": 4, "enforce_eager": True}  # fmt: skip
    return plan_for(str(llama), settings)


def as_planned(plan: Plan, way: Way) -> Report:
    def memory(num_bytes: int) -> HostMemoryReport:
        return HostMemoryReport(num_bytes=num_bytes, pinned_bytes=0, is_prepared=True, refused="")

    return Report(
        phase=Phase.STARTED,
        offloader="PrefetchOffloader",
        weights_in_ram_bytes=way.weights.ram_bytes,
        kv_bytes=way.kv.resident_bytes + way.kv.spilled_bytes,
        resident_bytes=way.kv.resident_bytes,
        spilled_bytes=way.kv.spilled_bytes,
        window_bytes=way.kv.window_bytes,
        pool=memory(way.offload_bytes),
        arena=memory(way.kv.spilled_bytes),
        max_model_len=plan.max_model_len,
    )


def chosen(plan: Plan) -> Way:
    assert plan.chosen is not None
    return plan.chosen


WRONG: dict[str, tuple[Callable[[Report], dict[str, object]], str]] = {
    "a shorter context": (lambda r: {"max_model_len": 4095}, "longest context"),
    "no spill": (lambda r: {"spilled_bytes": None, "resident_bytes": None}, "KV that can spill"),
    "no pool": (lambda r: {"pool": None}, "offload pool"),
    "less KV": (lambda r: {"resident_bytes": int((r.resident_bytes or 0) * 0.96)}, "KV cache"),
    "pinning refused": (lambda r: {"arena": HostMemoryReport(num_bytes=9, pinned_bytes=0, is_prepared=True,
                                                             refused="out of memory")}, "pinned arena"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_difference_from_the_plan_is_found_with_its_remedy(spilling: Plan, name: str) -> None:
    change, what = WRONG[name]
    way = chosen(spilling)
    report = as_planned(spilling, way)
    assert way.kv.spilled_bytes and way.offload_bytes and differences(spilling, way, report) == []
    (found,) = differences(spilling, way, dataclasses.replace(report, **change(report)))  # type: ignore[arg-type]
    assert found.what.startswith(what) and found.stops and found.remedy in str(found)


def test_a_little_less_kv_and_any_more_is_as_planned(spilling: Plan) -> None:
    way = chosen(spilling)
    report = as_planned(spilling, way)
    for factor in (0.98, 1.5):
        got = dataclasses.replace(report, resident_bytes=int(way.kv.resident_bytes * factor))
        assert differences(spilling, way, got) == []


def test_less_kv_does_not_stop_while_overheads_were_a_guess(spilling: Plan) -> None:
    way = chosen(spilling)
    nothing = measured(0)
    guess = Overheads(context_bytes=nothing, non_torch_bytes=nothing, activation_bytes=assumed(1), graph_bytes=nothing)
    report = dataclasses.replace(as_planned(spilling, way), resident_bytes=way.kv.resident_bytes // 2)
    (found,) = differences(spilling, dataclasses.replace(way, overheads=guess), report)
    assert not found.stops and "has now been measured" in found.remedy


def test_memory_that_is_still_being_pinned_is_no_difference(spilling: Plan) -> None:
    way = chosen(spilling)
    report = as_planned(spilling, way)
    assert report.arena is not None
    pinning = dataclasses.replace(report, arena=dataclasses.replace(report.arena, is_prepared=False))
    assert differences(spilling, way, pinning) == [] and not pinning.is_prepared


def test_weights_that_no_offloader_moved_are_found(llama: Path) -> None:
    plan = plan_for(str(llama), {"gpu": "24GiB", "ram": 64 * 2**30})
    way = chosen(plan)
    offload = dataclasses.replace(way.weights, layers=(0,), ram_bytes=MIB, group_size=4, num_in_group=1)
    moved = dataclasses.replace(way, weights=offload, offload_bytes=0)
    report = dataclasses.replace(as_planned(plan, moved), weights_in_ram_bytes=0, offloader="NoopOffloader")
    (found,) = differences(plan, moved, report)
    assert found.stops and "NoopOffloader" in str(found)


def test_a_profile_is_kept_only_where_vllm_profiled(spilling: Plan) -> None:
    report = as_planned(spilling, chosen(spilling))
    assert profile_of(report) is None
    sizes = {"non_torch_bytes": 1, "activation_bytes": 2, "graph_bytes": 0, "context_bytes": 4}
    profile = profile_of(dataclasses.replace(report, **sizes))  # type: ignore[arg-type]
    assert profile is not None and dataclasses.asdict(profile) == sizes


# Reports.


def test_reports_round_trip_and_the_slowest_worker_decides(spilling: Plan, tmp_path: Path) -> None:
    assert read(tmp_path) == [] and earliest([]) is Phase.STARTING
    reports = [as_planned(spilling, chosen(spilling)), Report(phase=Phase.LOADING)]
    for rank, report in enumerate(reports):
        write(report, tmp_path, rank)
    assert read(tmp_path) == reports and earliest(reports) is Phase.LOADING


def test_a_gpu_workers_report_holds_what_vllms_profiling_found() -> None:
    """Names of vLLM's that the report reads, on a stand-in: there is no GPU where these tests run."""
    import inspect

    from vllm.v1.worker import gpu_worker

    from overspill.serve.engine_report import WorkerReporter

    reporter = WorkerReporter.__new__(WorkerReporter)
    reporter._free_before = 100
    snapshot = SimpleNamespace(free_memory=60)
    profiled = {"total_consumed": 50, "peak_activation_memory": 9, "cudagraph_memory_estimate": 4}
    reporter._worker = SimpleNamespace(init_snapshot=snapshot, **profiled)
    sizes = {"activation_bytes": 5, "non_torch_bytes": 20, "graph_bytes": 4, "context_bytes": 40}
    assert reporter._profile(30) == sizes
    source = inspect.getsource(gpu_worker.Worker)
    assert all(f"self.{name} = " in source for name in (*profiled, "init_snapshot"))
    assert "self.model_runner.capture_model()" in source and "model_runner.model_memory_usage" in source


# A server that a small program plays.

PLAYED = """
import http.server, os, shutil, sys, time
report, port, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
if report != 'none':
    shutil.copy(report, os.path.join(os.environ['_OVERSPILL_START_REPORT'], 'rank-0.json'))
end = None
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global end
        end = end or time.monotonic() + seconds
        self.send_response(200); self.send_header('Content-Length', '0'); self.end_headers()
    def log_message(self, *_): pass
server = http.server.HTTPServer(('127.0.0.1', port), Handler)
server.timeout = 0.1
while end is None or time.monotonic() < end:
    server.handle_request()
print('ValueError: enough')
sys.exit(5)
"""


@pytest.fixture
def played(spilling: Plan, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Prepared]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def make(report: Report | None, *given: str, seconds: float = 60) -> Prepared:
        if report is not None:
            write(report, tmp_path, 0)
        settings = {"host": "127.0.0.1", "port": free_port()}
        words = [*given, "--skip-tokenizer-init"]
        prepared = prepare(str(llama), spilling, settings, words, vllm=CPU_BUILD, environment={})
        file = "none" if report is None else str(tmp_path / "rank-0.json")
        command = (sys.executable, "-c", PLAYED, file, str(settings["port"]), str(seconds))
        return dataclasses.replace(prepared, command=command)

    return make


def run(prepared: Prepared, *, force: bool = False) -> None:
    run_server(prepared, force=force, quiet=True, log_file=None)


def test_an_engine_that_differs_from_its_plan_is_stopped(
    spilling: Plan, played: Callable[..., Prepared], capfd: pytest.CaptureFixture[str]
) -> None:
    report = dataclasses.replace(as_planned(spilling, chosen(spilling)), pool=None)
    prepared = played(report)
    with pytest.raises(CannotServe, match="offload pool: planned 64 MiB, got 0 B"):
        run(prepared)
    assert "not as planned: offload pool" in capfd.readouterr().err
    require_free(prepared.address, set())  # nobody listens any more


def test_a_difference_made_by_a_user_flag_stops_no_engine(
    spilling: Plan, played: Callable[..., Prepared], capfd: pytest.CaptureFixture[str]
) -> None:
    report = dataclasses.replace(as_planned(spilling, chosen(spilling)), max_model_len=1000)
    with pytest.raises(CannotServe, match=r"vLLM ended with exit code 5.*ValueError: enough"):
        run(played(report, "--max-model-len", "1000", seconds=3))
    told = capfd.readouterr()
    assert "not as planned: longest context" in told.err and "/v1 serves" in told.out and "1,000 tokens" in told.out


@pytest.mark.parametrize("force", [False, True])
def test_an_engine_without_our_plugin_is_noticed(
    played: Callable[..., Prepared], capfd: pytest.CaptureFixture[str], force: bool
) -> None:
    with pytest.raises(CannotServe, match="exit code 5" if force else "loaded no plugin"):
        run(played(None, seconds=3), force=force)
    assert ("/v1 serves" in capfd.readouterr().out) == force


class Waits:
    """A reporter whose clock a test moves."""

    def __init__(self, prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(reporter.time, "monotonic", lambda: self.now)
        self.made = reporter.Reporter(prepared, log_file=None)

    def after(self, seconds: float, what: str) -> None:
        self.now += seconds
        self.made.waits(what)


def test_a_long_phase_gives_a_sign_of_life(
    played: Callable[..., Prepared], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The start of a model that was started before also says how long it will take."""
    prepared = played(None)
    first = Waits(prepared, monkeypatch)
    for _ in range(13):
        first.after(1, "loading the model")
    assert capfd.readouterr().err == "overspill:   10.0 s  still loading the model\n", "once, and not each time"
    first.now += 27
    first.made.reaches(Phase.READY)
    capfd.readouterr()
    second = Waits(prepared, monkeypatch)
    second.after(12, "loading the model")
    second.after(12, "loading the model")
    second.after(30, "loading the model")
    assert capfd.readouterr().err.splitlines() == [
        "overspill:   12.0 s  still loading the model; about 28 s left, judging by the last start",
        "overspill:   24.0 s  still loading the model; about 16 s left, judging by the last start",
        "overspill:   54.0 s  still loading the model",
    ]


def test_systemd_is_told_at_a_path_or_an_abstract_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, given in (
        (str(tmp_path / "notify"), str(tmp_path / "notify")),
        (f"\0overspill-{os.getpid()}", f"@overspill-{os.getpid()}"),
    ):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.bind(name)
            notify("READY=1", "STATUS=up", environment={"NOTIFY_SOCKET": given})
            assert systemd.recv(100) == b"READY=1\nSTATUS=up"
    notify("READY=1", environment={})
    assert capsys.readouterr().err == ""
    notify("READY=1", environment={"NOTIFY_SOCKET": str(tmp_path / "nobody")})
    assert "systemd could not be notified" in capsys.readouterr().err


def test_a_servers_end_is_recorded_and_a_new_start_replaces_it(spilling: Plan, played: Callable[..., Prepared]) -> None:
    prepared = played(as_planned(spilling, chosen(spilling)), seconds=2)
    for number in (1, 2):
        with pytest.raises(CannotServe):
            run(prepared)
        (status,) = read_statuses()
        assert status.run_id == number and not status.is_alive and status.ready_at is not None
        assert (status.error or "").startswith("vLLM ended with exit code 5") and status.lines
    with open_registry() as registry:
        ends = [(recorded.end, recorded.exit_code, recorded.pid) for recorded in list_runs(registry)]
    assert ends == [(RunEnd.FAILED, 5, os.getpid())] * 2


def stop_when_ready() -> None:
    while not any(one.is_ready for one in read_statuses()):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("reason", ["it was not used for 600 s", ""])
def test_a_stopped_run_records_the_reason_that_was_left(
    spilling: Plan, played: Callable[..., Prepared], capfd: pytest.CaptureFixture[str], reason: str
) -> None:
    me = identity(os.getpid())
    assert me is not None
    if reason:
        leave_reason(os.getpid(), me, reason)
    asking = threading.Thread(target=stop_when_ready)
    asking.start()
    run(played(as_planned(spilling, chosen(spilling))))
    asking.join()
    with open_registry() as registry:
        (recorded,) = list_runs(registry)
    assert (recorded.end, recorded.detail) == (RunEnd.STOPPED, reason or None)
    assert (f"stopped: {reason}" in capfd.readouterr().err) == bool(reason)


def test_a_stop_reason_is_read_once_and_only_by_its_process(tmp_path: Path) -> None:
    home = {"XDG_STATE_HOME": str(tmp_path)}
    assert take_reason(7, "boot 1", home) == ""
    leave_reason(7, "boot 1", "it was not used", home)
    assert take_reason(7, "boot 1", home) == "it was not used" and take_reason(7, "boot 1", home) == ""
    leave_reason(7, "boot 1", "it was not used", home)
    assert take_reason(7, "boot 2", home) == "" and take_reason(7, "boot 1", home) == ""
    assert read_statuses(home) == []


@pytest.mark.parametrize("trouble", ["no database", "no folder"])
def test_a_server_runs_on_if_its_status_cannot_be_recorded(
    spilling: Plan, played: Callable[..., Prepared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str], trouble: str,
) -> None:  # fmt: skip
    prepared = played(as_planned(spilling, chosen(spilling)), seconds=2)
    if trouble == "no database":
        monkeypatch.setenv("OVERSPILL_DATABASE_URL", "postgresql://me:hush@127.0.0.1:1/db")
    else:
        (tmp_path / "state").write_text("a file where the folder should be")
    with pytest.raises(CannotServe, match="exit code 5"):
        run(prepared)
    told = capfd.readouterr()
    assert "/v1 serves" in told.out and told.err.count("warning: this run is not recorded") == 1
    assert told.err.count("warning: other programs cannot see") == (trouble == "no folder")
    assert "hush" not in told.err


def test_a_run_that_was_lost_is_ended_by_the_next_start(spilling: Plan, played: Callable[..., Prepared]) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        with open_registry() as registry:
            start_run(registry, "other", ["vllm"], pid=other.pid)
            assert running_runs(registry)
        other.kill()
    with pytest.raises(CannotServe):
        run(played(as_planned(spilling, chosen(spilling)), seconds=1))
    with open_registry() as registry:
        assert [recorded.end for recorded in list_runs(registry, "other")] == [RunEnd.LOST]


def test_a_service_of_a_registered_model_counts_as_that_model(
    spilling: Plan, played: Callable[..., Prepared], llama: Path
) -> None:
    """Its unit names the folder, and serves it by the registry's name."""
    report = as_planned(spilling, chosen(spilling))
    with open_registry() as registry:
        add_model(registry, "qwen", {"source": str(llama)})
        for names in (("qwen", str(llama)), ("another",)):
            with pytest.raises(CannotServe):
                run(played(report, "--served-model-name", *names, seconds=1))
        assert [recorded.model for recorded in list_runs(registry)] == [str(llama), "qwen"]


def test_a_status_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    home = {"XDG_STATE_HOME": str(tmp_path)}
    assert read_statuses(home) == []
    folder = tmp_path / "overspill/serving"
    folder.mkdir(parents=True)
    mine = Status(
        pid=os.getpid(), process=identity(os.getpid()), host=platform.node(), model="m", source="m", served_name="m",
        url="http://127.0.0.1:1", started_at="2026-01-01T00:00:00+00:00",
    )  # fmt: skip
    write_status(mine, folder)
    for number, text in enumerate(("", "{", "[]", "null", '{"format": 2}', '{"format": 1}', "\0")):
        (folder / f"bad-{number}.json").write_text(text)
    assert read_statuses(home) == [mine] and mine.is_alive and not mine.is_ready
    assert not dataclasses.replace(mine, process="another boot:1").is_alive, "the number was used again"
    assert dataclasses.replace(mine, host="elsewhere").is_alive, "of another machine only the file is known"


def test_memory_is_that_of_all_workers_together() -> None:
    pool = HostMemoryReport(num_bytes=100, pinned_bytes=40, is_prepared=False, refused="")
    one = Report(phase=Phase.STARTED, kv_bytes=50, resident_bytes=20, spilled_bytes=30, window_bytes=5, pool=pool)
    memory = memory_of([one, dataclasses.replace(one, pool=None)])
    assert (memory.resident_kv_bytes, memory.spilled_bytes, memory.window_bytes) == (40, 60, 10)
    assert (memory.pool_bytes, memory.pinned_bytes, memory.weights_bytes) == (100, 40, None)
    assert memory_of([dataclasses.replace(one, resident_bytes=None)]).resident_kv_bytes == 50


# Plugins.


def test_the_plugins_are_those_of_the_package() -> None:
    package = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert package["entry-points"][plugins.GROUP] == plugins.PLUGINS


def test_our_plugin_metadata_is_found_before_older_metadata(tmp_path: Path) -> None:
    assert not plugins.are_found([str(tmp_path)])
    old = tmp_path / "old/overspill-0.0.1.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: overspill\nVersion: 0.0.1\n")
    assert not plugins.are_found([str(old.parent)])
    plugins.write_metadata(tmp_path / "new")
    assert plugins.are_found([str(tmp_path / "new"), str(old.parent)])
    path = plugins.with_path({"PYTHONPATH": "/given", "A": "b"}, tmp_path / "new")["PYTHONPATH"].split(os.pathsep)
    assert path[:2] == [str(tmp_path / "new"), "/given"] and (Path(path[2]) / "overspill/__init__.py").is_file()
