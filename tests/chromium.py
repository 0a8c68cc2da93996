"""Debian's chromium, and pages in it of which nothing may leave the machine."""

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

CHROMIUM = shutil.which("chromium")
TIMEOUT_MS = 120_000
MISSING = [
    *(["Debian's chromium (apt-get install chromium)"] if CHROMIUM is None else []),
    *(["playwright (pip install playwright)"] if importlib.util.find_spec("playwright") is None else []),
]
if MISSING and os.environ.get("CI"):
    raise RuntimeError(f"the browser's tests need {' and '.join(MISSING)}")
needs_chromium = pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}")


@contextlib.contextmanager
def chromium() -> "Iterator[Browser]":
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(
            executable_path=CHROMIUM,
            headless=True,
            timeout=TIMEOUT_MS,
            args=["--disable-gpu", "--no-sandbox", "--disable-dev-shm-usage"],
        )
        yield opened
        opened.close()


class Watched:
    """Pages of one manager, of which nothing may leave the machine, and nothing may go wrong unseen."""

    def __init__(self, browser: "Browser", url: str) -> None:
        self.browser, self.url = browser, url
        self.elsewhere: list[str] = []
        self.problems: list[str] = []
        self._contexts: list[BrowserContext] = []

    def page(self, **options: Any) -> "Page":
        return self.watch(self.context(**options).new_page())

    def context(self, **options: Any) -> "BrowserContext":
        context = self.browser.new_context(base_url=self.url, **options)
        context.set_default_timeout(TIMEOUT_MS)
        self._contexts.append(context)
        return context

    def watch(self, page: "Page") -> "Page":
        page.on("request", lambda request: self._asked(request.url))
        page.on("console", lambda told: self._said(told.type, told.text))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        return page

    def close(self) -> None:
        for context in self._contexts:
            context.close()

    def _asked(self, url: str) -> None:
        if not url.startswith((self.url, "data:", "blob:")):
            self.elsewhere.append(url)

    def _said(self, kind: str, text: str) -> None:
        if kind == "error" and text.startswith("htmx:sendAbort"):
            # Going to another page cuts off a poll in flight, which htmx says in two lines.
            self.problems.remove(f"error: {text.replace('sendAbort', 'afterRequest')}")
        elif kind in ("error", "warning"):
            self.problems.append(f"{kind}: {text}")
