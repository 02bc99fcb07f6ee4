"""`farspan search`."""

import json
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from farspan.cli.measured import print_plans
from farspan.cli.messages import err, one_line_errors
from farspan.cli.options import (
    LENGTHS,
    MODEL,
    RUN,
    TASK,
    AsJson,
    Chunk,
    LocalLoading,
    LocalModel,
    Out,
    Planning,
    Scored,
    Text,
    TextOptions,
    Warmup,
    count,
    option,
)
from farspan.terminal import Terminal

if TYPE_CHECKING:
    from farspan.measuring.search import RopeSearch
    from farspan.report.search import Searched

Shape = Literal["yarn", "factors"]  # as in farspan.measuring.search, which imports torch


@dataclass(frozen=True)
class Searching(TextOptions):
    """Options: the texts of a search, which are not the held-out ones."""

    text: Text = "builtin:train"


def search_rope(
    model: LocalModel,
    *,
    shape: Annotated[
        Shape, option(MODEL, "yarn: the ends of YaRN's ramp and its scale; factors: one factor for each frequency.")
    ] = "yarn",
    factor: Annotated[
        float, option(MODEL, "Target length of texts, as a multiple of the trained length.", metavar="X")
    ] = 4.0,
    max_nats: Annotated[
        float, option(TASK, "Most nats per token that a candidate may cost inside the window.", metavar="X")
    ] = 0.05,
    evaluations: Annotated[int, count(RUN, "Candidates to measure; a larger number continues a search.")] = 200,
    sampling: Searching,
    target_text: Annotated[
        str | None,
        option(LENGTHS, "Text to copy, or shuffled: that of --text in random order; default: --text.", metavar="TEXT"),
    ] = None,
    repeats: Annotated[int, option(LENGTHS, "Texts at each length.", metavar="N")] = 8,
    warmup: Warmup = None,
    scored: Scored = None,
    loading: LocalLoading,
    out: Out = None,
    batch: Annotated[int | None, count(RUN, "Texts read at once; default: as many as memory allows.")] = None,
    chunk: Chunk = None,
    planning: Planning,
    as_json: AsJson = False,
) -> None:
    """Search for the RoPE frequencies with which a model remembers most, at a bounded cost inside its window.

    Candidates are measured by the memory index of the forgetting curve. With --lengths auto: whole contexts of 1, 2,
    4, ... trained lengths, up to --factor of them. The best candidate is written to factors.json in the run folder.
    Needs the extra search.
    """
    with one_line_errors(planning.kept):
        from farspan.measuring.loop import Watch
        from farspan.measuring.search import RopeSearch

        planning.check()
        [model] = loading.models([model])
        console = err if as_json else Terminal()
        search = RopeSearch(
            shape=shape,
            factor=factor,
            evaluations=evaluations,
            max_nats=max_nats,
            target_text=target_text,
            repeats=repeats,
            warmup=warmup,
            scored=scored,
            out=out,
            batch=batch,
            chunk=chunk,
            **sampling.settings(auto=None),
        )
        if planning.plan:
            timed: dict[str, Any] = {"calibrate": planning.calibrate, "tflops": planning.tflops}
            print_plans(search.plan(model, loader=loading.loader(), **timed), False, as_json)
            return
        found = search.run(model, loader=loading.loader(), watch=Watch(notice=console.print_line))
        command = print_found(found, search, model, loading, console)
        if as_json:
            print(json.dumps(as_data(found) | {"command": command}))
        if command is None:
            raise typer.Exit(1)


def print_found(
    found: "Searched", search: "RopeSearch", model: str, loading: LocalLoading, console: Terminal
) -> str | None:
    """Print and draw the results of a search; return the command that compares its factors, None if there are none."""
    from farspan.report.search import draw_search, print_search

    print_search(found, console)
    picture = draw_search(found)[0]
    console.print_line(f"{found.folder}: {picture.name}" + (f", {found.file.name}" if found.file else ""))
    if found.best is None:
        line = f"no candidate costs at most {found.max_nats:+g} nats inside the window: the nearest costs "
        line += f"{found.nearest.increase:+.4f}. Raise --max-nats or --evaluations, or lower --factor"
        err.print_line(line, style="red")
        return None
    if found.best.memory < 0.0005:  # printed as 0.000
        err.print_line("no candidate remembers anything at these lengths. Lower --factor or --lengths", style="red")
        return None
    command = compare_command(found, search, model, loading)
    if not found.best.number:
        console.print_line("no candidate within the bound remembers more than untrained YaRN", style="yellow")
    same = " --seed " in command
    where = "on windows of the same texts, which can overlap: give another --text" if same else "on other texts"
    console.print_command(f"{where}:\n{command}")
    return command


def compare_command(found: "Searched", search: "RopeSearch", model: str, loading: LocalLoading) -> str:
    """Return the command that compares the factors with the model's own RoPE and YaRN, on other texts if they are
    known: the held-out part of the built-in texts."""
    methods = ["full", f"rope:type=yarn,factor={search.factor:g}", f"rope:type=factors,file={found.file}"]
    targets = max(1, min(256, found.lengths[0] // 2))
    curve = {"target_text": search.target_text, "warmup": search.warmup, "scored": search.scored}
    given = "".join(f",{name}={value}" for name, value in curve.items() if value is not None)
    tasks = [f"perplexity:target_tokens={targets}", f"curve:protocol=probe{given}"]
    words = ["farspan", "compare", model]
    words += [word for method in methods for word in ("--method", method)]
    words += [word for task in tasks for word in ("--task", task)]
    words += ["--lengths", ",".join(map(str, found.lengths)), "--repeats", str(search.repeats)]
    text = "builtin:held-out" if search.text == "builtin:train" else search.text
    words += ["--text", text]
    # where no other text is known: other windows of the same
    if text == search.text or search.target_text not in (None, "shuffled"):
        words += ["--seed", str(search.seed + 1)]
    for name, value in loading.given.items():
        words += [name] if value is True else [name, str(value)]
    return shlex.join(words)


def as_data(found: "Searched") -> dict[str, Any]:
    """Return the results as JSON."""
    from dataclasses import asdict

    return {
        "run": str(found.folder),
        "lengths": list(found.lengths),
        "max_nats": found.max_nats,
        "own": asdict(found.own),
        "yarn": asdict(found.yarn),
        "best": None if found.best is None else asdict(found.best),
        "evaluations": len(found.tried),
        "factors": None if found.file is None else str(found.file),
    }
