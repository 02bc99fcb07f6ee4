"""Headless Chromium opening a page from disk; the fixture `browser` starts it."""

from pathlib import Path
from typing import Any


def opened(browser: Any, path: Path) -> float:
    """Opens a page from disk; milliseconds from the start of the navigation until its figures stood."""
    from selenium.webdriver.support.wait import WebDriverWait

    browser.get_log("browser"), browser.get_log("performance")
    browser.get(path.as_uri())
    return float(
        WebDriverWait(browser, 60, 0.02).until(
            lambda it: it.execute_script("return document.documentElement.dataset.drawn")
        )
    )
