"""The manager behind a proxy that has TLS: the real process, asked as the proxy would ask it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from overspill.manager.errors import ManagerError
from overspill.manager.web.guards import client_address
from overspill.manager.web.setup import Setup, origin_of, require_protection
from overspill.registry import open_registry
from overspill.registry.access import create_key, remove_key, set_password
from tests.managed import Managed, managed
from tests.managed_here import managed_here
from tests.manager_process import place_in

PASSWORD = "four words, not together"
PUBLIC = "https://manager.example"
FORWARDED = {"Host": "manager.example", "X-Forwarded-For": "198.51.100.1, 203.0.113.9"}


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Managed]:
    folder = tmp_path_factory.mktemp("proxied")
    with open_registry(environ={"XDG_STATE_HOME": str(folder / "state")}) as registry:
        set_password(registry, PASSWORD)
    with managed(folder, "--public-url", PUBLIC) as running:
        yield running


def test_a_browser_logs_in_and_acts_through_the_proxy(manager: Managed) -> None:
    with manager.client(**FORWARDED, Origin=PUBLIC) as browser:
        page = browser.get("/login")
        assert page.status_code == 200 and "max-age" in page.headers["strict-transport-security"]
        assert browser.post("/login", data={"secret": "wrong, and long enough"}).status_code == 403
        entered = browser.post("/login", data={"secret": PASSWORD})
        assert entered.status_code == 303
        cookie = entered.headers["set-cookie"]
        assert cookie.startswith("__Host-overspill=") and "; Secure" in cookie
        kept = {"Cookie": cookie.partition(";")[0]}
        token = re.search(
            r'"X-CSRF-Token": "([0-9a-f]+)"', browser.get("/models", headers=kept).text.replace("&#34;", '"')
        )
        assert token is not None
        acted = {**kept, "X-CSRF-Token": token[1]}
        assert browser.post("/api/plan", json={"name": "none"}, headers=acted).status_code == 404, "it was let in"
        for elsewhere in ("http://manager.example", "https://evil.example"):
            refused = browser.post("/api/plan", json={"name": "none"}, headers={**acted, "Origin": elsewhere})
            assert refused.status_code == 403 and "another site" in refused.text
        assert browser.post("/api/plan", json={"name": "none"}, headers=kept).status_code == 403, "without the token"
        addresses = {(one["action"], one["address"]) for one in browser.get("/api/audit", headers=kept).json()}
        assert addresses == {("log in", "203.0.113.9")}


def test_a_client_behind_the_proxy_is_not_local(manager: Managed) -> None:
    with manager.client(**FORWARDED) as anybody:
        assert anybody.get("/api/models").status_code == 401
    with manager.client(Host="other.example") as anybody:
        assert anybody.get("/api/models").status_code == 421


@pytest.mark.parametrize("setup", [{"public_url": PUBLIC}, {"allowed_hosts": ("manager.example",)}])
def test_removing_the_last_key_does_not_admit_proxied_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setup: dict[str, Any]
) -> None:
    """The manager listens on loopback, where every client was local as soon as no key was left."""
    for place in place_in(tmp_path, monkeypatch):
        with place.registry() as registry:
            create_key(registry, "laptop")
        with managed_here(place, **setup) as here, here.client(**FORWARDED) as anybody:
            assert anybody.get("/api/models").status_code == 401
            with place.registry() as registry:
                remove_key(registry, "laptop")
            assert here.application is not None
            here.application.access.forget()
            for path in ("/api/models", "/v1/models", "/"):
                refused = anybody.get(path, headers={"Accept": "text/html"} if path == "/" else {})
                assert refused.status_code == 403, path
                told = refused.json()["error"]["message"]
                assert "neither a password nor an API key any more" in told and "overspill manager password" in told
            assert anybody.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"public_url": PUBLIC}, f"--public-url {PUBLIC}"),
        ({"allowed_hosts": ("manager.example",)}, "--allow-host manager.example"),
    ],
)
def test_a_way_in_from_elsewhere_needs_a_key_or_a_password(given: dict[str, Any], flag: str) -> None:
    setup = Setup(folder=Path(), **given)
    require_protection(setup, is_protected=True)
    with pytest.raises(
        ManagerError, match=rf"^{re.escape(flag)} lets .*overspill manager password.* Or leave that out"
    ):
        require_protection(setup, is_protected=False)


def test_public_access_needs_a_key_and_a_valid_site(tmp_path: Path) -> None:
    with managed(tmp_path) as plain:
        for words, told in (
            (("--public-url", PUBLIC), "has neither a password nor an API key"),
            (("--allow-host", "manager.example"), "has neither a password nor an API key"),
            (("--public-url", "manager.example"), "--public-url manager.example is not a site"),
        ):
            refused = plain.overspill("manager", "--port", "1", *words)
            assert refused.returncode == 2 and told in refused.stderr, refused.stderr


@pytest.mark.parametrize(
    ("peer", "told", "address"),
    [
        ("127.0.0.1", [b"198.51.100.1, 203.0.113.9"], "203.0.113.9"),
        ("127.0.0.1", [b"198.51.100.1", b"2001:db8::7"], "2001:db8::7"),
        ("::1", [b"203.0.113.9"], "203.0.113.9"),
        ("127.0.0.1", [b"203.0.113.9, nonsense"], "127.0.0.1"),
        ("127.0.0.1", [], "127.0.0.1"),
        ("192.0.2.4", [b"203.0.113.9"], "192.0.2.4"),
    ],
)
def test_only_a_proxy_on_this_machine_says_who_asks(peer: str, told: list[bytes], address: str) -> None:
    scope = {"client": (peer, 1), "headers": [(b"x-forwarded-for", one) for one in told]}
    assert client_address(scope, is_proxied=True) == address
    assert client_address(scope, is_proxied=False) == peer


def test_a_site_is_written_as_browsers_do() -> None:
    assert origin_of("https://Manager.Example:443/", "--public-url") == PUBLIC
    assert origin_of("http://manager.example:8080", "--public-url") == "http://manager.example:8080"
