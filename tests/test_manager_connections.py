"""What a client may cost before its request is there, with a real server."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp

from overspill.kv.sizes import MiB

SERVER = """
import sys
import uvicorn
from overspill.manager.web.server import BoundedProtocol
from tests.guarded_app import APP, open_to_all
from tests.test_manager_connections import big

BoundedProtocol.headers_s, BoundedProtocol.unread_s, BoundedProtocol.max_header_bytes = 2.0, 2.0, 4096
app = open_to_all(big(APP), body_pause_s=0.5)
uvicorn.Server(uvicorn.Config(app, http=BoundedProtocol, fd=int(sys.argv[1]), log_level="warning")).run()
"""


def big(app: ASGIApp) -> ASGIApp:
    """/big is an answer that fills every buffer."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] == "/big":
            await StreamingResponse(b"x" * MiB for _ in range(64))(scope, receive, send)
        else:
            await app(scope, receive, send)

    return answer


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number = listener.getsockname()[1]
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(listener.fileno())], pass_fds=[listener.fileno()],
            cwd=Path(__file__).parent.parent,
        )  # fmt: skip
    try:
        assert httpx.get(f"http://127.0.0.1:{number}/", timeout=60).status_code == 200
        yield number
    finally:
        server.terminate()
        assert server.wait(timeout=30) in (0, -15)


def connection(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def is_established(port: int, client_port: int) -> bool:
    """On the server's side, by the kernel's table; 01 is that state."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(
        line[1].endswith(f":{port:04X}") and line[2].endswith(f":{client_port:04X}") and line[3] == "01"
        for line in lines
    )


def received(client: socket.socket) -> bytes:
    """All until the server closes; a server that does not makes the test fail by its timeout."""
    told = b""
    try:
        while piece := client.recv(1 << 16):
            told += piece
    except ConnectionResetError:
        pass
    return told


def test_headers_that_come_slowly_or_never_end_the_connection(port: int) -> None:
    with connection(port) as silent, connection(port) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        with pytest.raises(OSError):
            for _ in range(300):
                slow.sendall(b"X: y\r\n")
                time.sleep(0.1)
        assert received(silent) == b""


def test_headers_without_end_end_the_connection(port: int) -> None:
    with connection(port) as client, pytest.raises(OSError):
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        for number in range(100_000):
            client.sendall(f"X-{number}: {'y' * 200}\r\n".encode())


def ask(client: socket.socket) -> None:
    client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer = b""
    while not answer.endswith(b"}"):
        piece = client.recv(1 << 16)
        assert piece, "closed"
        answer += piece
    assert answer.startswith(b"HTTP/1.1 200")


def test_a_second_request_of_a_connection_is_timed_as_well(port: int) -> None:
    with connection(port) as client:
        ask(client)
        client.sendall(b"GET / HT")
        assert received(client) == b""


def test_an_idle_connection_outlives_its_place_in_a_clients_pool(port: int) -> None:
    with connection(port) as client:
        ask(client)
        time.sleep(httpx.Limits().keepalive_expiry + 1)
        ask(client)


def test_a_body_that_stops_gets_408_and_the_connection_ends(port: int) -> None:
    with connection(port) as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nabc")
        assert received(client).startswith(b"HTTP/1.1 408")


def test_an_answer_that_nobody_reads_ends_the_connection(port: int) -> None:
    with connection(port) as client:
        client.sendall(b"GET /big HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while is_established(port, client.getsockname()[1]):
            time.sleep(0.05)
        assert len(received(client)) < 64 * MiB
    whole = httpx.get(f"http://127.0.0.1:{port}/big", timeout=60)
    assert len(whole.content) == 64 * MiB, "one who reads gets all"


def test_slow_clients_keep_nobody_else_waiting(port: int) -> None:
    slow = []
    for _ in range(100):
        slow.append(client := connection(port))
        client.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\na")
    answer = httpx.post(f"http://127.0.0.1:{port}/x", content=b"abc", timeout=30)
    assert answer.json()["length"] == 3
    for client in slow:
        assert received(client).startswith(b"HTTP/1.1 408")
        client.close()
