"""Names of texts as readers see them."""

import re
from pathlib import Path

from farspan.files import cache_folder

LISTED = "a list of documents"
_LISTED = re.compile(r"(shuffled:)?.*[/\\]texts[/\\][0-9a-f]{16}\.jsonl")  # as `path_of_list` makes it


def path_of_list(digest: str) -> Path:
    """Return the file in the cache for documents that were given as a list.

    Args:
        digest: of the documents, 16 hexadecimal digits.
    """
    return cache_folder() / "texts" / f"{digest}.jsonl"


def title_of(name: str) -> str:
    """Return the name of a text for readers: that of documents given as a list is the path of a file in the cache."""
    found = _LISTED.fullmatch(name)
    return f"{found[1] or ''}{LISTED}" if found else name


def described(name: str) -> str:
    """Return the name of a text as the subject of a message."""
    title = title_of(name)
    return title if title == LISTED else f"text {title!r}"
