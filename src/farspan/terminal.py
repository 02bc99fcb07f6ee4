"""A terminal that shows untrusted text (answers, names, texts, errors) without interpreting control characters."""

import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.status import Status
from rich.table import Table
from rich.text import Text

# C0 but for tab and newline, DEL, C1, and halves of surrogate pairs, which cannot be encoded
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
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
        """Print a text as it is, at any terminal width: without highlighting and added line breaks."""
        self.print(text, style=style, highlight=False, soft_wrap=True)

    def print_table(
        self, title: str, head: Iterable[str], lines: Iterable[Sequence[str]], *, num_names: int = 0
    ) -> None:
        """Print a table of numbers; its first `num_names` columns are names, on the left."""
        head, lines = list(head), list(lines)
        table = _table(title, head, lines, num_names)
        if table.__rich_measure__(self, self.options).maximum > self.width:  # a long name ends its lines after , or +
            head = [_broken(name) for name in head]
            lines = [[*map(_broken, line[:num_names]), *line[num_names:]] for line in lines]
            table = _table(title, head, lines, num_names, whole_names=True)
        self.print(table)

    def status(self, status: RenderableType, **options: Any) -> Status:
        return super().status(Text(shown(status)) if isinstance(status, str) else status, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(shown(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(shown(segment.text), segment.style)


def _broken(name: str) -> str:
    return re.sub(r"([,+])", r"\1\n", name)


def _table(
    title: str, head: Sequence[str], lines: Sequence[Sequence[str]], num_names: int, *, whole_names: bool = False
) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for place, name in enumerate(head):
        is_name = place < num_names
        table.add_column(name, justify="left" if is_name else "right", overflow="fold", no_wrap=is_name and whole_names)
    for line in lines:
        table.add_row(*line)
    return table
