"""From an empty home to the first answer: what has to be clicked and typed, in the page and in the shell."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chat_model import make_chat_model
from tests.chromium import Watched, chromium, needs_chromium
from tests.fake_hub import fake_hub
from tests.managed import managed
from tests.test_run import PROMPT, shell
from tests.test_serve import START_S

REPOSITORY = "org/tiny-chat"
QUESTION = "t5 t6 t7"
# What a machine without a GPU needs to be quick, and this test to be small; nobody types it.
SMALL = {
    "OVERSPILL_RAM": "6GiB",
    "OVERSPILL_GPU_MEMORY": "256MiB",
    "OVERSPILL_DTYPE": "float32",
    "OVERSPILL_ENFORCE_EAGER": "true",
}
COUNT = """
addEventListener("click", (event) => event.isTrusted && event.detail && counted("click", ""), true);
addEventListener("keydown", (event) => event.isTrusted && counted("key", event.key), true);
"""


@pytest.fixture
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """With a hub that has a model, and nothing of it here."""
    with fake_hub() as hub:
        made = make_chat_model(tmp_path / "hub's own")
        hub.repositories[REPOSITORY] = {path.name: path.read_bytes() for path in made.iterdir() if path.is_file()}
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        home = tmp_path / "home"
        home.mkdir()
        yield {
            **SMALL, "HOME": str(home), "HF_HOME": str(home / "hf"), "HF_ENDPOINT": hub.url,
            "XDG_STATE_HOME": str(home / "state"),
        }  # fmt: skip


@needs_chromium
def test_a_page_needs_three_clicks_and_one_word(empty_home: dict[str, str], tmp_path: Path) -> None:
    clicks: list[str] = []
    typed = ""

    def counted(_: object, kind: str, key: str) -> None:
        nonlocal typed
        if kind == "click":
            clicks.append(kind)
        else:
            typed += {"Enter": "\n"}.get(key, key)

    with managed(tmp_path, **empty_home) as manager, chromium() as browser:
        watched = Watched(browser, manager.url)
        context = watched.context()
        context.expose_binding("counted", counted)
        context.add_init_script(COUNT)
        page = watched.watch(context.new_page())
        page.goto("/")
        page.wait_for_url("**/add")
        page.keyboard.type("tiny\n")
        page.get_by_role("button", name=f"Download {REPOSITORY}").click()
        page.get_by_role("link", name="Use it").click()
        page.locator("#add-plan .good", has_text="Fits").wait_for()
        page.get_by_role("button", name="Start").click()
        page.wait_for_url("**/try?model=*")
        page.locator("#try-prompt:focus").wait_for()
        page.keyboard.type(f"{QUESTION}\n")
        page.locator("#turns > li.assistant", has_text=" t").wait_for(timeout=1000 * START_S)
        assert watched.elsewhere == []
        watched.close()
    assert (len(clicks), typed) == (3, f"tiny\n{QUESTION}\n")


def test_a_shell_needs_three_words(empty_home: dict[str, str]) -> None:
    with shell(REPOSITORY, home=empty_home) as chat:
        chat.wait_for(PROMPT, within=START_S)
        chat.type(f"{QUESTION}\n")
        chat.wait_for(QUESTION)
        chat.wait_for(" t")
