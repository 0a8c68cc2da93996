"""What a request must be like to reach the manager at all."""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message

from overspill.manager.messages import GatewayError
from overspill.manager.web.access import Access, cookie_name, read_cookie, set_cookie
from overspill.manager.web.guards import Guards, allowed_names, cross_site, csrf_token, host_is_allowed
from overspill.manager.web.setup import Setup
from overspill.registry import Registry, RegistryUnavailable
from overspill.registry.access import KeyScope, create_key, new_session_id, set_password
from tests.guarded_app import APP, SETUP, asked, message_of, open_to_all

PASSWORD = "four words, not together"


# Cookies and CSRF


def test_the_cookie_is_out_of_reach_for_scripts_and_other_sites() -> None:
    def cookie(value: str, *, is_tls: bool) -> list[str]:
        response = Response()
        set_cookie(response, value, is_tls=is_tls)
        first, *attributes = response.headers["set-cookie"].split("; ")
        return [first, *sorted(attributes)]

    assert cookie("abc", is_tls=False) == ["overspill=abc", "HttpOnly", "Path=/", "SameSite=strict"]
    assert cookie("abc", is_tls=True) == ["__Host-overspill=abc", "HttpOnly", "Path=/", "SameSite=strict", "Secure"]
    assert "Max-Age=0" in cookie("", is_tls=False)


def test_an_ambiguous_or_malformed_cookie_is_ignored() -> None:
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
    app = open_to_all(APP)
    cookie = new_session_id()
    browser = {"Origin": HERE, "Cookie": f"{cookie_name(is_tls=False)}={cookie}"}
    assert asked(app, "POST", "/api/x").status_code == 200, "a program"
    assert asked(app, "POST", "/api/x", headers={**browser, "X-CSRF-Token": csrf_token(cookie)}).status_code == 200
    assert asked(app, "POST", "/api/x", headers={**browser, "Authorization": "Bearer k"}).status_code == 200
    assert asked(app, "GET", "/api/x", headers=browser).status_code == 200
    for token in ({}, {"X-CSRF-Token": ""}, {"X-CSRF-Token": csrf_token(new_session_id())}, {"X-CSRF-Token": "é"}):
        headers = [(name, value.encode()) for name, value in {**browser, **token}.items()]
        answer = asked(app, "DELETE", "/api/x", headers=headers)
        assert answer.status_code == 403 and "X-CSRF-Token" in message_of(answer)
    no_cookie = asked(app, "POST", "/api/x", headers={"Origin": HERE, "X-CSRF-Token": csrf_token("")})
    assert no_cookie.status_code == 403


@pytest.mark.parametrize("path", ["/api/x", "/v1/chat/completions", "/login"])
def test_another_site_can_post_nothing_anywhere(path: str) -> None:
    """A form or a fetch of text/plain needs no leave of ours; on loopback without a key it would load models."""
    for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        answer = asked(open_to_all(APP), "POST", path, headers={**headers, "Content-Type": "text/plain"}, content=b"{}")
        assert answer.status_code == 403 and "another site" in message_of(answer)
    assert asked(open_to_all(APP), "POST", "/v1/x", headers={"Origin": HERE}).status_code == 200
    allowed = open_to_all(APP, Setup(folder=Path(), allowed_origins=("http://evil.example",)))
    assert asked(allowed, "POST", "/v1/x", headers={"Origin": "http://evil.example"}).status_code == 200


def test_a_refusal_on_the_gateways_paths_is_like_its_own_errors() -> None:
    """Clients of OpenAI's API were given a number as code, and `src` in place of `source`."""
    large, evil = {"Content-Length": "9999"}, {"Origin": "http://evil.example"}
    refusals = [
        (asked(open_to_all(APP), "POST", "/v1/completions", headers=evil), 403, "forbidden"),
        (asked(open_to_all(APP), "GET", "/v1/models", base="http://x.example"), 421, "wrong_host"),
        (asked(open_to_all(APP, max_body_bytes=9), "POST", "/v1/completions", headers=large), 413, "too_large"),
    ]
    for answer, status, code in refusals:
        told = GatewayError(status, message_of(answer), code=code)
        assert answer.status_code == status and answer.json() == json.loads(told.body)


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
    app = open_to_all(APP)
    assert asked(app, "GET", "/").status_code == 200
    answer = asked(app, "GET", "/", base="http://evil.example:7999")
    assert answer.status_code == 421 and "--allow-host" in message_of(answer) and "'evil.example:7999'" in answer.text
    twice = asked(app, "GET", "/", headers=[("Host", "localhost"), ("Host", "evil.example")])
    assert twice.status_code == 421


# Headers


def test_pages_may_load_from_here_and_nothing_else() -> None:
    over_tls = Setup(folder=Path(), public_url="https://manager.example")
    headers = asked(open_to_all(APP), "GET", "/page").headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
    assert "http" not in policy and "*" not in policy
    assert headers["x-content-type-options"] == "nosniff" and headers["cross-origin-opener-policy"] == "same-origin"
    assert headers["referrer-policy"] == "same-origin" and headers["cache-control"] == "no-store"
    assert "strict-transport-security" not in headers
    assert "strict-transport-security" in asked(open_to_all(APP, over_tls), "GET", "/page").headers
    vendored = asked(open_to_all(APP), "GET", "/static/vendor/htmx-2.0.11.min.js").headers
    assert "immutable" in vendored["cache-control"]
    streamed = asked(open_to_all(APP), "GET", "/parts")
    assert streamed.headers["cache-control"] == "no-cache", "a handler's own stays"
    assert streamed.text == "data: 0\n\ndata: 1\n\ndata: 2\n\n"


# Bodies


def test_a_body_over_the_limit_is_refused_declared_or_streamed() -> None:
    app = open_to_all(APP, max_body_bytes=1000)
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
        await open_to_all(APP, body_pause_s=0.2)(scope, send_bytes, send)
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


# All together


def test_unknown_clients_get_a_login_or_401_and_keys_their_scope(registry: Registry) -> None:
    everything, _ = create_key(registry, "all")
    gateway, _ = create_key(registry, "gateway", KeyScope.GATEWAY)

    def ask(method: str, path: str, key: str = "", **headers: str) -> httpx.Response:
        app = Guards(APP, Access(registry, is_loopback=True), SETUP)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return asked(app, method, path, headers={**named, **({"Authorization": f"Bearer {key}"} if key else {})})

    metrics, _ = create_key(registry, "metrics", KeyScope.METRICS)
    assert ask("GET", "/metrics", metrics).status_code == 200
    assert all(ask("GET", path, metrics).status_code == 403 for path in ("/v1/x", "/api/x", "/"))
    assert ask("POST", "/v1/x", X_API_Key=gateway).status_code == 200
    assert ask("POST", "/v1/x", X_API_Key="wrong").status_code == 401
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
            response = Response()
            set_cookie(response, session_id, is_tls=False)
            return response

        async def who(request: Request) -> Response:
            return JSONResponse(request.state.identity.who)

        routes = [Route("/login", log_in, methods=["POST"]), Route("/api/who", who, methods=["POST"])]
        app = Guards(Starlette(routes=routes), access, Setup(folder=Path(), host="0.0.0.0"))
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
    answer = asked(Guards(APP, access, SETUP), "GET", "/api/x")
    assert answer.status_code == 503 and "the registry is locked" in message_of(answer)
