"""The pages of the documentation: their blocks and commands, and whether a command prints what a page shows."""

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]
BLOCK = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.M | re.S)
INDENTED = re.compile(r"^(?: {4,}.*\n)+", re.M)
COMMAND = re.compile(r"(?:^|\s)farspan\s+(?=[a-z-])([^&|;>]*)")
COMMENT = re.compile(r"\s#\s.*$", re.M)
WRAPPED = re.compile(r'^.*--wrap "(.*)"$', re.M)  # of sbatch
OMITTED = "…"  # a line of a page's output that stands for any lines
PROGRESS = re.compile(r"^.* about .+ left\n", re.M)  # of a command that takes long on a busy machine


def code_and_prose(page: Path) -> tuple[str, str]:
    """Return the blocks of code of a page without those of Python, and the rest of the page."""
    text = page.read_text("utf-8")
    fenced = [content for language, _, content in BLOCK.findall(text) if language != "python"]
    rest = BLOCK.sub("", text)
    return "\n".join([*fenced, *INDENTED.findall(rest)]), INDENTED.sub("", rest)


def examples(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the commands of a page in order, each without `farspan`, and what the page shows of its output: the lines
    after a command that begins with $, else nothing."""
    text, at = page.read_text("utf-8"), 0
    blocks = list[str]()
    for fenced in BLOCK.finditer(text):
        blocks += [*INDENTED.findall(text[at : fenced.start()]), *([fenced[3]] if fenced[1] != "python" else [])]
        at = fenced.end()
    for block in [*blocks, *INDENTED.findall(text[at:])]:
        block = dedent(block)
        for session in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, _, shown = session.partition("\n")
            yield from ((one, shown) for one in commands(command))
        if not re.search(r"^\$ ", block, re.M):
            yield from ((one, "") for one in commands(block))


def commands(code: str) -> list[str]:
    """Return what follows `farspan` in each command of some code, without comments; variables of a shell are 1."""
    lines = COMMENT.sub("", WRAPPED.sub(r"\1", re.sub(r"\$\w+", "1", code).replace("\\\n", " "))).splitlines()
    return [command.strip() for line in lines for command in COMMAND.findall(line)]


def shows(printed: str, shown: str) -> None:
    """Fail unless the lines of a page are printed in this order, without the lines that it omits. Numbers depend on
    the machine and on Python's library, which is the text: they may differ, and so may what is a difference."""
    lines, at = [masked(line) for line in PROGRESS.sub("", printed).splitlines() if masked(line)], 0
    expected = [masked(line) for line in shown.splitlines() if masked(line)]
    for before, line in pairwise([OMITTED, *expected]):
        if line == OMITTED:
            continue
        found = [number for number in range(at, len(lines)) if lines[number] == line]
        assert found, f"{line!r} is not printed after line {at} of\n{printed}"
        assert before == OMITTED or found[0] == at, f"lines are omitted before {line!r} in\n{printed}"
        at = found[0] + 1


def masked(line: str) -> str:
    """Return a line without its numbers, their units of time and memory, and rules."""
    line = re.sub(r"[─━]+|[▲▼·](?=\s|$)|p [<=] ", " ", line)
    line = re.sub(r"[<>]?[+-]?(\d[\d,.]*\d|\d|∞)", "#", line)
    return " ".join(re.sub(r"# (seconds|minutes|hours|[KMG]iB)\b", "#", line).split())
