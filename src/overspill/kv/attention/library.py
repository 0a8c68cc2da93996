"""The compiled attention library: its C interface, checks before loading, and the kernels this CPU can run."""

import ctypes
import errno
import functools
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overspill.kv.attention.build import digest, library_path

# Torch's names of types, in the order of OverspillType.
TYPES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float32")
TYPE_BYTES = (2, 2, 1, 1, 4)
QUERY_TYPES = ("bfloat16", "float16", "float32")
# Cores left for the engine's own threads.
SPARED_CORES = 2
_AMX_STAGES = ("CPU", "permission", "configuration", "loads and stores", "products")
_AMX_TRY = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).overspill_try_amx(int(sys.argv[2])))"


class AttentionUnavailable(Exception):
    """Attention cannot run on this CPU; the message says why, and what to do about it."""


class NativeLayout(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("block_stride", "token_stride", "head_stride", "value_offset")),
        *((name, ctypes.c_int32) for name in ("num_blocks", "block_size", "kv_heads", "group", "head_size")),
        *((name, ctypes.c_int32) for name in ("kv_type", "query_type")),
    ]


class NativeSegment(ctypes.Structure):
    _fields_ = [
        ("blocks", ctypes.c_void_p), ("queries", ctypes.c_void_p),
        ("num_blocks", ctypes.c_int32), ("num_queries", ctypes.c_int32),
    ]  # fmt: skip


class NativeJob(ctypes.Structure):
    _fields_ = [
        ("layout", ctypes.POINTER(NativeLayout)), ("segments", ctypes.POINTER(NativeSegment)),
        *((name, ctypes.c_void_p) for name in ("kv", "query", "output", "lse", "ready", "done", "due")),
        ("num_segments", ctypes.c_int32), ("num_queries", ctypes.c_int32),
        *((name, ctypes.c_float) for name in ("scale", "key_scale", "value_scale")),
    ]  # fmt: skip


class NativeProgress(ctypes.Structure):
    _fields_ = [
        ("heartbeat", ctypes.c_uint64), ("units", ctypes.c_uint64),
        ("submitted", ctypes.c_int64), ("finished", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("layer", "state", "alive")),
    ]  # fmt: skip


class NativeAttended(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("bytes", "ns", "jobs", "late")]


_POOL, _INT, _INT64, _TEXT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_char_p
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "digest": (_TEXT, []),
    "num_kernels": (_INT, []),
    "kernel_name": (_TEXT, [_INT]),
    "kernel_runs": (_INT, [_INT]),
    "try_amx": (_INT, [_INT]),
    "enable_amx": (_INT, []),
    "error": (_TEXT, []),
    "pool_create": (_POOL, [_INT, ctypes.POINTER(ctypes.c_int32), _INT, _INT]),
    "pool_close": (_INT, [_POOL, _INT]),
    "pool_submit": (_INT64, [_POOL, ctypes.POINTER(NativeJob), _INT]),
    "pool_wait": (_INT, [_POOL, _INT64, _INT64]),
    "pool_abort": (_INT, [_POOL, _INT64]),
    "pool_progress": (None, [_POOL, ctypes.POINTER(NativeProgress)]),
    "pool_force_kernel": (None, [_POOL, _INT]),
    "pool_kernel": (_TEXT, [_POOL]),
    "pool_read": (_INT64, [_POOL, ctypes.c_void_p, _INT64]),
    "pool_cpu_ns": (_INT64, [_POOL]),
    "pool_attended": (None, [_POOL, ctypes.POINTER(NativeAttended)]),
    "pool_inject_fault": (None, [_POOL, _INT, _INT]),
}


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded library; `call` has the functions of the C interface as attributes, without their prefix."""

    path: Path
    call: Any
    amx: str  # "works", or why not
    kernels: tuple[str, ...]  # kernels that this CPU runs, best first

    def index(self, kernel: str) -> int:
        """Number of a compiled kernel in the C interface."""
        names = [self.call.kernel_name(i).decode() for i in range(self.call.num_kernels())]
        return names.index(kernel)


class _Functions:
    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, f"overspill_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)


@functools.cache
def load(path: Path | None = None) -> Library:
    """Load the library beside this file, or the one at `path`, once per process."""
    path = path or library_path()
    machine = platform.machine()
    remedy = "install a C++ compiler (or the package ziglang) and run `python -m overspill.kv.attention.build`"
    if not path.exists():
        raise AttentionUnavailable(
            f"attention on the CPU was not built for {machine} ({path.name} is missing): {remedy}"
        )
    try:
        call: Any = _Functions(path)
    except (OSError, AttributeError) as error:
        raise AttentionUnavailable(f"{path} does not load ({error}): {remedy}") from error
    if call.digest().decode() != digest():
        raise AttentionUnavailable(f"{path} was not built from the sources next to it: {remedy}")
    amx = _try_amx(path, call)
    if amx == "works":
        call.enable_amx()
    names = [call.kernel_name(i).decode() for i in range(call.num_kernels()) if call.kernel_runs(i)]
    if not names:
        raise AttentionUnavailable(f"this {machine} CPU has no AVX2, which attention on the CPU needs")
    return Library(path, call, amx, tuple(names))


def _try_amx(path: Path, call: Any) -> str:
    """Try AMX in a child: where a virtual machine shows AMX without supporting it, an instruction kills the process."""
    if refused := call.try_amx(0):
        return {errno.ENODEV: "not in this CPU", errno.ENOSYS: "not compiled in"}.get(refused, os.strerror(refused))
    for stage in (len(_AMX_STAGES) - 1, *range(1, len(_AMX_STAGES) - 1)):
        command = [sys.executable, "-I", "-S", "-c", _AMX_TRY, str(path), str(stage)]
        try:
            status = subprocess.run(command, capture_output=True, timeout=30, check=False).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"not tried: {error}"
        if status == 0 and stage == len(_AMX_STAGES) - 1:
            return "works"
        if status:
            reason, failed = signal.Signals(-status).name if status < 0 else os.strerror(status), stage
            if stage < len(_AMX_STAGES) - 1:  # the first failing stage
                break
    return f"{_AMX_STAGES[failed]}: {reason}"


def default_threads(cpus: Iterable[int] | None = None, sys: Path = Path("/sys")) -> int:
    """Physical cores less SPARED_CORES, at least one, of `cpus` or of all CPUs that this process may use."""
    cores = set()
    for cpu in os.sched_getaffinity(0) if cpus is None else cpus:
        try:
            cores.add((sys / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            cores.add(str(cpu))
    return max(1, len(cores) - SPARED_CORES)
