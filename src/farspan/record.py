"""Rows: one measured example each, appended to disk as it happens; and the folder of the run they belong to.

runs/NAME/run.json     settings, what the model is, versions, hardware, one entry for each time it was started
runs/NAME/rows.jsonl   a line an example; a kill loses at most the line being written
runs/NAME/examples.jsonl   the first example of each model and question, in words
"""

import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PACKAGES = ("farspan", "torch", "transformers", "tokenizers", "numpy", "scipy")


@dataclass(frozen=True)
class Row:
    """One example at one length, raw and self-describing."""

    model: str
    method: str  # as `farspan.method` parses it
    task: str
    version: int  # of the task; a change that moves numbers bumps it
    settings: dict[str, Any]  # of the task, such as protocol and texts
    length: int  # tokens
    repeat: int
    seed: int
    example: str  # hash of the example's tokens and settings
    depth: float = 0.0  # where in the text was asked: 0 its beginning, 1 its end
    status: str = "ok"  # or "oom", "nan", "too_long", "budget": then `scores` is empty or partial
    reason: str = ""
    scores: dict[str, Any] = field(default_factory=dict)
    num_seen: int = 0  # tokens the memory had read
    num_kept: int = 0  # tokens it still held
    seconds: float = 0.0
    peak_bytes: int = 0  # of the device so far; of the process on a CPU
    # how it was read: `repeats` read together, `chunk` tokens of one forward, `cuts` of the text up to this length.
    # Rows that were read alike are equal in every precision; others in float32, and by rate in lower ones
    reading: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, str, int, float]:
        """What makes a row the same measurement as another."""
        return self.model, self.method, self.example, self.length, self.depth


class Run:
    """A run folder opened for writing; a context manager."""

    def __init__(self, folder: Path, header: dict[str, Any], rows: list[Row], file: FileIO) -> None:
        self.folder = folder
        self.header = header
        self.rows = rows
        self._file = file

    @classmethod
    def open(cls, folder: str | Path, settings: dict[str, Any]) -> Self:
        """Creates the run, or continues it when it was made with the same settings.

        A torn last line, as a kill leaves it, is dropped. A run without rows is begun anew.

        Raises:
            ValueError: the folder holds another run or something else, or another process is writing it.
        """
        folder = Path(folder)
        if folder.exists() and not (folder / "run.json").exists() and not _only_begun(folder):
            raise ValueError(f"{folder} is not empty and holds no run (no run.json): choose another folder with --out")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "rows.jsonl"
        file = path.open("ab", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            rows, end = _parse(path)
            header: dict[str, Any] = {"settings": _plain(settings), "models": {}, "sessions": []}
            if (folder / "run.json").exists():
                before = read_header(folder)  # also where no rows are: what is not ours is not written over
                if rows:
                    refuse_differences(folder, "run", before["settings"], header["settings"])
                    header = before
            file.truncate(end)
            session = {"command": sys.argv, "started": datetime.now(UTC).isoformat(), **environment()}
            header["sessions"].append(session)
            run = cls(folder, header, rows, file)
            run._write_header()
        except BlockingIOError as error:
            file.close()
            raise ValueError(f"{folder} is being written by another process") from error
        except (ValueError, OSError):
            file.close()
            raise
        return run

    def add_model(self, identity: dict[str, Any]) -> None:
        """Records a model, or makes sure that it is the one the run was begun with.

        Raises:
            ValueError: another model of that name.
        """
        identity = _plain(identity)
        before = self.header["models"].setdefault(identity["name"], identity)
        refuse_differences(self.folder, "run", before, identity, may_change=("device",))
        self._write_header()

    def add_example(self, example: dict[str, Any]) -> None:
        """Keeps an example in words, unless there is one of its model and question ("what") already."""
        if (example["model"], example["what"]) not in {(e["model"], e["what"]) for e in read_examples(self.folder)}:
            with (self.folder / "examples.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(example) + "\n")

    def _write_header(self) -> None:
        beside = self.folder / "run.json.part"
        beside.write_text(json.dumps(self.header, indent=2) + "\n")
        os.replace(beside, self.folder / "run.json")

    def append(self, row: Row) -> None:
        """Writes the row through to the disk.

        Raises:
            OSError: the disk is full, say; the file then ends with the row before.
        """
        line = (json.dumps(asdict(row), allow_nan=False) + "\n").encode()
        end = os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            self._file.truncate(end)
            raise OSError(
                error.errno,
                f"{error.strerror}; the {len(self.rows):,} rows before it are safe: make room and repeat the command",
                str(self.folder / "rows.jsonl"),
            ) from error
        self.rows.append(row)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def default_folder(command: str, models: Sequence[str], settings: Any) -> Path:
    """runs/NAME, the same for the same command, so that repeating it continues it."""
    digest = hashlib.sha256(json.dumps([list(models), settings]).encode()).hexdigest()[:8]
    return Path("runs") / f"{command}-{Path(models[0]).name or 'model'}-{digest}"


def read_header(folder: str | Path) -> dict[str, Any]:
    """run.json of a run.

    Raises:
        ValueError: the folder holds no run, or its run.json is damaged.
    """
    path = Path(folder) / "run.json"
    try:
        header = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ValueError(f"{folder} holds no run (no run.json)") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(header, dict) or not {"settings", "models", "sessions"} <= header.keys():
        raise ValueError(f"{path} was not written by farspan: choose another folder")
    return header


def read_rows(folder: str | Path) -> list[Row]:
    """All rows of a run, in the order they were measured; a torn last line is left out.

    Raises:
        ValueError: the folder holds no run, or a line that is not a row.
    """
    read_header(folder)
    path = Path(folder) / "rows.jsonl"
    return _parse(path)[0] if path.exists() else []


def read_examples(folder: str | Path) -> list[dict[str, Any]]:
    """The examples in words of a run; a torn last line is left out.

    Raises:
        ValueError: a damaged line.
    """
    path = Path(folder) / "examples.jsonl"
    lines = path.read_text("utf-8").split("\n")[:-1] if path.exists() else []
    try:
        return [json.loads(line) for line in lines]
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def latest(rows: Iterable[Row]) -> list[Row]:
    """The last row of each measurement: one that ran out of memory may have been repeated with more of it."""
    return list({row.key: row for row in rows}.values())


def environment() -> dict[str, Any]:
    """Versions, hardware and the git state of the working directory."""
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
        "git": _git("describe", "--always", "--dirty"),
    }


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _parse(path: Path) -> tuple[list[Row], int]:
    """The rows of a file and where the last whole one ends, in bytes."""
    known = {f.name for f in fields(Row)}
    needed = {f.name for f in fields(Row) if f.default is MISSING and f.default_factory is MISSING}
    rows: list[Row] = []
    end = 0
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            values = None
        if values is None and number == len(lines):
            break
        if not isinstance(values, dict) or not needed <= values.keys() <= known:
            raise ValueError(f"{path}, line {number} is not a row: {line[:80]!r}")
        rows.append(Row(**values))
        end += len(line)
    return rows, end


def _only_begun(folder: Path) -> bool:
    """Whether a folder holds nothing but what a run leaves that ended before its run.json was written."""
    return all(
        file.name == "run.json.part" or (file.name == "rows.jsonl" and file.stat().st_size == 0)
        for file in folder.iterdir()
    )


def _plain(value: Any) -> Any:
    """As it will be after a round through JSON, so that comparisons compare like with like."""
    return json.loads(json.dumps(value))


def refuse_differences(
    folder: Path, what: str, before: dict[str, Any], now: dict[str, Any], may_change: Sequence[str] = ()
) -> None:
    """Raises ValueError, with both values, where two nested settings differ in other than what may change."""
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


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else key)
    else:
        yield name, value
