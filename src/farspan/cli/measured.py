"""The body of the commands that measure: plan, or measure with progress, draw and print."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from farspan.cli.messages import err
from farspan.cli.options import LocalLoading, Running
from farspan.terminal import Terminal

if TYPE_CHECKING:
    from farspan.measuring.plan import Planned
    from farspan.measuring.result import Measured
    from farspan.record import Row, Shard
    from farspan.tasks import Task

SHARDS_SHOWN = 8


def run_measurement(
    models: list[str] | None,
    methods: list[str] | None,
    tasks: "Sequence[str | Task]",
    running: Running,
    loading: LocalLoading,
    *,
    refusals: bool = False,
    minutes: float | None = None,
    test_texts: bool = False,
    paper: bool = False,
    **settings: Any,
) -> None:
    """Plan or measure the tasks.

    Args:
        test_texts: test whether several texts of a forgetting curve give the same results.
        paper: also print the memory lengths of the Forgetting Curve's paper.
        settings: text, lengths, repeats, seed and cost, as of `farspan.measure`.
    """
    from farspan.measuring.grid import measure, plans
    from farspan.measuring.loop import Watch
    from farspan.measuring.setups import grid
    from farspan.measuring.sharding import chosen_shard, parse_shard, sharding
    from farspan.methods import method
    from farspan.report.progress import Display

    running.check()
    models = loading.models(models)
    loading.refuse_chunk(running.chunk, models)
    methods, loader = methods or ["full"], loading.loader()
    given = parse_shard(running.shard) if running.shard is not None else None
    shard = chosen_shard(given) if running.ray is None else given
    settings |= {"refusals": refusals, "loader": loader}
    sizes: dict[str, Any] = {"batch": running.batch, "chunk": running.chunk}
    if running.plan:
        if minutes is not None:
            raise ValueError(f"--minutes {minutes:g} has no effect on --plan, which measures nothing: omit one of them")
        planned = grid(models, tasks, **settings, **sizes)
        timed: dict[str, Any] = {"calibrate": running.calibrate, "tflops": running.tflops}
        found = plans(models, methods, planned, loader=loader, out=running.out, **timed)
        print_plans(list(found), planned.adaptive, running.as_json)
        if shard is not None:
            err.print_line(
                str(sharding(models, planned.fitted([method(one) for one in methods]), planned, shard, loader))
            )
        return
    console = err if running.as_json else Terminal()
    with Display(Terminal(quiet=True) if running.quiet else console) as display:
        watch = Watch(display.start, display.row, display.notice, display.share)
        whole = (1, 1) if running.ray is None else None
        settings |= sizes | {"shard": shard or whole, "ray": running.ray, "gpus_per_model": running.gpus_per_model}
        measured = measure(models, methods, tasks, out=running.out, minutes=minutes, watch=watch, **settings)
    if shard is not None and measured.missing:
        if print_missing(measured, shard, console, running.as_json):
            raise typer.Exit(1)
        return
    if print_results(measured.rows, measured.folder, console, running.as_json, test=test_texts, paper=paper):
        raise typer.Exit(1)


def print_results(rows: "list[Row]", folder: Path, console: Terminal, as_json: bool, **options: Any) -> int:
    """Print and draw the results of a run, also as JSON if `as_json`; return how many cells or rows failed."""
    from farspan.record import read_header
    from farspan.report.terminal import Results  # rich and matplotlib take a while

    found = Results(rows, read_header(folder), folder, **options)
    found.print(console)
    if as_json:
        print(json.dumps(found.as_data()))
    return found.num_failed


def print_missing(measured: "Measured", shard: "Shard", console: Terminal, as_json: bool) -> int:
    """Print what a shard has measured and what others still have to; return how many rows failed so far."""
    from farspan.report.terminal import failed_rows

    name, folder = "{}/{}".format(*shard), measured.folder
    own = measured.missing.get(name)
    console.print_line(f"shard {name}: {f'{own} missing' if own else 'its part is measured'}. Rows: {folder}")
    others = [f"{what} of shard {other}" for other, what in measured.missing.items() if other != name]
    shown = others[:SHARDS_SHOWN] + [f"and of {len(others) - SHARDS_SHOWN:,} more"] * (len(others) > SHARDS_SHOWN)
    if others:
        console.print_line(f"still missing: {', '.join(shown)}")
        console.print_line("The last shard prints the tables and draws the pictures; so does this command, repeated.")
    if as_json:
        print(json.dumps({"run": str(folder), "shard": name, "missing": measured.missing}))
    num_failed, line = failed_rows(measured.rows)
    if line:
        err.print_line(line, style="red")
    return num_failed


def _print_costs(plans: "Sequence[Planned]", adaptive: bool, console: Terminal) -> None:
    """Print a table of predicted costs, a line for each model, method and task, and what its columns leave out."""
    from farspan.record import by_key
    from farspan.report.export import duration, memory_size
    from farspan.report.runs import short_names

    known = [(model, cost) for model, *_, cost in plans if not isinstance(cost, str)]
    costs = [cost for _, cost in known]
    timed = any(cost.seconds is not None for cost in costs)
    cells = by_key((one[:3], (one.length, one.cost)) for one in plans if not isinstance(one.cost, str))
    by_length = any(one.length is not None for one in plans)
    short = short_names(one.model for one in plans)
    tasks = [what.partition(":")[0] for what in {what: None for _, _, what in cells}]
    lines: list[list[str]] = []
    for (model, method, what), some in cells.items():
        lengths, each = [length for length, _ in some if length is not None], [cost for _, cost in some]
        task = what.partition(":")[0]
        line = [*([short[model]] if len(short) > 1 else []), method]
        line += [task if by_length and tasks.count(task) == 1 else what]
        ends = sorted({*lengths[:1], *lengths[-1:]})
        line += ["–".join(f"{length:,}" for length in ends)] if by_length else [f"{each[0].num_examples:,}"]
        flops = sum(cost.flops for cost in each)
        line += [f"{sum(cost.tokens for cost in each):,}"]
        line += [f"{flops / 1e12:,.0f}" if flops >= 1e15 else f"{flops / 1e12:,.3g}"]
        line += [memory_size(max(cost.extra_bytes for cost in each))]
        lines.append([*line, *([duration(sum(cost.seconds or 0.0 for cost in each))] if timed else [])])
    names = [*(["model"] if len(short) > 1 else []), "method", "task"]
    numbers = ["tokens", "TFLOP", "memory", *(["time"] if timed else [])]
    head = [*names, "lengths" if by_length else "examples", *numbers]
    begun = any(cost.num_done for cost in costs)
    title = "plan of what this run still lacks" if begun else "plan: nothing is measured yet"
    if adaptive:
        later = "later rounds depend on its rows" if begun else "all may take 2 to 4 times as long"
        title += f"; the first round of --lengths auto: {later}"
    console.print_table(title, head, lines, num_names=len(names))
    if len(costs) > 1:
        flops, seconds = sum(cost.flops for cost in costs), sum(cost.seconds or 0.0 for cost in costs)
        total = f"all: {sum(cost.tokens for cost in costs):,} tokens, {flops / 1e12:,.3g} TFLOP"
        console.print_line(total + (f", {duration(seconds)}" if timed else ""))
    longest = dict(sorted(known, key=lambda one: one[1].longest))  # by model, the cost of the longest context
    for model, cost in longest.items():
        weights = f"{model}: the weights need a further {memory_size(cost.weight_bytes)}"
        console.print(weights, markup=False, highlight=False)
        if (trained := cost.trained_length) is not None and cost.longest > trained:
            beyond = f"contexts of up to {cost.longest:,} tokens exceed the trained length of {trained:,} tokens"
            console.print(f"{model}: {beyond}", markup=False, highlight=False)
    if longest:
        console.print("memory: keys and values, one attention mask and one block of logits; no weights, no activations")
    if longest and not timed:
        console.print("time: --calibrate loads the model and times it, --tflops X divides the FLOPs by X * 10^12")


def print_plans(plans: "Sequence[Planned]", adaptive: bool, as_json: bool) -> None:
    """Print a table of predicted costs, or that nothing is left to measure; then each fallback and each refusal.

    Args:
        adaptive: the plans are of the first round of `--lengths auto`.
    """
    from dataclasses import asdict

    from farspan.record import by_key
    from farspan.report.export import memory_size

    console = err if as_json else Terminal()
    known = [(f"{model} {method}", cost) for model, method, *_, cost in plans if not isinstance(cost, str)]
    if any(cost.num_examples for _, cost in known):
        _print_costs(plans, adaptive, console)
    elif known:
        left = "nothing is left to measure"
        if adaptive:
            left = "nothing is left of the first round of --lengths auto, and later rounds depend on its rows"
        console.print_line(f"plan: {left}; finished rows: {sum(cost.num_done for _, cost in known):,}")
    largest = dict(sorted(known, key=lambda one: one[1].extra_bytes))
    for who, cost in largest.items():
        if cost.parts:
            parts = ", ".join(f"{name.replace('_', ' ')} {memory_size(size)}" for name, size in cost.parts.items())
            console.print(f"{who}: {parts}", markup=False, highlight=False)
    for who, fallback in dict.fromkeys((who, cost.fallback) for who, cost in known if cost.fallback):
        console.print_line(f"{who}: read with plain forwards: {fallback}", style="yellow")
    refused = by_key(
        ((f"{model} {method}", what, cost), f"{length:,}")
        for model, method, what, length, cost in plans
        if isinstance(cost, str)
    )
    alike = by_key(((what, ", ".join(at), reason), who) for (who, what, reason), at in refused.items())
    for (what, at, reason), each in alike.items():
        some = "" if len(each) == len({one[:2] for one in plans}) else f"{'; '.join(each)}, "
        console.print_line(f"{some}{what} at {at}: refused: {reason}", style="red")
    if as_json:
        cells = [
            {"model": model, "method": method, "what": what}
            | ({} if length is None else {"length": length})
            | ({"refused": cost} if isinstance(cost, str) else asdict(cost))
            for model, method, what, length, cost in plans
        ]
        print(json.dumps({"plans": cells}))
