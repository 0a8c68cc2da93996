"""Scripts of other sites: those of --allow-origin may use the gateway, in a browser too, and nobody else anything."""

import contextlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from overspill.manager.errors import ManagerError
from overspill.manager.web.setup import origin_of
from overspill.registry.access import KeyScope, create_key
from tests.chromium import TIMEOUT_MS, chromium, needs_chromium
from tests.managed_here import managed_here
from tests.manager_process import Place, place_in

SITE = "https://chat.example"
ASKED = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-stainless-os"}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    for one in place_in(tmp_path, monkeypatch):
        one.add("a")
        yield one


def key_of(place: Place) -> str:
    with place.registry() as registry:
        return create_key(registry, "chat", KeyScope.GATEWAY)[0]


def test_a_browser_is_told_what_a_site_may_ask_of_the_gateway(place: Place) -> None:
    """It was told nothing, so that --allow-origin allowed nothing."""
    key_of(place)
    with managed_here(place, allowed_origins=(SITE,)) as here, here.client() as client:
        for path in ("/v1/chat/completions", "/v1/models"):
            answer = client.options(path, headers={"Origin": SITE, **ASKED})
            assert (answer.status_code, answer.content) == (204, b"")
            assert answer.headers["access-control-allow-origin"] == SITE and answer.headers["vary"] == "origin"
            assert "POST" in answer.headers["access-control-allow-methods"]
            assert answer.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
            assert int(answer.headers["access-control-max-age"]) > 0
            assert "access-control-allow-credentials" not in answer.headers
        others = [
            ("/v1/models", {"Origin": "https://evil.example", **ASKED}),
            ("/v1/models", {"Origin": f"{SITE}.evil.example", **ASKED}),
            ("/v1/models", {"Origin": SITE}),  # no question of a browser's
            ("/v1/models", ASKED),
            ("/v1/models", {"Origin": SITE, "Host": "evil.example", **ASKED}),
            ("/api/models", {"Origin": SITE, **ASKED}),
            ("/", {"Origin": SITE, **ASKED}),
            ("/metrics", {"Origin": SITE, **ASKED}),
        ]
        for path, headers in others:
            answer = client.options(path, headers=headers)
            assert answer.status_code >= 400, (path, headers)
            assert "access-control-allow-methods" not in answer.headers


def test_only_the_allowed_site_reads_gateway_answers_and_errors(place: Place) -> None:
    key = {"Authorization": f"Bearer {key_of(place)}"}
    body = {"model": "a", "prompt": "x", "max_tokens": 2}
    with managed_here(place, allowed_origins=(SITE,)) as here, here.client(Origin=SITE) as client:
        refused = client.get("/v1/models")
        assert refused.status_code == 401 and refused.json()["source"] == "gateway"
        assert refused.json()["error"]["code"] == "invalid_api_key"
        answers = [
            refused,
            client.get("/v1/models", headers=key),
            client.post("/v1/completions", json=body, headers=key),
            client.post("/v1/completions", json={**body, "stream": True}, headers=key),
            client.post("/v1/echo", json=body, headers=key),  # which says of itself that every site may read it
            client.post("/v1/completions", json={**body, "model": "none"}, headers=key),
        ]
        assert [one.status_code for one in answers] == [401, 200, 200, 200, 200, 404]
        for one in answers:
            assert one.headers.get_list("access-control-allow-origin") == [SITE], one.url
            assert one.headers["cross-origin-resource-policy"] == "cross-origin" and one.headers["vary"] == "origin"
        assert "origin" not in answers[4].json()["headers"]
        # A site that may use the gateway may not use the rest.
        for one in (client.get("/healthz"), client.post("/api/engines/stop/a", headers=key)):
            assert "access-control-allow-origin" not in one.headers
            assert one.headers["cross-origin-resource-policy"] == "same-origin"
        assert client.post("/api/engines/stop/a", headers=key).status_code == 403
        evil = {**key, "Origin": "https://evil.example"}
        for one in (client.get("/v1/models", headers=evil), client.post("/v1/completions", json=body, headers=evil)):
            assert "access-control-allow-origin" not in one.headers
            assert one.headers["cross-origin-resource-policy"] == "same-origin"
        assert client.post("/v1/completions", json=body, headers=evil).status_code == 403


def test_origins_are_normalised_or_refused() -> None:
    given = ["https://chat.example/", "HTTPS://Chat.Example:443", "http://localhost:3000", "http://[::1]:3000"]
    assert tuple(origin_of(one, "--allow-origin") for one in given) == (
        "https://chat.example", "https://chat.example", "http://localhost:3000", "http://[::1]:3000",
    )  # fmt: skip
    for wrong in ("*", "chat.example", "https://", "https://chat.example/app", "https://me@chat.example",
                  "https://chat.example:x", "null", ""):  # fmt: skip
        with pytest.raises(ManagerError, match=r"--allow-origin .*https://chat\.example"):
            origin_of(wrong, "--allow-origin")


@needs_chromium
def test_a_page_of_that_site_uses_the_gateway_in_a_browser(place: Place) -> None:
    key = key_of(place)
    with (
        page_elsewhere() as site,
        page_elsewhere() as evil,
        managed_here(place, allowed_origins=(site,)) as here,
        chromium() as browser,
    ):
        page = browser.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.goto(site)
        asked = {"url": here.url, "key": key}
        assert page.evaluate(ASK, asked) == [401, 200, "a-0 a-1 ", True]
        page.goto(evil)
        assert page.evaluate(ASK, asked) == ["TypeError"]


ASK = """async ({url, key}) => {
  const headers = {"Authorization": `Bearer ${key}`, "Content-Type": "application/json", "X-Stainless-OS": "x"};
  const body = JSON.stringify({model: "a", messages: [], max_tokens: 2});
  try {
    const refused = await fetch(`${url}/v1/models`);
    const answer = await fetch(`${url}/v1/chat/completions`, {method: "POST", headers, body});
    const text = (await answer.json()).choices[0].message.content;
    const api = await fetch(`${url}/api/models`, {headers}).then(() => false, () => true);
    return [refused.status, answer.status, text, api];
  } catch (error) {
    return [error.name];
  }
}"""


@contextlib.contextmanager
def page_elsewhere() -> Iterator[str]:
    """An empty page of a site of its own; its origin."""

    class Empty(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *told: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Empty) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
