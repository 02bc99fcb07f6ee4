"""Rows of runs that are kept with the project: one compressed file for each run, after its settings."""

import gzip
import json
import re
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from farspan.record import Row, read_header, read_rows

BENCHMARKS = Path(__file__).resolve().parent
# a path in JSON, as models have, or as the last setting of a method; its name is kept
ABSOLUTE = re.compile(r'(["=])/(?:[^"/]*/)*([^"/]+)"')
OF_PLACES = ("--out", "--data", "--model")  # options whose values are folders of a machine


@cache
def recorded(folder: Path, model: str, part: str) -> tuple[dict[str, Any], list[Row]]:
    """Return run.json and the rows of one run; two empty ones where it was not recorded."""
    path = folder / model / f"{part}.jsonl.gz"
    if not path.is_file():
        return {}, []
    header, rows = gzip.decompress(path.read_bytes()).decode().split("\n", 1)
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "run.json").write_text(header)
        (Path(scratch) / "rows.jsonl").write_text(rows)
        return read_header(scratch), read_rows(scratch)


def record(out: Path, folder: Path) -> int:
    """Keep the rows of all runs OUT/MODEL/PART as FOLDER/MODEL/PART.jsonl.gz, without folders of this machine; return
    the bytes of all files there."""
    for run in sorted(out.glob("*/*/rows.jsonl")):
        header = json.loads((run.parent / "run.json").read_text())
        for session in header["sessions"]:
            session["command"] = _without_folders(session["command"])
        kept = folder / run.parent.parent.name / f"{run.parent.name}.jsonl.gz"
        kept.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(header), *run.read_text().splitlines()]
        text = ABSOLUTE.sub(r'\1\2"', "\n".join(lines) + "\n")
        kept.write_bytes(gzip.compress(text.encode(), mtime=0))  # without the time: equal rows make equal files
    return sum(path.stat().st_size for path in folder.rglob("*.gz"))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a compressed jsonl file; none where it is not there."""
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()] if path.exists() else []


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Write a compressed jsonl file; equal lines make equal files."""
    path.write_bytes(gzip.compress("".join(f"{json.dumps(line)}\n" for line in lines).encode(), mtime=0))


def with_tables(page: str, made: Callable[[str], str]) -> str:
    """Return a page whose tables, each between `<!-- table: NAME -->` and `<!-- end -->`, are made again.

    Args:
        made: makes a table by its name.
    """
    found = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
    return found.sub(lambda part: f"{part[1]}{made(part[2])}\n{part[3]}", page)


def _without_folders(command: Sequence[str]) -> list[str]:
    """Return a command without the options that name folders of this machine."""
    values = {i + 1 for i, word in enumerate(command) if word in OF_PLACES}
    return [word for i, word in enumerate(command) if i not in values and i + 1 not in values]
