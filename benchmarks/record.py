"""What every benchmark writes down: versions, hardware, statistics, the JSON file itself."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

Json = dict[str, Any]

GIB = 1 << 30
RESULTS = Path(__file__).parent / "results"


def say(message: str) -> None:
    """A progress line; flushed, because the GPU host's log is read after a kill."""
    stamp = datetime.datetime.now().strftime("%H:%M:%S")
    print(f"[{stamp}] {message}", flush=True)


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def percentile(values: Sequence[float], percent: float) -> float:
    """As `vllm bench serve` takes it."""
    return float(np.percentile(values, percent))


def spread(values: Sequence[float]) -> Json:
    """The numbers a reader needs to judge a median: how many, and how far apart."""
    if not values:
        return {"count": 0}
    return {
        "count": len(values),
        "median": statistics.median(values),
        "mean": statistics.fmean(values),
        "min": min(values),
        "max": max(values),
        "p99": percentile(values, 99),
    }


def versions() -> Json:
    found: Json = {"python": platform.python_version()}
    for name in ("torch", "transformers", "overspill"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    # On the GPU host vLLM is unpacked on PYTHONPATH, without metadata; importing only its version
    # module would still run vllm/__init__, so read the file.
    found["vllm"] = vllm_version()
    found["cuda"] = _torch_cuda()
    found["driver"] = _nvidia_smi("driver_version")
    found["commit"] = commit()
    return found


def vllm_version() -> str | None:
    for entry in sys.path:
        path = Path(entry or ".") / "vllm" / "_version.py"
        if path.is_file():
            scope: Json = {}
            exec(compile(path.read_text(), str(path), "exec"), scope)  # a generated file of constants
            return str(scope.get("__version__") or scope.get("version"))
    return None


def hardware() -> Json:
    total_mib = _nvidia_smi("memory.total")
    return {
        "gpu": _nvidia_smi("name"),
        "gpu_memory_bytes": int(float(total_mib.split()[0])) << 20 if total_mib else None,
        "cpu": _cpu_model(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "machine": platform.machine(),
        "kernel": platform.release(),
    }


def header(benchmark: str, settings: Json) -> Json:
    """The part of a result file that is the same for every benchmark."""
    return {
        "benchmark": benchmark,
        "started": now(),
        "command": [Path(sys.executable).name, *sys.argv],
        "versions": versions(),
        "hardware": hardware(),
        "settings": settings,
    }


def argument_parser(doc: str | None) -> argparse.ArgumentParser:
    """A script's docstring is its help, as it is written."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def settings(arguments: argparse.Namespace) -> Json:
    """A script's arguments as a result file keeps them."""
    return {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}


def default_path(benchmark: str) -> Path:
    """benchmarks/results/<benchmark>-<gpu or machine>-<date>.json"""
    gpu = _nvidia_smi("name")
    where = gpu.lower().removeprefix("nvidia ").replace(" ", "-") if gpu else platform.machine()
    return RESULTS / f"{benchmark}-{where}-{datetime.date.today().isoformat()}.json"


def read(path: Path) -> Json:
    result: Json = json.loads(path.read_text())
    return result


def resumed(path: Path, header: Json) -> Json:
    """A result that is added to: who did so, where and with what is listed in it."""
    result = read(path)
    for key in ("hardware", "versions"):
        if result[key] != header[key]:
            say(f"warning: {key} differ from those of the run that is resumed")
    result["resumed"].append({key: header[key] for key in ("started", "command", "versions", "hardware", "settings")})
    return result


def write(path: Path, result: Json) -> None:
    """Replace the file in one step: a run killed while writing must not lose what it already had."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as part:
        part.write(dumps(result) + "\n")
    os.chmod(part.name, 0o644)
    os.replace(part.name, path)


def dumps(value: Any, indent: int = 0) -> str:
    """JSON that diffs well: a value that holds no other object takes one line, be it a list of samples."""
    pad = "  " * (indent + 1)
    if _is_leaf(value):
        return json.dumps(_rounded(value))
    if isinstance(value, dict):
        lines = [f"{pad}{json.dumps(str(key))}: {dumps(item, indent + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + "\n" + "  " * indent + "}"
    lines = [pad + dumps(item, indent + 1) for item in value]
    return "[\n" + ",\n".join(lines) + "\n" + "  " * indent + "]"


def _is_leaf(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    nested = any(isinstance(item, dict | list | tuple) for item in items)
    return not nested and not (isinstance(value, dict) and len(json.dumps(value)) > 300)


def _rounded(value: Any) -> Any:
    """Six significant digits: a clock's noise is not worth the bytes in git."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value


def _torch_cuda() -> str | None:
    import torch

    cuda: str | None = torch.version.cuda
    return cuda


def _nvidia_smi(field: str) -> str | None:
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=30, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.strip().splitlines()[0].strip() if answer.strip() else None


def _cpu_model() -> str | None:
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    # ARM kernels give no name, only who made the core and which part it is.
    arm = f"ARM implementer {fields.get('CPU implementer')} part {fields.get('CPU part')}"
    return fields.get("model name") or (arm if "CPU part" in fields else None)


def commit() -> str | None:
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            capture_output=True, text=True, timeout=30, check=True, cwd=Path(__file__).parent,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None
