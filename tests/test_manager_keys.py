"""Keys with limits: for some models, for some time; made, listed and revoked in the page, the API and the shell."""

import asyncio
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from sqlalchemy import update

from overspill.manager.web.access import Access
from overspill.registry import Registry, RegistryError
from overspill.registry.access import Key, KeyExpired, KeyScope, create_key, list_keys
from overspill.registry.tables import now
from tests.chromium import Watched, chromium, needs_chromium
from tests.managed_here import Here, managed_here
from tests.manager_process import Place
from tests.pages import program

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.fixture
def here(place: Place) -> Iterator[Here]:
    place.add("a", aliases="chat", variants={"cold": {"temperature": 0}})
    place.add("b")
    with managed_here(place) as one:
        yield one


def ask(client: httpx.Client, model: str, path: str = "/v1/completions") -> httpx.Response:
    return client.post(path, json={"model": model, "prompt": "x", "max_tokens": 2})


def error_of(answer: httpx.Response) -> tuple[int, str, str]:
    told = answer.json()
    assert set(told["error"]) == {"message", "type", "param", "code"}
    return answer.status_code, told["error"]["code"], told["source"]


def expire(registry: Registry, name: str) -> None:
    with registry.writing() as session:
        session.execute(update(Key).where(Key.name == name).values(expires_at=now() - timedelta(seconds=1)))


def test_a_key_for_some_models_uses_no_others(place: Place, here: Here) -> None:
    with place.registry() as registry:
        create_key(registry, "owner")
        one, _ = create_key(registry, "one", KeyScope.GATEWAY, models=["a"])
        cold, _ = create_key(registry, "cold", KeyScope.GATEWAY, models=["chat:cold"])
    with here.client(authorization=f"Bearer {one}") as client:
        for name in ("a", "chat", "a:cold"):
            assert ask(client, name).is_success
        refused = ask(client, "b")
        assert error_of(refused) == (403, "model_not_allowed", "gateway")
        assert refused.json()["error"]["message"] == "the key one may not use 'b'; it is for a"
        assert error_of(ask(client, "secret-model")) == (403, "model_not_allowed", "gateway")
        assert error_of(client.get("/v1/models/b")) == (403, "model_not_allowed", "gateway")
        assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["a", "a:cold", "chat", "chat:cold"]
        assert client.get("/api/keys").status_code == 403
    with here.client(authorization=f"Bearer {cold}") as client:
        assert ask(client, "chat:cold").is_success
        assert ask(client, "a").status_code == ask(client, "chat").status_code == 403
        assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["chat:cold"]
    assert not place.starts("b")


def test_an_expired_key_is_refused_with_the_reason(place: Place, here: Here) -> None:
    with place.registry() as registry:
        create_key(registry, "owner")
        secret, key = create_key(registry, "guest", expires_in="30d")
        assert key.expires_at is not None and timedelta(days=29) < key.expires_at - now() < timedelta(days=31)
        with here.client(authorization=f"Bearer {secret}") as client:
            assert ask(client, "a").is_success
        with here.client() as browser:
            assert browser.post("/login", data={"secret": secret}).status_code == 303
            assert browser.get("/models").status_code == 200
            expire(registry, "guest")
            here.application.access.forget()  # type: ignore[union-attr]
            # Neither the key nor what was begun with it.
            assert browser.get("/models").status_code == 401
            assert "the key guest expired at" in browser.post("/login", data={"secret": secret}).text
        with here.client(authorization=f"Bearer {secret}") as client:
            refused = ask(client, "a")
            assert error_of(refused) == (401, "invalid_api_key", "gateway")
            assert "the key guest expired at" in refused.json()["error"]["message"]


def test_an_expired_key_still_protects(registry: Registry) -> None:
    """It ends its own right, and opens the door to nobody."""

    async def story() -> None:
        secret, _ = create_key(registry, "guest", expires_in=60)
        expire(registry, "guest")
        access = Access(registry, is_loopback=True)
        assert await access.is_protected() and await access.identify(None, None) is None
        assert not await access.has_way_in()
        with pytest.raises(KeyExpired):
            await access.identify(f"Bearer {secret}", None)

    asyncio.run(story())


@pytest.mark.parametrize(
    ("scope", "limits", "said"),
    [
        (KeyScope.ALL, {"models": ["a"]}, "give it the scope gateway"),
        (KeyScope.METRICS, {"models": ["a"]}, "give it the scope gateway"),
        (KeyScope.GATEWAY, {"models": ["a b"]}, "'a b' is not a model's name"),
        (KeyScope.ALL, {"expires_in": "99999d"}, "for 36500d at most"),
    ],
)
def test_limits_that_make_no_sense_are_refused(
    registry: Registry, scope: KeyScope, limits: dict[str, Any], said: str
) -> None:
    with pytest.raises(RegistryError, match=said):
        create_key(registry, "x", scope, **limits)
    assert list_keys(registry) == []


def test_the_api_makes_lists_and_revokes_keys(here: Here) -> None:
    with program(here) as client:
        first = client.post("/api/keys", json={"name": "phone", "scope": "gateway"})
        assert first.status_code == 400 and "cannot log in to this page" in first.json()["error"]["message"]
        assert client.post("/api/keys", json={"name": "x", "scope": "some"}).status_code == 422
        assert client.post("/api/keys", json={"name": "x", "expires_in": "soon"}).status_code == 400
        assert client.get("/api/keys").json() == []
        owner = client.post("/api/keys", json={"name": "owner"}).json()
        assert client.get("/api/keys").status_code == 401, "the first key protects at once"
    with here.client(authorization=f"Bearer {owner['key']}") as client:
        made = client.post("/api/keys", json={"name": "phone", "scope": "gateway", "models": ["a"], "expires_in": "1h"})
        assert made.status_code == 201
        with here.client(authorization=f"Bearer {made.json()['key']}") as phone:
            assert ask(phone, "a").is_success
        deadline = time.monotonic() + 60
        while not (listed := {one["name"]: one for one in client.get("/api/keys").json()})["phone"]["requests"]:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        phone_key = listed["phone"]
        assert (phone_key["prompt_tokens"], phone_key["completion_tokens"], phone_key["models"]) == (3, 2, ["a"])
        assert "key" not in phone_key and "digest" not in phone_key and made.json()["key"] not in str(listed)
        assert client.delete("/api/keys/phone").json()["name"] == "phone"
        assert client.delete("/api/keys/phone").status_code == 404
        told = [(one["action"], one["subject"], one["outcome"]) for one in client.get("/api/audit").json()]
        assert ("revoke key", "phone", "done") in told and ("add key", "owner", "done") in told
    with here.client(authorization=f"Bearer {made.json()['key']}") as phone:
        assert ask(phone, "a").status_code == 401


@needs_chromium
def test_the_page_makes_shows_once_and_revokes_a_key(here: Here) -> None:
    def make(page: "Page", name: str, scope: str, **more: str) -> None:
        page.get_by_label("Name").fill(name)
        page.get_by_label("For", exact=True).select_option(scope)
        for label, value in more.items():
            page.get_by_label(label).fill(value)
        page.get_by_role("button", name="Make a key").click()

    with chromium() as browser:
        watched = Watched(browser, here.url)
        page = watched.page(viewport={"width": 390, "height": 844})
        page.goto("/keys")
        make(page, "owner", "all")
        owner = page.get_by_label("The key").input_value()
        page.goto("/keys")
        page.get_by_label("Password, or an API key").fill(owner)
        page.keyboard.press("Enter")
        page.wait_for_url(f"{here.url}/")
        page.goto("/keys")
        make(page, "phone", "gateway", Models="a, b", Valid="7d")
        phone = page.get_by_label("The key").input_value()
        with here.client(authorization=f"Bearer {phone}") as client:
            assert ask(client, "a").is_success
        page.goto("/keys")
        assert phone not in page.content()
        row = page.get_by_role("row").filter(has_text="phone")
        assert "requests to models" in row.inner_text() and "a, b" in row.inner_text()
        page.once("dialog", lambda dialog: dialog.accept())
        row.get_by_role("button", name="Revoke").click()
        row.wait_for(state="detached")
        assert page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
        assert watched.problems == [] and watched.elsewhere == []
        watched.close()
    with here.client(authorization=f"Bearer {phone}") as client:
        assert ask(client, "a").status_code == 401
