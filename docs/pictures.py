"""Pictures of every page of the manager: real manager, real engine on the CPU, tiny models; and of a card that three
models share, with stand-ins for engines and for the card.

python docs/pictures.py              writes those that the documentation shows to docs/pictures
python docs/pictures.py --all OUT    writes all of them, in light, dark and for a phone, to the folder OUT

Needs playwright and Debian's chromium. Paths and names of this machine are replaced before a picture is taken.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

# By name; each template of a whole page is among them.
PAGES = {
    "dashboard": "/", "models": "/models", "add": "/add", "try": "/try", "activity": "/activity", "runs": "/runs",
    "job": "/runs/jobs/1", "result": "/results/1", "compare": "/compare?ids=1&ids=2", "logs": "/logs",
    "found": "/found", "keys": "/keys", "audit": "/audit", "api": "/api", "login": "/login", "refused": "/nowhere",
}  # fmt: skip
LOOKS = {
    "light": {"color_scheme": "light", "viewport": {"width": 1440, "height": 900}},
    "dark": {"color_scheme": "dark", "viewport": {"width": 1440, "height": 900}},
    "phone": {"color_scheme": "light", "viewport": {"width": 390, "height": 844}},
}
REPLACE = """pairs => {
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        let text = texts.currentNode.data;
        for (const [from, to] of pairs) text = text.replaceAll(from, to);
        if (text !== texts.currentNode.data) texts.currentNode.data = text;
    }
}"""


def shown_in_docs() -> set[str]:
    texts = [path.read_text() for path in (ROOT / "README.md", *HERE.glob("*.md"))]
    return {name for text in texts for name in re.findall(r"pictures/([\w-]+\.\w+)", text)}


class Camera:
    def __init__(self, browser: Browser, url: str, out: Path, wanted: set[str] | None, folder: str = "") -> None:
        self._browser, self._url, self._out, self._wanted = browser, url, out, wanted
        pairs = {
            f"{sys.executable} -P -m overspill": "overspill", sys.prefix: "~/.venv", str(ROOT): "~/overspill",
            folder: "~", str(Path.home()): "~", platform.node(): "here",
        }  # fmt: skip
        self._pairs = [pair for pair in pairs.items() if pair[0]]

    def take(self, name: str, path: str) -> None:
        for look, options in LOOKS.items():
            file = f"{name}-{look}.png"
            if self._wanted is not None and file not in self._wanted:
                continue
            context = self._browser.new_context(base_url=self._url, **options)  # type: ignore[arg-type]
            page = context.new_page()
            page.goto(path)
            _prepare(page, name)
            if name == "found" and page.locator("article").count():
                print(f"left out: {file} would show servers of this machine, which are nobody's business")
            else:
                self._shoot(page, self._out / file, is_whole=look != "phone" and name != "shared-card")
            context.close()

    def _shoot(self, page: Page, file: Path, *, is_whole: bool) -> None:
        while True:  # a page that lives may have been written anew meanwhile
            page.evaluate(REPLACE, self._pairs)
            page.screenshot(path=file, full_page=is_whole)
            text = page.inner_text("body")
            if not any(word in text for word, _ in self._pairs):
                break
        print(f"wrote {file}, {file.stat().st_size:,} bytes")


def of_pages(browser: Browser, out: Path, wanted: set[str] | None) -> None:
    from tests.chat_model import make_chat_model
    from tests.managed import SETTINGS, managed

    with tempfile.TemporaryDirectory() as folder, managed(Path(folder)) as manager:
        with manager.client() as client:
            for name in ("tiny-chat", "tiny-coder"):
                source = make_chat_model(manager.models / name)
                body = {"name": name, "source": str(source), **SETTINGS, "notes": "random weights"}
                client.post("/api/models", json=body).raise_for_status()
            client.post("/api/engines/start/tiny-chat").raise_for_status()
            for label in ("first", "second"):
                given = {"workload": "multi-turn:conversations=4,turns=3,first=256,input=32,output=16", "label": label}
                job = {"kind": "bench", "model": "tiny-chat", "given": given}
                client.post("/api/jobs", json=job).raise_for_status()
            while any(job["state"] in ("waiting", "running") for job in client.get("/api/jobs").json()):
                time.sleep(0.5)
        camera = Camera(browser, manager.url, out, wanted, folder)
        for name, path in PAGES.items():
            camera.take(name, path)


def of_shared_card(browser: Browser, out: Path, wanted: set[str] | None) -> None:
    """One is parked, and one of those that are awake has requests."""
    from tests.shared_card import shared_card

    def ask(url: str) -> None:
        import httpx

        body = {"model": "gemma-3-1b", "prompt": "x", "max_tokens": 200}
        httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False).raise_for_status()

    with shared_card() as card, card.here.client() as client:
        client.post("/api/engines/park/llama-3.2-3b").raise_for_status()
        asking = [threading.Thread(target=ask, args=(card.here.url,)) for _ in range(3)]
        for one in asking:
            one.start()
        while not client.get("/api/engines/gemma-3-1b").json()["kv"].get("used"):
            time.sleep(0.1)
        time.sleep(2)
        card.look()
        Camera(browser, card.here.url, out, wanted).take("shared-card", "/")
        for one in asking:
            one.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", type=Path, metavar="OUT", help="write all of them, to this folder")
    out = parser.parse_args().all
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("chromium is missing; run: apt-get install chromium")
    wanted = shown_in_docs() if out is None else None
    out = out or HERE / "pictures"
    out.mkdir(parents=True, exist_ok=True)

    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        of_shared_card(browser, out, wanted)
        of_pages(browser, out, wanted)
        browser.close()


def _prepare(page: Page, name: str) -> None:
    """As a user would find it after a moment."""
    if name == "dashboard":
        page.locator(".chart canvas").first.wait_for()
        page.wait_for_timeout(3000)
    elif name == "shared-card":
        page.locator("figure.map rect", has_text="KV in use").first.wait_for(state="attached")
        page.wait_for_timeout(2000)
    elif name == "models":
        page.locator("summary", has_text="Context").last.click()
        page.locator(".good", has_text="Fits:").wait_for()
    elif name == "add":
        page.get_by_role("link", name="Choose tiny-chat").click()
        page.locator(".map.large").first.wait_for()
    elif name == "try":
        page.get_by_text("Options", exact=True).click()
        page.get_by_label("Longest answer, tokens").fill("24")
        page.get_by_label("Prompt", exact=True).fill("t20 t30 t40 t50")
        page.get_by_role("button", name="Send").click()
        page.locator("#turns > li").nth(1).wait_for(state="attached")
        page.locator("#try-send:enabled").wait_for()
    elif name == "logs":
        page.locator("[data-log]", has_text="Application startup").wait_for()


if __name__ == "__main__":
    main()
