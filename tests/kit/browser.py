"""The system's Chromium, driven by playwright, for tests of pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

#: In the order in which they are tried.
NAMES = ("chromium", "chromium-browser", "google-chrome")
#: As root it has no sandbox, and in a container no large /dev/shm.
_FLAGS = ("--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu")


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser without a window; the test is skipped where there is none."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"there is none of {', '.join(NAMES)}; Debian: apt-get install chromium")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=list(_FLAGS))
        try:
            yield browser
        finally:
            browser.close()
