"""Check a built site: every link and anchor has a target, and no page loads anything from another host.

Usage: python docs/links.py site
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "video": "src"}


class Links(HTMLParser):
    """The ids of a page, the links that it has and the files that it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.add(given["href"])
        if tag in LOADED and LOADED[tag] in given and given.get("rel") != "canonical":
            self.loads.add(given[LOADED[tag]])


def problems(site: Path) -> list[str]:
    """Return a line for each broken link and each file of another host."""
    site = site.resolve()
    pages = {path: Links(path) for path in sorted(site.rglob("*.html"))}
    found = [] if pages else [f"{site} has no pages"]
    for page, has in pages.items():
        for link in sorted(has.links | has.loads):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in has.loads and parts.scheme != "data":
                    found.append(f"{page}: loads {link} from another host")
                continue
            base = site if parts.path.startswith("/") else page.parent  # 404.html has absolute links
            target = (base / unquote(parts.path).lstrip("/")).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                found.append(f"{page}: {link} does not exist")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
                found.append(f"{page}: {link} has no such anchor")
    return found


def main() -> None:
    lines = problems(Path(sys.argv[1]))
    print("\n".join(lines) or "all links have targets; nothing is loaded from another host")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
