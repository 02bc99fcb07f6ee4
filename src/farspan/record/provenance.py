"""What a process runs on: versions, hardware, and the source of farspan."""

import hashlib
import importlib.metadata
import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

PACKAGES = ("farspan", "torch", "transformers", "tokenizers", "numpy", "scipy")
PACKAGE = Path(__file__).resolve().parents[1]


def environment() -> dict[str, Any]:
    """Return versions, hardware, and the running source of farspan: its git commit, and a hash of its files."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerators": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
        **_imported(),
    }


@cache
def _imported() -> dict[str, Any]:
    """Return the versions that the process has imported; cached, so that later edits of the files do not count."""
    packages = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"packages": packages, "git": commit_of(PACKAGE), "source": source_hash(PACKAGE)}


def commit_of(package: Path) -> str | None:
    """Return the git commit of the checkout that has the package as src/farspan; None if there is none.

    The files of `.git` are read, and git is not called: git runs commands that a folder's `.git/config` names
    (`core.fsmonitor`, `filter.*.clean`), so it must not see a folder from somebody else.
    """
    checkout = package.parents[1]
    if package.parent.name != "src":  # installed, and not from a checkout
        return None
    try:
        place = checkout / ".git"
        if place.is_file():  # in a `git worktree` a file names the folder
            place = checkout / place.read_text("utf-8").removeprefix("gitdir:").strip()
        common = place / "commondir"
        shared = place / common.read_text("utf-8").strip() if common.is_file() else place
        head = (place / "HEAD").read_text("utf-8").strip()
        if not head.startswith("ref:"):
            return head or None
        branch = head.removeprefix("ref:").strip()
        for folder in (place, shared):
            if (folder / branch).is_file():
                return (folder / branch).read_text("utf-8").strip() or None
        packed = (shared / "packed-refs").read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    return next((line.split(" ")[0] for line in packed if line.endswith(f" {branch}")), None)


def source_hash(package: Path) -> str:
    """Return a hash over the package's Python files, which also changes with uncommitted edits."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
