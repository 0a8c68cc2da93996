"""Everything together: detect, and which GPUs count."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from overspill.figures import Origin, as_json
from overspill.hardware import Gpu, Hardware, detect, parse_gpu
from overspill.hardware.gpu import visible_gpus
from overspill.kv.errors import OverspillError
from overspill.kv.sizes import GiB, MiB
from tests.test_hardware_machine import Tree
from tests.test_hardware_nvml import LIBRARY_NOT_FOUND, Device, FakeNvml, NVMLError


def gpus(*uuids: str) -> list[Gpu]:
    return [replace(parse_gpu("rtx4090"), index=index, uuid=uuid) for index, uuid in enumerate(uuids)]


@pytest.mark.parametrize(
    ("setting", "seen"),
    [
        (None, "abc"),
        ("", "abc"),
        ("1", "b"),
        ("2,0", "ca"),
        (" 2 , 0 ", "ca"),
        ("GPU-c", "c"),
        ("GPU-b1,0", "ba"),
        ("-1", ""),
        ("none", ""),
        ("0,7,1", "a"),
        ("0,0", "a"),
        ("GPU-", ""),
        ("GPU-x", ""),
        ("²", ""),
    ],
)
def test_cuda_visible_devices_says_which_gpus_count(setting: str | None, seen: str) -> None:
    found = visible_gpus(gpus("GPU-a1", "GPU-b1", "GPU-c1"), setting)
    assert "".join(gpu.uuid[4] for gpu in found) == seen


def test_of_mig_devices_a_number_takes_the_first_of_its_gpu() -> None:
    two = [replace(gpu, index=0) for gpu in gpus("MIG-a", "MIG-b")]
    assert [gpu.uuid for gpu in visible_gpus(two, "0")] == ["MIG-a"]
    assert [gpu.uuid for gpu in visible_gpus(two, "MIG-b")] == ["MIG-b"]


def test_this_machine_is_detected_and_described_as_json() -> None:
    hardware = detect()
    described = json.loads(json.dumps(as_json(hardware)))
    assert described["machine"]["ram_total_bytes"] == {
        "value": hardware.machine.ram_total_bytes.value,
        "origin": "measured",
        "note": "",
    }
    assert isinstance(described["machine"]["ram_available_bytes"]["value"], int)
    assert len(described["gpus"]) == len(hardware.gpus)
    # Either there are GPUs or a sentence says why not.
    assert described["gpus"] or described["problems"]


def test_a_missing_gpu_is_an_error_only_when_one_is_needed() -> None:
    hardware = detect(nvml=FakeNvml(init=NVMLError(LIBRARY_NOT_FOUND)))
    assert hardware.gpus == ()
    with pytest.raises(OverspillError) as refused:
        hardware.first_gpu()
    message = str(refused.value)
    assert message.startswith("no GPU to plan for: no NVIDIA driver: libnvidia-ml.so.1 was not found")
    assert message.endswith("State one with --gpu, for example --gpu 24GiB")


def test_a_setting_that_hides_every_gpu_is_named() -> None:
    hardware = detect(nvml=FakeNvml(Device()), environ={"CUDA_VISIBLE_DEVICES": "5"})
    assert hardware.problems == ("CUDA_VISIBLE_DEVICES='5' hides every GPU",)


def test_gpus_are_described_with_every_figure_and_its_origin() -> None:
    described = as_json(detect(nvml=FakeNvml(Device()), environ={}))
    (gpu,) = json.loads(json.dumps(described))["gpus"]
    assert gpu["total_bytes"]["value"] == (24564 - 357) * MiB and gpu["total_bytes"]["origin"] == "derived"
    assert gpu["free_bytes"] == {"value": 20 * GiB, "origin": "measured", "note": ""}
    assert gpu["compute_capability"] == [8, 9]
    assert gpu["link"]["origin"] == "derived"


def test_importing_and_detecting_load_neither_torch_nor_vllm() -> None:
    code = (
        "import sys; import overspill.hardware as h; h.detect(); print({'torch', 'vllm', 'numpy'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_gpu_memory_counted_as_ram_is_subtracted(tmp_path: Path) -> None:
    """On a GH200 the kernel shows the GPU's HBM as a NUMA node without CPUs, and adds it to MemTotal."""
    tree = Tree(tmp_path, total_gib=576, available_gib=500)
    tree.node(0, 480, "0-71")
    tree.node(1, 96, "")
    memory = SimpleNamespace(total=97871 * MiB, reserved=500 * MiB, free=0)
    gh200 = Device(Name="NVIDIA GH200 480GB", MemoryInfo=memory, NumaNodeId=1)
    machine = detect(root=tmp_path, environ={}, nvml=FakeNvml(gh200)).machine
    assert machine.ram_total_bytes.value == 480 * GiB
    assert machine.ram_available_bytes.value == (500 - 95) * GiB
    assert machine.ram_total_bytes.origin is Origin.DERIVED
    assert [node.index for node in machine.numa_nodes] == [0]


def test_memory_without_cpus_that_is_not_a_gpus_stays_ram(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.node(0, 32, "0-7")
    tree.node(1, 32, "")  # a CXL expander
    machine = detect(root=tmp_path, environ={}, nvml=FakeNvml(Device())).machine
    assert machine.ram_total_bytes.value == 64 * GiB
    assert len(machine.numa_nodes) == 2


def test_missing_gpus_without_a_reason_still_get_a_message() -> None:
    with pytest.raises(OverspillError, match="no GPU to plan for: none was found"):
        Hardware(detect().machine, ()).first_gpu()


def test_a_node_with_cpus_is_ram_whatever_the_driver_calls_it(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.node(0, 64, "0-7")
    machine = detect(root=tmp_path, environ={}, nvml=FakeNvml(Device(NumaNodeId=0))).machine
    assert machine.ram_total_bytes.value == 64 * GiB
