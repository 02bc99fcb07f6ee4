"""Measure one run with the devices of a Ray cluster.

The driver, which is the process of the command, divides the run into units as shards are divided
(`farspan.measuring.dealing`) and hands them out. A worker is a Ray actor with a device of its own. It measures a unit
as a shard measures its part, and writes rows to a file of its own, so a unit counts as done when its rows are on the
disk. When a worker dies, its unit waits again and a new worker is started wherever a device is free. Rows have keys, so
measuring a unit twice does not duplicate its rows. A worker with several GPUs starts a process for each further GPU
(`farspan.measuring.followers`).
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers.distributed import DistributedConfig

from farspan.extras import optional_import
from farspan.measuring.followers import Followers
from farspan.measuring.loop import Watch
from farspan.measuring.queue import UnitQueue
from farspan.measuring.sharding import KnownRows, RowKey, Sharding, sharding
from farspan.measuring.units import Job, Units
from farspan.methods import method
from farspan.record import UNFINISHED, Row, Run, Shard, Tail, latest, read_rows

ANSWER = 60.0  # seconds in which a cluster must answer
TICK = 0.5  # seconds between two looks at the rows and nodes
END = 60.0  # seconds that workers have to record their end
PIECES = 4  # units for each worker, so that the last ones to be measured are short
SLOT_TRIES = 3  # workers that may die in a row on a device before it is left out


@dataclass(frozen=True)
class Slot:
    """A place for a worker: one device, or several that share a model."""

    node: str  # Ray's id
    index: int
    address: str
    gpus: int
    cpus: int

    def __str__(self) -> str:
        return f"{self.address}, GPU {self.index + 1}" if self.gpus else self.address


def slots(nodes: Sequence[Mapping[str, Any]], gpus_per_model: int | None, *, on_cpu: bool = False) -> list[Slot]:
    """Return the places for workers on the nodes that are alive: one for each GPU or group of GPUs; one for each node
    if no node has a GPU.

    Args:
        nodes: as `ray.nodes()` lists them.
        gpus_per_model: default 1.
        on_cpu: one place for each node, even if nodes have GPUs.
    """
    alive = [(one, one["Resources"]) for one in nodes if one["Alive"]]
    has_gpus = gpus_per_model or any(resources.get("GPU", 0) >= 1 for _, resources in alive)
    size = (gpus_per_model or 1) if has_gpus and not on_cpu else 0
    found = []
    for node, resources in alive:
        count = int(resources.get("GPU", 0)) // size if size else int(resources.get("CPU", 0) >= 1)
        cpus = 0 if size else int(resources.get("CPU", 0))
        found += [Slot(node["NodeID"], index, node["NodeManagerAddress"], size, cpus) for index in range(count)]
    return found


class Worker:
    """An actor with a device of its own, or with several that share a model."""

    def begin(self, job: Job, order: Sequence[str], writer: Shard, place: str, command: Sequence[str]) -> None:
        """Open the run.

        Args:
            order: names of the models.
            place: the folder that relative names of files refer to.
            command: the driver's, for the record.

        Raises:
            ValueError: the machine does not see the folder; as `Job.open`.
        """
        try:
            os.chdir(place)
        except OSError as error:
            raise ValueError(
                f"{os.uname().nodename} does not see the folder {place}: start the command in a folder that all "
                "machines of the cluster share"
            ) from error
        sys.argv = list(command)
        self._run = job.open(writer)
        self._units = Units(job, order, self._run)
        self._followers = Followers(job, order) if job.processes > 1 else None

    def measure(self, model: str, name: str, part: Sharding, *, again: bool) -> list[str]:
        """Measure one unit, as `Units.measure`; `again`: another worker began it and died."""
        if again:
            self._run.read_others()
        if self._followers is not None:
            self._followers.measure(model, name, part, self._run.rows)
        try:
            return self._units.measure(model, name, part)
        except RuntimeError:
            if self._followers is not None and self._followers.one_was_killed():
                os._exit(1)  # the driver starts another group
            raise

    def end(self, error: BaseException | None) -> None:
        """Close the run, and remove its empty files if an error ended it."""
        self._run.__exit__(None if error is None else type(error), error, None)


def measure_on_cluster(job: Job, address: str, gpus_per_model: int | None, watch: Watch) -> list[Row]:
    """Measure a run on all devices of a cluster, including devices that join later; return its rows.

    Args:
        address: of the cluster: HOST:PORT, "auto" or "local".
        gpus_per_model: default 1, if the cluster has any.

    Raises:
        ValueError: no such cluster, or none of its devices can be used; as `farspan.measure`.
        OSError: the disk is full.
    """
    ray = optional_import("ray", "cluster")
    count, options = gpus_per_model or 1, job.loader.options
    if count > 1 and job.loader.device is not None:
        raise ValueError("device and gpus_per_model contradict each other: give one (--device, --gpus-per-model)")
    on_cpu = job.loader.device == "cpu"
    processes = 1 if "device_map" in options else count
    if processes > 1:
        options = options | {"distributed_config": DistributedConfig(tp_size=processes)}
    loader = replace(job.loader, options=options)
    models = tuple(dict.fromkeys(job.models))
    with connected(ray, address):
        found = slots(ray.nodes(), gpus_per_model, on_cpu=on_cpu)
        if not found:
            wanted = f"{gpus_per_model} GPUs" if gpus_per_model else "a GPU or a CPU"
            raise ValueError(
                f"no machine of the cluster has {wanted}: start one that has, or give fewer (--gpus-per-model)"
            )
        methods, shard = [method(one) for one in job.methods], (1, PIECES * len(found))
        part = sharding(models, methods, job.what, shard, loader)
        # connections to servers cannot be sent to other processes
        job = replace(job, models=models, loader=replace(loader, _served={}), processes=processes)
        writers = len(part.dealing.units) + 1  # more workers than units would be idle; the last writer is the driver
        with job.open((writers, writers)) as run:
            driver = _Driver(ray, job, part, gpus_per_model, on_cpu, run, watch)
            driver.measure()
    return latest(read_rows(job.folder))


@dataclass
class _WorkerState:
    """A worker as the driver sees it."""

    slot: Slot
    actor: Any
    ready: bool = False  # it has opened the run
    unit: int | None = None


class _Driver:
    """Hands units to workers, and starts workers where a device is free."""

    def __init__(
        self, ray: Any, job: Job, part: Sharding, gpus_per_model: int | None, on_cpu: bool, run: Run, watch: Watch
    ) -> None:
        self._ray, self._job, self._part, self._watch, self._on_cpu = ray, job, part, watch, on_cpu
        self._gpus_per_model = gpus_per_model
        self._actor = ray.remote(Worker)
        known = KnownRows.of(row for row in run.rows if row.status not in UNFINISHED)
        self._wanted, self._got = set[RowKey](), set[RowKey]()
        units = list[int]()
        for number, unit in enumerate(part.dealing.units):
            content = part.contents[unit.cell]
            self._wanted |= content.rows(unit) if content.cell.divisible else set()
            if not content.cell.divisible or part.lacking(unit, known):
                units.append(number)
        self._units = [part.dealing.units[number] for number in units]
        self._names = [part.contents[unit.cell].cell.name[0] for unit in self._units]
        self._queue = UnitQueue(self._names, [unit.flops for unit in self._units])
        self._tail = Tail(job.folder)
        self._got |= {row.key for row in self._tail.new()} & self._wanted
        self._workers: dict[int, _WorkerState] = {}  # by the number of their file
        self._calls: dict[Any, int] = {}  # by Ray's reference: the worker that answers
        self._deaths = Counter[Slot]()  # in a row
        self._reason = ""  # of the last death
        self._shown = -1  # workers
        self._noticed = set[str]()
        self._since = time.monotonic()  # when a worker was last ready

    def measure(self) -> None:
        """Measure all units."""
        error: BaseException | None = None
        try:
            while self._queue.left:
                self._start_workers()
                self._hand_out()
                calls = list(self._calls)
                if calls:
                    for call in self._ray.wait(calls, num_returns=len(calls), timeout=TICK)[0]:
                        self._answered(call)
                else:
                    time.sleep(TICK)
                self._show()
        except BaseException as problem:
            error = problem
            raise
        finally:
            self._end_workers(error)

    def _start_workers(self) -> None:
        """Start a worker on each free device, as many as there are units left."""
        taken = {worker.slot for worker in self._workers.values()}
        places = slots(self._ray.nodes(), self._gpus_per_model, on_cpu=self._on_cpu)
        usable = [slot for slot in places if self._deaths[slot] < SLOT_TRIES]
        if places and not usable and not self._workers:
            raise ValueError(f"no worker of the cluster stays alive, the last one ended with: {self._reason}")
        numbers = (number for number in range(1, len(self._part.dealing.units) + 1) if number not in self._workers)
        for slot in usable:
            if len(self._workers) >= self._queue.left:
                break
            if slot not in taken:
                self._start_worker(slot, next(numbers))
        if any(worker.ready for worker in self._workers.values()):
            self._since = time.monotonic()
        elif time.monotonic() - self._since > ANSWER:
            self._notice("waiting for the first worker: devices of the cluster may be in use, or its machines gone")

    def _start_worker(self, slot: Slot, number: int) -> None:
        strategies = optional_import("ray.util.scheduling_strategies", "cluster")
        there = strategies.NodeAffinitySchedulingStrategy(slot.node, soft=False)
        # no restarts by Ray: a worker would wait for its own machine, and its unit with it
        options = {"num_gpus": slot.gpus, "num_cpus": slot.cpus, "max_restarts": 0}
        actor = self._actor.options(scheduling_strategy=there, **options).remote()
        writer = number, len(self._part.dealing.units) + 1
        self._workers[number] = _WorkerState(slot, actor)
        self._calls[actor.begin.remote(self._job, self._part.models, writer, str(Path.cwd()), sys.argv)] = number

    def _hand_out(self) -> None:
        models = dict(zip(self._part.models, self._job.models, strict=True))
        for number, worker in self._workers.items():
            if worker.ready and worker.unit is None and (unit := self._queue.take(number)) is not None:
                worker.unit = unit
                name, part = self._names[unit], self._part.only(self._units[unit])
                again = self._queue.tried(unit)
                self._calls[worker.actor.measure.remote(models[name], name, part, again=again)] = number

    def _answered(self, call: Any) -> None:
        """Take the answer of a worker, or note that it died."""
        number = self._calls.pop(call)
        worker = self._workers[number]
        try:
            lines = self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:
            # the error that the worker raised, without the trace that Ray adds to its text
            raise (error.cause if isinstance(error.cause, Exception) else RuntimeError(str(error))) from error
        except self._ray.exceptions.RayError as error:
            self._lost(number, str(error).partition("\n")[0])
            return
        worker.ready = True
        if worker.unit is not None:
            worker.unit = None
            self._deaths[worker.slot] = 0
            self._queue.done(number)
            for line in lines:
                self._notice(line)

    def _lost(self, number: int, reason: str) -> None:
        worker = self._workers.pop(number)
        self._ray.kill(worker.actor)  # it may be alive but out of reach
        self._deaths[worker.slot] += 1
        self._reason = reason
        unit = self._queue.lost(number)
        again = " Its unit of work is measured again." if unit is not None else ""
        self._watch.notice(f"worker {number} on {worker.slot} ended.{again}")

    def _notice(self, line: str) -> None:
        """Print a line once, although each worker may send it."""
        if line not in self._noticed:
            self._noticed.add(line)
            self._watch.notice(line)

    def _show(self) -> None:
        """Show the new rows of all workers."""
        ready = sum(worker.ready for worker in self._workers.values())
        if ready != self._shown:
            self._shown = ready
            self._watch.start(f"{ready} workers", len(self._wanted))
        for row in self._tail.new():
            self._got.add(row.key)
            self._watch.row(row, len(self._got), max(len(self._got), len(self._wanted)))

    def _end_workers(self, error: BaseException | None) -> None:
        plain = ValueError(str(error)) if error is not None else None  # some errors cannot be sent
        # do not wait for workers that are still measuring
        idle = [worker for worker in self._workers.values() if worker.ready and worker.unit is None]
        calls = [worker.actor.end.remote(plain) for worker in idle]
        if calls:
            self._ray.wait(calls, num_returns=len(calls), timeout=END)
        for worker in self._workers.values():
            self._ray.kill(worker.actor)


@contextlib.contextmanager
def connected(ray: Any, address: str) -> Iterator[None]:
    """Connect to a cluster, and disconnect at the end. A connection that is open already is used and left open.

    Raises:
        ValueError: it does not answer within a minute, or cannot be used.
    """
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # for a cluster started here
    if address != "local":
        _refuse_silent(address)
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    own: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except (RuntimeError, OSError, ValueError) as error:
        raise ValueError(f"the Ray cluster at {address} cannot be used: {str(error).strip()} (--ray)") from error
    finally:
        if main:
            signal.signal(signal.SIGTERM, handler)  # Ray replaces it
    try:
        yield
    finally:
        ray.shutdown()


def _refuse_silent(address: str) -> None:
    """Raise ValueError if no cluster answers. Tried in a subprocess: a failed connection could end this process."""
    if address.startswith("ray://"):
        return  # a Ray client has its own time limit
    named = [] if address == "auto" else ["--address", address]
    command = [sys.executable, "-m", "ray.scripts.scripts", "status", *named]
    try:
        answered = subprocess.run(command, capture_output=True, timeout=ANSWER, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        answered = False
    if not answered:
        where = "on this machine" if address == "auto" else f"at {address}"
        raise ValueError(
            f"no Ray cluster answers {where}: start one with `ray start --head`, give its address HOST:PORT, or local "
            "for the devices of this machine (--ray). Nothing was measured, and earlier rows are safe"
        )
