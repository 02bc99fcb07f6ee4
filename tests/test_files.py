"""Files are whole or as they were, whatever happens while they are written."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from farspan.files import PREFIX, added, appending, built, locked, parse_json, remove_leftovers, write, written


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_written_whole_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "a.json", "é")
    write(tmp_path / "a.json", b"b")
    assert (tmp_path / "a.json").read_bytes() == b"b"
    assert names(tmp_path) == ["a.json"]


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077])
def test_a_new_file_is_as_readable_as_any_other_also_one_of_safetensors(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        with written(tmp_path / "a") as beside:
            save_file({"x": torch.zeros(1)}, beside)
        with built(tmp_path / "built") as new:
            save_file({"x": torch.zeros(1)}, new / "a")
        with added(tmp_path, last="c") as new:
            save_file({"x": torch.zeros(1)}, new / "c")
        (tmp_path / "b").write_text("1")
    finally:
        os.umask(before)
    modes = {file.stat().st_mode for file in (*tmp_path.glob("?"), tmp_path / "built" / "a")}
    assert modes == {(tmp_path / "b").stat().st_mode}


def test_a_file_whose_writing_fails_stays_as_it_was_and_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.json", "old")

    def full(beside: Path) -> None:
        beside.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def not_a_file(beside: Path) -> None:
        beside.mkdir()
        beside.write_text("")

    for fails, message in ((full, "No space left on device"), (not_a_file, "Is a directory")):
        with pytest.raises(OSError, match=rf"{message}: '.*/a\.json'$"), written(tmp_path / "a.json") as beside:
            fails(beside)
    assert (tmp_path / "a.json").read_text() == "old"
    assert names(tmp_path) == ["a.json"]


def test_a_link_is_replaced_and_its_target_left_alone(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "a.json").symlink_to(tmp_path / "secret")
    write(tmp_path / "a.json", "new")
    assert (tmp_path / "secret").read_text() == "mine"
    assert not (tmp_path / "a.json").is_symlink()


def test_files_of_a_folder_are_replaced_together_the_named_one_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "config.json", "old")
    moved: list[str] = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: (moved.append(Path(new).name), replace(old, new)))

    def fails(new: Path) -> None:
        (new / "config.json").write_text("half")
        raise RuntimeError

    with pytest.raises(RuntimeError), added(tmp_path, last="config.json") as new:
        fails(new)
    assert (tmp_path / "config.json").read_text() == "old"
    with added(tmp_path, last="config.json") as new:
        for name in ("config.json", "a", "z"):
            (new / name).write_text("new")
    assert moved[-1] == "config.json"
    assert names(tmp_path) == ["a", "config.json", "z"]


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError), built(tmp_path / "deep" / "index") as folder:
        folder.mkdir()
    assert names(tmp_path / "deep") == []
    with built(tmp_path / "deep" / "index") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "a").write_text("1")
    assert (tmp_path / "deep" / "index" / "inner" / "a").read_text() == "1"
    assert names(tmp_path / "deep") == ["index"]


@pytest.mark.parametrize(("replace", "kept"), [(False, "first"), (True, "second")])
def test_a_folder_that_another_process_made_meanwhile_is_kept_unless_it_is_to_be_replaced(
    tmp_path: Path, replace: bool, kept: str
) -> None:
    with built(tmp_path / "index", replace=replace) as folder:
        (folder / "a").write_text("second")
        (tmp_path / "index").mkdir()
        (tmp_path / "index" / "a").write_text("first")
    assert (tmp_path / "index" / "a").read_text() == kept
    assert names(tmp_path) == ["index"]


def test_a_folder_is_not_built_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "index").symlink_to(tmp_path / "theirs")
    with pytest.raises(NotADirectoryError, match=r"index'$"), built(tmp_path / "index") as folder:
        (folder / "a").write_text("")
    assert names(tmp_path / "theirs") == []


WRITING = """
import sys, time
from pathlib import Path
from farspan.files import built
with built(Path(sys.argv[1])) as folder:
    (folder / "a").write_text("half")
    print("writing", flush=True)
    time.sleep(60)
"""


def test_what_a_killed_process_left_is_removed_by_the_next_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITING, str(tmp_path / "index")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        remove_leftovers(tmp_path)
        assert len(list(tmp_path.glob(f"{PREFIX}*/*/index/a"))) == 1
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(names(tmp_path)) == 1
    (tmp_path / f"{PREFIX}link").symlink_to("/")
    (tmp_path / f"{PREFIX}barely-begun").mkdir()
    write(tmp_path / "other", "")
    assert names(tmp_path) == [f"{PREFIX}link", "other"]


def test_a_folder_that_another_process_removes_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock makes sure of its folder: mkdir finds it, and then it is gone."""
    make, removed = os.mkdir, list[str]()

    def mkdir(path: str, *rest: int) -> None:
        if Path(path).name.startswith(PREFIX) and Path(path).exists() and not removed:
            removed.append(str(path))
            Path(path).rmdir()
            raise FileExistsError(errno.EEXIST, "File exists", str(path))
        make(path, *rest)

    monkeypatch.setattr(os, "mkdir", mkdir)
    write(tmp_path / "a", "whole")
    assert len(removed) == 1
    assert (tmp_path / "a").read_text() == "whole"
    assert names(tmp_path) == ["a"]


def test_a_lock_is_held_until_its_block_ends(tmp_path: Path) -> None:
    with locked(tmp_path / "lock"), pytest.raises(ValueError, match="is being written by another process"):
        locked(tmp_path / "lock")
    with locked(tmp_path / "lock"):
        pass


def test_a_file_is_appended_to(tmp_path: Path) -> None:
    for line in (b"1\n", b"2\n"):
        with appending(tmp_path / "rows.jsonl") as file:
            file.write(line)
    assert (tmp_path / "rows.jsonl").read_text() == "1\n2\n"


def test_links_and_pipes_are_not_locked_or_written(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "pipe")
    started = time.monotonic()
    for name in ("link", "pipe"):
        with pytest.raises(ValueError, match="is not a regular file"):
            locked(tmp_path / name)
        with pytest.raises(ValueError, match="is not a regular file"):
            appending(tmp_path / name)
    assert not (tmp_path / "target").exists()
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 10**6, b"9" * 5000, "\ud800", b"", b"\x00"])
def test_json_that_cannot_be_read_is_a_value_error_that_names_it(content: bytes | str) -> None:
    with pytest.raises(ValueError, match=r"^a\.json, line 2 is damaged: "):
        parse_json(content, "a.json, line 2")
