"""GPUs by NVML, which stays open; a machine without one is fine, and one whose driver comes later is found."""

import contextlib
import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from overspill.hardware.nvml import Device, NotUsable, read_gpus

_TRY_AGAIN_S = 60.0
# Counters of bytes, answered at once. The older call for the rate measures for 20 ms, each way.
_FIELDS = [198, 197]  # NVML_FI_DEV_PCIE_COUNT_RX_BYTES and TX: to the GPU, and from it
_UTILIZATIONS = (1, 0)  # NVML_PCIE_UTIL_RX_BYTES and TX, in KB/s
_TEMPERATURE_OF_GPU = 0
_LOST = (15, 16)  # NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """None where the driver has no figure."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    """What CUDA, and so vLLM, counts."""
    used_bytes: int
    use: float | None
    """Share of the last moments in which a kernel ran, 0 to 1."""
    temperature_c: int | None
    power_w: float | None
    to_gpu_bytes_per_s: int | None
    """Over PCIe."""
    from_gpu_bytes_per_s: int | None
    processes: Mapping[int, int | None]
    """Bytes by process."""


@dataclass(slots=True)
class _Gpu:
    index: int
    device: Device
    uuid: str
    name: str
    has_counters: bool = True
    counted: tuple[float, ...] | None = None
    """Time, bytes to the GPU, bytes from it."""


class GpuSampler:
    """Not for several threads at once."""

    def __init__(self, nvml: Any | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml, self._clock = nvml, clock
        self._gpus: list[_Gpu] | None = None
        self._opened_at = -_TRY_AGAIN_S
        self.problem = ""

    def read(self) -> tuple[GpuSample, ...]:
        if self._gpus is None and not self._open():
            return ()
        samples = []
        for gpu in self._gpus or ():
            try:
                samples.append(self._read(gpu))
            except NotUsable as error:
                self.problem = f"GPU {gpu.index} {error}"
            except self._nvml.NVMLError as error:  # type: ignore[union-attr]
                self.problem = f"GPU {gpu.index} cannot be read: {error}"
                if getattr(error, "value", None) in _LOST:
                    self.close()  # and looked for again later
                    break
        return tuple(samples)

    def close(self) -> None:
        if self._gpus is not None:
            with contextlib.suppress(self._nvml.NVMLError):  # type: ignore[union-attr]
                self._nvml.nvmlShutdown()  # type: ignore[union-attr]
        self._gpus = None

    def _open(self) -> bool:
        if self._clock() - self._opened_at < _TRY_AGAIN_S:
            return False
        self._opened_at = self._clock()
        try:
            self._nvml = self._nvml or importlib.import_module("pynvml")
            self._nvml.nvmlInit()
        except Exception:  # read_gpus has the reasons in words
            self.problem = " ".join(read_gpus(self._nvml).problems)
            return False
        self._gpus, self.problem = [], ""
        for index in range(self._nvml.nvmlDeviceGetCount()):
            try:
                device = Device(self._nvml, self._nvml.nvmlDeviceGetHandleByIndex(index))
                self._gpus.append(_Gpu(index, device, device.uuid(), device.name()))
            except self._nvml.NVMLError as error:
                self.problem = f"GPU {index} cannot be read: {error}"
        return True

    def _read(self, gpu: _Gpu) -> GpuSample:
        ask, memory = gpu.device.ask, gpu.device.memory()
        total = memory.total.value
        utilization, milliwatts = ask("nvmlDeviceGetUtilizationRates"), ask("nvmlDeviceGetPowerUsage")
        to_gpu, from_gpu = self._link(gpu)
        lists = [ask(f"nvmlDeviceGet{kind}RunningProcesses") for kind in ("Compute", "Graphics")]
        return GpuSample(
            index=gpu.index,
            uuid=gpu.uuid,
            name=gpu.name,
            total_bytes=total,
            used_bytes=min(total, max(0, total - memory.free.value)),
            use=None if utilization is None else utilization.gpu / 100,
            temperature_c=ask("nvmlDeviceGetTemperature", _TEMPERATURE_OF_GPU),
            power_w=None if milliwatts is None else milliwatts / 1000,
            to_gpu_bytes_per_s=to_gpu,
            from_gpu_bytes_per_s=from_gpu,
            # A program that draws and computes is in both lists, with the same memory.
            processes={each.pid: each.usedGpuMemory for some in lists for each in some or ()},
        )

    def _link(self, gpu: _Gpu) -> tuple[int | None, int | None]:
        """Bytes a second to the GPU and from it."""
        values = gpu.device.ask("nvmlDeviceGetFieldValues", _FIELDS) if gpu.has_counters else None
        if values is None or any(value.nvmlReturn for value in values):
            gpu.has_counters = False
            rates = [gpu.device.ask("nvmlDeviceGetPcieThroughput", which) for which in _UTILIZATIONS]
            return rates[0] and rates[0] * 1000, rates[1] and rates[1] * 1000
        counted = self._clock(), *(int(value.value.ullVal) for value in values)
        before, gpu.counted = gpu.counted, counted
        if before is None or counted[0] <= before[0]:
            return None, None
        seconds = counted[0] - before[0]
        # The counters may wrap (NVML's documentation does not say where): no rate then, instead of a wrong one.
        to_gpu, from_gpu = (
            int((new - old) / seconds) if new >= old else None for old, new in zip(before[1:], counted[1:])
        )
        return to_gpu, from_gpu
