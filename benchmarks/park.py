"""Park and wake on one GPU: two servers that share a card by taking turns.

    python benchmarks/park.py                         Llama-3.1-8B's shape, twice; about 3 minutes on an H200
    python benchmarks/park.py --cycles 10 --conversation 50000 --out mine.json
    python benchmarks/park.py --model tiny --dtype float32 --kv-bytes 32MiB --host-bytes 64MiB --conversation 900 \\
        --max-model-len 2048                          on a CPU, 2 minutes
    python benchmarks/park.py --loaded --cycles 100   answers under way at every park, compared; about 5 minutes

Measured, side by side in one run:

    cold       from the start of a server's process to its first token: the first start compiles, the second does not
    park       the first, and later ones; with what they copied and freed
    wake       with the speed of the copy, beside the link's own (pinned H2D of 4 GiB, on CUDA)
    switch     the other model is parked and this one woken; from the request to its first token
    return     TTFT of a long conversation: cold, warm on the GPU, and after switching away and back; with its
               tokens that were computed again

Weights are drawn at random: speed depends on shapes. Answers before and after are compared.

With --loaded, each model is parked in the middle of its answers, and goes on with them after its wake: weights are
drawn so that answers depend on the whole KV cache, kernels are batch-invariant on CUDA, and every answer must be that
from before the first park. What both servers hold is recorded after two cycles and at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

import gpu
import record
import shapes
from overspill.address import free_port
from overspill.kv.sizes import parse_size
from overspill.launch.vllm import CONTROL
from overspill.serve.control import HEADER, VARIABLE
from record import Json, say
from servers import Server, started

# As the plugin sets it; importing that would take vLLM's seconds.
WORKER = "overspill.kv.spill.vllm_worker.OverspillWorker"
ANSWER_TOKENS = 16
COMPUTED = "vllm:request_prefill_kv_computed_tokens"
PATIENCE_SECONDS = 300.0
# Made once: each client loads certificates, 20 ms that are not the server's.
HTTP = httpx.Client(timeout=PATIENCE_SECONDS, limits=httpx.Limits(max_connections=None))
# As `overspill verify` sets them: answers do not depend on what else is in a batch.
INVARIANT = {"VLLM_BATCH_INVARIANT": "1", "VLLM_USE_BREAKABLE_CUDAGRAPH": "0"}
# For /collective_rpc, by which weights are drawn.
DRAWN = {"VLLM_SERVER_DEV_MODE": "1"}
SETTLED_AFTER = 2  # cycles
# Where answers are compared and nothing is timed: a start without compiling, and graphs for the requests there are.
FEW_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}


class Parked:
    """A server that can be parked."""

    def __init__(self, server: Server, secret: str, model: str) -> None:
        self.server, self._secret, self._model = server, secret, model

    def control(self, action: str) -> Json:
        url = f"http://127.0.0.1:{self.server.port}/overspill/{action}"
        began = time.monotonic()
        answer = HTTP.post(url, headers={HEADER: self._secret})
        answer.raise_for_status()
        return {**answer.json(), "request_seconds": time.monotonic() - began}

    def ask(self, prompt: list[int]) -> Json:
        """TTFT, tokens, and how many of the prompt were computed."""
        before = self.counter(COMPUTED)
        answer = self.stream(prompt, ANSWER_TOKENS)
        return {**answer, "computed_tokens": self.counter(COMPUTED) - before, "prompt": len(prompt)}

    def stream(self, prompt: list[int], output: int) -> Json:
        body = {
            "model": self._model, "prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True,
            "stream": True, "return_token_ids": True, "detokenize": False,
        }  # fmt: skip
        began, first, tokens = time.monotonic(), None, list[int]()
        url = f"http://127.0.0.1:{self.server.port}/v1/completions"
        with HTTP.stream("POST", url, json=body) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    ids = json.loads(line[6:])["choices"][0].get("token_ids") or []
                    first = first or (time.monotonic() - began if ids else None)
                    tokens += ids
        return {"ttft_seconds": first, "tokens": tokens}

    def counter(self, name: str) -> float:
        families = text_string_to_metric_families(self.server.request("/metrics").text)
        return sum(
            one.value
            for family in families
            if family.name == name
            for one in family.samples
            if one.name in (f"{name}_sum", f"{name}_total", name)
        )


def command(arguments: argparse.Namespace, port: int, options: Json, *flags: str) -> list[str]:
    """A server with these options of the connector."""
    transfer = {
        "kv_connector": "OverspillConnector", "kv_connector_module_path": "overspill.kv.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"host_bytes": arguments.host_bytes, "load": "always", **options},
    }  # fmt: skip
    return [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(arguments.model),
        "--load-format", arguments.load_format, "--skip-tokenizer-init", "--dtype", arguments.dtype,
        "--max-model-len", str(arguments.max_model_len), "--kv-cache-memory-bytes", str(arguments.kv_bytes),
        "--gpu-memory-utilization", str(arguments.gpu_memory_utilization),
        "--kv-transfer-config", json.dumps(transfer), "--worker-cls", WORKER,
        "--host", "127.0.0.1", "--port", str(port), *flags,
    ]  # fmt: skip


@contextlib.contextmanager
def serving(arguments: argparse.Namespace, name: str, seed: int | None = None) -> Iterator[tuple[Parked, float]]:
    """A server, and the seconds until its first token; with a seed, its weights are drawn anew."""
    port, secret = free_port(), secrets.token_urlsafe(16)
    log = Path(tempfile.mkdtemp(prefix="park-")) / f"{name}.log"
    environment = {VARIABLE: secret, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    flags = ["--middleware", CONTROL, "--max-num-seqs", "16", "--enable-sleep-mode" if has_gpu() else "--enforce-eager"]
    if seed is not None:
        environment |= DRAWN | (INVARIANT if has_gpu() else {})
        flags += ["--worker-extension-cls", "shapes.SensitiveWeights"]
        flags += ["--compilation-config", json.dumps(FEW_GRAPHS)] if has_gpu() else []
    words = command(arguments, port, {"park": True}, *flags)
    with started(words, log, port, env=environment) as server:
        try:
            server.wait("/health", arguments.timeout)
            one = Parked(server, secret, str(arguments.model))
            if seed is not None:
                drawn = {"method": "make_weights_sensitive", "args": [seed]}
                server.request("/collective_rpc", drawn, PATIENCE_SECONDS).raise_for_status()
            one.ask([100, 101, 102, 103])
            yield one, time.monotonic() - server.began
        except (RuntimeError, httpx.HTTPError):
            print("\n".join(server.tail(60)), flush=True)
            raise


def has_gpu() -> bool:
    return bool(record.hardware().get("gpu"))


def link_bytes_per_second() -> float | None:
    """H2D from pinned memory, measured in a process of its own."""
    if not has_gpu():
        return None
    import subprocess

    code = (
        "import torch, time; n = 4 << 30; a = torch.empty(n, dtype=torch.uint8, pin_memory=True); "
        "b = torch.empty(n, dtype=torch.uint8, device='cuda'); b.copy_(a); torch.cuda.synchronize(); "
        "t = time.perf_counter(); [b.copy_(a, non_blocking=True) for _ in range(4)]; torch.cuda.synchronize(); "
        "print(4 * n / (time.perf_counter() - t))"
    )
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def gpu_used_bytes() -> int | None:
    used = record._nvidia_smi("memory.used")
    return int(used.split()[0]) << 20 if used else None


def switched(away: Parked, to: Parked, prompt: list[int]) -> Json:
    """One model goes, the other comes and answers: seconds from the request on."""
    began = time.monotonic()
    parked = away.control("park")
    woken = to.control("wake")
    before = time.monotonic() - began
    answer = to.ask(prompt)
    return {
        "park": parked, "wake": woken, "gpu_used_bytes_between": gpu_used_bytes(), **answer,
        "request_to_first_token_seconds": before + answer["ttft_seconds"],
        "wake_to_first_token_seconds": woken["request_seconds"] + answer["ttft_seconds"],
        "wake_copy_bytes_per_second": woken["weights_bytes"] / max(woken["copy_seconds"], 1e-9),
    }  # fmt: skip


def measure(arguments: argparse.Namespace, result: Json, out: Path) -> None:
    vocabulary = int(shapes.config_of(arguments.model)["vocab_size"])
    prompts = shapes.Prompts(vocabulary, 0)
    conversation = prompts("conversation", 0, arguments.conversation)
    short = prompts("short", 0, 64)

    def keep(**facts: Any) -> None:
        result.update(facts)
        record.write(out, result)

    keep(link_bytes_per_second=link_bytes_per_second())
    with contextlib.ExitStack() as stack:
        a, cold_a = stack.enter_context(serving(arguments, "a"))
        say(f"cold start: {cold_a:.1f} s to the first token")
        cold, warm = a.ask(conversation), a.ask(conversation)
        say(
            f"conversation of {len(conversation)}: {cold['ttft_seconds']:.2f} s cold, {warm['ttft_seconds']:.3f} s warm"
        )
        used = gpu_used_bytes()
        first = a.control("park")
        keep(cold_seconds=[cold_a], conversation={"cold": cold, "warm": warm}, first_park=first,
             gpu_used_bytes={"running": used, "parked": gpu_used_bytes()})  # fmt: skip
        b, cold_b = stack.enter_context(serving(arguments, "b"))
        keep(cold_seconds=[cold_a, cold_b])
        switches: list[Json] = []
        for number in range(arguments.cycles):
            for away, to, name, prompt in ((b, a, "a", conversation), (a, b, "b", short)):
                one = {"to": name, **switched(away, to, prompt)}
                switches.append(one)
                say(
                    f"switch {number} to {name}: {one['request_to_first_token_seconds']:.3f} s from the request, park "
                    f"{one['park']['seconds']:.3f} s, wake {one['wake']['seconds']:.3f} s at "
                    f"{one['wake_copy_bytes_per_second'] / 1e9:.1f} GB/s, {one['computed_tokens']:.0f} of "
                    f"{one['prompt']} tokens computed"
                )
                if name == "a" and one["tokens"] != warm["tokens"]:
                    raise SystemExit("error: the answer after a switch is another one")
                keep(switches=switches)
    summarise(result)
    record.write(out, result)


def measure_loaded(arguments: argparse.Namespace, result: Json, out: Path) -> None:
    """Cycles of two models with answers under way, each answer compared with that from before the first park."""
    prompts = shapes.Prompts(int(shapes.config_of(arguments.model)["vocab_size"]), 0)
    asked = [prompts("loaded", number, arguments.max_model_len // part) for number, part in enumerate((64, 32, 12, 4))]
    moments = random.Random(0)
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2 * len(asked)) as pool:

        def under_way(one: Parked) -> list[Future[Json]]:
            return [pool.submit(one.stream, prompt, arguments.answer_tokens) for prompt in asked]

        def answers(running: list[Future[Json]]) -> list[list[int]]:
            return [future.result()["tokens"] for future in running]

        both: list[Parked] = []
        for seed, name in enumerate("ab"):
            if both:
                both[-1].control("park")
            both.append(stack.enter_context(serving(arguments, name, seed))[0])
        a, b = both
        expected = {b: answers(under_way(b))}
        b.control("park")
        a.control("wake")
        expected[a] = answers(under_way(a))
        if expected[a] == expected[b]:
            raise SystemExit("error: the two models answer the same, so that a mix-up would not be seen")

        def compare(one: Parked, found: list[list[int]]) -> None:
            if found != expected[one]:
                record.write(out, result | {"differing": {"expected": expected[one], "found": found}})
                raise SystemExit(f"error: after {result['cycles']} cycles an answer is another one; see {out}")
            result["compared_answers"] += len(found)

        running: dict[Parked, list[Future[Json]]] = {}
        interrupted, held = 0, []
        result.update(cycles=0, compared_answers=0)
        for number in range(arguments.cycles):
            for away, to in ((a, b), (b, a)):
                running[away] = under_way(away)
                time.sleep(moments.uniform(0.02, 0.6))
                away.control("park")
                to.control("wake")
                interrupted += sum(not future.done() for future in running[away])
                if to in running:
                    compare(to, answers(running.pop(to)))
            if number + 1 in (SETTLED_AFTER, arguments.cycles):
                held.append({"cycles": number + 1, **holding(both)})
            if number % 10 == 9:
                say(f"{number + 1} cycles, {result['compared_answers']} answers compared")
            result.update(cycles=number + 1, interrupted_answers=interrupted, held=held)
            record.write(out, result)
        b.control("wake")
        compare(b, answers(running.pop(b)))
    names = ("cycles", "compared_answers", "interrupted_answers", "held")
    result["summary"] = {name: result[name] for name in names}
    record.write(out, result)


def holding(servers: list[Parked]) -> Json:
    processes = [process for one in servers for process in one.server.family()]
    return {
        "processes": len(processes), "gpu_bytes": gpu.held_bytes([process.pid for process in processes]),
        "ram_bytes": sum(process.memory_full_info().pss for process in processes),
    }  # fmt: skip


def summarise(result: Json) -> None:
    back = [one for one in result["switches"] if one["to"] == "a"]
    others = [one for one in result["switches"] if one["to"] == "b"]
    warm, link = result["conversation"]["warm"]["ttft_seconds"], result["link_bytes_per_second"]
    speeds = [one["wake_copy_bytes_per_second"] for one in result["switches"]]
    result["summary"] = {
        "cold_seconds": dict(zip(("first", "again"), result["cold_seconds"], strict=True)),
        "first_park_seconds": result["first_park"]["seconds"],
        "park_seconds": record.spread([one["park"]["seconds"] for one in result["switches"][1:]]),
        "wake_seconds": record.spread([one["wake"]["seconds"] for one in result["switches"]]),
        "wake_copy_bytes_per_second": record.spread(speeds),
        "wake_copy_share_of_link": record.spread([speed / link for speed in speeds]) if link else None,
        "switch_to_first_token_seconds": record.spread([one["request_to_first_token_seconds"] for one in others]),
        "wake_to_first_token_seconds": record.spread([one["wake_to_first_token_seconds"] for one in others]),
        "conversation_ttft_over_warm": record.spread([one["ttft_seconds"] / warm for one in back]),
        "conversation_computed_tokens": record.spread([one["computed_tokens"] for one in back]),
    }


def size(text: str) -> int:
    return int(parse_size(text))


def parse_arguments() -> argparse.Namespace:
    parser = record.argument_parser(__doc__)
    parser.add_argument("--model", default=None, help="folder, or 'tiny'; default: Llama-3.1-8B's shape")
    parser.add_argument("--loaded", action="store_true", help="park in the middle of answers, and compare them")
    parser.add_argument("--cycles", type=int, default=5, help="switches to each of the two")
    parser.add_argument("--answer-tokens", type=int, default=64, help="of each answer, with --loaded")
    parser.add_argument("--conversation", type=int, default=50_000, help="tokens")
    parser.add_argument("--max-model-len", type=int, default=65_536)
    parser.add_argument("--kv-bytes", type=size, default=size("16GiB"), help="GPU memory for KV, of each")
    parser.add_argument("--host-bytes", type=size, default=size("16GiB"), help="RAM for KV, of each")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.3)
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for one start")
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    arguments.model = shapes.folder_of(arguments.model)
    out = arguments.out or record.default_path("park-loaded" if arguments.loaded else "park")
    result = record.header("park-loaded" if arguments.loaded else "park", record.settings(arguments))
    (measure_loaded if arguments.loaded else measure)(arguments, result, out)
    print(record.dumps(result["summary"]))
    say(f"written to {out}")


if __name__ == "__main__":
    main()
