"""Checksums of the files of a folder, stored in it, to detect a damaged cache or index."""

import hashlib
import json
from pathlib import Path
from typing import Any

from farspan.files import parse_json

NAME = "checksums.json"
_verified: dict[Path, tuple[int, int, int]] = {}  # verified files: inode, bytes, modification time (ns)


def seal(folder: Path) -> None:
    """Write the sizes and checksums of all files in a folder and below into its checksums.json."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != NAME)
    sums = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "blake2b": _sum(path)} for path in files
    }
    (folder / NAME).write_text(json.dumps(sums, indent=2) + "\n")


def is_sealed(folder: Path) -> bool:
    """Return whether a folder has checksums."""
    return (folder / NAME).is_file()


def verify(folder: Path, *needed: str) -> None:
    """Compare the files of a sealed folder with its checksums. A process reads a file again only if its inode, size or
    modification time has changed.

    Args:
        needed: files that must have a checksum.

    Raises:
        ValueError: a file is missing, truncated or changed, or checksums.json is damaged; names the file.
        OSError: a file cannot be read.
    """
    sums = parse_json((folder / NAME).read_bytes(), str(folder / NAME))
    if not isinstance(sums, dict) or not all(isinstance(one, dict) for one in sums.values()):
        raise ValueError(f"{folder / NAME} is damaged: expected an object of sizes and checksums")
    if missing := [name for name in needed if name not in sums]:
        raise ValueError(f"{folder / NAME} is damaged: it has no checksum of {missing[0]}")
    for name, expected in sums.items():
        _verify(folder / name, expected)


def _verify(path: Path, expected: dict[str, Any]) -> None:
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    now = path.stat()
    if now.st_size != expected.get("bytes"):
        raise ValueError(f"{path} is damaged: got {now.st_size:,} bytes, expected {expected.get('bytes')}")
    seen = now.st_ino, now.st_size, now.st_mtime_ns
    if _verified.get(path.resolve()) == seen:
        return
    if _sum(path) != expected.get("blake2b"):
        raise ValueError(f"{path} is damaged: its content does not have the stored checksum")
    _verified[path.resolve()] = seen


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
