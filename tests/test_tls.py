"""Servers over TLS, with certificates of their own making."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from overspill import address
from overspill.address import free_port
from overspill.measure import CannotMeasure
from overspill.measure.target import Target, ask
from overspill.upstream import Upstream, UpstreamLost
from tests.certificates import make_certificate

FAKE_SERVER = Path(__file__).parent / "fake_server.py"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    behaviours, port = tmp_path / "behaviours.json", free_port()
    behaviours.write_text(json.dumps({"a": {"certificate": str(make_certificate(tmp_path, "127.0.0.1"))}}))
    command = [sys.executable, "-S", str(FAKE_SERVER), str(behaviours), "a", "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline(), "it is there"
        yield f"https://127.0.0.1:{port}"
        process.kill()


def complete(url: str) -> tuple[int, bytes]:
    async def run() -> tuple[int, bytes]:
        upstream = Upstream()
        body = json.dumps({"model": "a", "prompt": "x", "max_tokens": 2, "stream": True}).encode()
        connection, head = await upstream.request(url, "POST", b"/v1/completions", (), body)
        try:
            return head.status, await connection.read_all(1 << 20)
        finally:
            connection.close()

    return asyncio.run(run())


def test_a_local_server_is_measured_whatever_its_certificate(server: str) -> None:
    """An untrusted one was refused, although the manager accepts it."""
    assert ask(Target(url=server, model="a"), "/v1/models").json()["data"][0]["id"] == "a"
    status, body = complete(server)
    assert status == 200 and b"a-1 " in body


def test_a_certificate_from_elsewhere_must_be_trusted(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "is_loopback", lambda host: False)
    with pytest.raises(CannotMeasure, match="in SSL_CERT_FILE"):
        ask(Target(url=server, model="a"), "/v1/models")
    with pytest.raises(UpstreamLost, match="CERTIFICATE_VERIFY_FAILED"):
        complete(server)


def test_plain_http_has_no_context() -> None:
    assert address.client_context("http://127.0.0.1:8000") is None
    here, elsewhere = address.client_context("https://localhost"), address.client_context("https://gpu.example")
    assert here is not None and elsewhere is not None and here is not elsewhere and elsewhere.check_hostname
