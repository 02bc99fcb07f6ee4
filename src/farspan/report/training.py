"""Pictures of trainings, and measurements in their logs.

Of a Sparse Memory Training: the paper's figures 8 and 9 (training perplexity by step) and 10 (at the end of each
length), and costs and gains inside and beyond the window. Of a CEPE training: its losses, and perplexity with and
without context. Of a model in training: its forgetting curves.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from farspan.report.curve_figures import ACCURACY, LENGTH
from farspan.report.figure import COLOURS, SHAPES, Figure, Line, Rule
from farspan.report.picture import draw_grid
from farspan.stats import MeasuredCurve, MemoryLength, Summary, measured_mean

SMT_TERMS = {"loss_sparse": "target after sampled memory", "loss_window": "ordinary window"}
CEPE_TERMS = {"loss": "loss", "loss_ce": "cross-entropy", "loss_kl": "KL divergence from the teacher"}
PERPLEXITY = re.compile(r"farspan/perplexity_(\d+)")  # logged by PerplexityCallback, with a length in tokens
UP = next(one for one in SHAPES if one[0] == "▲")
SHOWN = 5  # curves of a training in one picture
SIZE = (6.0, 5.0)  # of a figure in inches
Log = Sequence[Mapping[str, Any]]


def draw_smt_losses(log: Log, folder: str | Path, window: int, *, returns: bool = False) -> list[Path]:
    """Draw the log of a Sparse Memory Training into losses.png and losses.svg and return the two paths; none where
    nothing was logged yet.

    Args:
        window: tokens of the window that is extended; lengths within it are dashed.
        returns: the training returns to lengths that it has reached, so that an entry of the log, whose length is that
            of its last step, is a mean over steps of several lengths. Losses by length are then left out.
    """
    entries = [entry for entry in log if any(term in entry for term in SMT_TERMS)]
    if not entries:
        return []
    by_step, by_length = [], []
    for index, (term, label) in enumerate(SMT_TERMS.items()):
        found = ((entry["step"], math.exp(entry[term])) for entry in entries if term in entry)
        by_step.append(line(label, found, index))
        by_length.append(line(label, sorted(last_of_each_length(entries, term).items()), index))
    reached = line("length", ((entry["step"], entry["length"]) for entry in entries), 2)
    losses = Figure("Training perplexity", "step", "perplexity", by_step, log_y=True)
    measured = measured_figure(log, window, "dashed: inside the window")
    ends = "Training perplexity at the end of each length"
    figures: list[list[Figure | None]] = [
        [losses, Figure(ends, "length (tokens)", "perplexity", by_length, log_y=True)],
        [Figure("Length that the training has reached", "step", "length (tokens)", [reached]), measured],
    ]
    return draw_grid([[losses, measured]] if returns else figures, folder, "losses", size=SIZE)


def draw_cepe_losses(log: Log, folder: str | Path, window: int) -> list[Path]:
    """Draw the log of a CEPE training as `draw_smt_losses`.

    Args:
        window: tokens that the decoder holds; lengths within it, which have no context, are dashed.
    """
    entries = [entry for entry in log if "loss" in entry]
    if not entries:
        return []
    lines = [
        line(label, ((entry["step"], entry[term]) for entry in entries if term in entry), index)
        for index, (term, label) in enumerate(CEPE_TERMS.items())
    ]
    losses = Figure("Training loss", "step", "nats per token", [one for one in lines if one.x])
    measured = measured_figure(log, window, "dashed: without context")
    return draw_grid([[one for one in (losses, measured) if one is not None]], folder, "losses", size=SIZE)


def line(label: str, points: Iterable[tuple[float, float]], index: int, **look: Any) -> Line:
    """Return a line through (x, y)."""
    points = list(points)
    return Line(label, [x for x, _ in points], [y for _, y in points], index, **look)


def measured_figure(log: Log, window: int, dashed: str) -> Figure | None:
    """Return the perplexity of the measured text by step, a line for each length; None where it was not measured.

    Args:
        window: lengths of at most this many tokens are dashed.
        dashed: what dashed lines mean.
    """
    lengths = measured_lengths(log)
    lines = []
    for place, length in enumerate(lengths):
        name = f"farspan/perplexity_{length}"
        found = ((entry["step"], entry[name]) for entry in log if name in entry)
        look = {"style": "dashed" if length <= window else "solid", "shade": place / max(1, len(lengths) - 1)}
        lines.append(line(f"{length:,} tokens", found, 0, **look))
    return Figure(f"Perplexity by length ({dashed})", "step", "perplexity", lines, log_y=True) if lines else None


def measured_lengths(log: Log) -> list[int]:
    """Return the lengths at which perplexity was measured, ascending."""
    return sorted({int(match[1]) for entry in log for name in entry if (match := PERPLEXITY.fullmatch(name))})


def memory_length(logged: Mapping[str, Any], name: str) -> str:
    """Return half_life or span of an entry of a log in whole tokens, with `>` or `<` if it is outside the lengths
    measured."""
    key = f"farspan/{name}"
    more, below = bool(logged.get(f"{key}_censored")), logged.get(f"{key}_below")
    return str(MemoryLength(logged[key], censored=more, below=below))


def last_of_each_length(log: Log, term: str) -> dict[int, float]:
    """Return the training perplexity of a term at the last entry of each length, by length."""
    return {entry["length"]: math.exp(entry[term]) for entry in log if term in entry}


def draw_memory(
    steps: Mapping[int, tuple[MeasuredCurve, Summary]], folder: str | Path, trained: int | None, trained_at: int
) -> list[Path]:
    """Draw half-life and span against the step, and some of the curves, into training.png and training.svg; return the
    two paths.

    Args:
        trained: tokens of the context that the model is trained on.
        trained_at: the length whose whole context has that many tokens.
    """
    order = sorted(steps)
    numbers, curves = [], []
    for index, name in enumerate(("half_life", "span")):
        found = {step: getattr(steps[step][1], name) for step in order}
        points = [
            {"step": step, "tokens": one.value, "tokens_low": one.low, "tokens_high": one.high}
            for step, one in found.items()
        ]
        label = name.replace("_", "-")
        numbers.append(Line.of(label, points, "step", "tokens", index))
        if over := [(step, one.value) for step, one in found.items() if one.censored]:
            up = index + len(COLOURS) * (SHAPES.index(UP) - index)  # of the same colour, with another marker
            numbers.append(line(f"{label}: at least", over, up, style="mark"))
    for step in sorted({order[round(place)] for place in np.linspace(0, len(order) - 1, SHOWN)}):
        curve = steps[step][0].kept(steps[step][0].measured)
        shade = order.index(step) / max(1, len(order) - 1)
        for half, values, style in ((f"step {step:,}", curve.copy, "solid"), ("", curve.control, "dashed")):
            drawn = zip(curve.lengths.tolist(), measured_mean(values).tolist(), strict=True)
            curves.append(line(half, drawn, 0, style=style, shade=shade))
    text = f"context = {trained:,} (trained)" if trained else ""
    left = Figure(
        "Memory of the model in training, 95 % intervals", "step", "tokens", numbers,
        rules=[Rule(text, y=trained_at)] if trained else [],
    )  # fmt: skip
    right = Figure(
        "Forgetting curves: copy, and control (dashed)", LENGTH, ACCURACY, curves,
        rules=[Rule(text, x=trained_at)] if trained else [], log_x=True, span=(-0.02, 1.02),
    )  # fmt: skip
    return draw_grid([[left, right]], folder, "training", size=SIZE)
