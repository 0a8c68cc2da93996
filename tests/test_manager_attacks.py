"""Attacks on the manager, and what each got: the table of docs/security.md, line by line, on the whole manager.

Two managers run: one open, as on loopback without a password, and one with a password and keys. Meanwhile hundreds of
slow clients hold on to the first.
"""

import contextlib
import json
import os
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from overspill.kv.sizes import MiB
from overspill.manager.web.app import make_web
from overspill.registry import Result, save_result
from overspill.registry.access import KeyScope, create_key, set_password
from tests.managed_process import ManagedProcess, QuickPlace, audit, managed_process, read_all
from tests.manager_process import ROOT

PASSWORD = "four words, not together"
EVIL = "<script>alert(1)</script>"
ASKED = {"model": "qwen", "prompt": "x", "max_tokens": 2}
NUM_SLOW = 200


@dataclass(frozen=True, kw_only=True)
class Target:
    open: ManagedProcess
    closed: ManagedProcess
    key: str
    narrow: str
    """For the gateway only."""
    slow: list[socket.socket]
    """Clients whose headers do not end, those who say nothing, and one whose body does not end."""

    @property
    def models(self) -> Path:
        return self.open.place.folder / "models"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    places = []
    for name in ("open", "closed"):
        folder = tmp_path_factory.mktemp(name)
        (folder / "models").mkdir()
        places.append(QuickPlace(folder))
    for place in places:
        place.add("qwen", behaviour={"says": f"it says {EVIL}"})
        place.add("broken", behaviour={"dies_at_start": True, "says": f"it says {EVIL}"})
    with places[1].registry() as registry:
        set_password(registry, PASSWORD)
        key, _ = create_key(registry, "laptop", KeyScope.ALL)
        narrow, _ = create_key(registry, "phone", KeyScope.GATEWAY)
    both = [managed_process(place) for place in places]
    with both[0] as opened, both[1] as closed:
        slow = [opened.connect() for _ in range(2 * NUM_SLOW + 1)]
        for one in slow[:NUM_SLOW]:
            one.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
        slow[-1].sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
        yield Target(open=opened, closed=closed, key=key, narrow=narrow, slow=slow)
        for one in slow:
            one.close()


@dataclass(frozen=True)
class Attack:
    kind: str
    tried: str
    got: str
    run: Callable[[Target], None]

    @property
    def row(self) -> str:
        return f"| {self.tried} | {self.got} |"


ATTACKS: list[Attack] = []


def attack(kind: str, tried: str, got: str) -> Callable[[Callable[[Target], None]], Callable[[Target], None]]:
    def known(run: Callable[[Target], None]) -> Callable[[Target], None]:
        ATTACKS.append(Attack(kind, tried, got, run))
        return run

    return known


def message(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["message"])


def add(target: Target, source: str, **more: Any) -> httpx.Response:
    with target.open.client() as client:
        return client.post("/api/models", json={"name": "evil", "source": source, **more})


def refused_source(target: Target, *sources: str) -> None:
    for source in sources:
        assert add(target, source).status_code == 403, source
        with target.open.client() as client:
            changed = client.patch("/api/models/broken", json={"source": source})
            assert changed.status_code == 403, source
            assert client.get("/api/models/evil").status_code == 404


def statuses(answer: bytes) -> list[int]:
    """Of all answers on one connection."""
    return [int(code) for code in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


def raw(target: Target, text: str) -> list[int]:
    return statuses(target.open.say(text.replace("\n", "\r\n").encode()))


# Paths of models and files


@attack("Paths", "`../../etc`, `models/../../etc` as a model's source, new or changed", "403; nothing is kept")
def relative(target: Target) -> None:
    refused_source(target, "../../etc", "models/../../etc", "..", "./x/../../y", "~/.ssh", "~root")


@attack("Paths", "`/etc`, `/proc/self`, a folder that is not there", "403, the same words for each")
def absolute(target: Target) -> None:
    refused_source(target, "/etc", "/proc/self", "/")
    told = {message(add(target, path)).replace(path, "") for path in ("/etc", "/nowhere/none", "/proc/self/environ")}
    assert len(told) == 1


@attack("Paths", "a way out of an allowed folder: `/models/..`, `/models/../models-of-others`", "403")
def out_of_a_folder(target: Target) -> None:
    beside = target.models.with_name("models-of-others")
    beside.mkdir(exist_ok=True)
    refused_source(target, f"{target.models}/..", f"{target.models}/../{beside.name}", str(beside))


@attack("Paths", "a link in an allowed folder that leads out, as the folder or as its `config.json`", "403")
def links(target: Target) -> None:
    link, folder = target.models / "link", target.models / "holds-a-link"
    if not link.is_symlink():
        link.symlink_to("/etc")
        folder.mkdir()
        (folder / "config.json").symlink_to("/etc/passwd")
    refused_source(target, str(link), str(folder))


@attack("Paths", "a null byte, a line break, a terminal's escape in the source", "403")
def unprintable(target: Target) -> None:
    refused_source(target, f"{target.models}/x\0y", "/etc\0", "a/b\n", "a/b\r\nX: y", "\x1b[2J", "a\u2028b")


@attack("Paths", "`%2e%2e%2f`, `..%2f`, `..\\`, `file:///etc`, `http://169.254.169.254/`, `//host/share`", "403")
def encoded(target: Target) -> None:
    refused_source(
        target, "%2e%2e%2fetc", "..%2f..%2fetc", "..\\..\\etc", "file:///etc", "http://169.254.169.254/",
        "//host/share", "s3://bucket/x", "git+ssh://x",
    )  # fmt: skip


@attack("Paths", "`../../x`, `a/../../b`, `.hidden`, `-flag`, `$(id)`, `;id` as a model's *name*", "400")
def names(target: Target) -> None:
    with target.open.client() as client:
        for name in ("../../x", "a/../../b", ".hidden", "-flag", "$(id)", "a;id", "a\0b", "", "a" * 201, "a//b"):
            assert client.post("/api/models", json={"name": name, "source": "o/m"}).status_code == 400, name


@attack("Paths", "`/static/../app.py`, `/static/%2e%2e/app.py`, `/static//etc/passwd`", "404")
def static_files(target: Target) -> None:
    assert raw(target, "GET /static/manager.css HTTP/1.1\nHost: localhost\nConnection: close\n\n") == [200]
    for path in ("../app.py", "%2e%2e/app.py", "..%2fapp.py", "/etc/passwd", "vendor/../../app.py", "%00", "a%00.css"):
        got = raw(target, f"GET /static/{path} HTTP/1.1\nHost: localhost\nConnection: close\n\n")
        assert got == [404], path


@attack("Paths", "`/api/logs/../../registry.db`, also encoded, to read files as logs", "404")
def logs_of_files(target: Target) -> None:
    for path in ("../../registry.db", "%2e%2e%2f%2e%2e%2fregistry.db", "/etc/passwd", "qwen/../../../registry"):
        for begin in ("/api/logs/", "/events/logs/", "/api/models/", "/api/engines/"):
            got = raw(target, f"GET {begin}{path} HTTP/1.1\nHost: localhost\nConnection: close\n\n")
            assert got == [404], begin + path


# Headers and logs


@attack(
    "Injection", "CR LF and `Set-Cookie:` in a model's name, in a path, in a query", "an error; no header of that name"
)
def header_injection(target: Target) -> None:
    bad = "qwen\r\nSet-Cookie: evil=1\r\n\r\n<html>"
    quoted = "qwen%0d%0aSet-Cookie:%20evil=1"
    with target.open.client() as client:
        for answer in (
            client.post("/v1/completions", json={**ASKED, "model": bad}),
            client.post("/api/models", json={"name": bad, "source": "o/m"}),
            client.get(f"/api/models/{quoted}"), client.get(f"/api/logs/qwen?search={quoted}"),
            client.get(f"/v1/models/{quoted}"), client.get(f"/logs?name={quoted}"),
            client.get(f"/api/export?form=csv&ids={quoted}"),
        ):  # fmt: skip
            assert "evil" not in answer.headers.get("set-cookie", "") and answer.status_code in (200, 400, 404)


@attack("Injection", "a line break, a null byte or a folded line in a request's header", "400, closed")
def broken_headers(target: Target) -> None:
    for header in (b"X-A: b\rX-Evil: 1", b"X-A: b\0c", b"X A: b", b"X-A\0: b", b": b", b"X-A: \x1b[2J\x00"):
        got = statuses(target.open.say(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + header + b"\r\n\r\n"))
        assert got == [400], header


@attack(
    "Injection", "line breaks, escapes and `data: [DONE]` in a prompt", "the engine gets them as they are, as one text"
)
def prompts(target: Target) -> None:
    prompt = 'x\r\n\r\ndata: [DONE]\n\n\x1b[2J\0 "}} \u2028'
    with target.open.client() as client:
        told = client.post("/v1/echo", json={**ASKED, "prompt": prompt}).json()
    assert json.loads(told["body"])["prompt"] == prompt


@attack(
    "Injection", "the same in whatever is refused, to write lines of one's own into the manager's log", "no such line"
)
def log_lines(target: Target) -> None:
    forged = "\nOverspill: qwen was removed by owner\x1b[2J"
    with target.open.client() as client:
        client.post("/v1/completions", json={**ASKED, "model": "x" + forged})
        client.post("/api/jobs", json={"kind": forged, "model": forged, "given": {}})
        client.post("/api/engines/start/qwen%0aOverspill:%20forged", headers={"user-agent": "x\tOverspill: forged"})
        assert not [one for one in audit(client) if "\n" in f"{one['subject']}{one['detail']}{one['who']}"]
    target.open.say(b"\x16\x03\x01 \x1b[2J\nOverspill: forged\r\n\r\n")
    written = target.open.out.read_text()
    assert "\x1b" not in written and "\nOverspill: qwen was" not in written and "\nOverspill: forged" not in written


@attack("Injection", "`X-Forwarded-For`, to be another address in the audit log", "the audit log has the real one")
def forwarded(target: Target) -> None:
    with target.open.client(**{"x-forwarded-for": "8.8.8.8", "forwarded": "for=8.8.8.8"}) as client:
        client.delete("/api/models/none")
        assert audit(client)[0]["address"] == "127.0.0.1" and audit(client)[0]["subject"] == "none"


# Other sites


def page_of(client: httpx.Client) -> dict[str, str]:
    """As a browser has it after it loaded a page: a cookie, and the page's token."""
    token = client.get("/models").text.partition('data-token="')[2].partition('"')[0]
    assert len(token) == 64
    return {"origin": str(client.base_url).rstrip("/"), "x-csrf-token": token, "sec-fetch-site": "same-origin"}


@attack("Other sites", "`Origin` of another site, of another port, or `null`, with cookie and token", "403")
def wrong_origin(target: Target) -> None:
    with target.open.client() as client:
        own = page_of(client)
        assert client.post("/models/stop/qwen", headers=own).status_code == 202
        for origin in ("https://evil.example", "null", "http://127.0.0.1:1", f"{own['origin']}.evil.example", ""):
            for path in ("/models/stop/qwen", "/api/engines/stop/qwen", "/v1/completions", "/login"):
                assert client.post(path, headers={**own, "origin": origin}, json=ASKED).status_code == 403


@attack("Other sites", "the cookie without the page's token, with an old one, with one of another browser", "403")
def wrong_token(target: Target) -> None:
    with target.open.client() as client, target.open.client() as other:
        own, theirs = page_of(client), page_of(other)
        for token in ("", "0" * 64, theirs["x-csrf-token"], own["x-csrf-token"][:-1]):
            answer = client.post("/models/stop/qwen", headers={**own, "x-csrf-token": token})
            assert answer.status_code == 403 and "X-CSRF-Token" in message(answer)


@attack("Other sites", "`Sec-Fetch-Site: cross-site` or `same-site`, without an `Origin`", "403")
def fetch_site(target: Target) -> None:
    with target.open.client() as client:
        token = page_of(client)["x-csrf-token"]
        for site in ("cross-site", "same-site", "evil"):
            for path in ("/models/stop/qwen", "/v1/completions"):
                headers = {"sec-fetch-site": site, "x-csrf-token": token}
                assert client.post(path, headers=headers, json=ASKED).status_code == 403


@attack("Other sites", "a form of another site: `text/plain` that is JSON, `multipart/form-data`", "403")
def foreign_forms(target: Target) -> None:
    body = json.dumps({"name": "csrf", "source": "o/m"})
    with target.open.client(origin="https://evil.example") as client:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
            for path in ("/api/models", "/models", "/api/engines/stop/qwen", "/v1/chat/completions", "/logout"):
                assert client.post(path, content=body, headers={"content-type": kind}).status_code == 403
    with target.open.client() as client:
        assert client.get("/api/models/csrf").status_code == 404


@attack("Other sites", "a GET that would change something: `/models/stop/qwen`, `/logout`", "404 or 405")
def changing_gets(target: Target) -> None:
    with target.open.client() as client:
        for path in ("/models/stop/qwen", "/logout", "/api/engines/stop/qwen", "/runs/jobs/1/stop", "/found/1/stop"):
            assert client.get(path).status_code in (404, 405), path


@attack("Other sites", "asking by `OPTIONS` whether another site may read answers", "no `Access-Control-Allow-*`")
def preflight(target: Target) -> None:
    asked = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    with target.open.client(**asked) as client:
        for path in ("/v1/completions", "/api/models", "/", "/api/openapi.json"):
            for answer in (client.options(path), client.get(path)):
                assert not [name for name in answer.headers if name.startswith("access-control")]


@attack("Other sites", "the page in another site's frame", "`frame-ancestors 'none'`, `X-Frame-Options: DENY`")
def frames(target: Target) -> None:
    for path in ("/", "/models", "/login", "/api/nothing", "/v1/models", "/static/manager.js"):
        headers = httpx.get(target.open.url + path, trust_env=False, timeout=60).headers
        assert "frame-ancestors 'none'" in headers["content-security-policy"], path
        assert headers["x-frame-options"] == "DENY" and headers["x-content-type-options"] == "nosniff"


@attack("Other sites", "another name for it (DNS rebinding): `Host: evil.example`, two of them, none", "421 or 400")
def hosts(target: Target) -> None:
    port = target.open.port
    for host in ("evil.example", f"evil.example:{port}", "localhost.evil.example", "127.0.0.1.evil.example", "", "a b",
                 "localhost@evil.example", "localhost:80:80"):  # fmt: skip
        assert raw(target, f"GET /api/models HTTP/1.1\nHost: {host}\nConnection: close\n\n") in ([421], [400]), host
    assert raw(target, "GET /api/models HTTP/1.1\nHost: localhost\nHost: evil.example\nConnection: close\n\n") == [421]
    assert raw(target, "GET /api/models HTTP/1.1\nConnection: close\n\n") in ([421], [400])
    assert raw(target, "GET /api/models HTTP/1.0\n\n") in ([421], [400])


# Size and time


@attack("Size and time", "a body of 10 GB, as `Content-Length` says", "413 before a byte of it is sent")
def declared_body(target: Target) -> None:
    for path in ("/v1/completions", "/api/models", "/login", "/models"):
        assert raw(target, f"POST {path} HTTP/1.1\nHost: localhost\nContent-Length: 10000000000\n\n") == [413]


@attack("Size and time", "a body without a length that does not end", "413 after 64 MiB, closed")
def endless_body(target: Target) -> None:
    piece = b"100000\r\n" + bytes(MiB) + b"\r\n"
    with target.open.connect() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        num_pieces = 0
        with contextlib.suppress(ConnectionError):
            while num_pieces < 200:
                connection.sendall(piece)
                num_pieces += 1
        assert 60 < num_pieces < 100


@attack("Size and time", "headers or a path of a megabyte, headers without end", "closed after 64 KiB")
def endless_headers(target: Target) -> None:
    for begin in (b"GET / HTTP/1.1\r\nX: ", b"GET /", b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000):
        with target.open.connect() as connection:
            sent = 0
            with contextlib.suppress(ConnectionError):
                connection.sendall(begin)
                while sent < 1000:
                    connection.sendall(b"x" * 65536)
                    sent += 1
            assert sent < 1000


@attack("Size and time", "JSON that is nested 100 000 deep, a number of 100 000 digits", "400 or 422")
def nested(target: Target) -> None:
    deep = "[" * 100_000
    with target.open.client() as client:
        for path in ("/v1/completions", "/api/models", "/api/plan"):
            for body in (deep, f'{{"model": {deep}', f'{{"model": "qwen", "name": "qwen", "ram": {"9" * 100_000}}}',
                         '{"name": "\\ud800", "source": "\\ud800"}', "\xff", "null", ""):  # fmt: skip
                answer = client.post(path, content=body, headers={"content-type": "application/json"})
                assert answer.status_code in (400, 403, 404, 422), (path, body[:40], answer.text[:200])


@attack("Size and time", "a form of 100 000 fields, a compressed body", "an error; nothing is unpacked")
def odd_bodies(target: Target) -> None:
    import gzip

    with target.open.client() as client:
        own = page_of(client)
        many = client.post("/models", headers=own, content="&".join(f"f{i}=1" for i in range(100_000)))
        assert 400 <= many.status_code < 500
        packed = gzip.compress(bytes(32 * MiB))
        for path in ("/api/models", "/v1/completions"):
            headers = {**own, "content-encoding": "gzip", "content-type": "application/json"}
            assert 400 <= client.post(path, headers=headers, content=packed).status_code < 500


@attack(
    "Size and time",
    "an odd method, `TRACE`, an upgrade to a WebSocket, HTTP/2 without asking",
    "404, 405 or 400; no 101",
)
def odd_protocols(target: Target) -> None:
    for line in ("TRACE / HTTP/1.1", "CONNECT evil.example:443 HTTP/1.1", "GET / HTTP/9.9", "PROPFIND /v1/x HTTP/1.1"):
        assert raw(target, f"{line}\nHost: localhost\nConnection: close\n\n")[0] in (400, 404, 405, 421), line
    upgrade = "Connection: Upgrade\nUpgrade: websocket\nSec-WebSocket-Version: 13\n"
    upgrade += "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\n"
    assert 101 not in raw(target, f"GET /v1/realtime HTTP/1.1\nHost: localhost\n{upgrade}\n")
    assert 101 not in raw(target, "PRI * HTTP/2.0\n\nSM\n\n")


# Keys, passwords, sessions


@attack(
    "Keys and sessions",
    "2000 wrong keys, some with a right one's beginning",
    "401 each, without a look into the database",
)
def wrong_keys(target: Target) -> None:
    with target.closed.client() as client:
        assert client.get("/api/models", headers={"authorization": f"Bearer {target.key}"}).status_code == 200
        before = target.closed.bytes_read()
        for i in range(2000):
            wrong = target.key[:-6] + f"{i:06}" if i % 2 else f"ov-{i:040}"
            assert client.get("/v1/models", headers={"authorization": f"Bearer {wrong}"}).status_code == 401
        # Reading the keys from the file each time would be many times as much.
        assert target.closed.bytes_read() - before < 2000 * 4096
        assert client.get("/api/models", headers={"authorization": f"Bearer {target.key}"}).status_code == 200


@attack(
    "Keys and sessions",
    "no key, an empty one, Basic, a key in the query, in a cookie, in `X-Api-Key` outside `/v1`",
    "401",
)
def odd_keys(target: Target) -> None:
    key = target.key
    for headers in ({}, {"authorization": ""}, {"authorization": "Bearer"}, {"authorization": f"Basic {key}"},
                    {"authorization": key}, {"authorization": f"Bearer {key[:-1]}"},
                    {"authorization": f"Bearer {key}x"}, {"cookie": f"overspill={key}"},
                    {"x-api-key": key}):  # fmt: skip
        for path in ("/api/models", "/v1/models", "/metrics", f"/api/models?api_key={key}", "/events/dashboard"):
            expected = 200 if "x-api-key" in headers and path == "/v1/models" else 401
            answer = httpx.get(target.closed.url + path, headers=headers, trust_env=False, timeout=60)
            assert answer.status_code == expected


@attack(
    "Keys and sessions", "ways around: `/static/../api/models`, `/login/../api/models`, `//api/models`", "401 or 404"
)
def ways_around(target: Target) -> None:
    for path in ("/static/../api/models", "/static/%2e%2e/api/models", "/login/../api/models", "/login/api/models",
                 "//api/models", "/healthz/../api/models", "/API/models", "/api/models/", "/v1/../api/models",
                 "/v1/%2e%2e/api/models", "http://localhost/api/models", "/;/api/models"):  # fmt: skip
        answer = target.closed.say(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert statuses(answer)[0] in (303, 400, 401, 404) and b"broken" not in answer, path


@attack("Keys and sessions", "a key for the gateway on the API, on pages, by `/v1/../api`", "403 or 404")
def narrow_key(target: Target) -> None:
    with target.closed.client(authorization=f"Bearer {target.narrow}") as client:
        assert client.get("/v1/models").status_code == 200
        for path in ("/api/models", "/", "/metrics", "/events/dashboard", "/api/openapi.json", "/v1"):
            assert client.get(path).status_code == 403, path
        assert client.post("/api/engines/start/qwen").status_code == 403
    for path in ("/v1/../api/models", "/v1/%2e%2e/api/models"):
        for method in ("GET", "DELETE"):
            said = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {target.narrow}\r\n"
            answer = target.closed.say(f"{said}Connection: close\r\n\r\n".encode())
            assert statuses(answer) == [404] and b"broken" not in answer


@attack(
    "Keys and sessions",
    "a cookie set before the login (session fixation)",
    "a new id at each login; the old one opens nothing",
)
def fixation(target: Target) -> None:
    with target.closed.client() as client:
        client.cookies.set("overspill", "chosen-by-somebody-else")
        answer = client.post("/login", data={"secret": PASSWORD}, headers={"origin": target.closed.url})
        assert answer.status_code == 303
        told = answer.headers["set-cookie"]
        session = told.partition("=")[2].partition(";")[0]
        assert session != "chosen-by-somebody-else" and len(session) >= 32
        # Browsers compare attributes whatever their case.
        assert "HttpOnly" in told and "samesite=strict" in told.lower()
    for cookie, status in (("chosen-by-somebody-else", 401), (session, 200), (f"{session}; overspill=other", 401)):
        headers = {"cookie": f"overspill={cookie}"}
        answer = httpx.get(f"{target.closed.url}/api/models", headers=headers, trust_env=False, timeout=60)
        assert answer.status_code == status


@attack("Keys and sessions", "a session's cookie after the logout, and guessed ones", "401")
def after_logout(target: Target) -> None:
    with target.closed.client() as client:
        client.post("/login", data={"secret": PASSWORD}, headers={"origin": target.closed.url})
        session = client.cookies["overspill"]
        assert client.post("/logout", headers=page_of(client)).status_code == 200
    for cookie in (session, session.swapcase(), "", "x" * 43, "a" * 4000):
        headers = {"cookie": f"overspill={cookie}"}
        answer = httpx.get(f"{target.closed.url}/api/models", headers=headers, trust_env=False, timeout=60)
        assert answer.status_code == 401


@attack("Keys and sessions", "200 wrong passwords, then the right one", "429 with `Retry-After` after five; keys go on")
def wrong_passwords(target: Target) -> None:
    with target.closed.client() as client:
        tried = [client.post("/login", data={"secret": f"guess {i}"}).status_code for i in range(200)]
        assert set(tried) == {403, 429} and tried.count(403) < 20
        # A wait of a second could be over before the next request.
        while int(client.post("/login", data={"secret": "guess"}).headers.get("retry-after", 0)) < 2:
            pass
        waiting = client.post("/login", data={"secret": PASSWORD})
        assert waiting.status_code == 429 and int(waiting.headers["retry-after"]) > 0
    with target.closed.client(authorization=f"Bearer {target.key}") as client:
        assert client.get("/api/models").status_code == 200


@attack("Keys and sessions", "a password or a key read back from the registry's file", "hashes only")
def stored_secrets(target: Target) -> None:
    folder = target.closed.place.folder
    kept = b"".join(path.read_bytes() for path in folder.glob("registry.db*"))
    assert b"laptop" in kept
    for secret in (PASSWORD, target.key, target.narrow):
        assert secret.encode() not in kept and secret[-20:].encode() not in kept
    assert (folder / "manager").stat().st_mode & 0o077 == 0
    assert target.key not in target.closed.out.read_text()


# Scripts in pages


def page(target: Target, path: str) -> str:
    answer = httpx.get(target.open.url + path, headers={"accept": "text/html"}, timeout=60, trust_env=False)
    assert "default-src 'none'; script-src 'self'" in answer.headers["content-security-policy"]
    return answer.text


def is_harmless(text: str) -> bool:
    """It is shown, as text."""
    return "<script>alert" not in text and "<img src=x" not in text and "alert(1)" in text


@attack("Scripts", f"`{EVIL}` as a model's notes and vLLM flags", "shown as text")
def in_notes(target: Target) -> None:
    with target.open.client() as client:
        assert (
            client.patch("/api/models/qwen", json={"notes": f'"><img src=x onerror=alert(1)>{EVIL}'}).status_code == 200
        )
        assert client.patch("/api/models/broken", json={"dtype": EVIL[:20]}).status_code in (200, 400)
    assert is_harmless(page(target, "/models/settings/qwen"))
    assert "<script>alert" not in page(target, "/models")


@attack("Scripts", "the same in an engine's log, as lines, in a search, in the card of a failed start", "shown as text")
def in_logs(target: Target) -> None:
    with target.open.client() as client:
        assert client.post("/api/engines/start/broken").status_code == 409
        raw_log = client.get("/api/logs/broken")
        assert raw_log.headers["content-type"].startswith("text/plain") and EVIL in raw_log.text
        with client.stream("GET", "/events/models") as told:
            lines = told.iter_lines()
            while "alert(1)" not in (line := next(lines)):
                pass
            assert "<script>alert" not in line
    assert is_harmless(page(target, "/models"))
    assert is_harmless(page(target, f"/logs?name=broken&search={EVIL}"))


@attack(
    "Scripts",
    "the same in a link: `/logs?search=`, `/logs?name=`, `/models/plan/qwen?max_model_len=`",
    "shown as text, or JSON",
)
def in_links(target: Target) -> None:
    assert is_harmless(page(target, f'/logs?name=qwen&search="><img src=x onerror=alert(1)>{EVIL}'))
    assert is_harmless(page(target, f"/models/plan/qwen?max_model_len={EVIL}"))
    for path in (f"/logs?name={EVIL}", f"/{EVIL}", f"/models/{EVIL}", f"/results/{EVIL}", f"/compare?ids={EVIL}",
                 f"/api/jobs/{EVIL}", f"/v1/models/{EVIL}", f"/try?model={EVIL}"):  # fmt: skip
        answer = httpx.get(target.open.url + path, trust_env=False, timeout=60)
        is_json = answer.headers["content-type"].startswith("application/json")
        assert is_json or "<script>alert" not in answer.text, path


@attack(
    "Scripts",
    "the same as label, experiment and model of a result, in tables, charts and exported HTML",
    "shown as text",
)
def in_results(target: Target) -> None:
    with target.open.place.registry() as registry:
        saved = [
            save_result(
                registry,
                Result(
                    benchmark=EVIL, model=EVIL, config={"x": EVIL}, argv=(EVIL,),
                    metrics={"output_throughput": 1.5 + i},
                    started_at=datetime(2026, 1, 2, tzinfo=UTC), experiment=EVIL, label=f"{i}{EVIL}", gpu=EVIL,
                ),
            )
            for i in range(2)
        ]  # fmt: skip
    ids = ",".join(str(getattr(one, "id", one)) for one in saved)
    for path in (
        "/runs",
        f"/compare?ids={ids}",
        f"/results/{ids.partition(',')[0]}",
        f"/api/export?form=html&ids={ids}",
    ):
        assert "<script>alert" not in (text := page(target, path)) and "alert(1)" in text, path


@attack("Scripts", "the same as what an audited request was about", "shown as text")
def in_audit(target: Target) -> None:
    with target.open.client() as client:
        client.post("/api/jobs", json={"kind": "bench", "model": EVIL, "given": {}})
        client.post("/api/found/1/stop", json={"identity": EVIL, "confirm_name": EVIL})
    assert is_harmless(page(target, "/audit"))


# What the web may start


DANGEROUS = (
    "--trust-remote-code", "--trust_remote_code", "--trust-remote", "--allowed-local-media-path=/", "--host=0.0.0.0",
    "--tool-parser-plugin=/tmp/x.py", "--chat-template=/etc/passwd", "--config=/etc/passwd", "--model=/etc",
    "--api-key=x", "--worker-cls=os.system", "--hf-overrides={}", "--download-dir=/", "--ssl-keyfile=/etc/shadow",
    "--kv-transfer-config={}", "--load-format=pt", "--middleware=os.system", "--logits-processors=os.system",
    "--speculative-config.model=/etc", "-cc.x=1", "--seed.x=1", "--otlp-traces-endpoint=http://evil.example",
    "--enable-lora", "--lora-modules=a=/etc", "--tokenizer=/etc", "--code-revision=x", "--port=80",
    "--allowed-origins=*", "--root-path=/x", "--reasoning-parser-plugin=/tmp/x.py",
)  # fmt: skip


@attack(
    "What may be started",
    f"{len(DANGEROUS)} vLLM flags that run code, open files or ports, also shortened",
    "403, or 400, each",
)
def dangerous_flags(target: Target) -> None:
    with target.open.client() as client:
        for flag in DANGEROUS:
            for words in ([flag], ["--seed", "1", flag], flag):
                answer = client.patch("/api/models/qwen", json={"vllm_args": words})
                assert answer.status_code in (400, 403), (flag, answer.text)
            job = {"kind": "ab", "model": "qwen", "given": {"a": "none", "b": flag}}
            assert client.post("/api/jobs", json=job).status_code in (400, 403), flag
        assert client.patch("/api/models/qwen", json={"vllm_args": ["--seed", "7"]}).status_code == 200
        assert not client.get("/api/jobs").json()


OPTIONS = (
    "native:1GiB,spec_name=Popen,spec_module_path=subprocess", "lmcache:1GiB,lmcache.remote_url=lm://evil.example:1",
    "x = 'native:1GiB,spec_module_path=os'", "simple:1GiB,kv_connector_module_path=os",
)  # fmt: skip


@attack(
    "What may be started",
    "an A/B of a connector whose options import a module or name a server",
    "403; nothing runs",
)
def dangerous_options(target: Target) -> None:
    with target.open.client() as client:
        for text in OPTIONS:
            for place in ("a", "b", "c"):
                given_ = {"a": "none", "b": "none", place: text}
                answer = client.post("/api/jobs", json={"kind": "ab", "model": "qwen", "given": given_})
                assert answer.status_code == 403 and "may not be set over the web" in answer.text, answer.text
        assert not client.get("/api/jobs").json()


@attack(
    "What may be started", "a job with a field of its own, a shell's words, a file as workload", "400; nothing runs"
)
def odd_jobs(target: Target) -> None:
    marker = target.open.place.folder / "marker"
    with target.open.client() as client:
        for kind, given_ in (
            ("bench", {"url": "http://169.254.169.254"}), ("bench", {"out": "/etc/cron.d/x"}),
            ("bench", {"label": f"x\n; touch {marker}"}), ("bench; id", {}), ("serve", {}), ("../bench", {}),
            ("bench", {"seed": "$(id)"}), ("verify", {"minutes": "-1"}), ("verify", {"": "x"}),
            ("ab", {"a": f"none; touch {marker}"}), ("bench", {"label": "x" * 501}),
        ):  # fmt: skip
            answer = client.post("/api/jobs", json={"kind": kind, "model": "qwen", "given": given_})
            assert answer.status_code in (400, 403), (kind, given_, answer.text)
        assert not client.get("/api/jobs").json() and not marker.exists()


@attack(
    "What may be started",
    "stopping a process that is no vLLM server, the manager's own, or by another name",
    "400; it lives",
)
def foreign_processes(target: Target) -> None:
    with target.open.client() as client:
        engine = client.post("/api/engines/start/qwen").json()["pid"]
        for pid in (1, os.getpid(), target.open.pid, engine, target.closed.pid):
            for name in ("qwen", "init", "python", ""):
                answer = client.post(f"/api/found/{pid}/stop", json={"identity": "x", "confirm_name": name})
                assert answer.status_code == 400, (pid, name)
        for pid in (0, -1, 1 << 40):
            assert client.post(f"/api/found/{pid}/stop", json={"identity": "", "confirm_name": ""}).status_code == 422
        assert client.get("/api/engines/qwen").json()["pid"] == engine


@attack(
    "What may be started",
    "an address of the attacker's in every field that is text, to make the manager ask there",
    "no connection comes",
)
def ssrf(target: Target) -> None:
    with socket.create_server(("127.0.0.1", 0)) as canary, target.open.client() as client:
        canary.settimeout(0.5)
        url = f"http://127.0.0.1:{canary.getsockname()[1]}"
        for field in ("source", "notes", "dtype", "vllm_args", "kv_cache_dtype", "gpu_memory"):
            client.patch("/api/models/qwen", json={field: url})
        for body in ({"name": url, "source": url}, {"name": "ssrf", "source": url}):
            assert client.post("/api/models", json=body).status_code in (400, 403)
        for given_ in ({"url": url}, {"workload": url}, {"a": url}):
            client.post("/api/jobs", json={"kind": "ab", "model": "qwen", "given": given_})
        assert client.post("/v1/completions", json={**ASKED, "model": url}).status_code == 404
        client.post("/v1/echo", json={**ASKED, "api_base": url}, headers={"x-forwarded-host": url, "referer": url})
        host = url.removeprefix("http://")
        for line in (f"GET {url}/v1/models HTTP/1.1", f"POST {url}/v1/echo HTTP/1.1", f"CONNECT {host} HTTP/1.1"):
            target.open.say(f"{line}\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        for job in client.get("/api/jobs").json():
            client.post(f"/api/jobs/{job['id']}/stop")
        with pytest.raises(TimeoutError):
            canary.accept()


# Requests inside requests


def smuggled(
    target: Target, headers: str, body: str = "0\r\n\r\nGET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
) -> bytes:
    text = f"POST /v1/echo HTTP/1.1\nHost: localhost\nContent-Type: application/json\n{headers}\n\n".replace(
        "\n", "\r\n"
    )
    return target.open.say((text + body).encode("latin-1"))


@attack(
    "Requests inside requests", "`Content-Length` and `Transfer-Encoding` in one request to the gateway", "400, closed"
)
def both_lengths(target: Target) -> None:
    for headers in ("Content-Length: 6\nTransfer-Encoding: chunked", "Transfer-Encoding: chunked\nContent-Length: 60"):
        assert statuses(smuggled(target, headers)) == [400], headers


@attack("Requests inside requests", "two lengths, a signed, a hexadecimal or an empty one", "400, closed")
def odd_lengths(target: Target) -> None:
    for headers in ("Content-Length: 5\nContent-Length: 50", "Content-Length: +5", "Content-Length: 0x5",
                    "Content-Length: 5, 50", "Content-Length: -1", "Content-Length: 99999999999999999999"):  # fmt: skip
        assert statuses(smuggled(target, headers)) == [400], headers


@attack(
    "Requests inside requests", "`Transfer-Encoding : chunked`, `xchunked`, `chunked, identity`, twice", "400, closed"
)
def odd_encodings(target: Target) -> None:
    for headers in ("Transfer-Encoding : chunked", "Transfer-Encoding: xchunked",
                    "Transfer-Encoding: chunked, identity",
                    "Transfer-Encoding: chunked\nTransfer-Encoding: identity"):  # fmt: skip
        assert set(statuses(smuggled(target, headers))) == {400}, headers


@attack("Requests inside requests", "a chunk's size that is signed, too large or not ended well", "400, closed")
def odd_chunks(target: Target) -> None:
    inner = "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for body in (
        f"-1\r\n{inner}",
        f"fffffffffffffffff\r\n{inner}",
        f"0x1\r\na\r\n0\r\n\r\n{inner}",
        f"1\r\nab\r\n{inner}",
    ):
        assert statuses(smuggled(target, "Transfer-Encoding: chunked", body)) == [400], body


@attack(
    "Requests inside requests",
    "a whole request as a body, and `Connection: content-length, host`",
    "one request to the engine, with its right length",
)
def inner_request(target: Target) -> None:
    asked = json.dumps({**ASKED, "prompt": "POST /v1/echo HTTP/1.1\r\nContent-Length: 0\r\n\r\n"})
    with target.open.client() as client:
        headers = {"connection": "content-length, host, x-secret", "x-secret": "1", "content-type": "application/json",
                   "authorization": "Bearer ov-mine", "te": "trailers", "x-other": "2"}  # fmt: skip
        told = client.post("/v1/echo", content=asked, headers=headers).json()
        assert told["body"] == asked and told["headers"]["content-length"] == str(len(asked))
        assert told["headers"]["x-other"] == "2" and not {"x-secret", "authorization", "te", "cookie"} & set(
            told["headers"]
        )


# Slow clients, which were there all the time


@attack(
    "Size and time", f"{NUM_SLOW} clients whose headers do not end, and {NUM_SLOW} that say nothing, all the time",
    "closed after 10 s; nobody else waits",
)  # fmt: skip
def slow_headers(target: Target) -> None:
    with target.open.client() as client:
        assert client.get("/healthz").text == "ok\n"
    for one in target.slow[:-1]:
        assert read_all(one) == b""


@attack("Size and time", "a body of which one byte comes", "408 after 20 s, closed")
def slow_body(target: Target) -> None:
    assert statuses(read_all(target.slow[-1])) == [408]


@pytest.mark.parametrize("tried", ATTACKS, ids=lambda one: one.run.__name__)
def test_an_attack_gets_what_the_table_says(tried: Attack, target: Target) -> None:
    tried.run(target)
    assert target.open.process.poll() is None and target.closed.process.poll() is None


# Nonsense, drawn from the API's own description


def operations() -> list[Any]:
    schema = schemathesis.openapi.from_dict(make_web(None).openapi())
    found: list[Any] = list(schema.get_all_operations())
    # /api/events goes on for ever, and is read elsewhere.
    return [operation for one in found if (operation := one.ok()).path != "/api/events"]


@pytest.mark.parametrize("operation", operations(), ids=lambda one: one.label)
def test_no_request_of_the_description_is_a_servers_error(operation: Any, target: Target) -> None:
    """Well and badly formed ones, on models that are there and not: each answered as the description says."""
    url = target.open.url
    with contextlib.suppress(httpx.HTTPStatusError), target.open.client() as client:
        client.post("/api/models", json={"name": "spare", "source": "o/m"}).raise_for_status()

    @seed(7)
    @settings(
        max_examples=16, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(
        case=st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in GenerationMode)),
        known=st.sampled_from(["qwen", "spare", "broken", None]),
    )
    def ask(case: Any, known: str | None) -> None:
        if known is not None:
            for part in (case.path_parameters, case.body):
                for field in ("name", "model"):
                    if isinstance(part, dict) and field in part:
                        part[field] = known
        if isinstance(case.query, dict) and "follow" in case.query:
            case.query["follow"] = "false"
        if isinstance(case.body, dict) and case.body.get("kind") in ("bench", "ab", "verify", "tune"):
            case.body["given"] = {"none": "such"}  # else it would be measured for minutes
        answer = case.call(base_url=url, timeout=60)
        checks = (not_a_server_error, status_code_conformance, response_schema_conformance)
        case.validate_response(answer, checks=checks)

    ask()
    with target.open.client() as client:
        assert client.get("/healthz").text == "ok\n"


# The table


def test_the_table_of_the_page_is_this_one() -> None:
    text = (ROOT / "docs/security.md").read_text()
    for one in ATTACKS:
        assert f"### {one.kind}\n" in text, one.kind
        assert one.row in text, one.row
    assert len(re.findall(r"^\| (?!tried|---)", text.partition("## Attacks")[2], re.MULTILINE)) == len(ATTACKS)
