"""`farspan curve` and `farspan recall`."""

from enum import StrEnum
from typing import Annotated, Any

import typer

from farspan.cli.measured import run_measurement
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
    spacing: Annotated[Spacing | None, typer.Option(help="Spacing of a range A:B, default linear.")] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Targets at each length; default 10, with auto lengths 4 or as needed.")
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Budget of time, for auto lengths.")] = None,
    protocol: Annotated[
        Protocol | None,
        typer.Option(help="nested; probe: cheap at any length; paper: the authors'. Default by the largest length."),
    ] = None,
    depths: Annotated[
        str | None,
        typer.Option(help="5, or 0,0.5,1: depths in the texts to probe, for a map; implies --protocol probe."),
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
        from farspan.lengths import authors_lengths, parse_depths
        from farspan.tasks.curve import Curve

        chosen = chosen_lengths(lengths, points, spacing, Spacing.linear)
        if compat is not None and (points or spacing or not lengths.startswith("8:")):
            raise ValueError("--compat authors measures 32 lengths from 8 on: name the longest, --lengths 8:N")
        if compat is not None and protocol is not None and protocol.value != "paper":
            raise ValueError(f"--compat authors is protocol paper: got --protocol {protocol.value}. Omit one of them")
        if test and len(target_text or ()) < 2 and len(prefix_text or ()) < 2:
            raise ValueError("--test compares texts: give two or more --prefix-text, or two or more --target-text")
        if compat is not None and chosen is not None:
            chosen = authors_lengths(chosen[-1])
        tasks = [
            Curve(
                protocol="paper" if compat else protocol.value if protocol else None,
                warmup=warmup,
                scored=scored,
                depths=parse_depths(depths) if depths is not None else (0.0,),
                target_text=target,
                prefix_text=prefix,
                compat=compat is not None,
            )
            for target, prefix in pairs_of(target_text, prefix_text)
        ]
        what: dict[str, Any] = {"text": text, "lengths": chosen or "auto", "repeats": repeats, "seed": seed}
        options: dict[str, Any] = {
            "running": running,
            "loader": loading.loader(attention),
            "out": out,
            "minutes": minutes,
        }
        run_measurement(models, method, tasks, test_texts=test, **options, **what)


def pairs_of(targets: list[str] | None, prefixes: list[str] | None) -> list[tuple[str | None, str | None]]:
    """Return each target text with each prefix text; None where the default is used."""
    return [(target, prefix) for target in targets or (None,) for prefix in prefixes or (None,)]


def recall(
    models: Models,
    method: Methods = None,
    text: Text = "builtin",
    target_text: TargetTexts = None,
    prefix_text: PrefixTexts = None,
    length: Annotated[
        int | None, typer.Option(min=1, max=LARGEST, help="Tokens of the text; default what fits the trained length.")
    ] = None,
    points: Annotated[int, typer.Option(min=2, max=1000, help="Depths in the text, evenly spaced.")] = 16,
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
        from farspan.tasks.recall import Recall

        tasks = [
            Recall(points, warmup, scored, target, prefix) for target, prefix in pairs_of(target_text, prefix_text)
        ]
        what: dict[str, Any] = {
            "text": text,
            "lengths": (length,) if length else "auto",
            "repeats": repeats,
            "seed": seed,
        }
        run_measurement(models, method, tasks, running=running, loader=loading.loader(attention), out=out, **what)
