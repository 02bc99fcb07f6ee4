"""Headless Chromium, which the fixture `browser` starts: opening a page from disk, and checking it with axe-core."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

FLAGS = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking disable-sync"
SIZES = {"wide": (1200, 1600), "phone": (390, 844)}  # CSS pixels
LOOKS = (("wide", "dark"), ("phone", "light"))
RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice")
REPORTED = ("critical", "serious", "moderate")  # all but minor ones
SCHEME = """  // pages of mkdocs-material have a switch of their own, and colours that fade
const style = document.createElement("style");
style.textContent = "* { transition: none !important; animation: none !important }";
document.head.append(style);
const { dataset } = document.body;
if (dataset.mdColorScheme) dataset.mdColorScheme = arguments[0] === "dark" ? "slate" : "default";
"""
# the page's scripts follow a new size when it is drawn, which a busy machine does late
DRAWN = "requestAnimationFrame(() => requestAnimationFrame(arguments[0]))"
RUN = """
const [rules, done] = arguments;
const options = { runOnly: rules, resultTypes: ["violations"], preload: false };
axe.run(document, options).then(({ violations }) => done(violations));
"""


@contextmanager
def chromium() -> Iterator[Any]:
    """Starts Chromium with a profile of its own; yields None where it, its driver or selenium is not installed."""
    places = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in places or find_spec("selenium") is None:
        yield None
        return
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = places[0]
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for flag in f"{FLAGS} disable-component-update window-size=1200,1600".split():
            options.add_argument(f"--{flag}")
        options.add_argument(f"--user-data-dir={profile}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        browser = webdriver.Chrome(options, webdriver.ChromeService(places[1]))
        try:
            yield browser
        finally:
            browser.quit()


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


def axe() -> str | None:
    """The source of axe-core; None where axe_core_python, whose wheel holds it, is not installed."""
    found = find_spec("axe_core_python")
    places = found.submodule_search_locations if found is not None else None
    return (Path(places[0]) / "axe.min.js").read_text("utf-8") if places else None


def findings(browser: Any, source: str) -> Iterator[str]:
    """Yields a line for each element of the open page in which axe-core finds a fault: in a wide window in dark mode,
    and in light mode on a phone."""
    for size, scheme in LOOKS:
        width, height = SIZES[size]
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == "phone"}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        browser.execute_script(SCHEME, scheme)
        browser.execute_script(source)
        browser.execute_async_script(DRAWN)
        for one in browser.execute_async_script(RUN, RULES):
            for node in one["nodes"] if one["impact"] in REPORTED else ():
                why, element = node["failureSummary"].splitlines()[1], " ".join(node["html"].split())
                yield f"{size}, {scheme}: {one['impact']}: {one['id']}: {why.strip()}: {element[:200]}"
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
