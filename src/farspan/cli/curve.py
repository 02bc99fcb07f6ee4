"""`farspan curve` and `farspan recall`."""

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farspan.cli.options import (
    LARGEST,
    Attention,
    Loading,
    Methods,
    Models,
    Out,
    Points,
    PrefixTexts,
    Running,
    Scored,
    Seed,
    Spacing,
    TargetTexts,
    Text,
    Warmup,
    chosen_lengths,
    said,
)
from farspan.cli.show import print_end, print_plans, watched
from farspan.terminal import Terminal

if TYPE_CHECKING:
    from farspan.curves import CurveSettings
    from farspan.lm import Load
    from farspan.record import Row
    from farspan.report.tables import Group


class Protocol(StrEnum):
    nested = "nested"
    probe = "probe"
    paper = "paper"


class Compat(StrEnum):
    authors = "authors"


def curve(
    models: Models,
    method: Methods = None,
    text: Text = "builtin",
    target_text: TargetTexts = None,
    prefix_text: PrefixTexts = None,
    lengths: Annotated[
        str, typer.Option(help="512,1024,2048 or 512:16384; auto: where the curve needs them.")
    ] = "auto",
    points: Points = None,
    spacing: Annotated[Spacing | None, typer.Option(help="Of a range A:B, default linear.")] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Targets at each length; default 10, with auto lengths 4 or as needed.")
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Budget of time; goes with auto lengths.")] = None,
    protocol: Annotated[
        Protocol | None,
        typer.Option(help="nested; probe: cheap at any length; paper: the authors'. Default by the largest length."),
    ] = None,
    depths: Annotated[
        str | None, typer.Option(help="5, or 0,0.5,1: where in the texts to ask, as a map; implies --protocol probe.")
    ] = None,
    warmup: Warmup = None,
    scored: Scored = None,
    compat: Annotated[
        Compat | None, typer.Option(help="The authors' token ids and grid; implies --protocol paper.")
    ] = None,
    test: Annotated[
        bool, typer.Option("--test", help="Test whether several prefix or target texts give the same curve.")
    ] = False,
    seed: Seed = 0,
    out: Out = None,
    attention: Attention = None,
    *,
    loading: Loading,
    running: Running,
) -> None:
    """The forgetting curve: how long a text a model can copy from memory, with its memory lengths and a picture."""
    with said(running.kept):
        from farspan.curves import CurveSettings
        from farspan.lengths import authors_lengths, parse_depths

        chosen = chosen_lengths(lengths, points, spacing, Spacing.linear)
        if compat is not None and (points or spacing or not lengths.startswith("8:")):
            raise ValueError("--compat authors measures 32 lengths from 8 on: name the longest, --lengths 8:N")
        if compat is not None and protocol is not None and protocol.value != "paper":
            raise ValueError(f"--compat authors is protocol paper: got --protocol {protocol.value}. Omit one of them")
        if test and len(target_text or ()) < 2 and len(prefix_text or ()) < 2:
            raise ValueError("--test compares texts: give two or more --prefix-text, or two or more --target-text")
        for texts in (target_text or [], prefix_text or []):
            if len(set(texts)) < len(texts):
                raise ValueError(f"texts {', '.join(texts)} are not all different: name each once")
        if compat is not None and chosen is not None:
            chosen = authors_lengths(chosen[-1])
        settings = CurveSettings(
            text=text,
            target_texts=tuple(target_text or ()),
            prefix_texts=tuple(prefix_text or ()),
            lengths=chosen,
            repeats=repeats,
            seed=seed,
            protocol="paper" if compat else protocol.value if protocol else "probe" if depths is not None else None,
            warmup=warmup,
            scored=scored,
            depths=parse_depths(depths) if depths is not None else (0.0,),
            compat=compat is not None,
        )
        loader = loading.loader(attention)
        measured(models, method, settings, loader, out, minutes, running, test)


def recall(
    models: Models,
    method: Methods = None,
    text: Text = "builtin",
    target_text: TargetTexts = None,
    prefix_text: PrefixTexts = None,
    length: Annotated[
        int | None, typer.Option(min=1, max=LARGEST, help="Tokens of the text; default what fits the trained length.")
    ] = None,
    points: Annotated[int, typer.Option(min=2, max=1000, help="Places in the text, evenly spaced.")] = 16,
    repeats: Annotated[int | None, typer.Option(help="Texts; default 10.")] = None,
    warmup: Warmup = None,
    scored: Scored = None,
    seed: Seed = 0,
    out: Out = None,
    attention: Attention = None,
    *,
    loading: Loading,
    running: Running,
) -> None:
    """Recall by distance: how well a model copies from near and from far, in one reading of a text of one length."""
    with said(running.kept):
        from farspan.curves import CurveSettings
        from farspan.lengths import parse_depths

        settings = CurveSettings(
            text=text,
            target_texts=tuple(target_text or ()),
            prefix_texts=tuple(prefix_text or ()),
            lengths=(length,) if length else None,
            repeats=repeats,
            seed=seed,
            protocol="probe",
            warmup=warmup,
            scored=scored,
            depths=parse_depths(str(points)),
            whole_window=length is None,
        )
        loader = loading.loader(attention)
        measured(models, method, settings, loader, out, None, running)


def measured(
    models: list[str],
    methods: list[str] | None,
    settings: "CurveSettings",
    loader: "Load",
    out: Path | None,
    minutes: float | None,
    running: Running,
    test: bool = False,
) -> None:
    """What `curve` and `recall` do once they know what is asked."""
    from farspan.curves import measure_curves, plan_curves

    methods = methods or ["full"]
    if running.plan:
        adaptive = settings.lengths is None and settings.protocol != "paper" and not settings.whole_window
        first = "; the first round of --lengths auto, about two thirds of it all" if adaptive else ""
        plans = plan_curves(models, methods, settings, loader=loader, batch=running.batch, chunk=running.chunk)
        print_plans(plans, first, running.as_json)
        return
    options = {"loader": loader, "minutes": minutes, "batch": running.batch, "chunk": running.chunk}
    rows, folder, console = watched(measure_curves, "curve", models, methods, settings, out, running.as_json, **options)
    if show_curves(rows, folder, console, running.as_json, test):
        raise typer.Exit(1)


def show_curves(rows: list["Row"], folder: Path, console: Terminal, as_json: bool, test: bool = False) -> int:
    """Draws and prints what a run holds; returns how many of its rows failed."""
    from farspan.display import print_memory_lengths, print_recall
    from farspan.record import latest, read_header
    from farspan.report.picture import draw_curves, draw_maps
    from farspan.report.tables import Source, as_data, grouped_series, remarks, series, short_names

    header = read_header(folder)
    curves = series(rows, header["models"])
    drawn = [one for one in curves if one.summary is not None]
    at_one_length = bool(drawn) and all(one.map is not None and len(one.curve.lengths) == 1 for one in drawn)
    lines: list[str] = []
    pictures = []
    if drawn:
        what = "; ".join(sorted({one.what for one in drawn}))
        names = ", ".join(sorted(short_names(one.model for one in drawn).values()))
        maps = [one for one in drawn if one.map is not None]
        if maps:
            pictures += draw_maps(maps, folder, f"Recall of {names} ({what})")
        if at_one_length:
            print_recall(drawn, console)
        else:
            pictures += draw_curves(drawn, folder, f"Forgetting curve of {names} ({what})")
            print_memory_lengths(drawn, console)
            lines += [line for one in drawn for line in remarks(one)]
    groups = grouped_series([(Source(folder.resolve().name, folder, header, latest(rows)), curves)])
    tests = _tested(folder, groups) if test and drawn else []
    differences = _differences(groups) if len(drawn) > 1 and not test else []
    for line in [*lines, *(line for _, told in [*tests, *differences] for line in told)]:
        console.print_line(line, style="dim")
    failed = print_end(rows, folder, pictures, console)
    if as_json:
        summary = {
            "run": str(folder),
            "curves": as_data(curves),
            "tests": [result for result, _ in tests],
            "differences": [result for result, _ in differences],
            "failed_rows": failed,
            "pictures": [str(path) for path in pictures],
        }
        print(json.dumps(summary))
    return failed


def _tested(folder: Path, groups: "list[Group]") -> list[tuple[dict[str, Any], list[str]]]:
    """What the tests of several texts say, as data and in words.

    Raises:
        ValueError: nothing that can be tested.
    """
    from farspan.report.contrasts import said, text_tests

    tests = text_tests([member for group in groups for member in group.members])
    if not tests:
        raise ValueError(f"{folder} holds too little to test its texts by: at least 3 repeats at a length are needed")
    return [
        (
            {"model": test.model, "method": test.method, "texts": test.which} | test.result.as_dict(),
            [f"{test.model} {test.method}, {test.which}: {line}" for line in said(test.result)],
        )
        for test in tests
    ]


def _differences(groups: "list[Group]") -> list[tuple[dict[str, Any], list[str]]]:
    """What curves under one question differ by from the first of them, as data and in words."""
    from farspan.report.contrasts import group_differences, said

    found = [one for group in groups for one in group_differences(group)]
    # a length that is 0 in both says nothing
    return [(one.as_dict(), said([one]) if any(one.values) else []) for one in found]
