"""Rows (see `farspan.schema.Row`), appended to disk as they are measured; and the folder of the run they belong to.

runs/NAME/run.json     settings, models, versions, hardware, one entry for each start
runs/NAME/rows.jsonl   a line an example; a kill loses at most the line being written
runs/NAME/rows.lock    held by the process that writes the run
runs/NAME/examples.jsonl   the first example of each model and question, as text
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cached_property
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from farspan.files import appending, locked, parse_json, read_json, remove_leftovers, write
from farspan.schema import Row, check_example, check_header, check_row

T = TypeVar("T")
LOCK = "rows.lock"
REPAIR = "Restore it, or choose another folder (--out)"  # of a damaged run.json
PACKAGES = ("farspan", "torch", "transformers", "tokenizers", "numpy", "scipy")
PACKAGE = Path(__file__).resolve().parent


class Run:
    """A run folder opened for writing; a context manager.

    The files it made are removed if the block ends with an error before anything was measured.
    """

    def __init__(
        self, folder: Path, header: dict[str, Any], rows: list[Row], file: FileIO, lock: ExitStack, made: list[Path]
    ) -> None:
        self.folder = folder
        self.header = header
        self.rows = rows
        self._file = file
        self._lock = lock
        self._made = made  # files and folders that did not exist before, the innermost first
        self._latest: dict[tuple[str, str], dict[tuple[Any, ...], Row]] = {}
        for row in rows:
            self._keep(row)

    @classmethod
    def open(cls, folder: str | Path, settings: dict[str, Any]) -> Self:
        """Create the run, or continue it if it was made with the same settings.

        A torn last line, as a kill leaves it, is dropped. A run without rows starts again with the new settings.

        Raises:
            ValueError: the folder holds another run or something else, is damaged, or another process is writing it.
        """
        folder = Path(folder)
        path = folder / "rows.jsonl"
        refuse_file(folder)
        if folder.exists() and not (folder / "run.json").exists() and not _only_begun(folder):
            raise ValueError(f"{folder} is not empty and holds no run (no run.json): choose another folder with --out")
        places = (folder / "run.json", path, folder / LOCK, folder, *folder.parents)
        made = [place for place in places if not place.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        lock = ExitStack()
        lock.enter_context(locked(folder / LOCK))
        try:
            file = lock.enter_context(appending(path))
            rows, end = _read_rows(path)
            header: dict[str, Any] = {"settings": _plain(settings), "models": {}, "sessions": []}
            if (folder / "run.json").exists():
                before = read_header(folder)  # also without rows: a file of others is not overwritten
                if rows:
                    refuse_differences(folder, "run", _by_name(before["settings"]), _by_name(header["settings"]))
                    header = before
            file.truncate(end)
            session = {"command": sys.argv, "started": datetime.now(UTC).isoformat(), **environment()}
            header["sessions"].append(session)
            run = cls(folder, header, rows, file, lock, made)
            run._write_header()
        except (ValueError, OSError):
            _remove(made)  # while it is locked
            lock.close()
            raise
        return run

    def of(self, model: str, method: str) -> list[Row]:
        """Return the last row of each measurement of one model under one method."""
        return list(self._latest.get((model, method), {}).values())

    def add_model(self, identity: dict[str, Any]) -> None:
        """Record a model, or check that it is the model that the run started with.

        Raises:
            ValueError: another model of that name, or a text that has changed.
        """
        identity = _plain(identity)
        before = self.header["models"].setdefault(identity["name"], identity)
        old, new = before.get("texts", []), identity.get("texts", [])
        if old != new:
            raise ValueError(
                f"{self.folder}: the text has changed since this run started: its hash was {', '.join(old)}, "
                f"now {', '.join(new)}. Restore the text to continue the run, or choose another folder (--out)"
            )
        refuse_differences(self.folder, "run", before, identity, may_change=("device",))
        self._write_header()

    def refuse_other_version(self, task: str, version: int) -> None:
        """Raise ValueError if the run holds rows of the task in another version, whose numbers cannot be compared."""
        versions = {row.version for by_key in self._latest.values() for row in by_key.values() if row.task == task}
        if other := sorted(versions - {version}):
            raise ValueError(
                f"{self.folder} holds rows of version {other[0]} of the task {task}: this farspan measures version "
                f"{version}, whose numbers differ. Choose another folder (--out); `farspan report` reads both"
            )

    def has_example(self, model: str, what: str) -> bool:
        """Return whether there is an example as text of this model and question."""
        return (model, what) in self._in_words

    def add_example(self, example: dict[str, Any]) -> None:
        """Write an example as text, unless there is one of its model and question ("what") already."""
        if not self.has_example(example["model"], example["what"]):
            kept = [*self._in_words.values(), example]
            write(self.folder / "examples.jsonl", "".join(json.dumps(one) + "\n" for one in kept))
            self._in_words[example["model"], example["what"]] = example

    @cached_property
    def _in_words(self) -> dict[tuple[str, str], dict[str, Any]]:
        """The first example of each model and question."""
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for one in read_examples(self.folder):
            found.setdefault((one["model"], one["what"]), one)
        return found

    def _keep(self, row: Row) -> None:
        self._latest.setdefault((row.model, row.method), {})[row.key] = row

    def _write_header(self) -> None:
        write(self.folder / "run.json", json.dumps(self.header, indent=2) + "\n")

    def append(self, row: Row) -> None:
        """Write the row and sync it to the disk.

        Raises:
            OSError: for example a full disk; the file then ends with the row before.
        """
        written = json.dumps(asdict(row), allow_nan=False)
        line = (written + "\n").encode()
        end = os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            self._file.truncate(end)
            raise OSError(
                error.errno,
                f"{error.strerror}; the {len(self.rows):,} rows before it are safe: free space and repeat the command",
                str(self.folder / "rows.jsonl"),
            ) from error
        row = Row(**json.loads(written))  # as it will be read: tuples become lists
        self.rows.append(row)
        self._keep(row)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if error is not None and not self.rows:
            _remove(self._made)  # while it is locked
        self._lock.close()


def default_folder(command: str, models: Sequence[str], settings: Any) -> Path:
    """Return runs/NAME, the same for the same command, so that repeating it continues it."""
    digest = hashlib.sha256(json.dumps([list(models), settings]).encode()).hexdigest()[:8]
    return Path("runs") / f"{command}-{Path(models[0]).name.replace(':', '-') or 'model'}-{digest}"


def read_header(folder: str | Path) -> dict[str, Any]:
    """Return the content of a run's run.json.

    Raises:
        ValueError: the folder holds no run, or its run.json is damaged.
    """
    path = Path(folder) / "run.json"
    refuse_file(Path(folder))
    try:
        header = read_json(path)
    except FileNotFoundError as error:
        raise ValueError(f"{folder} holds no run (no run.json). Name the folder of a run") from error
    except ValueError as error:
        raise ValueError(f"{error}. {REPAIR}") from error
    if not isinstance(header, dict) or not {"settings", "models", "sessions"} <= header.keys():
        raise ValueError(f"{path} was not written by farspan: choose another folder")
    try:
        check_header(header)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}. {REPAIR}") from error
    return header


def read_rows(folder: str | Path) -> list[Row]:
    """Return all rows of a run, in the order they were measured; a torn last line is left out.

    Raises:
        ValueError: the folder holds no run, or a line that is not a row.
    """
    read_header(folder)
    return _read_rows(Path(folder) / "rows.jsonl")[0]


def read_examples(folder: str | Path) -> list[dict[str, Any]]:
    """Return the examples of a run; a torn last line is left out.

    Raises:
        ValueError: a line that is not an example.
    """
    path = Path(folder) / "examples.jsonl"
    return [one for one, _ in _lines(path, check_example, "an example", "Delete the file to do without examples")]


def latest(rows: Iterable[Row]) -> list[Row]:
    """Return the last row of each measurement: one that ran out of memory may have been repeated with more."""
    return list({row.key: row for row in rows}.values())


def environment() -> dict[str, Any]:
    """Return versions, hardware, and the running source of farspan: its git commit, and a hash of its files."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerators": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
        "git": commit_of(PACKAGE),
        "source": source_hash(PACKAGE),
    }


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


def _read_rows(path: Path) -> tuple[list[Row], int]:
    """Return the rows of a file and the end of the last whole one, in bytes; none if there is no file."""
    rows: list[Row] = []
    known: dict[str, Any] = {}
    end = 0
    repair = "Delete the line to measure it again, or choose another folder (--out)"
    for row, after in _lines(path, lambda values: Row(**check_row(values, known)), "a row", repair):
        rows.append(row)
        end = after
    return rows, end


def _lines(path: Path, read: Callable[[Any], T], what: str, repair: str) -> Iterator[tuple[T, int]]:
    """Yield the value of `read` for each line of JSON, and the line's end in bytes, without a last line torn by a kill.

    Raises:
        ValueError: another line that is not JSON, or that `read` refuses; or no regular file.
    """
    if not path.exists():
        return
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file: got a folder, pipe or device. Replace it by a file")
    end, size = 0, path.stat().st_size
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if end + len(line) >= size and not _whole(line):
                return
            try:
                found = read(parse_json(line, "the line"))
            except ValueError as error:
                raise ValueError(f"{path}, line {number} is not {what}: {error}. {repair}") from error
            end += len(line)
            yield found, end


def _whole(line: bytes) -> bool:
    try:
        parse_json(line, "")
    except ValueError:
        return False
    return line.endswith(b"\n")


def _only_begun(folder: Path) -> bool:
    """Return whether a folder holds only the files of a run that ended before its run.json was written."""
    remove_leftovers(folder)
    return all(
        file.name in ("run.json.part", LOCK) or (file.name == "rows.jsonl" and file.stat().st_size == 0)
        for file in folder.iterdir()
    )


def refuse_file(folder: Path) -> None:
    """Raise ValueError if a file is where a folder, or one above it, should be."""
    place = next(place for place in (folder, *folder.parents) if place.exists())
    if not place.is_dir():
        raise ValueError(f"{place} is a file: got {folder} as a folder. Name a folder, such as with --out")


def _remove(made: Sequence[Path]) -> None:
    """Remove the files that a run without rows made, and its folders if they are then empty."""
    for place in made:
        if not place.is_dir():
            with suppress(PermissionError):  # a lock that is held cannot be removed on Windows
                place.unlink(missing_ok=True)
        elif any(place.iterdir()):
            return
        else:
            place.rmdir()


def _plain(value: Any) -> Any:
    """Return the value after a round trip through JSON, for comparison with values read from a file."""
    return json.loads(json.dumps(value))


def refuse_differences(
    folder: Path, what: str, before: dict[str, Any], now: dict[str, Any], may_change: Sequence[str] = ()
) -> None:
    """Raise ValueError, with both values, if two nested settings differ in a key that must not change."""
    old, new = dict(_flat(before)), dict(_flat(_plain(now)))
    found = [
        f"{name} was {old.get(name)!r}, now {new.get(name)!r}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name) and name not in may_change
    ]
    if found:
        raise ValueError(
            f"{folder} holds another {what}, made with other settings: {'; '.join(found)}. "
            f"Repeat that {what}'s settings to continue it, or choose another folder (--out, or out in a config)"
        )


def _by_name(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run with its tasks as written, which identifies them."""
    return settings | ({"tasks": ", ".join(settings["tasks"])} if isinstance(settings.get("tasks"), dict) else {})


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else key)
    else:
        yield name, value
