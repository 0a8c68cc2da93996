"""Pictures of every page of the manager, for the documentation: real manager, real engine on the CPU, tiny model.

python docs/pictures.py    writes docs/pictures/*.png; needs playwright and Debian's chromium
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

PAGES = ("/", "/models", "/add", "/try", "/activity", "/runs", "/logs", "/found", "/audit", "/api")
LOOKS = {
    "light": {"color_scheme": "light", "viewport": {"width": 1440, "height": 900}},
    "dark": {"color_scheme": "dark", "viewport": {"width": 1440, "height": 900}},
    "phone": {"color_scheme": "light", "viewport": {"width": 390, "height": 844}},
}
# All pages in light, and those that change most in the others.
IN_ALL_LOOKS = ("/", "/models")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "pictures", help="the folder for them")
    out = parser.parse_args().out
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("chromium is missing; run: apt-get install chromium")
    out.mkdir(parents=True, exist_ok=True)

    from playwright.sync_api import sync_playwright

    from tests.chat_model import make_chat_model
    from tests.managed import SETTINGS, managed

    with tempfile.TemporaryDirectory() as folder, managed(Path(folder)) as manager, sync_playwright() as playwright:
        with manager.client() as client:
            for name in ("tiny", "other"):
                source = make_chat_model(manager.models / name)
                body = {"name": name, "source": str(source), **SETTINGS, "notes": "random weights, for tests"}
                client.post("/api/models", json=body).raise_for_status()
            client.post("/api/engines/start/tiny").raise_for_status()
            for label in ("first", "second"):
                given = {"workload": "multi-turn:conversations=4,turns=3,first=256,input=32,output=16", "label": label}
                client.post("/api/jobs", json={"kind": "bench", "model": "tiny", "given": given}).raise_for_status()
            while any(job["state"] in ("waiting", "running") for job in client.get("/api/jobs").json()):
                time.sleep(0.5)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for look, options in LOOKS.items():
            page = browser.new_context(base_url=manager.url, **options).new_page()  # type: ignore[arg-type]
            for path in PAGES if look == "light" else IN_ALL_LOOKS:
                page.goto(path)
                _prepare(page, path)
                if path == "/found" and page.locator("article").count():
                    print("left out: /found shows servers of this machine, which are nobody's business")
                    continue
                page.screenshot(path=out / f"{path.strip('/') or 'dashboard'}-{look}.png", full_page=look == "light")
            if look == "light":
                page.goto("/compare?ids=1&ids=2")
                page.screenshot(path=out / "compare-light.png", full_page=True)
        browser.close()


def _prepare(page, path: str) -> None:  # type: ignore[no-untyped-def]
    """As a user would find it after a moment."""
    if path == "/":
        page.locator(".chart canvas").first.wait_for()
        page.wait_for_timeout(3000)
    elif path == "/models":
        page.locator("summary", has_text="Context").last.click()
        page.locator(".good", has_text="Fits:").wait_for()
    elif path == "/add":
        page.get_by_role("link", name="Choose tiny").click()
        page.locator(".map.large").first.wait_for()
    elif path == "/try":
        page.get_by_text("Options", exact=True).click()
        page.get_by_label("Longest answer, tokens").fill("24")
        page.get_by_label("Prompt", exact=True).fill("t20 t30 t40 t50")
        page.get_by_role("button", name="Send").click()
        page.locator("#turns > li").nth(1).wait_for(state="attached")
        page.locator("#try-send:enabled").wait_for()
    elif path == "/logs":
        page.locator("[data-log]", has_text="Application startup").wait_for()


if __name__ == "__main__":
    main()
