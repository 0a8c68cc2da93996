"""GPUs as NVIDIA's management library (NVML) reports them, and a sentence for each one it cannot read."""

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from overspill.figures import Known, assumed, derived, measured
from overspill.hardware.cards import Card, card_in_machine, link_of_card, tensor_flops
from overspill.hardware.gpu import Gpu, link_from_pcie
from overspill.kv.errors import OverspillError

# Codes of nvmlReturn_t.
_NO_PERMISSION, _DRIVER_NOT_LOADED, _LIBRARY_NOT_FOUND = 4, 9, 12
_GPU_IS_LOST, _RESET_REQUIRED, _VERSION_MISMATCH = 15, 16, 18
_MIG_ENABLED = 1
# NVML_NVLINK_MAX_LINKS, and the rate of one link each way since Volta; Blackwell's have twice that.
_MOST_NVLINKS, _NVLINK_BYTES_PER_SECOND = 18, 25 * 10**9

_NOT_INSTALLED = "GPUs cannot be read: the package nvidia-ml-py is missing; pip install nvidia-ml-py"
_NO_NVML = {
    _LIBRARY_NOT_FOUND: "no NVIDIA driver: libnvidia-ml.so.1 was not found; install the driver, or, in a container, "
    "start it with --gpus all",
    _DRIVER_NOT_LOADED: "the NVIDIA driver is installed but not loaded; load it with nvidia-modprobe, or reboot",
    _NO_PERMISSION: "the NVIDIA driver refuses this user; give it access to /dev/nvidiactl and /dev/nvidia0",
    _VERSION_MISMATCH: "the NVIDIA driver was updated and its old kernel module is still loaded; reboot",
}
_NO_GPU = {
    _GPU_IS_LOST: "is lost: it no longer answers on the bus; reset it with nvidia-smi --gpu-reset, or reboot",
    _RESET_REQUIRED: "needs a reset after an error; run nvidia-smi --gpu-reset, or reboot",
    _NO_PERMISSION: "may not be used by this user; give it access to the GPU's /dev/nvidia file",
}


@dataclass(frozen=True, slots=True)
class GpuReport:
    gpus: tuple[Gpu, ...] = ()
    problems: tuple[str, ...] = ()  # a sentence per GPU missing from `gpus`, or one for all of them


class NoNvml(OverspillError):
    """NVML cannot be used here; the message says why."""


@contextlib.contextmanager
def opened_nvml(nvml: Any | None = None) -> Iterator[Any]:
    """Start the library and shut it down afterwards; `nvml` stands in for pynvml in tests."""
    try:
        nvml = nvml or importlib.import_module("pynvml")
    except ImportError as error:
        raise NoNvml(_NOT_INSTALLED) from error
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NoNvml(_NO_NVML.get(_code(error), f"NVML did not start: {error}")) from error
    try:
        yield nvml
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def read_gpus(nvml: Any | None = None) -> GpuReport:
    """All GPUs of the machine. Starts no CUDA context, so it takes no GPU memory and may be called at any time."""
    try:
        with opened_nvml(nvml) as opened:
            try:
                return _read_all(opened)
            except opened.NVMLError as error:
                return GpuReport(problems=(f"the GPUs could not be listed: {error}",))
    except NoNvml as error:
        return GpuReport(problems=(str(error),))


def _code(error: Exception) -> int:
    return int(getattr(error, "value", -1))


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value  # bytes in older nvidia-ml-py


def _read_all(nvml: Any) -> GpuReport:
    driver = _text(nvml.nvmlSystemGetDriverVersion())
    gpus: list[Gpu] = []
    problems: list[str] = []
    count = nvml.nvmlDeviceGetCount()
    for index in range(count):
        try:
            device = Device(nvml, nvml.nvmlDeviceGetHandleByIndex(index))
            if device.in_mig_mode():
                gpus += _read_slices(device, index, driver)
            else:
                gpus.append(_read_gpu(device, index, driver, device.memory()))
        except nvml.NVMLError as error:
            problems.append(f"GPU {index} {_NO_GPU.get(_code(error), f'cannot be read: {error}')}")
        except NotUsable as error:
            problems.append(f"GPU {index} {error}")
    if not count:
        problems.append("the NVIDIA driver works and finds no GPU")
    return GpuReport(tuple(gpus), tuple(problems))


class NotUsable(Exception):
    """A GPU responds but cannot be planned for; the message says why."""


@dataclass(frozen=True, slots=True)
class _Memory:
    shown_bytes: int  # as nvidia-smi shows it
    total: Known[int]  # the part of it that CUDA counts
    free: Known[int]


class Device:
    """An NVML handle. `ask` returns None for what the GPU, its driver or this nvidia-ml-py does not support."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    def require(self, function: str, *arguments: Any, **options: Any) -> Any:
        return getattr(self._nvml, function)(self._handle, *arguments, **options)

    def ask(self, function: str, *arguments: Any, **options: Any) -> Any | None:
        if not hasattr(self._nvml, function):
            return None
        try:
            return self.require(function, *arguments, **options)
        except self._nvml.NVMLError as error:
            if _code(error) in (_GPU_IS_LOST, _RESET_REQUIRED):
                raise
            return None

    def memory(self) -> _Memory:
        memory = self.reported_memory()
        if memory is None:
            raise NotUsable(f"({self.name()}) does not report its memory; state it with --gpu, for example --gpu 24GiB")
        return memory

    def reported_memory(self) -> _Memory | None:
        version = getattr(self._nvml, "nvmlMemory_v2", None)
        info = None if version is None else self.ask("nvmlDeviceGetMemoryInfo", version=version)
        if info is not None:
            counted = derived(info.total - info.reserved, note="NVML's total less what the driver reserves")
            return _Memory(info.total, counted, measured(info.free))
        info = self.ask("nvmlDeviceGetMemoryInfo")
        if info is None:
            return None
        return _Memory(info.total, measured(info.total, "includes what the driver reserves"), measured(info.free))

    def name(self) -> str:
        return _text(self.require("nvmlDeviceGetName"))

    def uuid(self) -> str:
        return _text(self.require("nvmlDeviceGetUUID"))

    def in_mig_mode(self) -> bool:
        mode = self.ask("nvmlDeviceGetMigMode")
        return mode is not None and mode[0] == _MIG_ENABLED

    def mig_devices(self) -> list["Device"]:
        found = []
        for index in range(self.ask("nvmlDeviceGetMaxMigDeviceCount") or 0):
            handle = self.ask("nvmlDeviceGetMigDeviceHandleByIndex", index)
            if handle is not None:  # unused slots are "not found"
                found.append(Device(self._nvml, handle))
        return found


def _read_gpu(device: Device, index: int, driver: str, memory: _Memory) -> Gpu:
    name = device.name()
    card = card_in_machine(name, memory.shown_bytes)
    capability = device.ask("nvmlDeviceGetCudaComputeCapability")
    capability = None if capability is None else (int(capability[0]), int(capability[1]))
    generation, width = _pcie(device)
    return Gpu(
        index=index,
        uuid=device.uuid(),
        name=name,
        total_bytes=memory.total,
        free_bytes=memory.free,
        memory_bytes_per_second=_memory_bandwidth(device, card),
        bf16_flops=_flops(device, name, capability, card),
        compute_capability=capability,
        link=link_from_pcie(generation, width) if card is None else link_of_card(card, generation, width),
        driver_version=driver,
        nvlink=_nvlink(device),
        numa_node=_numa_node(device),
        # Supported only where the GPU's memory is a NUMA node of its own; not the node next to the GPU.
        memory_numa_node=device.ask("nvmlDeviceGetNumaNodeId"),
    )


def _nvlink(device: Device) -> Known[int] | None:
    """Rate of all links that are up. NVML reports only in pieces which of them lead to a switch or to one other GPU."""
    states = [device.ask("nvmlDeviceGetNvLinkState", link) for link in range(_MOST_NVLINKS)]
    up = sum(state == 1 for state in states)
    return derived(up * _NVLINK_BYTES_PER_SECOND, note=f"{up} NVLinks") if up else None


def _numa_node(device: Device, root: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """The NUMA node nearest to the GPU; None if the machine does not report one."""
    found = device.ask("nvmlDeviceGetPciInfo")
    address = "" if found is None else _text(found.busId).lower()  # 00000000:65:00.0; Linux drops four zeros
    try:
        node = int((root / address[-len("0000:00:00.0") :] / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _pcie(device: Device) -> tuple[Known[int] | None, Known[int] | None]:
    """Generation and width of the PCIe link.

    The current generation drops while the GPU idles and returns with work, so the highest one that card and slot
    agree on counts. The width does not change, so the current one counts.
    """
    generation = device.ask("nvmlDeviceGetMaxPcieLinkGeneration")
    width = device.ask("nvmlDeviceGetCurrPcieLinkWidth")
    # Virtual machines that hide the link answer 0.
    return measured(generation) if generation else None, measured(width) if width else None


def _memory_bandwidth(device: Device, card: Card | None) -> Known[int] | None:
    clock = device.ask("nvmlDeviceGetMaxClockInfo", 2)  # NVML_CLOCK_MEM, in MHz
    bits = device.ask("nvmlDeviceGetMemoryBusWidth")
    if clock and bits:
        # Two transfers a clock as NVML counts them, for every kind of memory: 10501 MHz and 384 bits give the 1008 GB/s
        # of an RTX 4090, 2619 MHz and 5120 bits the 3.35 TB/s of an H100.
        return derived(2 * clock * 10**6 * bits // 8, note=f"{bits} bits at {clock} MHz, two transfers a clock")
    return None if card is None else assumed(int(card.memory_gb_s * 1e9), f"data sheet of the {card.name}")


def _flops(device: Device, name: str, capability: tuple[int, int] | None, card: Card | None) -> Known[int] | None:
    if card is not None:
        return assumed(int(card.bf16_tflops * 1e12), f"data sheet of the {card.name}")
    cores = device.ask("nvmlDeviceGetNumGpuCores")
    clock = device.ask("nvmlDeviceGetMaxClockInfo", 1)  # NVML_CLOCK_SM
    if not cores or not clock or capability is None:
        return None
    flops = tensor_flops(name, capability, cores, clock)
    return None if flops is None else derived(flops, note=f"{cores} cores at {clock} MHz, their highest clock")


def _read_slices(device: Device, index: int, driver: str) -> list[Gpu]:
    """MIG devices as GPUs. NVML reports their memory; their speeds are scaled by their share of the GPU's memory."""
    parts = device.mig_devices()
    if not parts:
        raise NotUsable(f"({device.name()}) is in MIG mode without a MIG device; create one with nvidia-smi mig -cgi")
    # Users of a MIG device often lack permission to read the whole GPU's memory.
    memory = device.reported_memory()
    whole = _read_gpu(device, index, driver, memory or _Memory(0, measured(0), measured(0)))
    return [_slice(whole, part, memory) for part in parts]


def _slice(whole: Gpu, part: Device, whole_memory: _Memory | None) -> Gpu:
    memory = part.memory()
    share = min(1.0, memory.total.value / whole_memory.total.value) if whole_memory else None
    return replace(
        whole,
        uuid=part.uuid(),
        name=_text(part.ask("nvmlDeviceGetName") or whole.name),
        total_bytes=memory.total,
        free_bytes=memory.free,
        memory_bytes_per_second=_shared(whole.memory_bytes_per_second, share),
        bf16_flops=_shared(whole.bf16_flops, share),
        nvlink=None,  # MIG devices do not reach each other
    )


def _shared(figure: Known[int] | None, share: float | None) -> Known[int] | None:
    if figure is None or share is None:
        return None
    return assumed(int(figure.value * share), f"{share:.0%} of the whole GPU's, like its memory")
