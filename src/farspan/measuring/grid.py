"""Measure models × methods × tasks × lengths on the same tokens, in one run."""

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from farspan.lm import LM
from farspan.measuring.arguments import Lengths, Methods, Models, Tasks, check_division, methods_of, models_of, positive
from farspan.measuring.loader import Load
from farspan.measuring.loop import Watch
from farspan.measuring.one_model import identity_of, measure_model
from farspan.measuring.plan import Plan, Planned, check_timing, is_run, plan_examples, rows_so_far
from farspan.measuring.result import Measured
from farspan.measuring.setups import Grid, grid, possible_lengths
from farspan.measuring.sharding import chosen_shard, sharding
from farspan.methods import Method
from farspan.record import (
    DEFAULT_REPEATS,
    Run,
    Shard,
    current,
    latest,
    read_header,
    read_rows,
    refuse_other_texts,
)
from farspan.tasks import Example
from farspan.text.documents import Text


def measure(
    models: Models,
    methods: Methods = "full",
    tasks: Tasks = "perplexity",
    *,
    text: Text = "builtin",
    lengths: Lengths = None,
    repeats: int | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    cost: bool = False,
    minutes: float | None = None,
    refusals: bool = False,
    loader: Load | None = None,
    batch: int | None = None,
    chunk: int | None = None,
    shard: Shard | str | None = None,
    ray: str | None = None,
    gpus_per_model: int | None = None,
    watch: Watch | None = None,
) -> Measured:
    """Measure every task on every model under every method, on the same tokens, into the run folder `out`.

    Models are loaded one after another. Repeating the call resumes a stopped run; with the same `out` it may give other
    methods and models, more repeats, and more lengths below the longest. The result has all rows of the folder, also
    those of methods and models of earlier calls.

    Args:
        models: folders, hub ids, or models that are loaded already; one, or several.
        methods: as `farspan.method` parses them, or methods; one, or several.
        tasks: as `farspan.tasks.task` parses them, or tasks; one, or several.
        text: for tasks on a text: the name of a file, a folder, a hub data set or `builtin`; or documents, a list of
            strings, which farspan's cache keeps.
        lengths: ascending, for every task, in its unit. None: each task's own, the same for all models. "auto": chosen
            for each model: adaptive for forgetting curves, up to the end of positions and text for perplexity.
        repeats: examples; default 10, for adaptive lengths as many as needed.
        out: the run folder; default: one under runs/, the same for the same arguments.
        cost: also measure seconds and memory, apart from the tasks.
        minutes: time budget of adaptive lengths, not counting loading models and tokenising texts. Lengths left out
            get rows of status "budget".
        refusals: instead of raising, record lengths that a model or method refuses as rows of status "refused" with
            the reason, and measure the rest.
        batch, chunk: repeats read together, default as many as memory allows; and tokens of a row in one forward,
            default 1,024, on a GPU up to 8,192.
        shard: (i, n) measures part i of n of the run, with i from 1, while other processes measure the other parts
            into the same folder; default: number and count of the Slurm array task if its variables are set, else
            (1, 1), the whole run.
        ray: measure with one worker on each device of a Ray cluster (extra `cluster`): its address HOST:PORT, "auto"
            for the cluster that this machine is part of, "local" for all devices of this machine. A connection that
            `ray.init` has opened before is used instead. Models are folders, hub ids or URLs.
        gpus_per_model: GPUs of one worker, which divide the heads of each layer (tensor parallelism), or the layers if
            the loader has a `device_map`; default 1. On CPUs each worker uses a whole machine.

    Raises:
        ValueError: settings, texts or models that cannot be used; a folder with another run; too small a budget; a
            Ray cluster that does not answer within a minute.
        OSError: the disk is full.
    """
    watch, loader = watch or Watch(), loader or Load()
    models, given = models_of(models), methods_of(methods)
    check_division(models, shard, ray, gpus_per_model, minutes)
    shard = chosen_shard(shard) if ray is None else None
    options: dict[str, Any] = {"text": text, "lengths": lengths, "repeats": repeats, "seed": seed, "cost": cost}
    what = grid(models, tasks, refusals=refusals, batch=batch, chunk=chunk, loader=loader, **options)
    chosen = what.fitted(given)
    minutes = None if minutes is None else positive(minutes, "minutes")
    if minutes is not None and not what.adaptive:
        raise ValueError("a budget in minutes needs --lengths auto: use both, or omit --minutes")
    folder, header = what.run(models, chosen, out)
    if ray is not None:
        from farspan.measuring.cluster import measure_on_cluster
        from farspan.measuring.units import Job

        names, written = tuple(map(str, models)), tuple(map(str, chosen))
        job = Job(folder.absolute(), header, written, what, names, loader)
        return Measured(folder, measure_on_cluster(job, ray, gpus_per_model, watch))
    return _measure_here(models, chosen, what, folder, header, shard, loader, minutes, watch)


def _measure_here(
    models: Sequence[str | LM],
    methods: Sequence[Method],
    what: Grid,
    folder: Path,
    header: dict[str, Any],
    shard: Shard | None,
    loader: Load,
    minutes: float | None,
    watch: Watch,
) -> Measured:
    """Measure a run, or the part of a shard, in this process."""
    left = math.inf if minutes is None else 60 * minutes
    part = None if shard is None else sharding(models, methods, what, shard, loader)
    if part is not None:
        watch.notice(str(part))
        models = part.measured(models)
    with Run.open(folder, header, shard, may_grow=True) as run:
        for done, model in enumerate(models):
            share = left / (len(models) - done)
            # a separate call, so that a model is freed before the next is loaded
            left -= measure_model(loader.to_measure(model), methods, what, run, part, share, watch)
    if part is None:
        return Measured(folder, latest(current(run.rows)))
    rows = latest(read_rows(folder))
    return Measured(folder, rows, part.missing(rows, read_header(folder)["sessions"]))


def plans(
    models: Models,
    methods: Methods,
    what: Grid,
    *,
    loader: Load | None = None,
    calibrate: bool = False,
    tflops: float | None = None,
    out: str | Path | None = None,
) -> Iterator[Planned]:
    """Yield the cost of `measure` by model, method and task; for adaptive lengths, the cost of the first round. Where
    refusals are recorded, yield it by length too, or the reason of a refusal in its place.

    Args:
        calibrate: load the weights and time a few forwards; otherwise only config and tokenizer are loaded.
        tflops: 10^12 floating-point operations per second of the machine, to estimate the time without weights.
        out: the run folder, as of `measure`; what it holds is not counted.

    Raises:
        ValueError: a folder with another run; both `calibrate` and `tflops`, or `tflops` that is not a positive number.
    """
    check_timing(calibrate, tflops)
    loader, chosen = loader or Load(), what.fitted(methods_of(methods))
    models = models_of(models)
    folder, settings = what.run(models, chosen, out)
    rows = rows_so_far(folder, settings, may_grow=True)
    header = read_header(folder) if is_run(folder) else None
    for model in models:
        lm = loader(model, weights=calibrate)
        setups = what.setups(lm, Watch())
        if header is not None:
            refuse_other_texts(folder, header, identity_of(lm, setups, what))
        for one in setups:
            one = one.first_round
            measurement = one.bound.measurement
            possible, reasons = possible_lengths(lm, one, what.seed) if what.compared else (one, {})
            # of all lengths, also for the cost of one: they begin at places that depend on the longest
            examples, repeats = possible.examples(lm, what.seed), possible.repeats or DEFAULT_REPEATS
            for how in chosen:
                wanted = lm.name, str(how), measurement
                mine = [row for row in rows if (row.model, row.method, row.measurement) == wanted]
                options: dict[str, Any] = {"calibrate": calibrate, "tflops": tflops, "rows": mine, **possible.sizes(lm)}
                planned: Callable[..., Plan] = partial(
                    plan_examples, possible.bound, how, lm, repeats=repeats, **options
                )
                if not what.compared:
                    yield Planned(lm.name, str(how), one.what, None, planned(examples))
                    continue
                for length, cost in _by_length(planned, examples, one.lengths or (), reasons):
                    yield Planned(lm.name, str(how), one.what, length, cost)


def _by_length(
    planned: Callable[..., Plan], examples: Sequence[Example[Any]], lengths: Sequence[int], reasons: Mapping[int, str]
) -> Iterator[tuple[int, Plan | str]]:
    """Yield each length with the cost that it adds to the shorter ones, or with the reason of its refusal."""
    before: Plan | None = None
    for length in lengths:
        if length in reasons:
            yield length, reasons[length]
            continue
        try:
            cost = planned(_at(examples, (length,)))
            every = cost if before is None else planned(_at(examples, range(length + 1)), calibrate=False)
        except ValueError as error:
            yield length, str(error)
            continue
        yield length, cost if before is None else cost.after(before, every)
        before = every


def _at(examples: Sequence[Example[Any]], lengths: Container[int]) -> list[Example[Any]]:
    """Return the examples at these lengths only, those that have any."""
    some = [replace(one, lengths=tuple(n for n in one.lengths if n in lengths)) for one in examples]
    return [one for one in some if one.lengths]
