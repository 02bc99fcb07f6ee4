"""The progress of a long measurement, training or reading of a text in a terminal."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Self

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from farspan.record import Row
from farspan.report.export import memory_size
from farspan.terminal import Terminal

LINE_EVERY = 15.0  # seconds between lines where the output is not a terminal
SPEED_OVER = 600.0  # seconds over which the speed is estimated; a step of a training may take minutes


class Display:
    """A progress line: done/total, the state as text, time left. A context manager."""

    def __init__(self, console: Terminal) -> None:
        self.console = console
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[count]}"),
            TextColumn("{task.fields[state]}", markup=False),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            speed_estimate_period=SPEED_OVER,
            disable=not console.is_terminal,
        )
        self.task: Any = None
        self.printed = time.monotonic()

    def start(self, title: str, total: int) -> None:
        if self.task is not None:
            self.progress.remove_task(self.task)
        self.title, self.task = title, self.progress.add_task(title, total=1.0, state="", count=f"0/{total}")
        self.done: float | None = None
        self.tokens, self.started = 0, time.monotonic()

    def share(self, done: float) -> None:
        """Take the share of the work that is done, instead of that of the rows, for the bar and the time left."""
        self.done = done

    def row(self, row: Row, done: int, total: int) -> None:
        """Show a new row: tokens/s, peak memory, accuracies."""
        self.tokens += row.scores.get("context", 0)  # roughly the tokens fed: lengths share the text read
        seconds = max(1e-9, time.monotonic() - self.started)
        state = f"{self.tokens / seconds:,.0f} tokens/s, " if self.tokens else ""  # rows of cost count none
        state += f"peak {memory_size(row.peak_bytes)}"
        if row.status == "ok" and "copy" in row.scores:
            state += f", L={row.length:,} copy {row.scores['copy']:.2f} control {row.scores['control']:.2f}"
        elif row.status != "ok":
            state += f", L={row.length:,} {row.status}"
        self.step(done, total, state)

    def step(self, done: int, total: int, state: str) -> None:
        """Show how much is done."""
        share = done / total if self.done is None else self.done
        self.progress.update(self.task, completed=share, state=state, count=f"{done}/{total}")
        if not self.console.is_terminal and time.monotonic() - self.printed > LINE_EVERY:
            self.printed = time.monotonic()
            left = self.progress.tasks[0].time_remaining
            parts = [f"{self.title}: {done}/{total}", state, "" if left is None else f"{timedelta(seconds=left)} left"]
            self.console.print_line(", ".join(part for part in parts if part))

    def notice(self, text: str) -> None:
        self.console.print_line(text, style="yellow")

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()


@contextmanager
def reading(console: Terminal, total: int) -> Iterator[Callable[[int], None]]:
    """Show how many of `total` tokens have been read, until the block ends: as a bar on a terminal, else as a line from
    time to time. Yield the function to call with the tokens of each forward."""
    count = TextColumn("{task.completed:,} of {task.total:,} tokens")
    columns = (TextColumn("reading"), BarColumn(bar_width=20), TaskProgressColumn(), count, TimeRemainingColumn())
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task, done, printed = progress.add_task("", total=total), 0, time.monotonic()

    def read(num_tokens: int) -> None:
        nonlocal done, printed
        done, now = min(done + num_tokens, total), time.monotonic()  # tokens before the text are not in `total`
        progress.update(task, completed=done)
        if not console.is_terminal and now - printed > LINE_EVERY:
            printed = now
            console.print_line(f"reading: {done:,} of {total:,} tokens, {done / total:.0%}")

    with progress:
        yield read
