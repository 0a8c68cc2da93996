"""How fast the CPU attends to KV in RAM: assumed from its cores, stated, or nothing where the kernel cannot run."""

from pathlib import Path

import pytest

from overspill.figures import Origin
from overspill.hardware import cpu
from overspill.hardware.cpu import assumed_attention, cpu_attention
from overspill.hardware.stated import parse_cpu_attention
from overspill.kv.attention import library
from overspill.kv.errors import OverspillError


def test_attention_is_assumed_from_threads_up_to_the_memorys_speed() -> None:
    few, many = assumed_attention(2), assumed_attention(64)
    assert (few.value, few.origin) == (6 * 10**9, Origin.ASSUMED) and "2 threads" in few.note
    assert many.value == 20 * 10**9
    assert assumed_attention(1).note.startswith("1 thread ")


def test_attention_here_takes_the_threads_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "load", lambda: None)
    monkeypatch.setattr(cpu, "default_threads", lambda: 3)
    assert cpu_attention().value == 9 * 10**9
    assert cpu_attention(1).value == 3 * 10**9


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
