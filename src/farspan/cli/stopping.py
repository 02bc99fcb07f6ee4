"""How a command ends on SIGINT (Ctrl-C) and SIGTERM: with one line, and the exit code 128 + signal.

Both raise KeyboardInterrupt, so that files are closed and the terminal's cursor is shown again. The signal is
recorded, since libraries may swallow the exception.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


@dataclass
class Stopped:
    """The signal that this process received."""

    by: int | None = None  # signal; None: nothing yet
    reported: bool = False  # whether the line was printed


stopped = Stopped()


def line(kept: str = "") -> str:
    """Return the line to print, which then counts as printed. `kept`: the work that remains."""
    stopped.reported = True
    return WORDS[signal.Signals(stopped.by or signal.SIGINT)] + (f": {kept}" if kept else "")


def exit_code() -> int:
    return 128 + (stopped.by or signal.SIGINT)


def run(command: Callable[[], Any]) -> None:
    """Call `command`. If a signal came, exit with its code, even if a library swallowed its KeyboardInterrupt.

    While the interpreter shuts down after that, a first signal changes nothing and a second one ends the process.
    """
    process, over = os.getpid(), False

    def stop(number: int, frame: FrameType | None) -> None:
        if over:
            signal.signal(number, signal.SIG_DFL)
            return
        if os.getpid() != process and number != signal.SIGINT:  # a worker, ended by its parent
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        stopped.by = number
        raise KeyboardInterrupt

    def again(unraisable: Any) -> None:
        """Send the signal again if Python discarded the KeyboardInterrupt, for example in a finaliser."""
        if stopped.by is None or over or not isinstance(unraisable.exc_value, KeyboardInterrupt):
            printed(unraisable)
            return
        later = threading.Timer(0.01, os.kill, (os.getpid(), stopped.by))  # at once, it would be raised in this hook
        later.daemon = True
        later.start()

    printed, sys.unraisablehook = sys.unraisablehook, again
    for number in WORDS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a shell's background job
            signal.signal(number, stop)
    try:
        try:
            command()
        finally:
            over = True
    except (KeyboardInterrupt, SystemExit):
        if stopped.by is None:
            raise
    if stopped.by is not None:
        if not stopped.reported:
            print(line(), file=sys.stderr)
        sys.exit(exit_code())
