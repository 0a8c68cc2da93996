"""Hardware as users state it on the command line."""

import dataclasses

import pytest

from overspill.figures import Known, Origin
from overspill.hardware import Gpu, Hardware, detect, parse_gpu, parse_ram, with_stated
from overspill.hardware.stated import parse_link
from overspill.kv.errors import OverspillError
from overspill.kv.sizes import GiB, TiB


def figures(gpu: Gpu) -> list[Known[int]]:
    found = [getattr(gpu, field.name) for field in dataclasses.fields(gpu)]
    return [each for each in found if isinstance(each, Known)]


def test_a_card_by_name_has_the_figures_of_its_row() -> None:
    gpu = parse_gpu("RTX 4090")
    assert (gpu.name, gpu.is_stated, gpu.compute_capability) == ("NVIDIA GeForce RTX 4090", True, (8, 9))
    assert 23 * GiB < gpu.total_bytes.value < 24 * GiB
    assert gpu.free_bytes.value == gpu.total_bytes.value
    assert gpu.memory_bytes_per_second is not None and gpu.memory_bytes_per_second.value == 1008 * 10**9
    assert gpu.bf16_flops is not None and gpu.bf16_flops.value == pytest.approx(165.2e12)
    assert gpu.link.value == pytest.approx(26.8e9, rel=0.01)
    assert "sold as 24 GB" in gpu.total_bytes.note


def test_nothing_of_a_stated_card_counts_as_measured_or_derived() -> None:
    gpu = parse_gpu("rtx4090")
    assert {each.origin for each in (*figures(gpu), gpu.link)} == {Origin.ASSUMED}


@pytest.mark.parametrize("written", ["rtx 4090:23GiB", "rtx4090: 23 GiB ", "4090:23552MiB"])
def test_a_card_may_have_other_memory_than_usual(written: str) -> None:
    gpu = parse_gpu(written)
    assert gpu.total_bytes == Known(23 * GiB, Origin.ASSUMED, "stated with --gpu")
    assert gpu.name == "NVIDIA GeForce RTX 4090"


@pytest.mark.parametrize("written", ["24GiB", "24 gib", " 24G"])
def test_a_size_alone_is_a_gpu_with_the_speeds_of_a_modest_card(written: str) -> None:
    gpu = parse_gpu(written)
    assert gpu.total_bytes.value == 24 * GiB
    assert gpu.name == "a GPU of 24 GiB"
    assert gpu.memory_bytes_per_second is not None
    assert gpu.memory_bytes_per_second.value == 300 * 10**9
    assert gpu.memory_bytes_per_second.note == "as on an NVIDIA L4, the slowest of that size"


def test_a_link_that_is_not_pcie_comes_from_the_data_sheet() -> None:
    assert parse_gpu("gh200").link.value == pytest.approx(0.85 * 450e9)


def test_ram_is_taken_as_stated() -> None:
    assert parse_ram("128GiB") == Known(128 * GiB, Origin.ASSUMED, "stated with --ram")
    assert parse_ram("1.5TiB").value == 1536 * GiB


@pytest.mark.parametrize(
    ("written", "rate"),
    [("25GB/s", 25e9), ("25 GB / s", 25e9), ("25GiB/s", 25 * 2**30), ("12.5GB/s", 12.5e9), ("800MB/s", 8e8),
     ("0.45TB/s", 4.5e11), ("pcie4x16", 26.8e9), ("PCIe 5.0 x8", 26.8e9), ("pcie-3x16", 13.4e9)],
)  # fmt: skip
def test_a_link_is_a_rate_or_pcie(written: str, rate: float) -> None:
    link = parse_link(written)
    assert link.value == pytest.approx(rate, rel=0.01)
    assert link.origin is Origin.ASSUMED


GPU = '; write for example --gpu rtx4090, --gpu 24GiB or --gpu "rtx 4090:23GiB"'
RAM = "is not a size from 1GiB to 64TiB with its unit; write for example --ram 128GiB"
LINK = "is neither a rate from 0.1GB/s to 2TB/s nor a PCIe link; write for example --link 25GB/s or --link pcie4x16"


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("", "is neither a card known here nor a memory size with its unit"),
        ("   ", "is neither a card"),
        ("rtx4900", "is neither a card known here (nearest: rtx4090, "),
        ("a100", "(nearest: a100-40gb, a100-80gb)"),
        ("24", "is neither a card known here nor"),
        ("24 GBytes", "is neither a card"),
        ("-24GiB", "is neither a card"),
        ("24,5GiB", "is neither a card"),
        ("2x rtx4090", "(nearest: rtx4090"),
        ("rtx4900:24GiB", "(nearest: rtx4090"),
        ("24GiB:rtx4090", "is neither a card"),
        ("rtx4090:", "'' is not a memory size from 1GiB to 1TiB"),
        ("rtx4090:24", "'24' is not a memory size"),
        ("rtx4090:24GiB:1", "'24GiB:1' is not a memory size"),
        ("rtx4090:lots", "'lots' is not a memory size"),
        ("24MiB", "'24MiB' is not a memory size from 1GiB to 1TiB"),
        ("24TiB", "'24TiB' is not a memory size from 1GiB to 1TiB"),
        ("0GiB", "'0GiB' is not a memory size"),
        ("²4GiB", "is neither a card"),
    ],
)
def test_a_gpu_that_is_none_is_refused_in_one_sentence(written: str, why: str) -> None:
    with pytest.raises(OverspillError) as refused:
        parse_gpu(written)
    message = str(refused.value)
    assert message.startswith(f"--gpu {written!r}") and why in message and message.endswith(GPU)
    assert "\n" not in message and ". " not in message


@pytest.mark.parametrize(
    "written", ["", "128", "lots", "-1GiB", "128 GiBs", "1e3GiB", "0GiB", "512MiB", "100TiB", "inf"]
)
def test_ram_that_is_no_size_is_refused_in_one_sentence(written: str) -> None:
    with pytest.raises(OverspillError) as refused:
        parse_ram(written)
    assert str(refused.value) == f"--ram {written!r} {RAM}"


@pytest.mark.parametrize(
    "written",
    ["", "25", "25GB", "25GB/h", "25Gb/s", "200Gbit/s", "25GBps", "-25GB/s", "0GB/s", "1KB/s", "9TB/s", "fast",
     "pcie", "pcie4", "pcie4x3", "pcie9x16", "pcie4x", "4x16", "nanGB/s"],
)  # fmt: skip
def test_a_link_that_is_none_is_refused_in_one_sentence(written: str) -> None:
    with pytest.raises(OverspillError) as refused:
        parse_link(written)
    assert str(refused.value) == f"--link {written!r} {LINK}"


@pytest.fixture(scope="module")
def here() -> Hardware:
    return detect()


def test_a_stated_gpu_replaces_detected_gpus_and_their_problems(here: Hardware) -> None:
    stated = with_stated(here, gpu="rtx4090")
    assert [gpu.name for gpu in stated.gpus] == ["NVIDIA GeForce RTX 4090"]
    assert stated.problems == ()
    assert stated.machine == here.machine


def test_stated_ram_replaces_what_was_read(here: Hardware) -> None:
    machine = with_stated(here, ram="2TiB").machine
    assert machine.ram_total_bytes.value == machine.ram_available_bytes.value == 2 * TiB
    assert machine.ram_total_bytes.origin is Origin.ASSUMED
    assert machine.numa_nodes == ()


def test_a_stated_link_goes_over_that_of_the_card(here: Hardware) -> None:
    gpu = with_stated(here, gpu="rtx4090", link="10GB/s").first_gpu()
    assert gpu.link == Known(10**10, Origin.ASSUMED, "stated with --link")


def test_stating_nothing_changes_nothing(here: Hardware) -> None:
    assert with_stated(here) == here
