"""What mkdocs adds to the pages of docs/: the reference of the code, and the files of the repository that they name.

README.md is the home page. Other files outside docs/ are at `repository/PATH`: Markdown as pages, the rest as files.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from reference import pages

ROOT = Path(__file__).parents[1]
OUTSIDE = "repository/"
WHOLE = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    to_add = [*WHOLE, *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "benchmarks").glob("*.md")))]
    to_read = [f"docs/{file.src_uri}" for file in files.documentation_pages() if not file.generated_by]
    seen = set[str]()
    while to_add or to_read:
        for path in to_add:
            if path not in seen:
                seen.add(path)
                files.append(File.generated(config, _uri(path), abs_src_path=str(ROOT / path)))
                to_read += [path] * path.endswith(".md")
        named = {target for path in to_read for target in _targets(path)}
        to_add = sorted(one for one in named - seen if not one.startswith("docs/") and (ROOT / one).is_file())
        to_read = []
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links of the repository to where the site has their targets."""
    origin = page.file.src_uri
    path = "README.md" if origin == "index.md" else f"docs/{origin}"
    if origin.startswith(OUTSIDE):
        path = origin.removeprefix(OUTSIDE)

    def moved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link[2]))
        if not (ROOT / target).exists():  # a page that is generated, or a broken link, which mkdocs names
            return link[0]
        return f"{link[1]}{posixpath.relpath(_uri(target), posixpath.dirname(origin))}{link[3] or ''}"

    return LINK.sub(moved, markdown)


def _targets(path: str) -> set[str]:
    """Return the files of the repository that a page links to."""
    links = LINK.findall((ROOT / path).read_text("utf-8"))
    return {posixpath.normpath(posixpath.join(posixpath.dirname(path), target)) for _, target, _ in links}


def _uri(path: str) -> str:
    """Return where the site has a file of the repository."""
    if path == "README.md":
        return "index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else OUTSIDE + path
