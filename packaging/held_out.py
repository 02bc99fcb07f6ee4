"""Copy the held-out part of Python's library: python3.11 packaging/held_out.py. Another version of Python gives another
text, and so other numbers of all measurements on it."""

import gzip
import json
import platform
import sysconfig
from importlib import resources
from pathlib import Path

from farspan.text import library

if __name__ == "__main__":
    copy = Path(str(resources.files("farspan").joinpath(library.COPY)))
    copy.parent.mkdir(parents=True, exist_ok=True)
    files = {
        place: text for place, text in library.installed(library.is_held_out) if len(text) >= library.MIN_CHARACTERS
    }
    found = json.dumps({"python": platform.python_version(), "files": files}).encode()
    copy.write_bytes(gzip.compress(found, mtime=0))
    licence = Path(sysconfig.get_path("stdlib"), "LICENSE.txt").read_text("utf-8")
    (copy.parent / "LICENSE").write_text(licence, "utf-8")
    print(f"{len(files)} files, {copy.stat().st_size:,} bytes: {copy}")
