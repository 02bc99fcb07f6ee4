"""`farspan curve` and `farspan recall`."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from farspan.cli.show import print_plans, show, watched

if TYPE_CHECKING:
    from farspan.curves import CurveSettings
    from farspan.lm import Load


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
    if show(rows, folder, console, running.as_json, test=test):
        raise typer.Exit(1)
