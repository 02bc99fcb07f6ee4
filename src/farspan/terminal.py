"""A terminal that shows untrusted text (answers, names, texts, errors) without interpreting control characters."""

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import zip_longest
from textwrap import wrap
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.status import Status
from rich.table import Table
from rich.text import Text

# C0 except tab and newline, DEL, C1, and halves of surrogate pairs, which cannot be encoded
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
INTERVAL = re.compile(r" (?=\[|p = )")  # where a cell may be broken: before the interval, or the p, of its number
WORD = 16  # characters of a word in a column head that stay on one line, however narrow the cells are
_reported: set[str] = set()  # lines that this process has printed


def shown(text: str) -> str:
    """Return the text with a visible sign for each control character, ␛ for ESC, so that a terminal executes none."""
    return CONTROL.sub(_sign, text.replace("\r\n", "\n"))


def _sign(found: re.Match[str]) -> str:
    code = ord(found[0])
    return chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else "\ufffd"


def report(line: str) -> None:
    """Print a line for the user to stderr, once per process."""
    if line not in _reported:
        _reported.add(line)
        print(shown(line), file=sys.stderr, flush=True)


class Terminal(Console):
    """A console that interprets no markup or emoji codes, and shows control characters as visible signs.

    Styles are passed as arguments and as `Text`: in a markup string, a name such as `[/x]` would be a tag.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False} | options)

    def print_line(self, text: str, style: str | None = None) -> None:
        """Print a text without highlighting, on a terminal with line breaks between words, elsewhere as it is.

        A word longer than the width of the terminal, such as a path, is left to the terminal to wrap, so that it can
        be copied.
        """
        is_whole = not self.is_terminal or max(map(len, shown(text).split()), default=0) > self.width
        self.print(text, style=style, highlight=False, soft_wrap=is_whole)

    def print_command(self, text: str) -> None:
        """Print a command to copy, without added line breaks."""
        self.print(text, highlight=False, soft_wrap=True)

    def print_table(
        self,
        title: str,
        head: Iterable[str],
        lines: Iterable[Sequence[str]],
        *,
        num_names: int = 0,
        num_keys: int | None = None,
    ) -> None:
        """Print a table of numbers. If it is wider than the terminal, names are broken, after `,` or `+` and before
        numbers, and intervals are below their numbers if the table then fits; otherwise its columns are in several
        tables. Every number and every interval stays on one line.

        Args:
            num_names: the first columns that hold names, aligned on the left.
            num_keys: the first columns that each of several tables repeats; default: the names.
        """
        keys = num_names if num_keys is None else num_keys
        columns = [[str(cell) for cell in column] for column in zip_longest(head, *lines, fillvalue="")]
        self.print(Text(title, style="table.title"))
        if not self._fits(columns, num_names):
            columns, below = (_narrowed(columns, num_names, way) for way in (str, partial(INTERVAL.sub, "\n")))
            if not self._fits(columns, num_names) and self._fits(below, num_names):
                columns = below
        parts = [columns[:keys]]
        for column in columns[keys:]:
            if len(parts[-1]) > keys and not self._fits([*parts[-1], column], num_names):
                parts.append(columns[:keys])
            parts[-1] = [*parts[-1], column]
        for part in parts:
            self.print(_table(part, num_names))

    def _fits(self, columns: Sequence[Sequence[str]], num_names: int) -> bool:
        return _table(columns, num_names).__rich_measure__(self, self.options).maximum <= self.width

    def status(self, status: RenderableType, **options: Any) -> Status:
        return super().status(Text(shown(status)) if isinstance(status, str) else status, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(shown(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(shown(segment.text), segment.style)


def _narrowed(columns: Sequence[Sequence[str]], num_names: int, broken: Callable[[str], str]) -> list[list[str]]:
    """Return columns with broken names and heads.

    Args:
        broken: returns a cell of numbers in lines.
    """
    names = [list(map(_broken, column)) for column in columns[:num_names]]
    cells = [[head, *map(broken, cells)] for head, *cells in columns[num_names:]]
    return names + [[_narrow(head, _width(cells)), *cells] for head, *cells in cells]


def _broken(name: str) -> str:
    return re.sub(r"(?<=[,+])(?!\d)| (?=\d)", "\n", name)  # not within 32,768


def _narrow(head: str, width: int) -> str:
    """Return the head of a column in lines of `width` characters, broken between words. Longer words end their lines
    after `,` or `+`, and have at least WORD characters in a line."""
    lines = wrap(head, width, break_long_words=False, break_on_hyphens=False)
    parts = [part for line in lines for part in (line if len(line) <= width else _broken(line)).split("\n")]
    return "\n".join(_in_lines(part, max(width, WORD)) for part in parts if part)


def _in_lines(part: str, width: int) -> str:
    """Return a part of a head in lines of `width` characters; a `,` or `+` at its end has no line of its own."""
    end = part[-1] if re.search(r"[^ ][,+]$", part) else ""
    return "\n".join(wrap(part.removesuffix(end), width)) + end


def _width(cells: Iterable[str]) -> int:
    return max(1, *(len(line) for cell in cells for line in cell.split("\n")))


def _table(columns: Sequence[Sequence[str]], num_names: int) -> Table:
    """Return a table of columns, each with its head first; only names are broken where they do not fit."""
    table = Table(box=SIMPLE_HEAD)
    for place, (head, *_) in enumerate(columns):
        is_name = place < num_names
        table.add_column(head, justify="left" if is_name else "right", overflow="fold", no_wrap=not is_name)
    for line in list(zip(*columns, strict=True))[1:]:
        table.add_row(*line)
    return table
