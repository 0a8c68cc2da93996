"""Memory during a measurement: the GPU's, the server's and the machine's, sampled twice a second."""

import contextlib
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from overspill.hardware.nvml import NoNvml, opened_nvml
from overspill.processes import below, in_session, ram_of

_INTERVAL_S = 0.5
_LIST_PROCESSES_S = 5.0
MOST_SAMPLES = 200


@dataclass(frozen=True, slots=True)
class Sample:
    t: float
    """Seconds since the measurement began."""
    gpu_bytes: int | None
    """Memory in use on the server's GPUs, or on all GPUs if its processes were found on none."""
    ram_bytes: int | None
    """RAM of the server's processes, None once they are gone; of the machine if they are unknown."""
    machine_ram_bytes: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class MemorySampler:
    """Samples memory in a thread of its own, so that a busy client does not delay samples."""

    def __init__(self, *, pid: int | None, is_here: bool) -> None:
        self._pid, self._is_here = pid, is_here
        self._stopped = threading.Event()
        self._began = time.monotonic()
        self._pids: list[int] = []
        self._listed = -_LIST_PROCESSES_S
        self.samples: list[Sample] = []
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)

    @property
    def last(self) -> Sample | None:
        return self.samples[-1] if self.samples else None

    def __enter__(self) -> "MemorySampler":
        if self._is_here:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        if self._is_here:
            self._thread.join()

    def _run(self) -> None:
        with contextlib.ExitStack() as opened:
            gpus = None
            with contextlib.suppress(NoNvml):  # no GPU, no driver, or no right to read it
                nvml = opened.enter_context(opened_nvml())
                with contextlib.suppress(nvml.NVMLError):
                    gpus = _Gpus(nvml)
            self.samples.append(self._sample(gpus))
            while not self._stopped.wait(_INTERVAL_S):
                self.samples.append(self._sample(gpus))

    def _sample(self, gpus: "_Gpus | None") -> Sample:
        now = time.monotonic() - self._began
        if self._pid is not None and now - self._listed >= _LIST_PROCESSES_S:
            self._pids = sorted({self._pid, *below(self._pid), *in_session(self._pid)})
            self._listed = now
        memory = psutil.virtual_memory()
        machine = memory.total - memory.available
        server = machine if self._pid is None else ram_of(self._pids) or None
        used = None if gpus is None else gpus.used_bytes(self._pids)
        return Sample(round(now, 2), used, server, machine)


def thinned(samples: list[Sample], most: int = MOST_SAMPLES) -> list[Sample]:
    """At most `most` samples, each with the maxima of an interval, so that no peak is lost."""
    step = -(-len(samples) // most) if samples else 1
    intervals = [samples[i : i + step] for i in range(0, len(samples), step)]
    return [
        Sample(
            each[0].t, peak(one.gpu_bytes for one in each), peak(one.ram_bytes for one in each),
            max(one.machine_ram_bytes for one in each),
        )
        for each in intervals
    ]  # fmt: skip


def peak(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


class _Gpus:
    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        self._ours: list[Any] = []  # kept when the server is gone: other GPUs' memory was never its own

    def used_bytes(self, pids: list[int]) -> int | None:
        with contextlib.suppress(self._nvml.NVMLError):
            self._ours = [handle for handle in self._handles if self._runs(handle, pids)] or self._ours
            return sum(int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in self._ours or self._handles)
        return None

    def _runs(self, handle: Any, pids: list[int]) -> bool:
        running = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return any(process.pid in pids for process in running)
