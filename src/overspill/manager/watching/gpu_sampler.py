"""GPUs by NVML, which stays open; a machine without one is fine, and one whose driver comes later is found."""

import contextlib
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from overspill.hardware.nvml import read_gpus
from overspill.manager.watching.samples import GpuSample

_TRY_AGAIN_S = 60.0
# Counters of bytes, answered at once. The older call for the rate measures for 20 ms, each way.
_FIELD_FROM_GPU, _FIELD_TO_GPU = 197, 198  # NVML_FI_DEV_PCIE_COUNT_TX_BYTES and RX
_UTIL_FROM_GPU, _UTIL_TO_GPU = 0, 1  # NVML_PCIE_UTIL_TX_BYTES and RX, in KB/s
_TEMPERATURE_OF_GPU = 0
_LOST = (15, 16)  # NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED


@dataclass(slots=True)
class _Device:
    index: int
    handle: Any
    uuid: str
    name: str
    has_counters: bool = True
    counted: tuple[float, int, int] | None = None


class GpuSampler:
    """Not for several threads at once."""

    def __init__(self, nvml: Any | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml, self._clock = nvml, clock
        self._devices: list[_Device] | None = None
        self._opened_at = -_TRY_AGAIN_S
        self.problem = ""

    def read(self) -> tuple[GpuSample, ...]:
        if self._devices is None and not self._open():
            return ()
        samples = []
        for device in self._devices or ():
            try:
                samples.append(self._read(device))
            except self._nvml.NVMLError as error:  # type: ignore[union-attr]
                self.problem = f"GPU {device.index} cannot be read: {error}"
                if getattr(error, "value", None) in _LOST:
                    self.close()  # and looked for again later
                    break
        return tuple(samples)

    def close(self) -> None:
        if self._devices is not None:
            with contextlib.suppress(self._nvml.NVMLError):  # type: ignore[union-attr]
                self._nvml.nvmlShutdown()  # type: ignore[union-attr]
        self._devices = None

    def _open(self) -> bool:
        if self._clock() - self._opened_at < _TRY_AGAIN_S:
            return False
        self._opened_at = self._clock()
        try:
            self._nvml = self._nvml or importlib.import_module("pynvml")
            self._nvml.nvmlInit()
        except Exception:  # the reasons, in words, are known there
            self.problem = " ".join(read_gpus(self._nvml).problems)
            return False
        self._devices, self.problem = [], ""
        for index in range(self._nvml.nvmlDeviceGetCount()):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                uuid, name = self._nvml.nvmlDeviceGetUUID(handle), self._nvml.nvmlDeviceGetName(handle)
                self._devices.append(_Device(index, handle, _text(uuid), _text(name)))
            except self._nvml.NVMLError as error:
                self.problem = f"GPU {index} cannot be read: {error}"
        return True

    def _ask(self, function: str, device: _Device, *arguments: Any) -> Any | None:
        call = getattr(self._nvml, function, None)
        if call is None:
            return None
        try:
            return call(device.handle, *arguments)
        except self._nvml.NVMLError as error:  # type: ignore[union-attr]
            if getattr(error, "value", None) in _LOST:
                raise
            return None

    def _read(self, device: _Device) -> GpuSample:
        total, used = self._memory(device)
        utilization = self._ask("nvmlDeviceGetUtilizationRates", device)
        milliwatts = self._ask("nvmlDeviceGetPowerUsage", device)
        to_gpu, from_gpu = self._link(device)
        return GpuSample(
            index=device.index,
            uuid=device.uuid,
            name=device.name,
            total_bytes=total,
            used_bytes=used,
            use=None if utilization is None else utilization.gpu / 100,
            temperature_c=self._ask("nvmlDeviceGetTemperature", device, _TEMPERATURE_OF_GPU),
            power_w=None if milliwatts is None else milliwatts / 1000,
            to_gpu_bytes_per_s=to_gpu,
            from_gpu_bytes_per_s=from_gpu,
            processes=self._processes(device),
        )

    def _memory(self, device: _Device) -> tuple[int, int]:
        """As CUDA counts where the driver tells what it keeps for itself (overspill.hardware.nvml does the same)."""
        nvml: Any = self._nvml
        version = getattr(nvml, "nvmlMemory_v2", None)
        if version is not None:
            with contextlib.suppress(nvml.NVMLError):
                info = nvml.nvmlDeviceGetMemoryInfo(device.handle, version=version)
                total = info.total - info.reserved
                return total, min(total, max(0, total - info.free))
        info = nvml.nvmlDeviceGetMemoryInfo(device.handle)
        return info.total, info.total - info.free

    def _processes(self, device: _Device) -> dict[int, int | None]:
        lists = [self._ask(f"nvmlDeviceGet{kind}RunningProcesses", device) for kind in ("Compute", "Graphics")]
        # A program that draws and computes is in both lists, with the same memory.
        return {each.pid: each.usedGpuMemory for some in lists for each in some or ()}

    def _link(self, device: _Device) -> tuple[int | None, int | None]:
        """Bytes a second to the GPU and from it."""
        if device.has_counters:
            counted = self._counters(device)
            if counted is not None:
                before, device.counted = device.counted, counted
                return _rates(before, counted)
            device.has_counters = False
        rates = [self._ask("nvmlDeviceGetPcieThroughput", device, which) for which in (_UTIL_TO_GPU, _UTIL_FROM_GPU)]
        return rates[0] and rates[0] * 1000, rates[1] and rates[1] * 1000

    def _counters(self, device: _Device) -> tuple[float, int, int] | None:
        values = self._ask("nvmlDeviceGetFieldValues", device, [_FIELD_TO_GPU, _FIELD_FROM_GPU])
        if values is None or any(value.nvmlReturn for value in values):
            return None
        return self._clock(), int(values[0].value.ullVal), int(values[1].value.ullVal)


def _rates(before: tuple[float, int, int] | None, after: tuple[float, int, int]) -> tuple[int | None, int | None]:
    if before is None or after[0] <= before[0]:
        return None, None
    seconds = after[0] - before[0]
    # The counters may wrap (NVML's documentation does not say where): no rate then, instead of a wrong one.
    to_gpu, from_gpu = (int((new - old) / seconds) if new >= old else None for old, new in zip(before[1:], after[1:]))
    return to_gpu, from_gpu


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
