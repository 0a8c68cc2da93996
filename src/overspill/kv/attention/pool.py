"""Pool of threads that attend to KV in RAM, and the jobs that they run.

Addresses are plain integers (`tensor.data_ptr()`); the caller must keep a job's memory until its step has ended.
"""

import ctypes
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from overspill.kv.attention.library import (
    QUERY_TYPES,
    TYPE_BYTES,
    TYPES,
    AttentionUnavailable,
    Library,
    NativeAttended,
    NativeJob,
    NativeLayout,
    NativeProgress,
    NativeSegment,
    default_threads,
    load,
)

Ids = npt.NDArray[np.int32]

_SPIN_MICROSECONDS = 50


class StepFailed(Exception):
    """A step did not complete; its results must not be used."""


class StepAborted(StepFailed):
    """The step was aborted; no thread touches its memory any more."""


class StepStalled(StepFailed):
    """The step did not end in time, and its memory may still be in use; the message says how far the step got."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Layout of keys and values in memory. Strides are in bytes; the key of token t and head h in block b begins at
    `kv + b * block_stride + t * token_stride + h * head_stride`, and its value `value_offset` bytes later.
    """

    num_blocks: int
    block_size: int
    kv_heads: int
    group: int  # query heads per kv head
    head_size: int
    kv_type: str  # torch's name: "bfloat16", "float8_e4m3fn", ...
    query_type: str
    block_stride: int
    token_stride: int
    head_stride: int
    value_offset: int

    @classmethod
    def packed(
        cls, *, num_blocks: int, block_size: int, kv_heads: int, group: int, head_size: int, kv_type: str,
        query_type: str, heads_first: bool = False,
    ) -> Self:  # fmt: skip
        """Layout of blocks without gaps, each [token][head][K | V], or [head][token][K | V] with `heads_first`."""
        content = 2 * head_size * TYPE_BYTES[TYPES.index(kv_type)]
        return cls(
            num_blocks=num_blocks, block_size=block_size, kv_heads=kv_heads, group=group, head_size=head_size,
            kv_type=kv_type, query_type=query_type, block_stride=block_size * kv_heads * content,
            token_stride=content if heads_first else kv_heads * content,
            head_stride=block_size * content if heads_first else content, value_offset=content // 2,
        )  # fmt: skip

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values per token."""
        return 2 * self.kv_heads * self.head_size * TYPE_BYTES[TYPES.index(self.kv_type)]

    @cached_property
    def native(self) -> NativeLayout:
        if self.query_type not in QUERY_TYPES or self.kv_type not in TYPES:
            raise ValueError(
                f"queries of {self.query_type} and KV of {self.kv_type} cannot be attended on the CPU; queries may be "
                f"{', '.join(QUERY_TYPES)}, and KV {', '.join(TYPES)}"
            )
        fields = {name: getattr(self, name) for name, *_ in NativeLayout._fields_}
        return NativeLayout(
            **fields | {"kv_type": TYPES.index(self.kv_type), "query_type": TYPES.index(self.query_type)}
        )


class Segments:
    """Full blocks, and the query tokens that attend to all of them; blocks that requests share are read once.

    All layers of a step share one object, so that the library divides the work once.
    """

    def __init__(self, segments: Iterable[tuple[Sequence[int] | Ids, Sequence[int] | Ids]]) -> None:
        self._ids = [(_ids(blocks), _ids(queries)) for blocks, queries in segments]
        self.native = (NativeSegment * len(self._ids))(
            *(NativeSegment(b.ctypes.data, q.ctypes.data, len(b), len(q)) for b, q in self._ids)
        )


def _ids(ids: Sequence[int] | Ids) -> Ids:
    return np.ascontiguousarray(ids, dtype=np.int32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Attention of one layer. `query` and `output` (fp32) are [num_queries][heads][head_size], `lse` (fp32) is
    [heads][num_queries]. `ready`, `done` and `due` are addresses of 32-bit flags, 0 or 1: the job begins when `ready`
    is raised and lowers it, raises `done` at the end, and is late if `due` (its result is awaited) is up by then.
    """

    layout: Layout
    segments: Segments
    kv: int
    query: int
    output: int
    lse: int
    num_queries: int
    scale: float
    key_scale: float = 1.0
    value_scale: float = 1.0
    ready: int | None = None
    done: int | None = None
    due: int | None = None

    def native(self) -> NativeJob:
        return NativeJob(
            ctypes.pointer(self.layout.native),
            ctypes.cast(self.segments.native, ctypes.POINTER(NativeSegment)),
            self.kv, self.query, self.output, self.lse, self.ready, self.done, self.due,
            len(self.segments.native), self.num_queries, self.scale, self.key_scale, self.value_scale,
        )  # fmt: skip


class Step:
    """Jobs of all layers, prepared once; only their blocks and queries change from step to step."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = tuple(jobs)  # kept: native jobs point to their layouts
        self.native = (NativeJob * len(jobs))(*(job.native() for job in jobs))
        self.segments = [job.segments for job in jobs]

    def attend_to(self, segments: Segments, num_queries: int, layers: Iterable[int] | None = None) -> None:
        """Replace blocks and queries, in all layers or in those of one cache group."""
        pointer = ctypes.cast(segments.native, ctypes.POINTER(NativeSegment))
        for layer in range(len(self.native)) if layers is None else layers:
            job = self.native[layer]
            job.segments, job.num_segments, job.num_queries = pointer, len(segments.native), num_queries
            self.segments[layer] = segments


class State(IntEnum):
    IDLE = 0
    WAITING = 1  # for a job's `ready`
    ATTENDING = 2


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of the threads. A live leader keeps raising `heartbeat`; threads that make progress raise `units`."""

    heartbeat: int
    units: int
    submitted: int
    finished: int
    layer: int
    state: State
    alive: int

    def __str__(self) -> str:
        where = "" if self.state == State.IDLE else f" at layer {self.layer} of step {self.finished + 1}"
        return f"{self.state.name.lower()}{where}, {self.alive} threads alive, {self.units} pieces of work done"


class Attended(NamedTuple):
    """Totals over completed jobs with KV."""

    num_bytes: int = 0
    seconds: float = 0.0  # from `ready` to `done`
    jobs: int = 0
    late: int = 0  # jobs that were due before they were done

    def since(self, before: "Attended") -> "Attended":
        return Attended(
            self.num_bytes - before.num_bytes, self.seconds - before.seconds, self.jobs - before.jobs,
            self.late - before.late,
        )  # fmt: skip


class Fault(IntEnum):
    """Fault that a test injects: the thread takes its next piece of work, and then stalls or exits."""

    NONE = 0
    STALL = 1
    EXIT = 2


class Pool:
    """Dedicated threads, asleep while there is no work. One of them leads."""

    def __init__(
        self, threads: int | None = None, *, cpus: Iterable[int] = (), pools: int = 1,
        spin_us: int = _SPIN_MICROSECONDS, library: Library | None = None,
    ) -> None:  # fmt: skip
        """Without `threads`, the pool takes its part of the cores, which `pools` pools share."""
        self._library = library or load()
        self._call = self._library.call
        near = sorted(set(cpus) & os.sched_getaffinity(0))
        self.threads = threads or max(1, default_threads(near or None) // pools)
        self._handle = self._call.pool_create(self.threads, (ctypes.c_int32 * len(near))(*near), len(near), spin_us)
        if not self._handle:
            raise AttentionUnavailable(f"{self.threads} threads for attention: {self._call.error().decode()}")
        self._running: dict[int, object] = {}  # objects that steps point to, by step id
        self._lock = threading.Lock()

    def submit(self, step: Step) -> int:
        """Queue a step behind the earlier ones and return its id; the caller may change `step` right away."""
        with self._lock:
            id = self._call.pool_submit(self._handle, step.native, len(step.native))
            if id < 0:
                raise ValueError(f"attention on the CPU: {self._call.error().decode()}")
            finished = self.progress().finished
            self._running = {old: kept for old, kept in self._running.items() if old > finished}
            self._running[id] = (step.jobs, *step.segments)
        return int(id)

    def wait(self, step: int, timeout: float) -> None:
        """Return when the step has ended; raise if it was aborted, or does not end in time."""
        result = self._call.pool_wait(self._handle, step, int(timeout * 1e6))
        if result == 1:
            raise StepAborted(f"step {step} was aborted")
        if result:
            progress = self.progress()
            died = f" ({self.threads - progress.alive} of {self.threads} threads died)" if result == 3 else ""
            raise StepStalled(f"attention on the CPU did not end within {timeout:g} s{died}: {progress}")

    def attend(self, job: Job, timeout: float = 60.0) -> None:
        """Run one job, and wait for it."""
        self.wait(self.submit(Step([job])), timeout)

    def abort(self, timeout: float = 1.0) -> None:
        """End all steps submitted so far without setting `done`; raise if a thread keeps using their memory."""
        result = self._call.pool_abort(self._handle, int(timeout * 1e6))
        if result != 1:
            raise StepStalled(f"a thread still uses an aborted step's memory after {timeout:g} s: {self.progress()}")
        with self._lock:
            self._running.clear()

    def progress(self) -> Progress:
        native = NativeProgress()
        self._call.pool_progress(self._handle, ctypes.byref(native))
        values = {name: getattr(native, name) for name, *_ in NativeProgress._fields_}
        return Progress(**values | {"state": State(native.state)})

    @property
    def kernel(self) -> str:
        """Name of the kernel that ran last."""
        return str(self._call.pool_kernel(self._handle).decode())

    @property
    def cpu_seconds(self) -> float:
        """CPU time that all threads spent at work, without waiting."""
        return self._call.pool_cpu_ns(self._handle) / 1e9

    @property
    def attended(self) -> Attended:
        native = NativeAttended()
        self._call.pool_attended(self._handle, ctypes.byref(native))
        return Attended(native.bytes, native.ns / 1e9, native.jobs, native.late)

    def force_kernel(self, name: str | None) -> None:
        """Use the kernel `name` for steps submitted from now on; with None, the best one again."""
        self._call.pool_force_kernel(self._handle, -1 if name is None else self._library.index(name))

    def read(self, address: int, num_bytes: int, timeout: float = 60.0) -> None:
        """Read memory, in whole MiB, with all threads: a measure of the speed that attention could reach."""
        self.wait(self._call.pool_read(self._handle, address, num_bytes), timeout)

    def inject_fault(self, thread: int, fault: Fault) -> None:
        """Inject a fault into a thread, for tests. Thread 0 leads."""
        self._call.pool_inject_fault(self._handle, thread, fault)

    def close(self, timeout: float = 2.0) -> None:
        """End the threads; running steps end early."""
        if self._handle:
            handle, self._handle = self._handle, None
            left = self._call.pool_close(handle, int(timeout * 1e3))
            if left:
                raise StepStalled(f"{left} of {self.threads} attention threads did not end within {timeout:g} s")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
