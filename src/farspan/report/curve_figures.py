"""Figures of forgetting curves: accuracy and memory index over length, recall over distance, and maps."""

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

import numpy as np

from farspan import stats
from farspan.report.curves import Measured, Series
from farspan.report.curves import trained_at as length_trained_at
from farspan.report.figure import Area, Failed, Figure, Line, Mark, Rule
from farspan.report.figures import with_interval
from farspan.report.interactive import hover, numbers

BACKGROUNDS = (("fine", "#d9efd9"), ("coarse", "#fdf3d0"), ("amnesia", "#eeeeee"))
RECALL = [[0.0, "#ebe2d0"], [0.25, "#c9dbe4"], [0.5, "#83b3d3"], [0.75, "#3583b8"], [1.0, "#08386b"]]
LENGTH = "length of the text to be copied (tokens)"
ACCURACY = "accuracy (share of tokens predicted)"


def curve_figure(series: Sequence[Series], title: str = "") -> Figure:
    """Return accuracy over length: copy solid, control dashed, half-lives as marks, the trained context as a line. One
    curve alone has fine memory, coarse memory and amnesia as background, amnesia only where coarse memory ends within
    the lengths measured."""
    lines: list[Line] = []
    marks: list[Mark] = []
    failed = []
    for index, one in enumerate(series):
        prefix = "" if len(series) == 1 else f"{one.name}: "
        good = one.curve.kept(one.curve.measured)
        if len(good.lengths):
            lines += _halves(index, prefix, good.lengths, good.copy, good.control, _texts(one.name, good))
        marks += _half_life(index, prefix, one, good)
        if one.curve.failures:
            partly = frozenset(good.lengths.tolist())
            missing = [int(length) for length in one.curve.lengths if length not in partly]
            reasons = sorted({one.curve.failures.get(length, "missing") for length in missing})
            label = f"{prefix}failed: {', '.join(reasons)}"
            failed.append(Failed(one.name, label, index, dict(one.curve.failures), partly))
    return Figure(
        title=title,
        x=LENGTH,
        y=ACCURACY,
        lines=lines,
        marks=marks,
        failed=failed,
        rules=_trained(series),
        areas=_areas(series[0]) if len(series) == 1 else [],
        span=(-0.04, 1.04),
        num_members=len(series),
    )


def _halves(
    index: int, prefix: str, x: np.ndarray, copy: np.ndarray, control: np.ndarray, texts: Sequence[Sequence[str]]
) -> Iterator[Line]:
    """Yield the lines of copy and control, [repeats, x]."""
    for kind, values in (("copy", copy), ("control", control)):
        low, high = stats.bands(values)
        mean, style = stats.measured_mean(values), "solid" if kind == "copy" else "dashed"
        yield Line(f"{prefix}{kind}", x, mean, index, low, high, texts, kind, style)  # type: ignore[arg-type]


def _half_life(index: int, prefix: str, one: Series, good: stats.MeasuredCurve) -> list[Mark]:
    half = one.summary.half_life if one.summary else None
    if half is None or half.value == 0 or half.censored:
        return []
    height = float(np.interp(half.value, good.lengths, stats.measured_mean(good.copy)))
    text = [one.name, f"half-life {half} tokens"]
    return [Mark(f"{prefix}half-life {half}", half.value, height, half.low, half.high, index, text, "half-life")]


def _trained(series: Sequence[Series]) -> list[Rule]:
    places = {(at, one.trained_length) for one in series if (at := length_trained_at(one)) is not None}
    return [Rule(f"context = {trained:,} (trained)", x=at) for at, trained in sorted(places)]


def _areas(one: Series) -> list[Area]:
    if one.summary is None:
        return []
    edge = float(one.curve.lengths[-1]) * 1.015
    fine = edge if one.summary.fine.censored else one.summary.fine.value
    coarse = max(fine, edge if one.summary.coarse.censored else one.summary.coarse.value)
    names = (f"fine memory {one.summary.fine}", f"coarse memory {one.summary.coarse}", "amnesia")
    ends = zip(BACKGROUNDS, (0.0, fine, coarse), (fine, coarse, edge), names, strict=True)
    return [Area(name, start, end, colour) for (_, colour), start, end, name in ends if end > start]


def index_figure(series: Sequence[Series], title: str = "") -> Figure:
    """Return the memory index over length, with the two thresholds that define half-life and reach."""
    lines = []
    for index, one in enumerate(series):
        good = one.curve.kept(one.curve.measured)
        if len(good.lengths):
            texts = _texts(one.name, good)
            lines.append(Line(one.name, good.lengths, stats.memory_index(good), index, texts=texts, kind="index"))
    levels = [Rule("half-life", y=stats.HALF_LIFE), Rule("reach", y=stats.REACH)]
    trained = [Rule("", x=rule.x) for rule in _trained(series)]
    return Figure(
        title, LENGTH, "memory index", lines, rules=levels + trained, span=(-0.07, 1.07),
        num_members=len(series),
    )  # fmt: skip


def recall_figure(found: Sequence[Measured], title: str = "") -> Figure:
    """Return accuracy over the distance between a token and its copy, of those that were measured at one length."""
    lines: list[Line] = []
    for index, one in enumerate(found):
        where = one.series.map
        if where is None or len(where.lengths) > 1:
            continue
        prefix = "" if len(found) == 1 else f"{one.series.name}: "
        ats = [one.at_depth(float(depth)) for depth in where.depths]
        order = [int(i) for i in np.argsort(where.distance[0]) if ats[i].measured.any()]
        texts = [_texts(one.series.name, ats[i], where, i)[0] for i in order]
        distance = where.distance[0, order]
        lines += _halves(index, prefix, distance, where.copy[:, 0, order], where.control[:, 0, order], texts)
        indexes = where.memory_index[0, order]
        lines.append(Line(f"{prefix}memory index", distance, indexes, index, texts=texts, kind="index", style="dotted"))
    x = "distance between a token and its copy (tokens)"
    return Figure(title, x, ACCURACY, lines, span=(-0.07, 1.07), num_members=len(found))


def map_figure(one: Measured) -> dict[str, Any]:
    """Return the memory index over length and depth, for the page: empty where nothing was measured."""
    where = one.series.map
    assert where is not None
    shape = (len(where.depths), len(where.lengths))
    values, texts = np.full(shape, np.nan), np.full(shape, "not measured", dtype=object)
    columns = {int(length): column for column, length in enumerate(where.lengths)}
    for row, depth in enumerate(where.depths):
        at = one.at_depth(float(depth))
        for length, status in at.failures.items():
            texts[row, columns[length]] = f"length {length:,}, depth {depth:g}: {escape(status, quote=False)}"
        good = at.kept(at.measured)
        lines = _texts(one.series.name, good, where, row)
        for length, value, text in zip(good.lengths, stats.memory_index(good), lines, strict=True):
            values[row, columns[length]], texts[row, columns[length]] = value, hover(text)
    heat = {
        "type": "heatmap",
        "x": [f"{length:,}" for length in where.lengths],
        "y": [f"{depth:g}" for depth in where.depths],
        "z": [numbers(row) for row in values],
        "text": texts.tolist(),
        "hoverinfo": "text",
        "zmin": 0,
        "zmax": 1,
        "colorscale": RECALL,
        "xgap": 1,
        "ygap": 1,
        "colorbar": {"thickness": 10, "outlinewidth": 0, "title": {"text": "memory index", "side": "right"}},
    }
    depth_axis = {"type": "category", "title": {"text": "depth (0: beginning)"}, "showgrid": False}
    layout = {
        "xaxis": {"type": "category", "title": {"text": "length (tokens)"}, "showgrid": False},
        "yaxis": depth_axis | {"autorange": "reversed"},
        "height": 150 + 40 * len(where.depths),
    }
    return {"data": [heat], "layout": layout}


def _texts(name: str, curve: stats.MeasuredCurve, where: stats.Map | None = None, depth: int = 0) -> list[list[str]]:
    """Return what is known of each length, in lines. `depth`: which one of the map, if there is one."""
    index, counts = stats.memory_index(curve), np.isfinite(curve.copy).sum(0)
    halves = [(stats.measured_mean(values), *stats.bands(values)) for values in (curve.copy, curve.control)]
    texts = []
    for i, length in enumerate(curve.lengths):
        lines = [name, f"length {length:,}"]
        if where is not None:
            distance = where.distance[where.lengths.tolist().index(length), depth]
            lines[1] += f", depth {where.depths[depth]:g}"
            lines.append(f"distance {distance:,.0f} tokens")
        lines += [
            f"{what} {known(*(v[i] for v in half))}" for what, half in zip(("copy", "control"), halves, strict=True)
        ]
        lines += [f"memory index {index[i]:.3f}", f"{counts[i]} {'repeat' if counts[i] == 1 else 'repeats'}"]
        texts.append(lines)
    return texts


def known(mean: float, low: float, high: float) -> str:
    ends = (None, None) if np.isnan(low) else (float(low), float(high))
    return with_interval(float(mean), *ends)
