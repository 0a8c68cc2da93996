"""The link: what PCIe promises, what was measured, and keeping it between runs."""

import json
import logging
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from overspill.figures import Origin, assumed, derived, measured
from overspill.hardware import Gpu, Link, LinkNotMeasured, measure_link, parse_gpu
from overspill.hardware.gpu import link_from_pcie, pcie_bytes_per_second
from overspill.hardware.link import Fingerprint, copy_bytes, fingerprint_of, load_link, store_link
from overspill.kv.sizes import MiB

HERE = Fingerprint("GPU-1", "580.1", 5, 16, "6.8.0")


def link(h2d: int, d2h: int) -> Link:
    return Link(measured(h2d), measured(d2h))


def rates(found: Link | None) -> tuple[int, int]:
    assert found is not None
    return found.h2d_bytes_per_second.value, found.d2h_bytes_per_second.value


def kept_file(folder: Path) -> Path:
    (file,) = (folder / "links").iterdir()
    return file


@pytest.mark.parametrize(
    ("generation", "width", "gb_s"),
    [
        (1, 16, 4.0),
        (2, 16, 8.0),
        (3, 16, 15.75),
        (4, 8, 15.75),
        (4, 16, 31.5),
        (5, 16, 63.0),
        (6, 16, 121),
        (7, 16, 121),
    ],
)
def test_pcie_rates_are_those_of_the_specification(generation: int, width: int, gb_s: float) -> None:
    assert pcie_bytes_per_second(generation, width) / 1e9 == pytest.approx(gb_s, rel=0.001)


def test_a_link_that_is_not_measured_is_derived_from_pcie() -> None:
    found = link_from_pcie(measured(5), measured(16))
    assert found.h2d_bytes_per_second == derived(53_563_076_922, note="85% of PCIe 5.0 x16")
    assert found.d2h_bytes_per_second == found.h2d_bytes_per_second


def test_from_a_stated_pcie_link_it_is_assumed() -> None:
    assert link_from_pcie(assumed(5), measured(16)).h2d_bytes_per_second.origin is Origin.ASSUMED


def test_without_knowing_pcie_the_slowest_common_link_is_assumed() -> None:
    for found in (link_from_pcie(None, measured(16)), link_from_pcie(measured(4), None)):
        assert found.h2d_bytes_per_second.origin is Origin.ASSUMED
        assert rates(found)[0] == pytest.approx(13.4e9, rel=0.01)


@pytest.mark.parametrize(
    ("gb_s", "mib"), [(500, 256), (55, 256), (12, 228), (3, 57), (0.8, 16), (0.01, 16), (float("inf"), 256)]
)
def test_the_size_of_a_copy_follows_the_speed_of_the_link(gb_s: float, mib: int) -> None:
    assert copy_bytes(16 * MiB / (gb_s * 1e9)) == mib * MiB


# Keeping what was measured.


def test_a_kept_link_is_found_again_as_measured(tmp_path: Path) -> None:
    assert load_link(tmp_path, HERE) is None
    store_link(tmp_path, HERE, link(55, 54))
    found = load_link(tmp_path, HERE)
    assert rates(found) == (55, 54)
    assert found is not None and found.h2d_bytes_per_second.origin is Origin.MEASURED
    assert found.h2d_bytes_per_second.note.startswith("measured on 20")


@pytest.mark.parametrize(
    "change",
    [{"gpu_uuid": "GPU-2"}, {"driver_version": "590"}, {"pcie_generation": 4}, {"pcie_width": 8}, {"pcie_width": None},
     {"kernel": "6.9"}],
    ids=str,
)  # fmt: skip
def test_a_link_measured_under_other_conditions_is_not_taken(tmp_path: Path, change: dict[str, object]) -> None:
    store_link(tmp_path, HERE, link(55, 54))
    other = replace(HERE, **change)  # type: ignore[arg-type]
    assert load_link(tmp_path, other) is None
    store_link(tmp_path, other, link(1, 2))
    assert rates(load_link(tmp_path, HERE)) == (55, 54)


def test_the_fingerprint_is_of_the_gpu_its_driver_its_slot_and_the_kernel() -> None:
    gpu = replace(parse_gpu("rtx4090"), uuid="GPU-9", driver_version="580", pcie_width=None)
    assert fingerprint_of(gpu, "6.8") == Fingerprint("GPU-9", "580", 4, None, "6.8")


def damage(change: dict[str, object]) -> str:
    whole = {"format": 1, "fingerprint": {"gpu_uuid": "GPU-1", "driver_version": "580.1", "pcie_generation": 5,
             "pcie_width": 16, "kernel": "6.8.0"}, "measured_on": "2026-01-02", "h2d_bytes_per_second": 5,
             "d2h_bytes_per_second": 4}  # fmt: skip
    return json.dumps(whole | change)


def test_the_damages_below_are_each_the_only_one(tmp_path: Path) -> None:
    store_link(tmp_path, HERE, link(55, 54))
    kept_file(tmp_path).write_text(damage({}))
    assert rates(load_link(tmp_path, HERE)) == (5, 4)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe",
        b'{"format": 1}',
        damage({"format": 2}).encode(),
        damage({"fingerprint": {}}).encode(),
        damage({"h2d_bytes_per_second": 0}).encode(),
        damage({"h2d_bytes_per_second": -5}).encode(),
        damage({"h2d_bytes_per_second": 1e300}).encode(),
        damage({"h2d_bytes_per_second": float("nan")}).encode(),
        damage({"d2h_bytes_per_second": "5"}).encode(),
        damage({"d2h_bytes_per_second": True}).encode(),
        damage({"d2h_bytes_per_second": 10**20}).encode(),
        damage({"measured_on": "yesterday"}).encode(),
        damage({"measured_on": 5}).encode(),
    ],
)
def test_a_damaged_file_is_ignored_with_a_warning_and_written_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    store_link(tmp_path, HERE, link(55, 54))
    kept_file(tmp_path).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert load_link(tmp_path, HERE) is None
    assert "measured again" in caplog.text and str(kept_file(tmp_path)) in caplog.text
    store_link(tmp_path, HERE, link(7, 8))
    assert rates(load_link(tmp_path, HERE)) == (7, 8)


@pytest.mark.parametrize("obstacle", ["a file for the folder", "a folder for the file"])
def test_a_folder_that_cannot_be_written_costs_a_warning_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, obstacle: str
) -> None:
    if obstacle == "a file for the folder":
        (tmp_path / "links").write_text("in the way")
    else:
        store_link(tmp_path, HERE, link(1, 1))
        file = kept_file(tmp_path)
        file.unlink()
        file.mkdir()
    with caplog.at_level(logging.WARNING):
        store_link(tmp_path, HERE, link(1, 1))
        assert load_link(tmp_path, HERE) is None
    assert "could not be kept" in caplog.text
    if obstacle == "a folder for the file":
        assert len(list((tmp_path / "links").iterdir())) == 1, "a temporary file was left"


def test_a_full_disk_costs_a_warning_and_leaves_what_was_kept(tmp_path: Path) -> None:
    """A process that may write no byte to files stands for the disk: its write fails as on a full one."""
    store_link(tmp_path, HERE, link(55, 54))
    code = (
        "import resource, sys; from pathlib import Path; from tests.test_hardware_link import *\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "store_link(Path(sys.argv[1]), HERE, link(1, 2)); print('went on')"
    )
    child = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert child.returncode == 0 and child.stdout == "went on\n", child.stderr
    assert "could not be kept" in child.stderr and "File too large" in child.stderr
    assert rates(load_link(tmp_path, HERE)) == (55, 54)
    assert kept_file(tmp_path).suffix == ".json", "a temporary file was left"


def test_two_processes_that_write_at_once_never_show_half_a_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.test_hardware_link import *\n"
        "for _ in range(2000): store_link(Path(sys.argv[1]), HERE, link(*([int(sys.argv[2])] * 2)))"
    )
    numbers = (10**3, 10**12)  # of different lengths, so that one over the other would show
    writers = [subprocess.Popen([sys.executable, "-c", code, tmp_path, str(number)]) for number in numbers]
    seen: set[tuple[int, int]] = set()
    with caplog.at_level(logging.WARNING):
        while any(writer.poll() is None for writer in writers):
            found = load_link(tmp_path, HERE)
            if found is not None:
                seen.add(rates(found))
    assert [writer.wait() for writer in writers] == [0, 0]
    assert seen and seen <= {(number, number) for number in numbers}
    assert caplog.text == ""
    assert kept_file(tmp_path).suffix == ".json", "a temporary file was left"


# Measuring, in a process of its own. Without a GPU another program stands for the child.


@pytest.fixture
def gpu() -> Gpu:
    return replace(parse_gpu("rtx4090"), uuid="GPU-1", driver_version="580.1", index=3)


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(program))


def test_the_rates_of_the_child_are_measured_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    stand_in(tmp_path, monkeypatch, 'echo "some library talks"; echo \'{"h2d": 55.3e9, "d2h": 54.9e9}\'')
    found = measure_link(gpu)
    assert rates(found) == (55_300_000_000, 54_900_000_000)
    assert found.h2d_bytes_per_second.origin is Origin.MEASURED


def test_the_child_gets_the_gpu_by_uuid_and_the_cpus_of_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: Gpu
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    stand_in(
        tmp_path, monkeypatch, f'echo "$CUDA_VISIBLE_DEVICES $3" > {tmp_path}/seen; echo \'{{"h2d": 1, "d2h": 1}}\''
    )
    measure_link(gpu, {9, 8})
    assert (tmp_path / "seen").read_text() == "GPU-1 [8, 9]\n"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'Traceback' >&2; echo 'CUDA out of memory' >&2; exit 1", "CUDA out of memory"),
        ("exit 1", "exit status 1"),
        ("kill -9 $$", "exit status -9"),
        ("true", "no rates in ''"),
        ("echo '{}'", "no rates in '{}"),
        ('echo \'{"h2d": NaN, "d2h": 1}\'', "no rates in"),
        ("exec sleep 60", "timed out after"),
    ],
)
def test_a_link_that_cannot_be_measured_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: Gpu, script: str, why: str
) -> None:
    stand_in(tmp_path, monkeypatch, script)
    with pytest.raises(LinkNotMeasured) as failed:
        measure_link(gpu, timeout_s=0.5 if "sleep" in script else 60)
    assert str(failed.value).startswith("the link of GPU 3 could not be measured: ") and why in str(failed.value)


def test_without_a_gpu_the_real_child_ends_with_one_sentence(gpu: Gpu) -> None:
    with pytest.raises(LinkNotMeasured) as failed:
        measure_link(replace(gpu, uuid="GPU-00000000-0000-0000-0000-000000000000"), os.sched_getaffinity(0))
    assert "\n" not in str(failed.value) and "Traceback" not in str(failed.value)
