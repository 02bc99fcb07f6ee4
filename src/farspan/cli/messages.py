"""What commands print besides results: notices, the files written, and errors as one line."""

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from farspan.cli import stopping
from farspan.terminal import Terminal

err = Terminal(stderr=True)
LONGEST = 1000  # characters of an error
LESS_MEMORY = "--dtype bfloat16, --device-map auto or another --device"
ROWS_KEPT = "the rows measured so far, if any, are kept, and the same command continues from there"


def print_notice(line: str) -> None:
    err.print_line(line, style="yellow")


def print_written(paths: Iterable[Path], as_json: bool) -> None:
    written = [str(path) for path in paths]
    for path in written:
        (err if as_json else Terminal()).print_line(path)
    if as_json:
        print(json.dumps({"written": written}))


@contextmanager
def one_line_errors(
    kept: str | Callable[[], str] = "", out: str = "--out", less_memory: str = LESS_MEMORY
) -> Iterator[None]:
    """Print an error that a user can correct as one line, and exit with 2.

    Args:
        kept: what remains of the work if a signal stops the command; or a function that returns it.
        out: the option that names the folder of results, `(out)` in an error.
        less_memory: the options with which the command needs less memory.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        err.print_line(stopping.line(kept() if callable(kept) else kept))
        raise typer.Exit(stopping.exit_code()) from error
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        message = str(error)
        if isinstance(error, OSError) and error.filename is not None and error.strerror:
            message = f"{error.filename}: {error.strerror}"
            if error.errno == errno.ENOSPC and "free space" not in message.lower():
                message += ". Free space and repeat the command"
            elif error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EROFS, errno.ENAMETOOLONG):
                message += ". Choose another file or folder"
        if isinstance(error, RuntimeError | MemoryError):
            from farspan.hf.device import is_out_of_memory

            if not is_out_of_memory(error):
                raise
            first = message.partition("\n")[0]
            message = f"out of memory: {first}; try {less_memory}"
        if os.environ.get("FARSPAN_DEBUG"):
            raise
        line = " ".join(f"error: {message}".replace("(out)", f"({out})").splitlines())
        if len(line) > LONGEST:  # the problem comes first, the fix last
            line = f"{line[: LONGEST * 2 // 3]} … {line[-LONGEST // 3 :]}"
        err.print_line(line, style="red")
        raise typer.Exit(2) from error
