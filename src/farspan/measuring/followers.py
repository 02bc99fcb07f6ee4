"""The other processes of a worker whose model is divided among several GPUs (tensor parallelism).

The worker is the first process of the group, and starts one more for each further GPU of its machine. All of them
measure the same units: in every forward each computes its part of the heads and waits for the others. Only the worker
writes rows. The others must make the same decisions, so the worker sends them the rows that it knows, and all of them
use the least free memory. If one of them ends, so does the worker, and a new group measures its unit again.
"""

import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Container, Sequence
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed

from farspan.extras import optional_import
from farspan.measuring.sharding import Sharding
from farspan.measuring.units import Job, Units
from farspan.record import Row, Run

HOST = "127.0.0.1"
JOINING = timedelta(minutes=10)  # to start all processes of a group
MOMENT = 3.0  # seconds
GRACE = 10.0  # seconds for an error that all processes raise to reach the driver


class Followers:
    """The other processes of a worker, controlled by the worker.

    Args:
        job, order: as `Units`.

    Raises:
        torch.distributed.DistError: a process does not start.
    """

    def __init__(self, job: Job, order: Sequence[str]) -> None:
        ranks = range(1, job.processes)
        store = torch.distributed.TCPStore(HOST, 0, job.processes, True, JOINING, wait_for_workers=False)
        path = os.pathsep.join(one for one in sys.path if one)
        command = [sys.executable, "-m", __name__]
        self._started = [
            subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}) for _ in ranks
        ]
        for rank, process in zip(ranks, self._started, strict=True):
            _send(process, (rank, store.port, job, order))
            threading.Thread(target=_end_with, args=(process,), daemon=True).start()
        _join(store, 0, job.processes)

    def measure(self, model: str, name: str, part: Sharding, rows: Sequence[Row]) -> None:
        """Make them measure a unit, as `Units.measure`; `rows`: the rows that the worker knows."""
        known = [row for row in rows if row.model == name]
        for process in self._started:
            _send(process, (model, name, part, known))

    def one_was_killed(self) -> bool:
        """Return whether one was killed. Waits a moment after a failed forward: connections end before processes."""
        end = time.monotonic() + MOMENT
        while all(one.poll() is None for one in self._started) and time.monotonic() < end:
            time.sleep(0.05)
        return any((one.poll() or 0) < 0 for one in self._started)


class Unwritten(Run):
    """A run whose rows are kept in memory: another process writes them."""

    def __init__(self) -> None:
        super().__init__(Path(), {"sessions": [], "models": {}}, [], None, None, [], None)  # type: ignore[arg-type]

    def append(self, row: Row) -> None:
        self._keep(row)

    def add_model(self, identity: dict[str, Any], order: Sequence[str] = ()) -> None:
        pass

    def has_example(self, model: str, what: str, known: Container[str]) -> bool:
        return True


def main() -> None:
    """Measure the units that standard input names, until it ends."""
    messages = SimpleQueue[Any]()
    threading.Thread(target=_receive, args=(messages,), daemon=True).start()
    rank, port, job, order = messages.get()
    store = torch.distributed.TCPStore(HOST, port, job.processes, False, JOINING)
    _join(store, rank, job.processes)
    run = Unwritten()
    units = Units(job, order, run)
    while True:
        *unit, rows = messages.get()
        run.know(rows)
        units.measure(*unit)


def _send(process: "subprocess.Popen[bytes]", message: Any) -> None:
    assert process.stdin is not None
    pickled = optional_import("ray.cloudpickle", "cluster").dumps(message)  # also pickles tasks defined in a notebook
    process.stdin.write(pickled)
    process.stdin.flush()


def _receive(messages: "SimpleQueue[Any]") -> None:
    """Read messages. End the process when its worker ends, even during a forward that waits for the worker."""
    while True:
        try:
            messages.put(pickle.load(sys.stdin.buffer))
        except EOFError:
            os._exit(0)


def _end_with(process: "subprocess.Popen[bytes]") -> None:
    """End this process some seconds after `process` ends: a forward would wait for the part of `process`."""
    code = process.wait()
    time.sleep(GRACE)
    print(f"the process {process.pid} of a divided model ended with exit code {code}", file=sys.stderr, flush=True)
    os._exit(1)


def _join(store: torch.distributed.TCPStore, rank: int, count: int) -> None:
    """Make this process a member of the group; its rank is the index of its GPU among those of the worker."""
    os.environ["LOCAL_RANK"] = str(rank)  # transformers reads the rank here
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=count)


if __name__ == "__main__":
    main()
