"""Attention on the CPU by itself: every kernel against float64, then GB/s of KV beside plain reads by the same threads.

    python benchmarks/attention_kernel.py --threads 4 8 14 --out benchmarks/results/attention-kernel-h200.json

Reads and attention take turns. torch and llama.cpp get the same numbers in the same layout and as many threads.
llama.cpp is the package xllamacpp, whose library exports ggml's C interface, or another such library (--llama-cpp). It
converts queries to the type of KV, and is compiled for one set of instructions, which it reports.
"""

import argparse
import ctypes
import dataclasses
import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import record
from attention_cases import Case, bounds, cases
from attention_rates import measure_rates
from overspill.kv.attention.library import Library, default_threads, load
from overspill.kv.attention.pool import Job, Layout, Pool, Segments, Step
from overspill.kv.attention.rates import kv_memory
from record import GIB, Json, say

# kv heads, group, head size
SHAPES = {
    "Llama-3.1-8B": (8, 4, 128),
    "Qwen3-Coder-30B-A3B": (4, 8, 128),
    "32 heads, no groups": (32, 1, 128),
    "Gemma-3-4B": (4, 2, 256),
}
FIRST = "Llama-3.1-8B"
TYPES = ("bfloat16", "float16", "float8_e4m3fn", "float32")
LAYERS = 32


def check(library: Library, pool: Pool) -> list[Json]:
    """Largest errors of every kernel that runs here."""
    rows = []
    for kernel in library.kernels:
        pool.force_kernel(kernel)
        chosen = [case for case in cases() if case.suits(kernel)]
        errors = [case.errors(pool) for case in chosen]
        worst = [max(error) for error in zip(*errors)]
        passed = all(error < bound for error, bound in zip(worst, bounds(kernel)))
        rows.append({"kernel": kernel, "cases": len(chosen), "output": worst[0], "lse": worst[1], "passed": passed})
        say(f"{kernel}: {len(chosen)} cases, output {worst[0]:.1e}, lse {worst[1]:.1e}: {'ok' if passed else 'WRONG'}")
    pool.force_kernel(None)
    return rows


def rate(pool: Pool, shape: str, kv_type: str, queries: int, memory: torch.Tensor, repeats: int) -> Json:
    kv_heads, group, head_size = SHAPES[shape]
    rates = measure_rates(
        pool, kv_heads=kv_heads, group=group, head_size=head_size, kv_type=kv_type, queries=queries, memory=memory,
        query_type="float32" if kv_type == "float32" else "bfloat16", repeats=repeats,
    )  # fmt: skip
    ratio, cpu_ratio = (
        rates.attend_bytes_per_s / rates.read_bytes_per_s,
        rates.attend_bytes_per_cpu_s / rates.read_bytes_per_cpu_s,
    )
    say(
        f"{rates.threads:3} threads, {shape}, {kv_type}, {queries} queries: {rates.kernel} "
        f"{rates.attend_bytes_per_s / 1e9:.1f} GB/s, reads {rates.read_bytes_per_s / 1e9:.1f}: {ratio:.0%}"
        f" (by CPU time {cpu_ratio:.0%})"
    )
    return {
        "shape": shape, "kv_type": kv_type, "queries": queries, "of_reads": ratio, "of_reads_by_cpu_time": cpu_ratio,
    } | dataclasses.asdict(rates)  # fmt: skip


def measure(library: Library, pool: Pool, settings: argparse.Namespace) -> list[Json]:
    """Every kernel with one query; the best one with other types, shapes and numbers of queries."""
    rows = []
    for kv_type in TYPES:
        memory = kv_memory(int(settings.gib * GIB), kv_type)
        for kernel in library.kernels if kv_type == "bfloat16" else ():
            pool.force_kernel(kernel)
            rows += [rate(pool, FIRST, kv_type, queries, memory, settings.repeats) for queries in settings.queries]
        pool.force_kernel(None)
        shapes = SHAPES if kv_type == "bfloat16" else [FIRST]
        rows += [
            rate(pool, shape, kv_type, queries, memory, settings.repeats)
            for shape in shapes
            for queries in settings.queries
        ]
    return rows


def microseconds_per_job(pool: Pool) -> float:
    """Of a step of many layers with next to nothing to attend to."""
    case = Case(segments=((1, (0,)),))
    results = case.results()
    step = Step([case.job(*results)] * LAYERS)
    times = []
    for _ in range(50):
        began = time.perf_counter()
        pool.wait(pool.submit(step), 60)
        times.append((time.perf_counter() - began) / LAYERS)
    return 1e6 * statistics.median(times)


def timed(work: Callable[[], object], repeats: int) -> float:
    work()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def torch_attention(threads: int, queries: int, num_bytes: int, repeats: int) -> Json:
    """scaled_dot_product_attention on views of the same layout."""
    kv_heads, group, head_size = SHAPES[FIRST]
    torch.set_num_threads(threads)
    kv = kv_memory(num_bytes, "bfloat16").view(torch.bfloat16).view(1, -1, kv_heads, 2, head_size)
    keys, values = kv[:, :, :, 0].transpose(1, 2), kv[:, :, :, 1].transpose(1, 2)
    query = torch.randn(1, kv_heads * group, queries, head_size).bfloat16()
    attend = torch.nn.functional.scaled_dot_product_attention
    seconds = timed(lambda: attend(query, keys, values, enable_gqa=True), repeats)
    torch.set_num_threads(1)
    return {"peer": "torch", "version": torch.__version__, "bytes_per_s": kv.numel() * 2 / seconds}


class Ggml:
    """The few functions of ggml's C interface that attention needs."""

    F16, F32, BF16 = 1, 0, 30

    class Parameters(ctypes.Structure):
        _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        for name in ("init", "new_tensor_4d", "view_4d", "flash_attn_ext", "new_graph", "get_data"):
            getattr(self._library, f"ggml_{name}").restype = ctypes.c_void_p

    def features(self) -> list[str]:
        names = [
            "sse3",
            "ssse3",
            "avx",
            "avx2",
            "f16c",
            "fma",
            "avx512",
            "avx512_bf16",
            "amx_int8",
            "neon",
            "arm_fma",
            "fp16_va",
            "dotprod",
            "sve",
        ]
        return [name for name in names if getattr(self._library, f"ggml_cpu_has_{name}", lambda: 0)()]

    def attention(self, threads: int, queries: int, num_bytes: int, kv_type: str, repeats: int, pool: Pool) -> Json:
        kv_heads, group, head_size = SHAPES[FIRST]
        call, i64, size = self._library, ctypes.c_int64, ctypes.c_size_t
        pointer = ctypes.c_void_p
        call.ggml_init.argtypes = [self.Parameters]
        spare = 64 << 20  # of graphs and of work memory, which no call gives back
        context = pointer(call.ggml_init(self.Parameters(num_bytes + spare * (repeats + 2), None, False)))
        kind = self.F16 if kv_type == "float16" else self.BF16
        content = 4 * head_size
        tokens = num_bytes // (kv_heads * content)
        kv = pointer(call.ggml_new_tensor_4d(context, kind, i64(2 * head_size), i64(kv_heads), i64(tokens), i64(1)))
        query = pointer(
            call.ggml_new_tensor_4d(context, self.F32, i64(head_size), i64(queries), i64(kv_heads * group), i64(1))
        )
        address, query_address = call.ggml_get_data(kv), call.ggml_get_data(query)
        filled = kv_memory(num_bytes, kv_type)
        ctypes.memmove(address, filled.data_ptr(), filled.numel())
        numbers = torch.randn(kv_heads * group, queries, head_size).to(getattr(torch, kv_type)).float()
        ctypes.memmove(query_address, numbers.data_ptr(), numbers.numel() * 4)

        def view(offset: int) -> ctypes.c_void_p:  # [head size][tokens][kv heads], as ggml orders it
            shape, strides = (head_size, tokens, kv_heads, 1), (kv_heads * content, content, num_bytes)
            return pointer(call.ggml_view_4d(context, kv, *map(i64, shape), *map(size, strides), size(offset)))

        scale = head_size**-0.5
        result = pointer(
            call.ggml_flash_attn_ext(
                context, query, view(0), view(content // 2), None, ctypes.c_float(scale), ctypes.c_float(0),
                ctypes.c_float(0),
            )
        )  # fmt: skip
        graph = pointer(call.ggml_new_graph(context))
        call.ggml_build_forward_expand(graph, result)
        seconds = timed(lambda: call.ggml_graph_compute_with_ctx(context, graph, threads), repeats)
        # Held against ours on the same bytes: a fast wrong answer is no measurement.
        theirs = torch.empty(queries, kv_heads * group, head_size)
        ctypes.memmove(theirs.data_ptr(), call.ggml_get_data(result), theirs.numel() * 4)
        layout = Layout.packed(
            num_blocks=tokens // 16, block_size=16, kv_heads=kv_heads, group=group, head_size=head_size,
            kv_type=kv_type, query_type="float32",
        )  # fmt: skip
        output, lse = torch.empty_like(theirs), torch.empty(kv_heads * group, queries)
        ours = numbers.transpose(0, 1).contiguous()
        job = Job(
            layout=layout, segments=Segments([(range(layout.num_blocks), range(queries))]), kv=address,
            query=ours.data_ptr(), output=output.data_ptr(), lse=lse.data_ptr(), num_queries=queries, scale=scale,
        )  # fmt: skip
        pool.attend(job)
        call.ggml_free(context)
        difference = float((theirs - output).abs().max() / output.abs().max())
        return {
            "peer": "llama.cpp", "kv_type": kv_type, "bytes_per_s": num_bytes / seconds, "difference": difference,
            "features": self.features(),
        }  # fmt: skip


def peers(threads: int, pool: Pool, settings: argparse.Namespace) -> list[Json]:
    rows: list[Json] = []
    # torch is too slow on this layout for much memory; the cache is left behind anyway.
    some = min(int(settings.gib * GIB), settings.peer_mib << 20)
    ggml = Ggml(settings.llama_cpp) if settings.llama_cpp else None
    for queries in settings.queries:
        place = {"threads": threads, "queries": queries, "kv_type": "bfloat16", "shape": FIRST}
        rows.append(place | torch_attention(threads, queries, some, settings.repeats))
        for kv_type in ("float16", "bfloat16") if ggml else ():
            rows.append(place | ggml.attention(threads, queries, some, kv_type, settings.repeats, pool))  # type: ignore[union-attr]
    for row in rows:
        say(f"{row['peer']}, {row['kv_type']}, {row['queries']} queries: {row['bytes_per_s'] / 1e9:.2f} GB/s")
    return rows


def installed_llama_cpp() -> Path | None:
    spec = importlib.util.find_spec("xllamacpp")
    found = list(Path(spec.origin).parent.glob("xllamacpp*.so")) if spec and spec.origin else []
    return found[0] if found else None


def parse_arguments() -> argparse.Namespace:
    parser = record.argument_parser(__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[default_threads(), os.cpu_count() or 1])
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--peer-mib", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--llama-cpp", type=Path, default=installed_llama_cpp(), help="a library that exports ggml")
    parser.add_argument("--library", type=Path, help="attention library; default: the installed one")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    settings = parse_arguments()
    out = settings.out or record.default_path("attention-kernel")
    library = load(settings.library)
    say(f"kernels: {', '.join(library.kernels)}; AMX: {library.amx}")
    peer = settings.llama_cpp and settings.llama_cpp.name
    result: dict[str, Any] = record.header("attention-kernel", record.settings(settings) | {"llama_cpp": peer})
    result |= {"kernels": library.kernels, "amx": library.amx, "checks": [], "rates": [], "peers": [], "jobs": []}
    if not settings.llama_cpp:
        result["notes"] = ["llama.cpp was not measured: no library that exports ggml was at hand (xllamacpp)."]
    torch.set_num_threads(1)
    with Pool(2, library=library) as pool:
        result["checks"] = check(library, pool)
    for threads in sorted(set(settings.threads)):
        with Pool(threads, library=library) as pool:
            result["jobs"].append({"threads": threads, "microseconds_per_job": microseconds_per_job(pool)})
            result["rates"] += measure(library, pool, settings)
            record.write(out, result)
            result["peers"] += peers(threads, pool, settings)
            record.write(out, result)
    say(f"written to {out}")
    if not all(row["passed"] for row in result["checks"]):
        raise SystemExit("a kernel's results are wrong")


if __name__ == "__main__":
    main()
