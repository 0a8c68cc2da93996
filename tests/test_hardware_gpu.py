"""The real NVML and the real link. Run with `pytest -m gpu`."""

import subprocess
import sys

import pytest

from overspill.hardware import Gpu, detect

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    hardware = detect()
    if not hardware.gpus:
        pytest.skip("; ".join(hardware.problems))
    return hardware.first_gpu()


def cuda(expression: str) -> str:
    """What torch says of the first GPU, in a process whose CUDA context ends with it."""
    code = f"import torch; p = torch.cuda.get_device_properties(0); print({expression})"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_nvml_and_cuda_agree_about_the_gpu(gpu: Gpu) -> None:
    assert cuda("p.name") == gpu.name
    assert cuda("p.uuid") in gpu.uuid
    assert cuda("(p.major, p.minor)") == str(gpu.compute_capability)


def test_the_total_is_what_vllm_will_count(gpu: Gpu) -> None:
    assert int(cuda("torch.cuda.mem_get_info()[1]")) == pytest.approx(gpu.total_bytes.value, rel=0.01)
    assert 0 < gpu.free_bytes.value <= gpu.total_bytes.value


def test_the_gpu_has_every_figure(gpu: Gpu) -> None:
    assert gpu.memory_bytes_per_second is not None and gpu.memory_bytes_per_second.value > 10**11
    assert gpu.bf16_flops is not None and gpu.bf16_flops.value > 10**13
    assert gpu.driver_version


def test_a_program_on_the_gpu_is_seen(gpu: Gpu) -> None:
    code = "import torch; x = torch.zeros(2**28, dtype=torch.uint8, device='cuda'); print('ready', flush=True); input()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True) as program:
        assert program.stdout is not None and program.stdout.readline() == "ready\n"
        busy = detect().first_gpu()
        program.communicate("\n")
    assert busy.free_bytes.value <= gpu.free_bytes.value - 2**28
