"""A run folder opened for writing, by one process or by several shards at the same time."""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cached_property
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from farspan.files import appending, locked, remove_leftovers, write
from farspan.record.configs import OPTIONAL, refuse_other_config, refuse_other_weights
from farspan.record.provenance import environment
from farspan.record.rows import (
    ROWS_BEFORE,
    Shard,
    changes,
    joined,
    read_examples,
    read_file,
    read_header,
    refuse_file,
    writer,
    writers_files,
    written_by,
)
from farspan.record.sampled import CONTENTS, LENGTHS, SAMPLED, VERSIONS, refuse_other_texts
from farspan.record.settings import as_read, continued, refuse_differences
from farspan.schema import FORM
from farspan.schema.row import Row

NOISE = 0.25  # nats, mean over tokens; SmolLM2 in bf16 with another attention kernel differs by 0.09
HEADER_LOCK = "run.lock"
HEADER_WAIT = 600.0  # seconds: a thousand shards that start together write run.json one after another


class Run:
    """A run folder opened for writing; a context manager.

    The files it made are removed if the block ends with an error before anything was measured.
    """

    def __init__(
        self,
        folder: Path,
        header: dict[str, Any],
        rows: list[Row],
        file: FileIO,
        lock: ExitStack,
        made: list[Path],
        shard: Shard | None,
    ) -> None:
        self.folder = folder
        self.header = header
        self.shard = shard
        self._file = file
        self._lock = lock
        self._made = made  # files and folders that did not exist before, the innermost first
        self._session = len(header["sessions"]) - 1
        self._latest: dict[tuple[str, str, str], dict[tuple[Any, ...], Row]] = {}
        self.know(rows)

    @classmethod
    def open(
        cls, folder: str | Path, settings: dict[str, Any], shard: Shard | None = None, *, may_grow: bool = False
    ) -> Self:
        """Create the run, or continue it if it was made with the same settings. Its methods may be others, unless it is
        divided among shards.

        A last line torn by a kill is dropped. A run without rows starts again with the new settings, unless
        other shards are writing it.

        Args:
            shard: its number and the number of shards, if several processes write the run at the same time, each a
                file of its own.
            may_grow: whether it may be continued with more lengths and repeats (`continued`).

        Raises:
            ValueError: the folder holds another run or something else, is damaged, or is being written by another
                process: one that measures the whole run, the same shard, or one of another number of shards.
        """
        folder = Path(folder)
        refuse_file(folder)
        name = writer(shard)
        path, own_lock = folder / f"{name}.jsonl", folder / f"{name}.lock"
        outer = [place for place in (folder / HEADER_LOCK, folder, *folder.parents) if not place.exists()]
        made = list[Path]()
        lock = ExitStack()
        try:
            with _header_locked(folder):
                if not (folder / "run.json").exists() and not _only_begun(folder):
                    raise ValueError(
                        f"{folder} is not empty and holds no run (no run.json): choose another folder (out)"
                    )
                new = [place for place in (path, own_lock, folder / "run.json") if not place.exists()]
                lock.enter_context(locked(own_lock, _who(folder, shard)))
                made = new  # not before: another process of the same shard may have made them
                _refuse_other_layout(folder, shard)
            file = lock.enter_context(appending(path))
            found = {one: read_file(one) for one in writers_files(folder, ".jsonl")}
            every = {one: rows for one, (rows, _) in found.items()}
            named = {"methods": settings["methods"]} if "methods" in settings else {}  # `add_model` adds the models
            session = {"command": sys.argv, "started": datetime.now(UTC).isoformat(), **named, **environment()}
            with _header_locked(folder):
                header = _begun(folder, as_read(settings), shard, every, may_grow)
                file.truncate(found[path][1])
                header["sessions"].append(session if shard is None else session | {"shard": list(shard)})
                write(folder / "run.json", json.dumps(header, indent=2) + "\n")
            return cls(folder, header, joined(every, header), file, lock, [*made, *outer], shard)
        except (ValueError, OSError):
            _remove([*made, *outer], folder)  # while it is locked
            lock.close()
            raise

    def read_others(self) -> None:
        """Read the rows of all writers again: a writer that has ended may have begun the same work."""
        parts = {file: read_file(file)[0] for file in writers_files(self.folder, ".jsonl")}
        self.know(joined(parts, read_header(self.folder)))

    def know(self, rows: Sequence[Row]) -> None:
        """Replace the known rows by these."""
        self.rows: list[Row] = []
        self._latest.clear()
        for row in rows:
            self._keep(row)

    def cut(self, first: Callable[[Row], bool]) -> None:
        """Remove the first row that meets a condition and all rows after it, and models that then have no row."""
        rows, end = read_file(self.folder / f"{writer(self.shard)}.jsonl", first)
        self._file.truncate(end)
        self.know(rows)
        known = {row.model for row in rows}
        self._change_header(
            lambda header: header.update(models={name: one for name, one in header["models"].items() if name in known})
        )

    def of(self, model: str, method: str, measurement: str) -> list[Row]:
        """Return the last row at each place of one measurement of one model under one method."""
        return list(self._latest.get((model, method, measurement), {}).values())

    def add_model(self, identity: dict[str, Any], order: Sequence[str] = ()) -> None:
        """Record a model, or check that it is the model that the run started with.

        Args:
            order: names of models, in the order in which to record them; the first is the baseline of a comparison.

        Raises:
            ValueError: another model of that name, another config or chat template of it, a text that has changed,
                lengths with other texts, or as `refuse_other_versions`.
        """
        identity = as_read(identity)
        beside = LENGTHS, SAMPLED, CONTENTS, VERSIONS  # which older runs do not record
        known = {name: identity.pop(name) for name in beside if name in identity}

        def add(header: dict[str, Any]) -> None:
            refuse_other_texts(self.folder, header, identity | known)
            self.refuse_other_versions(known.get(VERSIONS, {}))
            before = header["models"].setdefault(identity["name"], identity)
            recorded, now = (one.get("sentence_nats") for one in (before, identity))
            if not _alike(recorded, now):
                raise ValueError(
                    f"{self.folder}: the server scores a sentence differently than when this run began ({recorded} "
                    f"nats, now {now}): {identity['name']} probably has other weights, or another precision. Choose "
                    "another folder (out)"
                )
            recorded = {key: value for key, value in before.items() if key not in beside}
            old, new = (one | OPTIONAL for one in (recorded, identity))
            refuse_differences(self.folder, "run", old, new, may_change=("device", "sentence_nats", "fingerprint"))
            refuse_other_config(self.folder, before, identity)
            refuse_other_weights(self.folder, before, identity)
            before |= known
            session = header["sessions"][self._session]
            session.setdefault("devices", {})[identity["name"]] = identity.get("device")
            named = session.setdefault("models", [])
            if identity["name"] not in named:
                named.append(identity["name"])
            places = {name: place for place, name in enumerate(order)}
            names = sorted(header["models"], key=lambda name: places.get(name, len(places)))
            header["models"] = {name: header["models"][name] for name in names}

        self._change_header(add)

    def refuse_other_versions(self, versions: Mapping[str, int]) -> None:
        """Raise ValueError if the run has a task in another version, whose numbers cannot be compared: in its rows, or
        of a model that another shard has begun.

        Args:
            versions: by task.
        """
        rows = [row for by_slot in self._latest.values() for row in by_slot.values()]
        begun = [one.get(VERSIONS, {}) for one in self.header["models"].values()]
        for task, version in versions.items():
            found = {row.version for row in rows if row.task == task} | {one[task] for one in begun if task in one}
            if other := sorted(found - {version}):
                raise ValueError(
                    f"{self.folder} holds rows of version {other[0]} of the task {task}: this farspan measures version "
                    f"{version}, whose numbers differ. Choose another folder (out); `farspan report` reads both"
                )

    def has_example(self, model: str, what: str, known: Container[str]) -> bool:
        """Return whether there is a readable example of this model and task, one of those with these hashes."""
        return self._in_words.get((model, what), {}).get("example") in known

    def add_example(self, example: dict[str, Any], known: Container[str]) -> None:
        """Write a readable example, unless its model and task ("what") already have one of those with these hashes."""
        with _header_locked(self.folder):
            self.__dict__.pop("_in_words", None)  # another shard may have written since
            if not self.has_example(example["model"], example["what"], known):
                self._in_words[example["model"], example["what"]] = example
                lines = (json.dumps(one) + "\n" for one in self._in_words.values())
                write(self.folder / "examples.jsonl", "".join(lines))

    @cached_property
    def _in_words(self) -> dict[tuple[str, str], dict[str, Any]]:
        """The first example of each model and task."""
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for one in read_examples(self.folder):
            found.setdefault((one["model"], one["what"]), one)
        return found

    def _keep(self, row: Row) -> None:
        self.rows.append(row)
        self._latest.setdefault((row.model, row.method, row.measurement), {})[row.slot] = row

    def _change_header(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Change run.json as it is now: other shards may have changed it since."""
        with _header_locked(self.folder):
            self.header = read_header(self.folder)
            before = json.dumps(self.header)
            change(self.header)
            if json.dumps(self.header) != before:
                write(self.folder / "run.json", json.dumps(self.header, indent=2) + "\n")

    def append(self, row: Row) -> None:
        """Write the row; the operating system has it when this returns. A shard also syncs it to the disk, so that
        other machines see it there.

        Raises:
            OSError: for example a full disk; the file then ends with the row before.
        """
        written = json.dumps(asdict(row), allow_nan=False)
        line = (written + "\n").encode()
        end = os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) :]
            if self.shard is not None:
                os.fsync(self._file.fileno())
        except OSError as error:
            self._file.truncate(end)
            raise OSError(
                error.errno,
                f"{error.strerror}; the {len(self.rows):,} rows before it are safe: free space and repeat the command",
                str(self.folder / f"{writer(self.shard)}.jsonl"),
            ) from error
        self._keep(Row(**json.loads(written)))  # as it will be read: tuples become lists

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if error is not None and not self.rows:
            _remove(self._made, self.folder)  # while it is locked
        elif error is None and self.shard is not None:
            ended = datetime.now(UTC).isoformat()
            self._change_header(lambda header: header["sessions"][self._session].update(ended=ended))
        self._lock.close()


def default_folder(command: str, models: Sequence[str], settings: Any) -> Path:
    """Return runs/NAME, the same for the same command, so that repeating the command continues the run."""
    digest = hashlib.sha256(json.dumps([list(models), settings]).encode()).hexdigest()[:8]
    return Path("runs") / f"{command}-{Path(models[0]).name.replace(':', '-') or 'model'}-{digest}"


@contextmanager
def _header_locked(folder: Path) -> Iterator[None]:
    """Make the folder, and keep other processes from changing run.json and examples.jsonl in the block."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # another shard, which ended without a row, has just removed the folder
            lock = locked(folder / HEADER_LOCK, wait=HEADER_WAIT)
            break
    with lock:
        yield


def _who(folder: Path, shard: Shard | None) -> str:
    return str(folder) if shard is None else "shard {}/{} of {}".format(*shard, folder)


def _refuse_other_layout(folder: Path, shard: Shard | None) -> None:
    """Raise ValueError if another process writes the run with another division, and so measures the same rows."""
    for file in writers_files(folder, ".lock"):
        other = written_by(file.stem)
        if (other and other[1]) != (shard and shard[1]):
            with locked(file, _who(folder, other)):
                pass


def _others_write(folder: Path, shard: Shard) -> bool:
    """Return whether other shards are writing the run."""
    for file in writers_files(folder, ".lock"):
        if written_by(file.stem) != shard:
            try:
                with locked(file):
                    pass
            except ValueError:
                return True
    return False


def _begun(
    folder: Path, settings: dict[str, Any], shard: Shard | None, parts: Mapping[Path, list[Row]], may_grow: bool
) -> dict[str, Any]:
    """Return the content of the run.json that a process continues, or of a new one.

    Args:
        parts: the rows of each file of the run.

    Raises:
        ValueError: run.json is damaged; as `continued`, if the run has rows or other shards write.
    """
    header: dict[str, Any] = {"version": FORM, "settings": settings, "models": {}, "sessions": []}
    if not (folder / "run.json").exists():
        return header
    before = read_header(folder)  # even without rows: a file of another program is not overwritten
    if not (
        any(file.stat().st_size for file in writers_files(folder, ".jsonl"))
        or (shard is not None and before["settings"] == settings)
        or (shard is not None and _others_write(folder, shard))
    ):
        return header
    old, divided = before["settings"], shard is not None
    rows = [row for part in parts.values() for row in part]
    now = continued(folder, old, settings, rows, divided=divided, may_grow=may_grow)
    changed = {name for name in ("methods", "lengths", "repeats") if now.get(name) != old.get(name)}
    for session in before["sessions"] if changed else ():
        session.pop("ended", None)  # no shard has measured its part of what is new
    if changed - {"methods"}:
        before[ROWS_BEFORE] = [*changes(before), {file.name: len(part) for file, part in parts.items()}]
    return before | {"settings": now}


def _only_begun(folder: Path) -> bool:
    """Return whether a folder holds only the files of a run that ended before its run.json was written."""
    remove_leftovers(folder)
    locks = {HEADER_LOCK, *(file.name for file in writers_files(folder, ".lock"))}
    empty = {file.name for file in writers_files(folder, ".jsonl") if file.stat().st_size == 0}
    return all(file.name in locks | empty for file in folder.iterdir())


def _remove(made: Sequence[Path], folder: Path) -> None:
    """Remove the files that a process without rows made, and its folders if they are then empty. Files of the whole run
    are left if other shards have begun."""
    with _header_locked(folder):
        for place in made:
            if place.name in ("run.json", HEADER_LOCK) and any(writers_files(folder, ".jsonl")):
                return
            if not place.is_dir():
                with suppress(PermissionError):  # a lock that is held cannot be removed on Windows
                    place.unlink(missing_ok=True)
            elif any(place.iterdir()):
                return
            else:
                place.rmdir()


def _alike(before: Sequence[float | None] | None, now: Sequence[float | None] | None) -> bool:
    """Return whether a server scores a sentence as before, up to the noise of an engine; also if one is unknown."""
    pairs = zip(before or (), now or (), strict=False)
    apart = [abs(a - b) for a, b in pairs if a is not None and b is not None]
    return not apart or sum(apart) / len(apart) < NOISE
