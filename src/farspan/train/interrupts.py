"""What a training does on SIGINT (Ctrl-C) and SIGTERM: it finishes its step, saves a checkpoint and ends."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import TrainerCallback

from farspan.train.engines import in_any_process, processes
from farspan.train.progress import Notice

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PAUSE = 1.0  # seconds in which signals count as one: a terminal and a launcher can both send the signal


class SavesWhenInterrupted(TrainerCallback):
    """Save a checkpoint at the end of the step in which a signal came, in this process or another one of the training,
    and end the training: by what the signal would have done without this callback, or else by KeyboardInterrupt. A
    second signal acts at once, and so does the first before a step of this session is done: there is nothing to save.

    Args:
        notice: called with a line for the user when a signal came.
    """

    def __init__(self, notice: Notice) -> None:
        self.notice, self.handlers, self.process = notice, dict[int, Any](), os.getpid()
        self.by: int | None = None  # the signal that came
        self.begun, self.ends, self.since = False, False, 0.0

    @contextmanager
    def active(self) -> Iterator[None]:
        """Handle signals in the block as described, if it runs in the main thread."""
        try:
            yield
        finally:
            self._restore()
        if self.by is not None:  # it came after the last step
            signal.raise_signal(self.by)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if threading.current_thread() is threading.main_thread():  # before there are workers, which then ignore Ctrl-C
            caught = (number for number in SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None))
            self.handlers = {number: signal.signal(number, self._came) for number in caught}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun = True
        if in_any_process(self.by is not None):
            self.ends = control.should_save = control.should_log = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.ends:
            processes().wait_for_everyone()  # a launcher ends the others when the first one ends
            self._restore()
            if self.by is not None:
                signal.raise_signal(self.by)
            raise KeyboardInterrupt

    def _came(self, number: int, frame: Any) -> None:
        if os.getpid() != self.process:  # a worker that prepares batches: its parent ends it
            if number != signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
        elif self.begun and self.by is None:
            self.by, self.since = number, time.monotonic()
            line = "stopping: this step is finished and a checkpoint saved; a second signal (Ctrl-C) ends at once"
            threading.Thread(target=self.notice, args=(line,)).start()  # a handler must not print: it may interrupt one
        elif not self.begun or time.monotonic() - self.since > PAUSE:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.handlers = {}
