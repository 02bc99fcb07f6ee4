"""What comes from a stranger, folders, models and names, runs no command and no code."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

from farspan import record


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that does not exist while no command of the current folder's .git/config has run."""
    trap, proof, folder = tmp_path / "trap.sh", tmp_path / "ran", tmp_path / "unpacked"
    trap.write_text(f"#!/bin/sh\ntouch {proof}\ncat\n")
    trap.chmod(trap.stat().st_mode | stat.S_IXUSR)
    folder.mkdir()
    clean = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull, "PATH": os.environ["PATH"]}

    def git(*arguments: str) -> None:
        name = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *name, *arguments], cwd=folder, check=True, capture_output=True, env=clean)

    git("init")
    (folder / "text.txt").write_text("a text\n")
    git("add", ".")
    git("commit", "-m", "text")
    (folder / ".gitattributes").write_text("*.txt filter=trap diff=trap\n")
    settings = ("core.fsmonitor", "filter.trap.clean", "filter.trap.smudge", "diff.trap.textconv", "core.sshCommand")
    for setting in (*settings, "core.pager", "core.hooksPath", "alias.describe", "core.editor"):
        git("config", setting, f"!{trap}" if setting.startswith("alias") else str(trap))
    (folder / "text.txt").write_text("a text that was changed\n")  # so that the filter has to run to compare it
    os.utime(folder / "text.txt", (1, 1))
    monkeypatch.chdir(folder)
    return proof


def test_no_command_of_a_folders_git_config_runs(ran: Path) -> None:
    with record.Run.open("run", {"task": "curve"}) as run:
        session = run.header["sessions"][0]
    assert not ran.exists()
    assert len(session["source"]) == 16
    subprocess.run(["git", "describe", "--always", "--dirty"], check=True, capture_output=True)
    assert ran.exists(), "the folder of this test is no trap"


@pytest.mark.parametrize("packed", [False, True], ids=["loose", "packed"])
def test_the_recorded_commit_is_that_of_the_checkout(tmp_path: Path, packed: bool) -> None:
    def git(*arguments: str, where: Path = tmp_path) -> str:
        name = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(["git", *name, *arguments], cwd=where, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    checkout, other, package = tmp_path / "checkout", tmp_path / "other", tmp_path / "checkout" / "src" / "farspan"
    package.mkdir(parents=True)
    assert record.commit_of(package) is None
    git("init", where=checkout)
    assert record.commit_of(package) is None  # a branch without a commit
    git("commit", "--allow-empty", "-m", "one", where=checkout)
    git("worktree", "add", str(other), where=checkout)
    git("commit", "--allow-empty", "-m", "two", where=other)
    if packed:
        git("pack-refs", "--all", where=checkout)
    (other / "src" / "farspan").mkdir(parents=True)
    for folder in (checkout, other):
        assert record.commit_of(folder / "src" / "farspan") == git("rev-parse", "HEAD", where=folder)
    git("checkout", "--detach", where=other)
    assert record.commit_of(other / "src" / "farspan") == git("rev-parse", "HEAD", where=other)
    assert record.commit_of(tmp_path / "site-packages" / "farspan") is None


def test_the_recorded_hash_of_the_source_tells_changes_apart(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one")
    before = record.source_hash(tmp_path)
    (tmp_path / "a.py").write_text("two")
    assert record.source_hash(tmp_path) != before
