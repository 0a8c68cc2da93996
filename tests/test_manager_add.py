"""Adding a model: found here or on the hub, downloaded with progress, pictured at a context, started, and talked to."""

import asyncio
import contextlib
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from overspill.kv.sizes import MiB
from overspill.manager.errors import ManagerError
from overspill.manager.library import Downloads, hub_bytes, local_models, remove_cached, search_hub
from overspill.manager.needs import NOTHING, replan
from overspill.manager.telemetry.overview import Kind, plan_maps
from overspill.manager.web.forms import GROUPS
from overspill.processes import below
from overspill.registry import ModelSettings
from overspill.settings import MODEL_SETTINGS, parse_settings
from tests.chat_model import make_chat_model
from tests.chromium import Watched, chromium, needs_chromium
from tests.fake_hub import FakeHub, fake_hub
from tests.managed import SETTINGS
from tests.managed_here import Here, managed_here
from tests.manager_process import Place

if TYPE_CHECKING:
    from playwright.sync_api import Page

REPOSITORY = "org/tiny-chat"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with fake_hub() as one:
        monkeypatch.setenv("HF_ENDPOINT", one.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        made = make_chat_model(tmp_path / "made")
        files = {path.name: path.read_bytes() for path in made.iterdir() if path.is_file()}
        one.repositories[REPOSITORY] = {**files, "pytorch_model.bin": b"x" * 100}
        yield one


@pytest.fixture
def here(hub: FakeHub, place: Place) -> Iterator[Here]:
    with managed_here(place) as one:
        yield one


@pytest.fixture
def watched(here: Here) -> Iterator[Watched]:
    with chromium() as browser:
        one = Watched(browser, here.url)
        yield one
        assert one.elsewhere == []
        one.close()


def until_over(downloads: Downloads) -> str:
    deadline = time.monotonic() + 60
    while (seen := downloads.list()[0]).state == "running":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return seen.state


def test_every_setting_is_in_one_group() -> None:
    grouped = [setting.name for _, group in GROUPS for setting, _ in group]
    assert sorted(grouped) == sorted(setting.name for setting in MODEL_SETTINGS)


def test_models_are_found_and_removed(tmp_path: Path) -> None:
    cache, folder = tmp_path / "hub", tmp_path / "models"
    for name in ("models--org--whole", "models--org--part"):
        (cache / name / "blobs").mkdir(parents=True)
        (cache / name / "snapshots/1").mkdir(parents=True)
        (cache / name / "blobs/1").write_bytes(b"x" * 100)
        (cache / name / "snapshots/1/config.json").write_text("{}")
        (cache / name / "snapshots/1/model.safetensors").symlink_to("../../blobs/1")
    (cache / "models--org--part/blobs/2.incomplete").write_bytes(b"x" * 50)
    (folder / "team/qwen").mkdir(parents=True)
    (folder / "team/qwen/config.json").write_text("{}")
    (folder / "team/qwen/model.safetensors").write_bytes(b"x" * 30)
    found = {one.name: one for one in local_models([folder], cache)}
    assert found["org/whole"].is_complete and found["org/whole"].num_bytes == 102
    assert not found["org/part"].is_complete and found["team/qwen"].num_bytes == 30
    assert remove_cached(cache, "org/whole") == 102
    assert {one.name for one in local_models([folder], cache)} == {"org/part", "team/qwen"}
    for source in ("../models", "/etc", "org/none"):
        with pytest.raises(ManagerError):
            remove_cached(cache, source)


@contextlib.contextmanager
def as_somebody() -> Iterator[None]:
    """As a user who is not root, who may read everything."""
    before = os.geteuid()
    os.seteuid(before or 65534)
    try:
        yield
    finally:
        os.seteuid(before)


def test_a_folder_that_may_not_be_read_hides_no_other() -> None:
    """A disk of its own for models has a lost+found."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        folder.chmod(0o755)
        (folder / "good").mkdir()
        (folder / "good/config.json").write_text("{}")
        (folder / "lost+found").mkdir(mode=0)
        with as_somebody():
            assert [one.name for one in local_models([folder], folder / "none")] == ["good"]
            assert local_models([folder / "lost+found"], folder / "none") == []
        (folder / "lost+found").chmod(0o700)


def test_an_unreachable_hub_is_said_plainly(hub: FakeHub) -> None:
    assert [one.source for one in search_hub("TINY")] == [REPOSITORY]
    assert 0 < hub_bytes(REPOSITORY) < sum(map(len, hub.repositories[REPOSITORY].values()))
    with pytest.raises(ManagerError, match="check the name"):
        hub_bytes("org/none")
    with pytest.raises(ManagerError, match="cannot be reached from here"):
        search_hub("x", {"HF_ENDPOINT": "http://127.0.0.1:9"})
    with pytest.raises(ManagerError, match="HF_HUB_OFFLINE"):
        search_hub("x", {"HF_HUB_OFFLINE": "1"})


def test_a_paused_download_goes_on_with_the_missing_files(hub: FakeHub, tmp_path: Path) -> None:
    del hub.repositories[REPOSITORY]["model.safetensors"]
    hub.repositories[REPOSITORY]["model-00001-of-00002.safetensors"] = os.urandom(MiB)
    hub.repositories[REPOSITORY]["model-00002-of-00002.safetensors"] = os.urandom(30 * MiB)
    hub.piece_s = 0.02
    downloads = Downloads(tmp_path / "cache", tmp_path / "downloads")

    async def start_twice() -> None:
        await asyncio.gather(downloads.start(REPOSITORY), downloads.start(REPOSITORY))

    before = set(below(os.getpid()))
    asyncio.run(start_twice())
    assert len(set(below(os.getpid())) - before) == 1, "one process, though it was asked for twice at once"
    deadline = time.monotonic() + 60
    while downloads.list()[0].done_bytes < 10 * MiB:
        assert time.monotonic() < deadline and downloads.list()[0].state == "running", downloads.list()
        time.sleep(0.05)
    downloads.stop(REPOSITORY)
    (paused,) = downloads.list()
    assert paused.state == "stopped" and MiB <= paused.done_bytes < 10 * MiB  # the first, and no half
    (part,) = local_models([], tmp_path / "cache")
    assert not part.is_complete, "also for a manager that knows nothing of the download"
    hub.piece_s, sent = 0.0, len(hub.begun_at)
    asyncio.run(downloads.start(REPOSITORY))
    assert until_over(downloads) == "done" and len(hub.begun_at) == sent + 1
    (found,) = local_models([], tmp_path / "cache")
    assert found.is_complete and found.num_bytes > 31 * MiB


def test_the_picture_adds_up(tmp_path: Path) -> None:
    settings = ModelSettings(source=str(make_chat_model(tmp_path / "m")), **parse_settings(SETTINGS))
    planned = replan(settings, {"max_model_len": 4096}, NOTHING)
    assert planned.fits, planned.why_not
    device, ram = plan_maps(planned)
    for one in (device, ram):
        assert sum(part.num_bytes for part in one.parts) == one.total_bytes
    kinds = {part.kind for part in device.parts}
    assert {Kind.WEIGHTS, Kind.RESIDENT_KV} <= kinds and ram.title == "RAM"


def speeds(page: "Page") -> list[str]:
    return page.locator("#add-plan tbody td").all_inner_texts()


@needs_chromium
def test_from_nothing_to_a_chat(watched: Watched, hub: FakeHub, place: Place) -> None:
    """Find it on the hub, download it, turn the dial, start, and talk."""
    place.behave("tiny-chat", start_s=0.5)
    page = watched.page(viewport={"width": 1280, "height": 900})
    page.goto("/")
    page.wait_for_url("**/add")
    page.get_by_label("Search").fill("tiny")
    page.keyboard.press("Enter")
    page.get_by_role("button", name=f"Download {REPOSITORY}").click()
    page.get_by_role("link", name="Use it").click()
    page.wait_for_url(re.compile(r"/add\?source="))
    page.locator("#add-plan .good", has_text="Fits").wait_for()
    assert page.locator("#add-plan .map").count() == 2 and page.get_by_text("First token after").is_visible()
    before = speeds(page)
    dial = page.get_by_label("Context: how long a conversation may be, in tokens")
    dial.fill("1024")
    page.locator("#add-plan th", has_text="1,024 tokens").wait_for()
    assert (
        page.locator("#add-number").input_value() == "1024"
        and len(speeds(page)) == 2
        and speeds(page)[0] != before[0]
        and speeds(page)[1] != before[1]
    )
    page.get_by_role("button", name="Start").click()
    page.wait_for_url(re.compile(r"/try\?model=tiny-chat"))
    page.get_by_label("Prompt", exact=True).fill("hello")
    page.get_by_role("button", name="Send").click()
    page.locator("#turns li.assistant", has_text="tiny-chat-0").wait_for()
    page.goto("/add")
    page.get_by_text("added as tiny-chat").wait_for()
    assert watched.problems == []


@needs_chromium
def test_files_are_removed_and_not_while_they_are_used(watched: Watched, hub: FakeHub, here: Here) -> None:
    cache = Path(os.environ["HF_HOME"]) / "hub/models--org--old"
    (cache / "blobs").mkdir(parents=True)
    (cache / "blobs/1").write_bytes(b"x" * MiB)
    page = watched.page()
    page.on("dialog", lambda dialog: dialog.accept())
    page.goto("/add")
    page.get_by_role("button", name="Remove the files of org/old").click()
    page.get_by_role("button", name="Remove the files of org/old").wait_for(state="detached")
    assert not cache.exists()


@needs_chromium
def test_a_plan_that_fails_says_why_where_it_would_be(watched: Watched, tmp_path: Path) -> None:
    page = watched.page()
    page.goto("/add?source=org/none")
    page.locator("#add-plan .problem").wait_for()
    page.goto("/add?source=/etc")
    page.locator("#add-plan", has_text="is outside the folders that models may come from").wait_for()
