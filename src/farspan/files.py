"""Write files atomically (next to their destination, synced, then renamed); hold locks; read JSON.

A file is first written in a temporary folder next to its destination, `.farspan-part-XXXXXXXX`, whose lock is held as
long as its process lives. The next write in the same parent folder removes folders of processes that have ended. A
symbolic link at the destination is replaced or refused, never followed.
"""

import errno
import json
import os
import reprlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from filelock import AcquireReturnProxy, FileLock, Timeout

PREFIX = ".farspan-part-"  # of temporary folders
DEEPEST = 100  # levels of lists and objects in JSON
LONGEST = 2**31 - 1  # tokens of a text
LOCK = "lock"  # the file in them that their process keeps locked
NEW = "new"  # the folder in them that is written
# in the messages of torch, safetensors and tokenizers if the disk is full
FULL_DISK = ("PytorchStreamWriter", "inline_container", "iostream error", "No space left")


def write(path: Path, content: str | bytes) -> None:
    """Write a whole file: after a kill or a full disk it has either its old content or all of `content`.

    Text becomes UTF-8; half a surrogate pair, which UTF-8 cannot encode, is written as \\udXXX.

    Raises:
        OSError: for example a full disk; names `path`.
    """
    with written(path) as beside:
        beside.write_bytes(content.encode(errors="backslashreplace") if isinstance(content, str) else content)


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """Yield a path of the same name in a temporary folder; the file written there replaces `path` if the block ends
    without an error. The parent folder has to exist.

    Raises:
        OSError: for example a full disk; names `path`.
    """
    path = Path(path)
    with _naming(path), _beside(path.parent) as folder:
        yield folder / path.name
        _finish(folder / path.name)
        os.replace(folder / path.name, path)
        _sync(path.parent)


@contextmanager
def built(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield an empty temporary folder that is renamed to `folder` if the block ends without an error.

    If another process has filled `folder` meanwhile, it is kept and the new one is removed.

    Args:
        replace: replace the content of `folder` instead, such as a damaged cache. Files that a process has open or
            mapped stay readable for it.

    Raises:
        OSError: for example a full disk, or `folder` is a file or a symbolic link; names `folder`.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _naming(folder), _beside(folder.parent) as place:
        new = place / folder.name
        new.mkdir()
        yield new
        for inside, _, names in os.walk(new, topdown=False):
            for name in names:
                _finish(Path(inside) / name)
            _sync(Path(inside))
        if replace and folder.exists():
            with suppress(FileNotFoundError):  # another process removes it, too
                os.replace(folder, place.parent / "old")
        if folder.is_dir() and not folder.is_symlink() and any(folder.iterdir()):
            return  # another process was faster
        try:
            os.replace(new, folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return  # another process was faster between these lines
        _sync(folder.parent)


@contextmanager
def added(folder: Path, last: str) -> Iterator[Path]:
    """Yield an empty temporary folder; the files written there replace those of the same name in `folder`, `last` after
    all others, if the block ends without an error. If `last` is new, so are the others. `folder` has to exist.

    Raises:
        OSError: for example a full disk; names `folder`.
    """
    with _naming(folder), _beside(folder) as new:
        yield new
        files = sorted(new.iterdir(), key=lambda file: file.name == last)
        for file in files:
            _finish(file)
        for file in files:
            os.replace(file, folder / file.name)
        _sync(folder)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary folders in `folder` whose process is gone. Every write there does this first."""
    for place in folder.glob(f"{PREFIX}*"):
        if place.is_symlink() or not place.is_dir():
            continue
        try:
            lock = locked(place / LOCK)
        except (ValueError, OSError):  # in use, or another user's
            continue
        with lock:
            shutil.rmtree(place, ignore_errors=True)


class HeldError(ValueError):
    """Another process holds a lock."""


def locked(path: Path, what: str = "", wait: float = 0.0) -> AcquireReturnProxy:
    """Hold a lock file, made if missing, until the block of the returned context manager ends or the process does.

    Args:
        what: what is locked, for the error; default: the folder.
        wait: seconds to wait for a process that holds it.

    Raises:
        HeldError: another process holds it.
        ValueError: `path` is no regular file, such as a symbolic link.
        OSError: the file cannot be opened or made.
    """
    _refuse_irregular(path)
    try:
        return FileLock(path).acquire(timeout=wait)
    except Timeout as error:
        raise HeldError(
            f"{what or path.parent} is being written by another process. Wait until it ends, or choose another folder"
        ) from error


def appending(path: Path) -> FileIO:
    """Open a file for appending, unbuffered. Makes it if missing.

    Raises:
        ValueError: `path` is no regular file, such as a symbolic link.
        OSError: the file cannot be opened or made.
    """
    _refuse_irregular(path)
    # safe even if it becomes a link or a pipe after the check; Windows has neither flag
    flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    return FileIO(path, "ab", opener=lambda name, mode: os.open(name, mode | flags, 0o666))


def _refuse_irregular(path: Path) -> None:
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise ValueError(f"{path} is not a regular file: got a link, folder or device, which is not written. Delete it")


def parse_json(content: str | bytes, where: str) -> Any:
    """Return the value of a JSON text; `where` names it in errors, such as a file, or a file and a line.

    Raises:
        ValueError: not JSON in UTF-8, nested more than 100 levels deep, or an integer of more than 4,300 digits.
    """
    deep = f"{where} is damaged: got values nested deeper than {DEEPEST} levels, expected at most {DEEPEST}"
    try:
        value = json.loads(content)
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is damaged: it is not UTF-8 ({error.reason} at byte {error.start:,})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is damaged: expected JSON in UTF-8: {error}") from error
    except ValueError as error:
        raise ValueError(f"{where} is damaged: got an integer of more than 4,300 digits. Shorten it") from error
    except RecursionError as error:
        raise ValueError(deep) from error
    marks: tuple[Any, Any] = (b"[", b"{") if isinstance(content, bytes) else ("[", "{")
    if sum(content.count(mark) for mark in marks) <= DEEPEST:  # most rows: too few marks to nest so deep
        return value
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(DEEPEST):
        items = (item for one in level for item in (one.values() if isinstance(one, dict) else one))
        level = [item for item in items if isinstance(item, dict | list)]
        if not level:
            return value
    raise ValueError(deep)


def read_json(path: Path) -> Any:
    """Return the value of a JSON file.

    Raises:
        ValueError: as `parse_json`, naming the file; or no regular file, such as a folder or a pipe.
        FileNotFoundError: no such file.
    """
    refuse_special(path)
    return parse_json(path.read_bytes(), str(path))


def check_number(where: str, value: Any, least: float, most: float) -> None:
    """Raise ValueError unless a value of JSON is a number from `least` to `most`, a whole one if `least` is an int.
    `where` names it: its file and what it is there."""
    whole = isinstance(least, int)
    if type(value) not in ((int,) if whole else (int, float)) or not least <= value <= most:
        kind, form = ("a whole number", ",") if whole else ("a number", "g")
        raise ValueError(f"{where}: got {reprlib.repr(value)}, expected {kind} from {least:{form}} to {most:{form}}")


def refuse_special(path: Path) -> None:
    """Raise ValueError for a folder, pipe or device, which cannot be read as a file."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file: got a folder, pipe or device. Replace it by a file")


def expanded(place: str | Path) -> Path:
    """Return a path with its `~` replaced.

    Raises:
        ValueError: the home folder of a user that does not exist, or an empty name.
    """
    if not str(place):
        raise ValueError("a name is empty: got '', expected a file or folder. Is a variable of the shell not set?")
    try:
        return Path(place).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{str(place)!r} is not a path: {error} Correct the name after ~") from error


def cache_folder() -> Path:
    """Return where texts and converted models are cached: $FARSPAN_CACHE, else ~/.cache/farspan."""
    return Path(os.environ.get("FARSPAN_CACHE") or Path.home() / ".cache" / "farspan")


def is_disk_full(error: BaseException) -> bool:
    """Return whether an error of the system, torch, safetensors or tokenizers means that no space is left."""
    return any(words in str(error) for words in FULL_DISK)


@contextmanager
def _beside(parent: Path) -> Iterator[Path]:
    """Yield an empty folder in a temporary one that has a lock, which `remove_leftovers` respects."""
    remove_leftovers(parent)
    while True:
        place = Path(tempfile.mkdtemp(dir=parent, prefix=PREFIX))
        try:
            lock = locked(place / LOCK)
        except (ValueError, FileNotFoundError, FileExistsError):
            # another process removed it as a leftover between these lines; FileExistsError: while filelock, which makes
            # the folder of a lock if it is missing, looked at it
            continue
        break
    try:
        with lock:
            (place / NEW).mkdir()
            yield place / NEW
    finally:
        shutil.rmtree(place, ignore_errors=True)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Let system errors name the user's path instead of the temporary one or none, also a full disk, which libraries
    report by errors of their own."""
    try:
        yield
    except Exception as error:  # tokenizers raise a plain Exception
        if not isinstance(error, OSError):
            if not is_disk_full(error):
                raise
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        if error.errno is None or (error.filename is not None and PREFIX not in str(error.filename)):
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def _finish(file: Path) -> None:
    """Sync a file, and give it at least the mode that the umask gives, as its folder shows: safetensors makes its files
    private."""
    mode, others = file.stat().st_mode, file.parent.stat().st_mode & 0o666
    if others & ~mode:
        file.chmod(mode | others)
    _sync(file)


def _sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    if os.name == "nt" and path.is_dir():  # Windows cannot open a folder
        return
    number = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(number)
