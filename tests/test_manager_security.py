"""What the manager refuses, to whom, and what a client may cost it."""

import asyncio
import hashlib
import json
import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message

import overspill.manager
from overspill.kv.sizes import MiB
from overspill.manager.errors import ManagerError
from overspill.manager.security.access import IDLE, LOCAL, LONGEST, Access
from overspill.manager.security.binding import require_protection
from overspill.manager.security.bodies import BodyGuard
from overspill.manager.security.cookies import clear_cookie, cookie_name, new_browser_id, read_cookie, set_cookie
from overspill.manager.security.csrf import CsrfGuard, cross_site, csrf_token
from overspill.manager.security.guards import guarded
from overspill.manager.security.headers import SecurityHeaders
from overspill.manager.security.hosts import HostGuard, allowed_names, host_is_allowed
from overspill.manager.security.log_text import OneLine, one_line
from overspill.manager.security.login_limit import _MAX_ADDRESSES, LoginLimit
from overspill.manager.security.model_sources import ModelNotAllowed, confined_source, is_repo_id
from overspill.registry import Registry, RegistryUnavailable, open_registry
from overspill.registry.keys import KeyScope, create_key, list_keys, remove_key
from overspill.registry.logins import list_sessions, sessions_were_seen, set_password
from overspill.registry.schema import now

T = TypeVar("T")
PASSWORD = "four words, not together"
VENDOR = Path(overspill.manager.__file__).parent / "static" / "vendor"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def echo(request: Request) -> Response:
    body = await request.body()
    return JSONResponse({"length": len(body), "path": request.url.path})


async def parts(request: Request) -> Response:
    async def numbers() -> Any:
        for number in range(3):
            yield f"data: {number}\n\n"

    return StreamingResponse(numbers(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


METHODS = ["GET", "POST", "PUT", "DELETE"]
APP = Starlette(routes=[Route("/parts", parts), Route("/{path:path}", echo, methods=METHODS)])


def asked(app: ASGIApp, method: str, path: str, base: str = "http://localhost:7999", **options: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url=base) as client:
            return await client.request(method, path, **options)

    return asyncio.run(ask())


def message_of(answer: httpx.Response) -> str:
    """In OpenAI's shape."""
    told = answer.json()
    assert told["src"] == "overspill" and told["error"]["code"] == answer.status_code
    return str(told["error"]["message"])


# Keys, password, sessions


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with open_registry(f"sqlite:///{tmp_path}/registry.db") as registry:
        yield registry


def test_on_loopback_everybody_is_local_until_there_is_a_key_or_a_password(registry: Registry) -> None:
    async def story() -> None:
        access = Access(registry, is_loopback=True)
        assert await access.identify(None, None) is LOCAL
        assert await access.identify("Bearer none", None) is LOCAL, "OpenAI's clients always send something"
        secret, _ = create_key(registry, "laptop", KeyScope.GATEWAY)
        access.forget()
        assert await access.identify(None, None) is None
        assert await access.identify("Bearer none", None) is None
        known = await access.identify(f"bearer  {secret}", None)
        assert known is not None and (known.who, known.scope) == ("key laptop", KeyScope.GATEWAY)
        for wrong in (secret[:-1] + ("a" if secret[-1] != "a" else "b"), secret[:-1], f"{secret} {secret}", ""):
            assert await access.identify(f"Bearer {wrong}", None) is None
        assert await access.identify(f"Basic {secret}", None) is None

    asyncio.run(story())


def test_removing_the_last_key_does_not_open_the_door_to_other_machines(registry: Registry) -> None:
    async def story() -> None:
        access = Access(registry, is_loopback=False)
        secret, _ = create_key(registry, "laptop")
        assert await access.identify(f"Bearer {secret}", None) is not None
        remove_key(registry, "laptop")
        access.forget()
        assert await access.identify(f"Bearer {secret}", None) is None
        assert await access.identify(None, None) is None

    asyncio.run(story())


def test_a_key_that_another_process_removed_ends_within_two_seconds(registry: Registry) -> None:
    async def story() -> None:
        clock = Clock()
        access = Access(registry, is_loopback=True, clock=clock)
        secret, _ = create_key(registry, "laptop")
        create_key(registry, "other")
        assert await access.identify(f"Bearer {secret}", None) is not None
        remove_key(registry, "laptop")
        clock.now += 2.1
        assert await access.identify(f"Bearer {secret}", None) is None

    asyncio.run(story())


def test_on_a_busy_server_nobody_waits_for_the_registry(registry: Registry) -> None:
    """It is read again beside the requests, which go on with what is known for less than two seconds."""

    async def story() -> None:
        clock = Clock()
        access = Access(registry, is_loopback=False, clock=clock)
        secret, _ = create_key(registry, "laptop")
        assert await access.identify(f"Bearer {secret}", None) is not None
        remove_key(registry, "laptop")
        clock.now += 1.5
        assert await access.identify(f"Bearer {secret}", None) is not None
        assert access._looking is not None
        await access._looking
        assert await access.identify(f"Bearer {secret}", None) is None

    asyncio.run(story())


def test_wrong_keys_by_the_thousand_do_not_reach_the_database(registry: Registry) -> None:
    async def story() -> None:
        secret, _ = create_key(registry, "laptop")
        access = Access(registry, is_loopback=False, clock=Clock())
        reads = 0

        def count() -> Any:
            nonlocal reads
            reads += 1
            return Access._read(access)

        access._read = count  # type: ignore[method-assign]
        wrong = [f"Bearer {secret[:-5]}{number:05}" for number in range(5000)]
        answers = await asyncio.gather(*(access.identify(one, None) for one in wrong if one != f"Bearer {secret}"))
        assert set(answers) == {None} and reads == 1

    asyncio.run(story())


def test_who_logs_in_has_a_session_until_they_log_out(registry: Registry) -> None:
    async def story() -> None:
        set_password(registry, PASSWORD)
        access = Access(registry, is_loopback=True)
        assert await access.log_in("wrong", "10.0.0.7") is None
        assert await access.log_in("x" * 100_000, "10.0.0.7") is None
        session_id = await access.log_in(PASSWORD, "10.0.0.7")
        assert session_id is not None
        known = await access.identify(None, session_id)
        assert known is not None and known.who.startswith("session ") and known.scope is KeyScope.ALL
        assert session_id not in known.who
        assert await access.identify("Bearer wrong", session_id) is None, "a wrong key is not overlooked"
        assert await access.identify(None, session_id + "x") is None
        await access.log_out(known)
        assert await access.identify(None, session_id) is None

    asyncio.run(story())


def test_a_key_for_everything_may_log_in_and_one_for_the_gateway_may_not(registry: Registry) -> None:
    async def story() -> None:
        everything, _ = create_key(registry, "all")
        gateway, _ = create_key(registry, "gateway", KeyScope.GATEWAY)
        access = Access(registry, is_loopback=True)
        session_id = await access.log_in(everything, "")
        assert session_id is not None
        known = await access.identify(None, session_id)
        assert known is not None and known.who.endswith("by key all")
        assert await access.log_in(gateway, "") is None
        remove_key(registry, "all")
        access.forget()
        assert await access.identify(None, session_id) is None

    asyncio.run(story())


@pytest.mark.parametrize("age", [IDLE, LONGEST])
def test_a_session_that_is_idle_or_old_is_none(registry: Registry, age: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from overspill.manager.security import access as module

    async def story() -> None:
        set_password(registry, PASSWORD)
        access = Access(registry, is_loopback=True)
        session_id = await access.log_in(PASSWORD, "")
        assert session_id is not None
        began = now()
        # Idle is counted from the last use, which is not in the database yet; old, whatever it is used for.
        over = 2 * age if age is IDLE else age + age / 100
        for offset, is_known in ((age - age / 100, True), (over, False)):
            if age is LONGEST:
                (login,) = list_sessions(registry)
                sessions_were_seen(registry, {login.digest: began + offset})
            access.forget()
            monkeypatch.setattr(module, "now", lambda offset=offset: began + offset)
            assert (await access.identify(None, session_id) is not None) == is_known
        await access.note_use()
        assert list_sessions(registry) == [], "it is removed from the database as well"

    asyncio.run(story())


def test_use_is_noted_and_a_registry_that_fails_for_a_moment_locks_nobody_out(registry: Registry) -> None:
    async def story() -> None:
        clock = Clock()
        secret, _ = create_key(registry, "laptop")
        access = Access(registry, is_loopback=False, clock=clock)
        assert await access.identify(f"Bearer {secret}", None) is not None
        await access.note_use()
        assert list_keys(registry)[0].last_used_at is not None

        def fail() -> Any:
            raise RegistryUnavailable("locked")

        access._read = fail  # type: ignore[method-assign]
        clock.now += 30
        assert await access.identify(f"Bearer {secret}", None) is not None
        clock.now += 60
        with pytest.raises(RegistryUnavailable):
            await access.identify(f"Bearer {secret}", None)

    asyncio.run(story())


# Cookies and CSRF


def test_the_cookie_is_out_of_reach_for_scripts_and_other_sites() -> None:
    plain, over_tls = set_cookie("abc", is_tls=False), set_cookie("abc", is_tls=True, max_age_s=60)
    assert plain == "overspill=abc; Path=/; HttpOnly; SameSite=Strict"
    assert over_tls == "__Host-overspill=abc; Path=/; HttpOnly; SameSite=Strict; Secure; Max-Age=60"
    assert "Max-Age=0" in clear_cookie(is_tls=False)


def test_a_cookie_that_is_there_twice_or_odd_is_none() -> None:
    assert read_cookie("a=1; overspill=abc; b=2", is_tls=False) == "abc"
    assert read_cookie("overspill=abc; overspill=abc", is_tls=False) == "abc"
    for header in (
        None,
        "",
        "a=1",
        "overspill=",
        "overspill=a; overspill=b",
        "overspill=" + "x" * 200,
        "overspill=\x01",
    ):
        assert read_cookie(header, is_tls=False) is None
    assert read_cookie("overspill=abc", is_tls=True) is None


HERE = "http://localhost:7999"


@pytest.mark.parametrize(
    ("headers", "refused"),
    [
        ({}, None),  # curl
        ({"origin": HERE}, None),
        ({"sec-fetch-site": "same-origin"}, None),
        ({"sec-fetch-site": "none"}, None),
        ({"origin": "https://app.example"}, None),
        ({"origin": "http://evil.example"}, "http://evil.example"),
        ({"origin": "null"}, "null"),
        ({"origin": "http://localhost:8000"}, "http://localhost:8000"),  # another program of this machine
        ({"origin": "https://localhost:7999"}, "https://localhost:7999"),
        ({"origin": "http://localhost:7999.evil.example"}, "http://localhost:7999.evil.example"),
        ({"sec-fetch-site": "same-site"}, "same-site"),
        ({"sec-fetch-site": "cross-site"}, "cross-site"),
        ({"origin": "http://evil.example", "sec-fetch-site": "same-origin"}, "http://evil.example"),
    ],
)
def test_where_a_request_comes_from(headers: dict[str, str], refused: str | None) -> None:
    assert cross_site({"host": "localhost:7999", **headers}, "http", {"https://app.example"}) == refused


def test_a_browser_needs_the_token_of_our_page_and_others_do_not() -> None:
    app = CsrfGuard(APP)
    cookie = new_browser_id()
    browser = {"Origin": HERE, "Cookie": f"{cookie_name(is_tls=False)}={cookie}"}
    assert asked(app, "POST", "/api/x").status_code == 200, "a program"
    assert asked(app, "POST", "/api/x", headers={**browser, "X-CSRF-Token": csrf_token(cookie)}).status_code == 200
    assert asked(app, "POST", "/api/x", headers={**browser, "Authorization": "Bearer k"}).status_code == 200
    assert asked(app, "GET", "/api/x", headers=browser).status_code == 200
    for token in ({}, {"X-CSRF-Token": ""}, {"X-CSRF-Token": csrf_token(new_browser_id())}, {"X-CSRF-Token": "é"}):
        headers = [(name, value.encode()) for name, value in {**browser, **token}.items()]
        answer = asked(app, "DELETE", "/api/x", headers=headers)
        assert answer.status_code == 403 and "X-CSRF-Token" in message_of(answer)
    no_cookie = asked(app, "POST", "/api/x", headers={"Origin": HERE, "X-CSRF-Token": csrf_token("")})
    assert no_cookie.status_code == 403


@pytest.mark.parametrize("path", ["/api/x", "/v1/chat/completions", "/login"])
def test_another_site_can_post_nothing_anywhere(path: str) -> None:
    """A form or a fetch of text/plain needs no leave of ours; on loopback without a key it would load models."""
    for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        answer = asked(CsrfGuard(APP), "POST", path, headers={**headers, "Content-Type": "text/plain"}, content=b"{}")
        assert answer.status_code == 403 and "another site" in message_of(answer)
    assert asked(CsrfGuard(APP), "POST", "/v1/x", headers={"Origin": HERE}).status_code == 200
    allowed = CsrfGuard(APP, allowed_origins=["http://evil.example"])
    assert asked(allowed, "POST", "/v1/x", headers={"Origin": "http://evil.example"}).status_code == 200


# Host


def test_names_of_this_machine_are_answered_and_others_are_not() -> None:
    names = allowed_names("0.0.0.0", ["gpu.example.org"])
    for good in ("localhost", "localhost:7999", "LOCALHOST.", "127.0.0.1:1", "[::1]:7999", "192.168.1.5:7999",
                 "gpu.example.org", f"{socket.gethostname()}:7999", "a.localhost"):  # fmt: skip
        assert host_is_allowed(good, names), good
    for bad in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "a b", "localhost:", "[::1",
                "localhost:7999:7999", "localhost\n", "1.2.3.4.5", "gpu.example.org@evil.example"):  # fmt: skip
        assert not host_is_allowed(bad, names), bad
    # On loopback nobody calls it by the machine's name.
    assert socket.gethostname() == "localhost" or not host_is_allowed("gpu.example.org", allowed_names("127.0.0.1"))


def test_a_rebound_name_is_refused_before_anything_else() -> None:
    app = HostGuard(APP, names=allowed_names("127.0.0.1"))
    assert asked(app, "GET", "/").status_code == 200
    answer = asked(app, "GET", "/", base="http://evil.example:7999")
    assert answer.status_code == 421 and "--allow-host" in message_of(answer) and "'evil.example:7999'" in answer.text
    twice = asked(app, "GET", "/", headers=[("Host", "localhost"), ("Host", "evil.example")])
    assert twice.status_code == 421


# Login limit


def tries(limit: LoginLimit, address: str, count: int) -> int:
    """How many of so many at once were let through."""
    return sum(limit.try_now(address) == 0 for _ in range(count))


def test_waits_double_after_five_tries_and_success_forgives() -> None:
    clock = Clock()
    limit = LoginLimit(clock)
    assert tries(limit, "10.0.0.7", 100) == 5, "at once, no more than one after the other"
    waits = []
    for _ in range(12):
        waits.append(limit.try_now("10.0.0.7"))
        clock.now += waits[-1]
        assert limit.try_now("10.0.0.7") == 0
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 900, 900]
    assert tries(limit, "10.0.0.8", 3) == 3, "others do not wait"
    clock.now += 900
    assert limit.try_now("10.0.0.7") == 0
    limit.succeeded("10.0.0.7")
    assert tries(limit, "10.0.0.7", 10) == 5


def test_thousands_of_addresses_are_slowed_together_and_take_bounded_memory() -> None:
    clock = Clock()
    limit = LoginLimit(clock)
    limit.succeeded("10.0.0.7")
    let_through = 0
    for number in range(20_000):
        let_through += limit.try_now(f"2001:db8:{number:x}::1") == 0
        clock.now += 0.01
    assert let_through < 200, "20000 tries within 200 s"
    assert limit.try_now("10.0.0.7") == 0, "the owner is not locked out"
    slow = LoginLimit(clock)
    for number in range(3 * _MAX_ADDRESSES):
        clock.now += 3
        assert slow.try_now(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}") == 0
    assert len(slow._by_address) == _MAX_ADDRESSES


def test_all_of_an_ipv6_network_is_one_and_mapped_addresses_are_ipv4() -> None:
    limit = LoginLimit(Clock())
    assert sum(limit.try_now(f"2001:db8::{number:x}") == 0 for number in range(100)) == 5
    assert tries(limit, "10.0.0.9", 5) == 5 and limit.try_now("::ffff:10.0.0.9") > 0
    assert tries(limit, "not an address", 9) == 5


# Headers


def test_pages_may_load_from_here_and_nothing_else() -> None:
    headers = asked(SecurityHeaders(APP), "GET", "/page").headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
    assert "http" not in policy and "*" not in policy
    assert headers["x-content-type-options"] == "nosniff" and headers["cross-origin-opener-policy"] == "same-origin"
    assert headers["referrer-policy"] == "same-origin" and headers["cache-control"] == "no-store"
    assert "strict-transport-security" not in headers
    assert "strict-transport-security" in asked(SecurityHeaders(APP, is_tls=True), "GET", "/page").headers
    vendored = asked(SecurityHeaders(APP), "GET", "/static/vendor/htmx-2.0.11.min.js").headers
    assert "immutable" in vendored["cache-control"]
    streamed = asked(SecurityHeaders(APP), "GET", "/parts")
    assert streamed.headers["cache-control"] == "no-cache", "a handler's own stays"
    assert streamed.text == "data: 0\n\ndata: 1\n\ndata: 2\n\n"


# Bodies


def test_a_body_that_is_too_large_is_refused_before_it_is_read_or_as_soon_as_it_is() -> None:
    app = BodyGuard(APP, max_bytes=1000)
    assert asked(app, "POST", "/", content=b"x" * 1000).json()["length"] == 1000
    declared = asked(app, "POST", "/", content=b"x" * 1001)
    assert declared.status_code == 413 and "at most 1000 B" in message_of(declared)
    assert declared.headers["connection"] == "close"
    sent = 0

    async def pieces() -> Any:
        nonlocal sent
        for _ in range(1000):
            sent += 100
            yield b"x" * 100

    streamed = asked(app, "POST", "/", content=pieces())
    assert streamed.status_code == 413 and sent < 2000


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def story(send_bytes: Callable[[], Awaitable[Message]]) -> list[Message]:
        answers: list[Message] = []

        async def send(message: Message) -> None:
            answers.append(message)

        scope = {"type": "http", "method": "POST", "path": "/", "raw_path": b"/", "query_string": b"",
                 "headers": [(b"content-length", b"100"), (b"host", b"localhost")]}  # fmt: skip
        await BodyGuard(APP, pause_s=0.2)(scope, send_bytes, send)
        return answers

    async def nothing() -> Message:
        await asyncio.sleep(3600)
        return {}

    async def drops() -> Message:
        await asyncio.sleep(0.05)
        return {"type": "http.request", "body": b"x", "more_body": True}

    for behaviour in (nothing, drops):
        answers = asyncio.run(story(behaviour))
        assert [message.get("status") for message in answers] == [408, None], "one answer, and not the app's"


# Connections, with a real server

SERVER = """
import sys
import uvicorn
from overspill.manager.security.connections import BoundedProtocol
from tests.test_manager_security import APP, BodyGuard, big

BoundedProtocol.headers_s, BoundedProtocol.unread_s, BoundedProtocol.max_header_bytes = 0.5, 0.5, 4096
app = BodyGuard(big(APP), pause_s=0.5)
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


def test_a_second_request_of_a_connection_is_timed_as_well(port: int) -> None:
    with connection(port) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            answer += client.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 200")
        client.sendall(b"GET / HT")
        assert received(client) == b""


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
    slow = [connection(port) for _ in range(100)]
    for client in slow:
        client.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\na")
    answer = httpx.post(f"http://127.0.0.1:{port}/x", content=b"abc", timeout=30)
    assert answer.json()["length"] == 3
    for client in slow:
        assert received(client).startswith(b"HTTP/1.1 408")
        client.close()


# Logs, addresses, folders


def test_no_client_writes_lines_of_its_own_into_a_log(caplog: pytest.LogCaptureFixture) -> None:
    attack = 'GET /\r\nINFO: key admin logged in\x1b[2J\u202e\u2028\x85"'
    shown = one_line(attack)
    assert shown == r'GET /\r\nINFO: key admin logged in\x1b[2J\u202e\u2028\x85"'
    assert one_line("naïve ✓ 漢字") == "naïve ✓ 漢字"
    assert len(one_line("x" * 10**6)) < 2100
    logger = logging.getLogger("overspill.test")
    logger.addFilter(OneLine())
    logger.warning("%s - %s", "10.0.0.7", attack)
    assert caplog.records[-1].getMessage() == f"10.0.0.7 - {shown}"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_loopback_needs_no_protection(host: str) -> None:
    require_protection(host, is_protected=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "gpu.example.org"])
def test_other_addresses_need_a_key_or_a_password_and_the_refusal_says_how(host: str) -> None:
    require_protection(host, is_protected=True)
    with pytest.raises(ManagerError, match=rf"--host {re.escape(host)} .*overspill manager password.* keys add NAME"):
        require_protection(host, is_protected=False)


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """models/good, a hub cache with a snapshot of links, and secrets beside them."""
    (tmp_path / "models" / "good").mkdir(parents=True)
    (tmp_path / "models" / "good" / "config.json").write_text("{}")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "config.json").write_text("key")
    (tmp_path / "models-of-others").mkdir()
    snapshot = tmp_path / "hub" / "models--a--b" / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (tmp_path / "hub" / "models--a--b" / "blobs").mkdir()
    (tmp_path / "hub" / "models--a--b" / "blobs" / "1").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/1")
    return tmp_path


def confined(folders: Path, source: str) -> str:
    return confined_source(source, [folders / "models"], folders / "hub")


def test_models_come_from_the_hub_the_cache_and_configured_folders(folders: Path) -> None:
    good = str(folders / "models" / "good")
    assert confined(folders, "Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    assert confined(folders, good) == good
    assert confined(folders, f"{folders}/models/../models/./good/") == good
    (folders / "models" / "link").symlink_to(folders / "models" / "good")
    assert confined(folders, str(folders / "models" / "link")) == good, "kept as what it is"
    snapshot = str(folders / "hub" / "models--a--b" / "snapshots" / "c0ffee")
    assert confined(folders, snapshot) == snapshot


def test_models_come_from_nowhere_else(folders: Path) -> None:
    (folders / "models" / "out").symlink_to(folders / "secret")
    (folders / "models" / "loop").symlink_to(folders / "models" / "loop")
    (folders / "models" / "half").mkdir()
    (folders / "models" / "half" / "config.json").symlink_to(folders / "secret" / "config.json")
    inside = folders / "models"
    for source in (
        str(folders / "secret"), f"{inside}/../secret", f"{inside}/good/../../secret", str(inside / "out"), "/", "/etc",
        str(inside / "loop"), str(inside / "half"), str(inside / "none"), f"{inside}-of-others", f"{inside}/good\0/x",
        str(inside / "good" / "config.json"), "../secret", "~/secret", "~root", "./x", "", "x" * 5000, "a\nb", "..",
        "file:///etc", "a/b/c", "-flag", "--model", "a--b/c", "Qwen/..", "org/name.git", "x" * 97, "s3://bucket/x",
        "\\\\host\\share", "Qwen/Qwen3-8B\x00", "Qwen/Qwen3-8B ", "gпt2",
    ):  # fmt: skip
        with pytest.raises(ModelNotAllowed):
            confined(folders, source)


def test_a_refusal_does_not_tell_what_is_on_the_disk(folders: Path) -> None:
    def said(source: str) -> str:
        with pytest.raises(ModelNotAllowed) as error:
            confined(folders, source)
        return str(error.value).replace(source, "X")

    assert said(str(folders / "secret")) == said(str(folders / "there-is-none"))


def test_a_repositorys_id_does_not_become_a_folder_by_where_the_manager_runs(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folders)
    assert is_repo_id("secret")
    with pytest.raises(ModelNotAllowed, match="a folder of that name is where the manager was started"):
        confined(folders, "secret")


# All together


def test_whoever_is_unknown_gets_the_login_page_or_a_refusal_and_a_gateway_key_the_gateway(registry: Registry) -> None:
    everything, _ = create_key(registry, "all")
    gateway, _ = create_key(registry, "gateway", KeyScope.GATEWAY)

    def ask(method: str, path: str, key: str = "", **headers: str) -> httpx.Response:
        app = guarded(APP, Access(registry, is_loopback=True), bound_host="127.0.0.1")
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return asked(app, method, path, headers={**named, **({"Authorization": f"Bearer {key}"} if key else {})})

    assert ask("GET", "/api/x").status_code == 401 and ask("POST", "/v1/x", "wrong").status_code == 401
    assert ask("GET", "/api/x").headers["www-authenticate"] == "Bearer"
    page = ask("GET", "/models", Accept="text/html,*/*")
    assert (page.status_code, page.headers["location"]) == (303, "/login")
    assert "content-security-policy" in page.headers, "refusals have them too"
    assert all(ask("GET", path).status_code == 200 for path in ("/login", "/static/x.css", "/healthz"))
    assert ask("POST", "/api/x", everything).status_code == ask("POST", "/v1/x", everything).status_code == 200
    assert ask("POST", "/v1/x", gateway).status_code == 200
    for path in ("/api/x", "/", "/metrics", "/v1", "//v1/x", "/v1x"):
        refused = ask("GET", path, gateway)
        assert refused.status_code == 403 and "key gateway is for /v1/ only" in message_of(refused), path


def test_a_whole_login_in_a_browser(registry: Registry) -> None:
    """Form, cookie, page with token, action, and the same from another site."""
    set_password(registry, PASSWORD)

    async def story() -> None:
        access = Access(registry, is_loopback=False)

        async def log_in(request: Request) -> Response:
            session_id = await access.log_in((await request.body()).decode(), "10.0.0.7")
            assert session_id is not None
            return Response(headers={"Set-Cookie": set_cookie(session_id, is_tls=False)})

        async def who(request: Request) -> Response:
            return JSONResponse(request.state.identity.who)

        routes = [Route("/login", log_in, methods=["POST"]), Route("/api/who", who, methods=["POST"])]
        app = guarded(Starlette(routes=routes), access, bound_host="0.0.0.0")
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url=HERE, headers={"Origin": HERE}) as browser:
            assert (await browser.post("/api/who")).status_code == 403, "no cookie, no token"
            assert (await browser.post("/login", content=PASSWORD)).status_code == 200
            token = {"X-CSRF-Token": csrf_token(browser.cookies["overspill"])}
            answer = await browser.post("/api/who", headers=token)
            assert answer.status_code == 200 and answer.json().startswith("session ")
            assert (await browser.post("/api/who")).status_code == 403, "no token"
            evil = {**token, "Origin": "http://evil.example"}
            assert (await browser.post("/api/who", headers=evil)).status_code == 403
            rebound = {**token, "Host": "evil.example"}
            assert (await browser.post("/api/who", headers=rebound)).status_code == 421

    asyncio.run(story())


def test_a_registry_that_cannot_be_read_lets_nobody_in(registry: Registry) -> None:
    access = Access(registry, is_loopback=True)

    def fail() -> Any:
        raise RegistryUnavailable("the registry is locked")

    access._read = fail  # type: ignore[method-assign]
    answer = asked(guarded(APP, access, bound_host="127.0.0.1"), "GET", "/api/x")
    assert answer.status_code == 503 and "the registry is locked" in message_of(answer)


# Vendored files


def test_vendored_files_are_those_that_were_fetched_with_their_licences() -> None:
    listed: dict[str, str] = {}
    for package in json.loads((VENDOR / "vendor.json").read_text())["packages"]:
        assert package["licence"] in ("0BSD", "MIT") and package["licence_file"] in package["files"]
        assert all(package["version"] in name for name in package["files"])
        listed |= package["files"]
    there = {path.name for path in VENDOR.iterdir()} - {"vendor.json"}
    assert there == set(listed)
    for name, expected in listed.items():
        content = (VENDOR / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == expected, name
        assert b"sourceMappingURL" not in content
    assert sum(os.path.getsize(VENDOR / name) for name in listed) < 150_000
