"""Where a server listens, and ports that nobody has."""

import socket
from pathlib import Path

import pytest

from overspill import address
from overspill.address import Address, free_port, require_free
from overspill.kv.errors import OverspillError


def test_an_address_that_all_machines_reach_is_asked_on_this_one() -> None:
    assert Address("0.0.0.0", 80).url == "http://127.0.0.1:80" and Address("::", 80, True).url == "https://[::1]:80"
    with pytest.raises(OverspillError, match="not a host"):
        require_free(Address("no such host", 80), set())


def test_a_free_port_is_none_that_the_system_gives_to_anybody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "_FIRST_PORT", 10000)
    monkeypatch.setattr(address, "_LAST_PORT", 65535)
    first, last = (int(port) for port in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    found = {free_port() for _ in range(20)}
    assert len(found) > 10 and not [port for port in found if first <= port <= last or port < 10000]
    told = tmp_path / "sys/net/ipv4/ip_local_port_range"
    told.parent.mkdir(parents=True)
    told.write_text("10000\t65534\n")
    with socket.socket() as taken:
        assert free_port(tmp_path) == 65535
        taken.bind(("127.0.0.1", 65535))
        assert 10000 <= free_port(tmp_path) < 65535, "where there is no other, any"
    told.write_text("?")
    assert not 32768 <= free_port(tmp_path) <= 60999
