"""Check the pages of a built site with axe-core in headless Chromium: WCAG 2.1 A and AA, and its best practices.

A wide window in dark mode and the width of a phone in light mode. Usage: python docs/accessibility.py site
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from browser import axe, chromium, findings


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        """Log nothing."""


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Serve a folder on loopback; yields its address. 404.html has absolute links, which need one."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


def problems(site: Path, browser: object, source: str) -> Iterator[str]:
    """Yield a line for each fault of a page."""
    with served(site) as address:
        for page in sorted(site.rglob("*.html")):
            path = page.relative_to(site).as_posix()
            browser.get(f"{address}/{path}")
            yield from (f"{path}: {line}" for line in findings(browser, source))


def main() -> None:
    source, lines = axe(), []
    with chromium() as browser:
        if source is None or browser is None:
            print("accessibility is not checked: it needs chromium, chromedriver, selenium and axe-core-python")
            return
        for line in problems(Path(sys.argv[1]), browser, source):
            lines.append(line)
            print(line, flush=True)
    print(f"{len(lines)} faults of accessibility" if lines else "axe-core finds no fault of accessibility")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
