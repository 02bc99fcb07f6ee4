"""Pictures: the forgetting curve, accuracy against length, as figure 1 of Liu et al. 2024, with intervals; and recall
over length and depth, or over distance."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Tick
from matplotlib.figure import Figure  # not pyplot, which would choose the backend of the whole program
from matplotlib.text import Text

from farspan import stats
from farspan.files import written
from farspan.report.tables import Series, trained_at
from farspan.terminal import CONTROL

LEGEND_CHARACTERS = 150  # of small print in the width of a picture
SHOWN = 5  # curves of a training in one picture
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito
MARKERS = "osD^vP*"
BANDS = (("fine", "#d9efd9"), ("coarse", "#fdf3d0"), ("amnesia", "#eeeeee"))


def draw_curves(series: Sequence[Series], folder: str | Path, title: str, name: str = "curve") -> list[Path]:
    """Draws the curves into NAME.png and NAME.svg; returns the two paths.

    Copy accuracy is a full line with its 95 % interval over repeats, control a dashed one. A single curve
    has the bands of fine memory, coarse memory and amnesia in its background, amnesia only where coarse memory ends
    within the lengths measured; several have their half-lives marked.
    Lengths without a good row stand as crosses at the bottom.
    """
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    for colour, one in zip(_cycled(len(series)), series, strict=True):
        _draw(axes, one, colour, alone=len(series) == 1)
    windows = {(one.trained_length, at) for one in series if (at := trained_at(one)) is not None}
    for context, length in windows:
        axes.axvline(length, color="#777777", linestyle=":", linewidth=1.2)
        axes.annotate(
            f"context = {context:,} (trained)",
            (length, 0.5),
            xytext=(-3, 0),
            textcoords="offset points",
            rotation=90,
            va="center",
            ha="right",
            fontsize=8,
            color="#555555",
        )
    longest = max(int(one.curve.lengths[-1]) for one in series)
    axes.set(xlim=(0, longest * 1.015), ylim=(-0.04, 1.04), xlabel="length of the text to be copied (tokens)")
    axes.set(ylabel="accuracy (share of tokens predicted)", title=title)
    axes.grid(alpha=0.25)
    add_legend(figure, axes)
    return saved(figure, Path(folder), name)


def draw_maps(series: Sequence[Series], folder: str | Path, title: str) -> list[Path]:
    """Draws recall over length and depth: a heat map for each series with several lengths (`map.png`, ...), and one
    picture of recall by distance for those with a single one (`recall.png`). Each as PNG and SVG; returns the paths.

    Raises:
        ValueError: a series without a map.
    """
    if without := [one.name for one in series if one.map is None]:
        raise ValueError(f"{without[0]} was asked for at one depth only, so it has no map: measure with --depths")
    maps = [one for one in series if one.map is not None and len(one.map.lengths) > 1]
    lines = [one for one in series if one.map is not None and len(one.map.lengths) == 1]
    paths = []
    for number, one in enumerate(maps, 1):
        figure = Figure(figsize=(9, 5), layout="constrained")
        axes = figure.subplots()
        _draw_map(figure, axes, one)
        axes.set_title(f"{title}\n{one.name}" if len(maps) > 1 else title)
        paths += saved(figure, Path(folder), "map" if len(maps) == 1 else f"map-{number}")
    if lines:
        figure = Figure(figsize=(9, 5.5), layout="constrained")
        axes = figure.subplots()
        for colour, one in zip(_cycled(len(lines)), lines, strict=True):
            _draw_recall(axes, one, colour, prefix="" if len(lines) == 1 else f"{one.name}: ")
        axes.set(xlabel="distance between a token and its copy (tokens)", ylabel="accuracy (share of tokens predicted)")
        axes.set(ylim=(-0.04, 1.04), title=title)
        axes.grid(alpha=0.25)
        add_legend(figure, axes)
        paths += saved(figure, Path(folder), "recall")
    return paths


def draw_training(
    steps: Mapping[int, tuple[stats.Curve, stats.Summary]], folder: Path, trained: int | None, trained_at: int
) -> list[Path]:
    """Draws half-life and span against the step, and some of the curves, into training.png and training.svg; returns
    the two paths.

    Args:
        trained: tokens of the context that the model is trained on.
        trained_at: the length whose whole context has as many.
    """
    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    order = sorted(steps)
    _draw_lengths(left, order, [steps[step][1].half_life for step in order], "half-life", "#0072B2")
    _draw_lengths(left, order, [steps[step][1].span for step in order], "span", "#D55E00")
    for step in sorted({order[round(place)] for place in np.linspace(0, len(order) - 1, SHOWN)}):
        curve = steps[step][0].kept(steps[step][0].measured)
        colour = colormaps["viridis_r"](0.1 + 0.9 * order.index(step) / max(1, len(order) - 1))
        right.plot(curve.lengths, stats.measured_mean(curve.copy), color=colour, label=f"step {step:,}")
        right.plot(curve.lengths, stats.measured_mean(curve.control), "--", color=colour)
    if trained:
        for line in (left.axhline, right.axvline):
            line(trained_at, color="#777777", linestyle=":", label=f"context = {trained:,} (trained)")
    left.set(xlabel="step", ylabel="tokens", title="Memory of the model in training, 95 % intervals")
    left.set_ylim(bottom=0)
    left.xaxis.get_major_locator().set_params(integer=True)
    right.set_xscale("log", base=2)
    right.xaxis.set_major_formatter("{x:,.0f}")
    right.set(xlabel="length of the text to be copied (tokens)", ylim=(-0.02, 1.02), ylabel="accuracy")
    right.set(title="Forgetting curves: copy, and control (dashed)")
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8)
    return saved(figure, folder, "training")


def _draw_lengths(
    axes: Axes, steps: Sequence[int], found: Sequence[stats.MemoryLength], label: str, colour: str
) -> None:
    values, low, high = (np.array([getattr(o, n) for o in found], float) for n in ("value", "low", "high"))
    axes.plot(steps, values, "o-", color=colour, markersize=4, label=label)
    axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    over = np.array([one.censored for one in found])
    if over.any():
        axes.plot(np.array(steps)[over], values[over], "^", color=colour, markersize=7, label=f"{label}: at least")


def _draw_map(figure: Figure, axes: Axes, one: Series) -> None:
    assert one.map is not None
    lengths, depths = one.map.lengths, one.map.depths
    image = axes.pcolormesh(
        np.arange(len(lengths) + 1), np.arange(len(depths) + 1), one.map.memory_index.T, cmap="cividis", vmin=0, vmax=1
    )
    for (column, row), value in np.ndenumerate(one.map.memory_index):
        if np.isfinite(value):
            shade = "black" if value > 0.6 else "white"
            axes.text(column + 0.5, row + 0.5, f"{value:.2f}", ha="center", va="center", fontsize=8, color=shade)
    axes.set_xticks(np.arange(len(lengths)) + 0.5, [f"{length:,}" for length in lengths], rotation=45, ha="right")
    axes.set_yticks(np.arange(len(depths)) + 0.5, [f"{depth:.0%}" for depth in depths])
    axes.invert_yaxis()  # the beginning of the text on top
    axes.set(xlabel="length of the text (tokens)", ylabel="depth in the text")
    figure.colorbar(image, ax=axes, label="memory index (share recalled of what cannot be guessed)")


def _draw_recall(axes: Axes, one: Series, colour: str, *, prefix: str) -> None:
    assert one.map is not None
    distance = one.map.distance[0]
    for values, line, what in ((one.map.copy, "-", "copy"), (one.map.control, "--", "control")):
        values = values[:, 0]
        axes.plot(
            distance, stats.measured_mean(values), line, color=colour, marker="o", markersize=3, label=prefix + what
        )
        axes.fill_between(distance, *stats.bands(values), color=colour, alpha=0.15, linewidth=0)
    axes.plot(distance, one.map.memory_index[0], ":", color=colour, label=f"{prefix}memory index")


def add_legend(figure: Figure, axes: Axes) -> None:
    """Below the axes, in as many columns as fit."""
    longest = max(len(label) for label in axes.get_legend_handles_labels()[1])
    columns = max(1, min(3, LEGEND_CHARACTERS // (longest + 6)))
    figure.legend(fontsize=8, loc="outside lower center", ncols=columns, frameon=False)


def saved(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write a figure as PNG and SVG. Names in it are shown as they are: a dollar sign begins no formula."""
    ticks = {id(text) for tick in figure.findobj(Tick) for text in tick.findobj(Text)}  # powers of ten are formulas
    for text in figure.findobj(Text):
        if not isinstance(text, Text) or id(text) in ticks:
            continue
        text.set_parse_math(False)
        text.set_text(CONTROL.sub("\ufffd", text.get_text()))
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    for path in paths:
        with written(path) as beside:
            figure.savefig(beside, dpi=140)
    return paths


def _draw(axes: Axes, one: Series, colour: str, *, alone: bool) -> None:
    curve, summary = one.curve, one.summary
    assert summary is not None
    prefix = "" if alone else f"{one.name}: "
    good = curve.measured
    lengths = curve.lengths[good]
    for values, line, what in ((curve.copy, "-", "copy"), (curve.control, "--", "control")):
        values = values[:, good]
        axes.plot(
            lengths,
            stats.measured_mean(values),
            line,
            color=colour,
            marker="o",
            markersize=3,
            label=prefix + what,
        )
        if len(values) > 1:
            low, high = stats.bands(values)
            axes.fill_between(lengths, low, high, color=colour, alpha=0.15, linewidth=0)
    if alone:
        _draw_bands(axes, summary, float(curve.lengths[-1]))
    half = summary.half_life
    if half.value > 0 and not half.censored:
        height = float(np.interp(half.value, lengths, stats.measured_mean(curve.copy[:, good])))
        spread = None if half.low is None or half.high is None else [[half.value - half.low], [half.high - half.value]]
        axes.errorbar(
            half.value, height, xerr=spread, color=colour, marker="D", markersize=6, capsize=4, linestyle="none",
            label=f"{prefix}half-life {half}",
        )  # fmt: skip
    failed = [int(length) for length in curve.lengths[~good]]
    if failed:
        reasons = sorted({curve.failures.get(length, "missing") for length in failed})
        axes.plot(
            failed,
            [-0.02] * len(failed),
            "x",
            color="#cc0000",
            clip_on=False,
            label=f"{prefix}failed: {', '.join(reasons)}",
        )


def _draw_bands(axes: Axes, summary: stats.Summary, longest: float) -> None:
    edge = longest * 1.015
    fine = edge if summary.fine.censored else summary.fine.value
    coarse = max(fine, edge if summary.coarse.censored else summary.coarse.value)
    starts, ends = (0.0, fine, coarse), (fine, coarse, edge)
    names = (f"fine memory {summary.fine}", f"coarse memory {summary.coarse}", "amnesia")
    for (_, colour), start, end, name in zip(BANDS, starts, ends, names, strict=True):
        if end > start:
            axes.axvspan(start, end, color=colour, zorder=0, label=name)


def _cycled(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]
