"""The work of a cluster's worker: the run, which every worker receives, and its units, one after the other."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farspan.files import HeldError
from farspan.lm import LM
from farspan.measuring.adaptive import TimeBudget
from farspan.measuring.loader import Load
from farspan.measuring.loop import Watch
from farspan.measuring.one_model import begin_model, measure_setups
from farspan.measuring.setups import Grid, Setup
from farspan.measuring.sharding import Sharding
from farspan.methods import method
from farspan.record import Run, Shard

HELD = 60.0  # seconds after which the lock of a dead process is free, also on another machine
TICK = 0.5  # seconds between two tries


@dataclass(frozen=True)
class Job:
    """The tasks, methods and models of a run, and its folder. Each worker gets it."""

    folder: Path  # absolute
    header: dict[str, Any]
    methods: tuple[str, ...]
    what: Grid
    models: tuple[str, ...]
    loader: Load
    processes: int = 1  # of each worker; they divide a model among as many GPUs

    def open(self, writer: Shard) -> Run:
        """Open the run for one writer. Wait a while for a process that is about to end.

        Raises:
            ValueError: the folder holds another run, or another process keeps writing it.
        """
        end = time.monotonic() + HELD
        while True:
            try:
                return Run.open(self.folder, self.header, writer)
            except HeldError:
                if time.monotonic() > end:
                    raise
                time.sleep(TICK)


class Units:
    """Measures units and writes their rows into a run; keeps the last model loaded.

    Args:
        order: names of the models.
    """

    def __init__(self, job: Job, order: Sequence[str], run: Run) -> None:
        self._job, self._order, self._run = job, order, run
        self._name = ""
        self._lm: LM | None = None
        self._setups: list[Setup] = []
        self._notices: list[str] = []
        self._watch = Watch(notice=self._notices.append)

    def measure(self, model: str, name: str, part: Sharding) -> list[str]:
        """Measure one unit; return lines for the user.

        Args:
            model: to load; `name` in rows.

        Raises:
            ValueError: as `farspan.measure`.
            OSError: the disk is full.
        """
        if self._lm is None or self._name != name:
            self._lm, self._setups, self._name = None, [], ""  # freed before the next one is loaded
            self._lm = self._job.loader(model)
            self._setups = begin_model(self._lm, self._job.what, self._run, self._order, self._watch)
            self._name = name
        job, methods = self._job, [method(one) for one in self._job.methods]
        measure_setups(self._setups, self._lm, methods, job.what, self._run, part, TimeBudget(), self._watch)
        lines = list(self._notices)
        self._notices.clear()
        return lines
