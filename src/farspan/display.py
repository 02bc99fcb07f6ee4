"""What a long measurement shows in a terminal, and what it prints when it is done."""

import time
from types import TracebackType
from typing import Any, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from farspan import stats
from farspan.record import Row
from farspan.report.tables import HEADLINE, Series, spoken
from farspan.terminal import Terminal

LINE_EVERY = 15.0  # seconds between lines where the output is no terminal


class Display:
    """A progress line: done/total, tokens/s, peak memory, running accuracies, time left. A context manager."""

    def __init__(self, console: Terminal) -> None:
        self.console = console
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}", markup=False),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.task: Any = None

    def start(self, title: str, total: int) -> None:
        if self.task is not None:
            self.progress.remove_task(self.task)
        self.title, self.task = title, self.progress.add_task(title, total=total, state="")
        self.tokens, self.started, self.printed = 0, time.monotonic(), time.monotonic()

    def row(self, row: Row, done: int, total: int) -> None:
        self.tokens += row.scores.get("context", 0)  # about what was fed: lengths share what they read
        now = time.monotonic()
        state = f"{self.tokens / max(1e-9, now - self.started):,.0f} tokens/s, peak {row.peak_bytes / 2**30:.2f} GiB"
        if row.status == "ok" and "copy" in row.scores:
            state += f", L={row.length:,} copy {row.scores['copy']:.2f} control {row.scores['control']:.2f}"
        elif row.status != "ok":
            state += f", L={row.length:,} {row.status}"
        self.progress.update(self.task, completed=done, total=total, state=state)
        if not self.console.is_terminal and now - self.printed > LINE_EVERY:
            self.printed = now
            self.console.print_line(f"{self.title}: {done}/{total}, {state}")

    def notice(self, text: str) -> None:
        self.console.print_line(text, style="yellow")

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()


def print_memory_lengths(series: list[Series], console: Terminal) -> None:
    """The memory lengths of some curves, a column each, in tokens with their 95 % intervals, and what they mean."""
    table = Table(title="memory lengths (tokens to be copied, 95 % interval over repeats)", title_justify="left")
    table.add_column("")
    for one in series:
        table.add_column(one.name, justify="right", overflow="fold")
    for field in HEADLINE:
        table.add_row(spoken(field), *(str(getattr(one.summary, field)) for one in series))
    console.print(table)
    meanings = "; ".join(f"{spoken(field)}: {meaning}" for field, meaning in HEADLINE.items())
    console.print(meanings, style="dim", highlight=False)


def print_recall(series: list[Series], console: Terminal) -> None:
    """Recall by distance of some maps with one length each: memory index, copy and control at each distance."""
    for one in series:
        assert one.map is not None
        table = Table(title=f"recall by distance: {one.name}, {one.map.lengths[0]:,} tokens")
        for column in ("depth", "distance (tokens)", "copy", "control", "memory index"):
            table.add_column(column, justify="right")
        means = [stats.measured_mean(values[:, 0]) for values in (one.map.copy, one.map.control)]
        bands = [stats.bands(values[:, 0]) for values in (one.map.copy, one.map.control)]
        for i, depth in enumerate(one.map.depths):
            halves = [f"{m[i]:.3f} [{low[i]:.3f}, {high[i]:.3f}]" for m, (low, high) in zip(means, bands, strict=True)]
            table.add_row(
                f"{depth:.0%}", f"{one.map.distance[0, i]:,.0f}", *halves, f"{one.map.memory_index[0, i]:.3f}"
            )
        console.print(table)
