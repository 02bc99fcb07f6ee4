"""The files of a run, read: run.json, the rows of all its writers, the examples."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from farspan.files import expanded, parse_json, read_json, refuse_special
from farspan.schema import FORM, check_example, check_header, check_row
from farspan.schema.row import Row

T = TypeVar("T")
K = TypeVar("K")
Shard = tuple[int, int]  # the number of a shard, from 1, and of how many
REPAIR = "Restore it, or choose another folder (out)"  # of a damaged run.json
UNFINISHED = ("oom", "budget")  # statuses of measurements that are repeated: more memory or time may be free then
ABSENT = ("no_keys",)  # statuses of measurements that are complete and have no number
NOT_FAILED = ("ok", "budget", *ABSENT)  # statuses of rows that did not fail
ROWS_BEFORE = "rows_before"  # in run.json: the rows that each file had at each change of lengths or repeats
WRITER = re.compile(r"rows(?:-([1-9]\d*)-of-([1-9]\d*))?")


def writer(shard: Shard | None) -> str:
    """Return the file name, without its ending, for a process that measures a shard or a whole run."""
    return "rows" if shard is None else "rows-{}-of-{}".format(*shard)


def written_by(name: str) -> Shard | None:
    """Return the shard whose files have this name, without its ending; None for a process that measures a whole run."""
    found = WRITER.fullmatch(name)
    assert found is not None
    number, count = found.groups()
    return None if number is None else (int(number), int(count))


def writers_files(folder: Path, ending: str) -> list[Path]:
    """Return the files of all writers of a run with this ending: first that of whole runs, then those of shards."""
    found = [file for file in folder.glob(f"rows*{ending}") if WRITER.fullmatch(file.name.removesuffix(ending))]

    def order(file: Path) -> Shard:
        number, count = written_by(file.name.removesuffix(ending)) or (0, 0)
        return count, number

    return sorted(found, key=order)


def read_header(folder: str | Path) -> dict[str, Any]:
    """Return the content of a run's run.json.

    Raises:
        ValueError: the folder holds no run, or its run.json is damaged or of a newer farspan.
    """
    path = expanded(folder) / "run.json"
    refuse_file(expanded(folder))
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
    if header.get("version", FORM) > FORM:
        raise ValueError(
            f"{path}: got version {header['version']}, expected at most {FORM}: a newer farspan wrote it. Update "
            "farspan, or choose another folder (out)"
        )
    return header


def read_rows(folder: str | Path) -> list[Row]:
    """Return the `current` rows of a run, in the order in which each writer measured them, without a torn last line.

    Raises:
        ValueError: the folder holds no run, or a line that is not a row.
    """
    header = read_header(folder)
    return current(joined({file: read_file(file)[0] for file in writers_files(expanded(folder), ".jsonl")}, header))


def current(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of a run without those of a repeat that later got another example, as a run with more repeats."""
    slots = [row.slot for row in rows]
    examples = dict(zip(slots, (row.example for row in rows), strict=True))
    return [row for slot, row in zip(slots, rows, strict=True) if row.example == examples[slot]]


def joined(parts: Mapping[Path, list[Row]], header: Mapping[str, Any]) -> list[Row]:
    """Return the rows of all writers: first those written before each change of the run's lengths or repeats, which
    later ones may replace.

    Args:
        parts: the rows of each file.
    """
    ends = [{file: one.get(file.name, 0) for file in parts} for one in changes(header)]
    spans = zip([{}, *ends], [*ends, {}], strict=True)
    spans_of = [[rows[first.get(file) : end.get(file)] for file, rows in parts.items()] for first, end in spans]
    return [row for some in spans_of for row in merged(some)]


def changes(header: Mapping[str, Any]) -> list[dict[str, int]]:
    """Return the rows that each file had at each change of the run's lengths or repeats, the earliest first."""
    found = header.get(ROWS_BEFORE, [])
    return [found] if isinstance(found, dict) else found  # an older farspan recorded the last change only


def merged(parts: Sequence[list[Row]]) -> list[Row]:
    """Return the rows of several writers. If several wrote rows of a measurement, only one writer's are kept: the
    first whose last row of it is finished, else the first."""
    parts = [rows for rows in parts if rows]
    if len(parts) == 1:
        return parts[0]
    owners: dict[tuple[Any, ...], tuple[bool, int]] = {}  # by measurement: unfinished or not, and the writer
    for number, rows in enumerate(parts):
        for row in {row.key: row for row in rows}.values():
            mine = row.status in UNFINISHED, number
            owners[row.key] = min(owners.get(row.key, mine), mine)
    return [row for number, rows in enumerate(parts) for row in rows if owners[row.key][1] == number]


def read_examples(folder: str | Path) -> list[dict[str, Any]]:
    """Return the examples of a run; a torn last line is left out.

    Raises:
        ValueError: a line that is not an example.
    """
    path = Path(folder) / "examples.jsonl"
    return [one for one, _ in _lines(path, check_example, "an example", "Delete the file to do without examples")]


def latest(rows: Iterable[Row]) -> list[Row]:
    """Return the last row of each measurement: one that ran out of memory may have been repeated with more.

    The one row of all examples of a length is left out if its model, method, task and length were measured after it;
    where time did not suffice for any length, if another length was.
    """
    found: dict[tuple[Any, ...], Row] = {}
    of_all: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # by model, method, task and length, the key of such a row
    for row in rows:
        cell = row.model, row.method, row.measurement
        if row.of_all:
            of_all[*cell, None if row.status == "budget" else row.length] = row.key
        elif of_all:
            for length in (row.length, None):
                if (key := of_all.pop((*cell, length), None)) is not None:
                    found.pop(key, None)  # out of time, then refused: two cells name one row
        found[row.key] = row
    return list(found.values())


def by_key(pairs: Iterable[tuple[K, T]]) -> dict[K, list[T]]:
    """Return the values of each key, from pairs of key and value; keys and values in the order of the pairs."""
    found: dict[K, list[T]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def read_file(path: Path, until: Callable[[Row], bool] = lambda row: False) -> tuple[list[Row], int]:
    """Return the rows of one writer and the end of the last whole row in bytes; no rows if there is no file.

    Args:
        until: whether to stop before this row.

    Raises:
        ValueError: a line that is not a row, or no regular file.
    """
    rows: list[Row] = []
    known: dict[str, Any] = {}
    end = 0
    repair = "Delete the line to measure it again, or choose another folder (out)"
    for row, after in _lines(path, lambda values: Row(**check_row(values, known)), "a row", repair):
        if until(row):
            break
        rows.append(row)
        end = after
    return rows, end


class Tail:
    """The rows that processes append to a run, as they arrive.

    Args:
        folder: of the run. The first call of `new` returns the rows already in it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ends: dict[Path, int] = {}  # bytes read of each file

    def new(self) -> list[Row]:
        """Return the rows added since the last call.

        Raises:
            ValueError: a line that is not a row.
        """
        rows, known = list[Row](), dict[str, Any]()
        for path in writers_files(self._folder, ".jsonl"):
            with path.open("rb") as file:
                file.seek(self._ends.get(path, 0))
                lines = file.read()
            whole = lines[: lines.rfind(b"\n") + 1]
            self._ends[path] = self._ends.get(path, 0) + len(whole)
            rows += [Row(**check_row(parse_json(line, "the line"), known)) for line in whole.splitlines()]
        return rows


def _lines(path: Path, read: Callable[[Any], T], what: str, repair: str) -> Iterator[tuple[T, int]]:
    """Yield the value of `read` for each line of JSON, and the line's end in bytes; skip a last line torn by a kill.

    Raises:
        ValueError: any other line that is not JSON, or that `read` refuses; or no regular file.
    """
    if not path.exists():
        return
    refuse_special(path)
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


def refuse_file(folder: Path) -> None:
    """Raise ValueError if a file is where a folder, or one above it, should be."""
    place = next(place for place in (folder, *folder.parents) if place.exists())
    if not place.is_dir():
        what = "expected a folder" if place == folder else f"so {folder} cannot be a folder"
        raise ValueError(f"{place} is a file, {what}: choose another folder (out)")
