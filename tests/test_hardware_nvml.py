"""What is made of NVML's answers, with a stand-in for its Python module: there is no driver where these tests run."""

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import overspill.hardware.nvml
from overspill.figures import Origin, derived, measured
from overspill.hardware.gpu import Gpu
from overspill.hardware.nvml import GpuReport, read_gpus
from overspill.kv.sizes import GiB, MiB

NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND = 3, 4, 6, 9, 12
LOST, RESET_REQUIRED, MISMATCH, UNKNOWN = 15, 16, 18, 999


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        self.value = value

    def __str__(self) -> str:
        return f"code {self.value}"


def used(pid: int, num_bytes: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=num_bytes)


class Device:
    """An RTX 4090 unless told otherwise. An answer that is an NVMLError is raised."""

    def __init__(self, number: int = 0, **answers: Any) -> None:
        self.answers: dict[str, Any] = {
            "Name": "NVIDIA GeForce RTX 4090",
            "UUID": f"GPU-{number}",
            "MemoryInfo": SimpleNamespace(total=24564 * MiB, reserved=357 * MiB, free=20 * GiB),
            "CudaComputeCapability": (8, 9),
            "MaxPcieLinkGeneration": 4,
            "CurrPcieLinkGeneration": 1,  # as when idle
            "CurrPcieLinkWidth": 16,
            "MaxClockInfo": {1: 3120, 2: 10501},
            "MemoryBusWidth": 384,
            "NumGpuCores": 16384,
            "ComputeRunningProcesses": [],
            "GraphicsRunningProcesses": [],
            "MigMode": NVMLError(NOT_SUPPORTED),
            "MaxMigDeviceCount": NVMLError(NOT_SUPPORTED),
            "MigDeviceHandleByIndex": NVMLError(NOT_FOUND),
            "NumaNodeId": NVMLError(NOT_SUPPORTED),
            "NvLinkState": NVMLError(NOT_SUPPORTED),
            "PciInfo": SimpleNamespace(busId=b"00000000:65:00.0"),
        } | answers


class FakeNvml:
    """The part of pynvml that is used."""

    NVMLError = NVMLError
    nvmlMemory_v2 = 0x02000028

    def __init__(self, *devices: Device | NVMLError, init: NVMLError | None = None, missing: str = "") -> None:
        self._devices, self._init, self._missing = devices, init, missing
        self.open = 0

    def nvmlInit(self) -> None:
        if self._init is not None:
            raise self._init
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.159.04"  # bytes, as older versions of nvidia-ml-py give

    def nvmlDeviceGetCount(self) -> int:
        return len(self._devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Device:
        device = self._devices[index]
        if isinstance(device, NVMLError):
            raise device
        return device

    def __getattr__(self, name: str) -> Any:
        key = name.removeprefix("nvmlDeviceGet")
        if key == name or key == self._missing or key not in Device().answers:
            raise AttributeError(name)

        def answer(device: Device, *arguments: Any, **options: Any) -> Any:
            found = device.answers[key]
            if isinstance(found, NVMLError):
                raise found
            if key == "MemoryInfo" and not options:
                return SimpleNamespace(total=found.total, free=found.free)
            if arguments:
                found = found.get(arguments[0], NVMLError(NOT_FOUND))
            if isinstance(found, NVMLError):
                raise found
            return found

        return answer


def read(*devices: Device | NVMLError, **options: Any) -> GpuReport:
    nvml = FakeNvml(*devices, **options)
    report = read_gpus(nvml)
    assert nvml.open == 0, "NVML was left open"
    return report


def only(report: GpuReport) -> Gpu:
    assert report.problems == ()
    assert len(report.gpus) == 1
    return report.gpus[0]


@pytest.fixture(scope="module")
def pynvml() -> Iterator[ModuleType]:
    """The real module, from vLLM's copy of it; vLLM itself takes long to import and is not needed."""
    vllm = importlib.util.find_spec("vllm")
    assert vllm is not None and vllm.submodule_search_locations
    path = Path(vllm.submodule_search_locations[0]) / "third_party/pynvml.py"
    spec = importlib.util.spec_from_file_location("real_pynvml", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where it looks for itself
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_the_stand_in_has_nothing_that_the_real_module_has_not(pynvml: ModuleType) -> None:
    for key in Device().answers:
        assert callable(getattr(pynvml, f"nvmlDeviceGet{key}"))
    for name in vars(FakeNvml):
        assert name.startswith("_") or hasattr(pynvml, name)
    assert pynvml.nvmlMemory_v2 == FakeNvml.nvmlMemory_v2
    assert (pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM) == (1, 2)
    assert pynvml.NVML_DEVICE_MIG_ENABLE == 1
    names = ("NOT_SUPPORTED", "NO_PERMISSION", "NOT_FOUND", "DRIVER_NOT_LOADED", "LIBRARY_NOT_FOUND", "GPU_IS_LOST",
             "RESET_REQUIRED", "LIB_RM_VERSION_MISMATCH", "UNKNOWN")  # fmt: skip
    assert [getattr(pynvml, f"NVML_ERROR_{name}") for name in names] == [3, 4, 6, 9, 12, 15, 16, 18, 999]
    assert pynvml.NVMLError(15).value == 15
    assert {"total", "reserved", "free"} <= {name for name, _ in pynvml.c_nvmlMemory_v2_t._fields_}


def test_every_function_asked_for_is_one_the_real_module_has(pynvml: ModuleType) -> None:
    """A misspelt one would be taken for one that an old version lacks."""
    source = ast.parse(Path(overspill.hardware.nvml.__file__).read_text())
    words = {node.value for node in ast.walk(source) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    asked = {word for word in words if word.startswith("nvmlDeviceGet") and word != "nvmlDeviceGet"}
    assert len(asked) > 10
    assert [word for word in asked if not hasattr(pynvml, word)] == []


def test_the_real_module_says_here_that_there_is_no_driver(pynvml: ModuleType) -> None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        report = read_gpus(pynvml)
        assert report.gpus == ()
        assert report.problems[0].startswith("no NVIDIA driver: libnvidia-ml.so.1 was not found; install the driver")
    else:
        pytest.skip("there is a driver")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", missing)
    assert read_gpus().problems == (
        "GPUs cannot be read: the package nvidia-ml-py is missing; pip install nvidia-ml-py",
    )


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (LIBRARY_NOT_FOUND, "in a container, start it with --gpus all"),
        (DRIVER_NOT_LOADED, "installed but not loaded"),
        (NO_PERMISSION, "refuses this user; give it access to /dev/nvidiactl"),
        (MISMATCH, "was updated and its old kernel module is still loaded; reboot"),
        (UNKNOWN, "NVML did not start: code 999"),
    ],
)
def test_without_nvml_there_are_no_gpus_and_a_sentence_says_why(code: int, said: str) -> None:
    report = read_gpus(FakeNvml(init=NVMLError(code)))
    assert report.gpus == ()
    (problem,) = report.problems
    assert said in problem


def test_a_driver_without_a_gpu_says_so() -> None:
    assert read().problems == ("the NVIDIA driver works and finds no GPU",)


def test_a_gpu_is_read_with_the_origin_of_each_figure() -> None:
    gpu = only(read(Device()))
    assert (gpu.index, gpu.uuid, gpu.name, gpu.driver_version) == (0, "GPU-0", "NVIDIA GeForce RTX 4090", "580.159.04")
    assert gpu.total_bytes == derived((24564 - 357) * MiB, note="NVML's total less what the driver reserves")
    assert gpu.free_bytes == measured(20 * GiB)
    assert gpu.memory_bytes_per_second is not None
    assert gpu.memory_bytes_per_second.value == pytest.approx(1008e9, rel=0.001)
    assert gpu.memory_bytes_per_second.origin is Origin.DERIVED
    assert gpu.bf16_flops is not None and gpu.bf16_flops.value == pytest.approx(165.2e12)
    assert gpu.bf16_flops.origin is Origin.ASSUMED and "data sheet" in gpu.bf16_flops.note
    assert gpu.link.value == pytest.approx(26.8e9, rel=0.01)
    assert gpu.link.origin is Origin.DERIVED
    assert gpu.compute_capability == (8, 9)
    assert not gpu.is_stated


def test_an_h200_is_as_fast_as_its_data_sheet_says() -> None:
    h200 = Device(
        Name="NVIDIA H200",
        MemoryInfo=SimpleNamespace(total=143771 * MiB, reserved=606 * MiB, free=0),
        MaxClockInfo={1: 1980, 2: 3201},
        MemoryBusWidth=6144,
        CudaComputeCapability=(9, 0),
        MaxPcieLinkGeneration=5,
    )
    gpu = only(read(h200))
    assert gpu.memory_bytes_per_second is not None and gpu.memory_bytes_per_second.value == pytest.approx(
        4.8e12, rel=0.03
    )
    assert gpu.bf16_flops is not None and gpu.bf16_flops.value == 989 * 10**12
    assert gpu.link.value == pytest.approx(55e9, rel=0.05)


def test_an_unlisted_cards_flops_come_from_cores_and_clock() -> None:
    gpu = only(
        read(Device(Name="NVIDIA GeForce RTX 4090 Laptop GPU", NumGpuCores=9728, MaxClockInfo={1: 2040, 2: 9001}))
    )
    assert gpu.bf16_flops is not None
    assert gpu.bf16_flops.value == 9728 * 4 * 2040 * 10**6
    assert gpu.bf16_flops.origin is Origin.DERIVED and "their highest clock" in gpu.bf16_flops.note


def test_a_virtual_gpu_tells_little_and_is_still_usable() -> None:
    none = NVMLError(NOT_SUPPORTED)
    vgpu = Device(
        Name="GRID A100-10C", MaxPcieLinkGeneration=none, CurrPcieLinkWidth=0, MaxClockInfo={},
        MemoryBusWidth=none, NumGpuCores=none,
    )  # fmt: skip
    gpu = only(read(vgpu))
    assert gpu.memory_bytes_per_second is gpu.bf16_flops is None
    assert gpu.link.origin is Origin.ASSUMED
    assert gpu.link.note == "PCIe link not known: taken as 3.0 x16"


def test_the_width_of_the_slot_counts() -> None:
    gpu = only(read(Device(CurrPcieLinkWidth=4)))
    assert gpu.link.note == "85% of PCIe 4.0 x4"


def test_the_table_stands_in_for_memory_clocks_that_are_not_told() -> None:
    gpu = only(read(Device(MemoryBusWidth=NVMLError(NOT_SUPPORTED))))
    assert gpu.memory_bytes_per_second is not None
    assert gpu.memory_bytes_per_second.value == 1008 * 10**9
    assert gpu.memory_bytes_per_second.origin is Origin.ASSUMED


def test_a_missing_nvml_function_leaves_its_figure_unknown() -> None:
    assert only(read(Device(Name="NVIDIA X"), missing="NumGpuCores")).bf16_flops is None


def test_a_driver_without_the_newer_memory_call_gives_its_total() -> None:
    class Older(FakeNvml):
        def __getattr__(self, name: str) -> Any:
            answer = super().__getattr__(name)
            if name != "nvmlDeviceGetMemoryInfo":
                return answer

            def without_version(device: Device, **options: Any) -> Any:
                if options:
                    raise NVMLError(13)  # function not found
                return answer(device)

            return without_version

    gpu = only(read_gpus(Older(Device())))
    assert gpu.total_bytes == measured(24564 * MiB, "includes what the driver reserves")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (LOST, "GPU 1 is lost: it no longer answers on the bus; reset it with nvidia-smi --gpu-reset, or reboot"),
        (RESET_REQUIRED, "GPU 1 needs a reset after an error; run nvidia-smi --gpu-reset, or reboot"),
        (NO_PERMISSION, "GPU 1 may not be used by this user; give it access to the GPU's /dev/nvidia file"),
        (UNKNOWN, "GPU 1 cannot be read: code 999"),
    ],
)
def test_a_gpu_that_does_not_answer_leaves_the_others(code: int, said: str) -> None:
    report = read(Device(0), NVMLError(code), Device(2))
    assert [gpu.index for gpu in report.gpus] == [0, 2]
    assert report.problems == (said,)


def test_a_gpu_lost_while_it_is_read_is_not_half_a_gpu() -> None:
    report = read(Device(0, MemoryBusWidth=NVMLError(LOST)))
    assert report.gpus == ()
    assert report.problems[0].startswith("GPU 0 is lost")


def test_a_gpu_that_shares_the_machines_ram_must_be_stated() -> None:
    report = read(Device(Name="NVIDIA GB10", MemoryInfo=NVMLError(NOT_SUPPORTED)))
    assert report.gpus == ()
    assert report.problems == (
        "GPU 0 (NVIDIA GB10) does not report its memory; state it with --gpu, for example --gpu 24GiB",
    )


def mig(whole_memory: Any, *parts: Device) -> Device:
    handles = dict(enumerate(parts))
    return Device(
        Name="NVIDIA A100-SXM4-40GB", MemoryInfo=whole_memory, MigMode=[1, 1], MaxMigDeviceCount=7,
        MigDeviceHandleByIndex=handles, MaxClockInfo={1: 1410, 2: 1215}, MemoryBusWidth=5120,
        CudaComputeCapability=(8, 0),
    )  # fmt: skip


def mig_part(uuid: str, gib: int) -> Device:
    memory = SimpleNamespace(total=gib * GiB, reserved=0, free=gib * GiB - 1)
    return Device(Name=f"NVIDIA A100-SXM4-40GB MIG {gib}gb", UUID=uuid, MemoryInfo=memory)


def test_mig_devices_are_gpus_with_their_share() -> None:
    whole = SimpleNamespace(total=40 * GiB, reserved=0, free=0)
    report = read(mig(whole, mig_part("MIG-a", 20), mig_part("MIG-b", 10)))
    a, b = report.gpus
    assert (a.uuid, a.index, a.name, b.uuid, b.index) == ("MIG-a", 0, "NVIDIA A100-SXM4-40GB MIG 20gb", "MIG-b", 0)
    assert (a.total_bytes.value, b.free_bytes.value) == (20 * GiB, 10 * GiB - 1)
    assert a.memory_bytes_per_second is not None and b.bf16_flops is not None
    assert a.memory_bytes_per_second.value == pytest.approx(1555e9 / 2, rel=0.01)
    assert b.bf16_flops.value == pytest.approx(312e12 / 4)
    assert b.bf16_flops.origin is Origin.ASSUMED and b.bf16_flops.note == "25% of the whole GPU's, like its memory"


def test_a_mig_device_is_read_without_access_to_the_whole_gpu() -> None:
    (part,) = read(mig(NVMLError(NO_PERMISSION), mig_part("MIG-a", 20))).gpus
    assert part.total_bytes.value == 20 * GiB
    assert part.memory_bytes_per_second is part.bf16_flops is None


def test_mig_mode_without_a_mig_device_is_a_problem() -> None:
    report = read(mig(SimpleNamespace(total=40 * GiB, reserved=0, free=0)))
    assert report.gpus == ()
    assert report.problems == (
        "GPU 0 (NVIDIA A100-SXM4-40GB) is in MIG mode without a MIG device; create one with nvidia-smi mig -cgi",
    )


def test_memory_that_is_a_numa_node_of_its_own_is_known() -> None:
    memory = SimpleNamespace(total=97871 * MiB, reserved=500 * MiB, free=0)
    gpu = only(read(Device(Name="NVIDIA GH200 480GB", MemoryInfo=memory, NumaNodeId=1)))
    assert gpu.memory_numa_node == 1
    assert gpu.link.value == pytest.approx(0.85 * 450e9)
    assert only(read(Device())).memory_numa_node is None


def test_links_between_gpus_that_are_up_are_counted() -> None:
    assert only(read(Device())).nvlink is None
    gpu = only(read(Device(NvLinkState={0: 1, 1: 1, 2: 0, 3: 1})))
    assert gpu.nvlink == gpu.peer_link == derived(75 * 10**9, note="3 NVLinks")


def test_the_nearest_numa_node_is_read(tmp_path: Path) -> None:
    nvml = FakeNvml(Device())
    device = overspill.hardware.nvml.Device(nvml, nvml.nvmlDeviceGetHandleByIndex(0))
    folder = tmp_path / "0000:65:00.0"
    folder.mkdir()
    for written, node in (("1\n", 1), ("-1\n", None), ("", None)):
        (folder / "numa_node").write_text(written)
        assert overspill.hardware.nvml._numa_node(device, tmp_path) == node
    assert overspill.hardware.nvml._numa_node(device, tmp_path / "none") is None
