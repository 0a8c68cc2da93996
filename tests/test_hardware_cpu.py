"""How fast the CPU attends to KV in RAM: measured, assumed, stated, or nothing where the kernel cannot run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from overspill.figures import Origin
from overspill.hardware import cpu
from overspill.hardware.cpu import assumed_attention, cpu_attention, measure_attention
from overspill.hardware.stated import parse_cpu_attention
from overspill.kv.attention import library
from overspill.kv.errors import OverspillError


def test_attention_is_assumed_from_threads_up_to_the_memorys_speed() -> None:
    few, many = assumed_attention(2), assumed_attention(64)
    assert (few.value, few.origin) == (6 * 10**9, Origin.ASSUMED) and "2 threads" in few.note
    assert many.value == 20 * 10**9
    assert assumed_attention(1).note.startswith("1 thread ")


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "overspill/cpu-attention.json"


def test_attention_here_takes_the_threads_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "load", lambda: None)
    monkeypatch.setattr(cpu, "default_threads", lambda: 3)
    assert cpu_attention().value == 9 * 10**9
    assert cpu_attention(1).value == 3 * 10**9


def test_attention_is_measured_once_for_each_number_of_threads(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert cpu_attention(1).origin is Origin.ASSUMED
    assert measure_attention(1)
    kept = json.loads(home.read_text())
    (rate,) = kept.values()
    found = cpu_attention(1)
    assert (found.origin, found.value) == (Origin.MEASURED, int(rate * 0.7)) and rate > 10**8
    assert cpu_attention(2).origin is Origin.ASSUMED, "of others nothing is known"
    assert measure_attention(2) and len(json.loads(home.read_text())) == 2
    home.write_text("torn")
    assert cpu_attention(1).origin is Origin.ASSUMED


def test_a_busy_machine_is_not_measured(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    assert not measure_attention(1) and not home.exists()


def test_a_machine_that_cannot_be_measured_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu.os, "getloadavg", lambda: (0.0, 0.0, 0.0))

    ends = [sys.executable, "-c", "raise SystemExit('threads died')"]
    run = subprocess.run
    monkeypatch.setattr(cpu.subprocess, "run", lambda command, **more: run(ends, **more))
    assert not measure_attention(1) and "is assumed; measuring it failed: threads died" in caplog.text


def test_a_library_that_is_missing_attends_to_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu, "load", lambda: library.load(tmp_path / "none.so"))
    found = cpu_attention()
    assert found.value == 0 and "install a C++ compiler" in found.note


def test_a_stated_rate_is_taken_as_it_is() -> None:
    stated = parse_cpu_attention("80 GB/s")
    assert (stated.value, stated.origin) == (80 * 10**9, Origin.ASSUMED) and "--cpu-attention" in stated.note


@pytest.mark.parametrize("written", ["80", "80Gb/s", "0GB/s", "pcie4x16", "3TB/s", "fast"])
def test_a_rate_that_is_none_is_refused_in_one_sentence(written: str) -> None:
    with pytest.raises(OverspillError, match=r"is not a rate from 0\.1GB/s to 2TB/s; write for example --cpu-att"):
        parse_cpu_attention(written)
