"""`farspan curve` and `farspan recall`."""

from typing import Annotated, Any, Literal

from farspan.cli.measured import run_measurement
from farspan.cli.messages import one_line_errors
from farspan.cli.options import (
    LENGTHS,
    RUN,
    TASK,
    Loading,
    Methods,
    Models,
    PrefixTexts,
    Running,
    Scored,
    Seed,
    TargetTexts,
    Text,
    TextOptions,
    Warmup,
    count,
    option,
)

Protocol = Literal["auto", "nested", "probe", "paper"]


def curve(
    models: Models = None,
    *,
    target_text: TargetTexts = None,
    prefix_text: PrefixTexts = None,
    sampling: TextOptions,
    repeats: Annotated[
        int | None,
        option(
            LENGTHS,
            "Texts to copy at each length; default 10, or with auto lengths 4 and more where needed.",
            metavar="N",
        ),
    ] = None,
    protocol: Annotated[
        Protocol, option(TASK, "auto: nested, or probe if a length exceeds 4,096; paper: that of the paper's authors.")
    ] = "auto",
    depths: Annotated[
        str | None,
        option(TASK, "Number of depths to probe, or the depths, such as 0,0.5,1, for a map; implies --protocol probe."),
    ] = None,
    warmup: Warmup = None,
    scored: Scored = None,
    compat: Annotated[
        Literal["authors"] | None, option(TASK, "Use the authors' token ids and lengths; implies --protocol paper.")
    ] = None,
    test: Annotated[
        bool, option(TASK, "Test whether several prefix or target texts give the same curve.", "--test")
    ] = False,
    paper: Annotated[
        bool,
        option(
            TASK, "Also print the memory lengths of the paper: fine, coarse; always with --protocol paper.", "--paper"
        ),
    ] = False,
    minutes: Annotated[float | None, option(RUN, "Time budget in minutes, for auto lengths.", metavar="N")] = None,
    method: Methods = None,
    loading: Loading,
    running: Running,
) -> None:
    """Measure the forgetting curve: how well a model copies longer and longer texts.

    Also draws the curve, and prints memory lengths. With --lengths auto, lengths are added where the curve needs them.
    """
    with one_line_errors(running.kept):
        from farspan.lengths import authors_lengths, parse_depths
        from farspan.tasks.curve import Curve

        settings = sampling.settings("linear")
        if compat is not None and (sampling.points or sampling.spacing or not sampling.lengths.startswith("8:")):
            raise ValueError("--compat authors measures 32 lengths from 8 on: name the longest, --lengths 8:N")
        if compat is not None and protocol not in ("auto", "paper"):
            raise ValueError(f"--compat authors is protocol paper: got --protocol {protocol}. Omit one of them")
        if test and len(target_text or ()) < 2 and len(prefix_text or ()) < 2:
            raise ValueError("--test compares texts: give two or more --prefix-text, or two or more --target-text")
        if compat is not None:
            settings["lengths"] = authors_lengths(settings["lengths"][-1])
        tasks = [
            Curve(
                protocol="paper" if compat else protocol,
                warmup=warmup,
                scored=scored,
                depths=parse_depths(depths) if depths is not None else (0.0,),
                target_text=target,
                prefix_text=prefix,
                compat=compat is not None,
            )
            for target, prefix in pairs_of(target_text, prefix_text)
        ]
        settings |= {"repeats": repeats, "minutes": minutes, "test_texts": test}
        settings["paper"] = paper or tasks[0].protocol == "paper"
        run_measurement(models, method, tasks, running, loading, **settings)


def pairs_of(targets: list[str] | None, prefixes: list[str] | None) -> list[tuple[str | None, str | None]]:
    """Return each target text with each prefix text; None where the default is used."""
    return [(target, prefix) for target in targets or (None,) for prefix in prefixes or (None,)]


def recall(
    models: Models = None,
    *,
    text: Text = "builtin",
    target_text: TargetTexts = None,
    prefix_text: PrefixTexts = None,
    length: Annotated[
        int | None,
        count(LENGTHS, "Tokens of the text; default: what fits the trained length.", names=("--length", "--lengths")),
    ] = None,
    points: Annotated[int, count(LENGTHS, "Depths in the text, evenly spaced.", 2, 1000)] = 16,
    repeats: Annotated[int | None, option(LENGTHS, "Texts; default 10.", metavar="N")] = None,
    seed: Seed = 0,
    warmup: Warmup = None,
    scored: Scored = None,
    method: Methods = None,
    loading: Loading,
    running: Running,
) -> None:
    """Measure recall by distance: how well a model copies from near and far places of a text that it reads once."""
    with one_line_errors(running.kept):
        from farspan.tasks.recall import Recall

        pairs = pairs_of(target_text, prefix_text)
        tasks = [Recall(points, warmup, scored, target, prefix) for target, prefix in pairs]
        settings: dict[str, Any] = {"text": text, "lengths": (length,) if length else "auto", "seed": seed}
        run_measurement(models, method, tasks, running, loading, repeats=repeats, **settings)
