"""Figures of forgetting curves: accuracy and memory index over length, recall over distance, and maps."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np

from farspan import stats
from farspan.report.curves import CurveMember, Point
from farspan.report.export import counted, ranged
from farspan.report.figure import Area, Failed, Figure, Heat, Line, Rule, Style, sample_size
from farspan.report.figures import depth_map, depth_names

BACKGROUNDS = ("#d9efd9", "#fdf3d0", "#eeeeee")  # of fine memory, coarse memory and amnesia
LENGTH = "length of the text to be copied (tokens)"
ACCURACY = "accuracy (share of tokens predicted)"
MOST_BARS = 4  # intervals of half-lives in one figure: more cover each other, and the legend has them


def curve_figure(curves: Sequence[CurveMember], title: str = "", indices: Iterable[int] | None = None) -> Figure:
    """Return accuracy over length: copy solid, control dashed, half-lives as marks (of up to MOST_BARS curves with
    their intervals), the trained context as a line. A single curve has fine memory, coarse memory and amnesia as
    background; amnesia only if coarse memory ends within the lengths measured.

    Args:
        indices: that give the curves their colours; default 0, 1, …
    """
    lines: list[Line] = []
    marks: list[Line] = []
    failed = []
    for index, one in zip(indices or count(), curves, strict=False):
        prefix = "" if len(curves) == 1 else f"{one.name}: "
        points = _measured(one)
        legend = f"{prefix}half-life {one.summary.half_life}" if one.summary else one.name
        lines += _halves(index, prefix, legend, "length", points, [_text(one, point) for point in points])
        marks += _half_life(index, prefix, one, has_bar=len(curves) <= MOST_BARS)
        if failures := one.curve.failures:
            partly = frozenset(point["length"] for point in points)
            missing = [length for length in one.curve.lengths.tolist() if length not in partly]
            reasons = sorted({failures.get(length, "missing") for length in missing})
            failed.append(Failed(one.name, f"{prefix}no result: {', '.join(reasons)}", index, dict(failures), partly))
    return Figure(
        title=title,
        x=LENGTH,
        y=ACCURACY,
        lines=[*lines, *marks],
        failed=failed,
        rules=_trained(curves),
        areas=_areas(curves[0]) if len(curves) == 1 else [],
        keys=_keys(curves, ("half-life", "mark") if marks else None),
        span=(-0.04, 1.04),
        num_members=len(curves),
        note=sample_size((point["n"] for one in curves for point in _measured(one)), "text"),
    )


def _measured(one: CurveMember, depth: float = 0.0) -> list[Point]:
    return [point for point in one.points(depth) if "copy" in point]


def _halves(
    index: int, prefix: str, legend: str, x: str, points: Sequence[Point], texts: Sequence[Sequence[str]]
) -> Iterator[Line]:
    """Yield the lines of copy and control over `x`, the name of a number of their points. With a prefix, which
    names the curve, a legend has only the first of the two."""
    for half, style in (("copy", "solid"), ("control", "dashed")) if points else ():
        look: dict[str, Any] = {"kind": half, "style": style}
        if prefix:
            look["legend"] = legend if half == "copy" else ""
        yield Line.of(f"{prefix}{half}", points, x, half, index, texts, **look)


def _half_life(index: int, prefix: str, one: CurveMember, has_bar: bool) -> list[Line]:
    half = one.summary.half_life if one.summary else None
    if half is None or half.value == 0 or half.censored:
        return []
    height = float(np.interp(half.value, one.measured.lengths, stats.measured_mean(one.measured.copy)))
    ends = (half.low, half.high) if has_bar else (None, None)
    x, low, high = (np.array([end], float) for end in (half.value, *ends))
    texts = [[one.name, f"half-life {half} tokens"]]
    legend = "" if prefix else None
    return [Line(f"{prefix}half-life {half}", x, [height], index, low, high, texts, "half-life", "mark", legend=legend)]


def _keys(curves: Sequence[CurveMember], more: tuple[str, Style] | None) -> list[tuple[str, Style]]:
    """Return what the styles mean, where there are several curves."""
    keys: list[tuple[str, Style]] = [("copy", "solid"), ("control", "dashed"), *([more] if more else [])]
    return keys if len(curves) > 1 else []


def _trained(curves: Sequence[CurveMember]) -> list[Rule]:
    places = {(at, one.trained_length) for one in curves if (at := one.trained_at) is not None}
    return [Rule(f"context = {trained:,} (trained)", x=at) for at, trained in sorted(places)]


def _areas(one: CurveMember) -> list[Area]:
    if one.summary is None:
        return []
    last = float(one.measured.lengths[-1])
    edge = last * 1.015 if last == one.curve.lengths[-1] else last  # to the edge of the figure, or what was measured
    fine = edge if one.summary.fine.censored else one.summary.fine.value
    coarse = max(fine, edge if one.summary.coarse.censored else one.summary.coarse.value)
    names = (f"fine memory {one.summary.fine}", f"coarse memory {one.summary.coarse}", "amnesia")
    ends = zip(BACKGROUNDS, (0.0, fine, coarse), (fine, coarse, edge), names, strict=True)
    return [Area(name, start, end, colour) for colour, start, end, name in ends if end > start]


def index_figure(curves: Sequence[CurveMember], indices: Iterable[int]) -> Figure:
    """Return the memory index over length, with the two thresholds that define half-life and reach. `indices`: as of
    `curve_figure`."""
    lines = []
    for index, one in zip(indices, curves, strict=True):
        if points := _measured(one):
            texts = [_text(one, point) for point in points]
            lines.append(Line.of(one.name, points, "length", "memory_index", index, texts, kind="index"))
    rules = [Rule("half-life", y=stats.HALF_LIFE), Rule("reach", y=stats.REACH)]
    rules += [Rule("", x=rule.x) for rule in _trained(curves)]
    return Figure("", LENGTH, "memory index", lines, rules=rules, span=(-0.07, 1.07), num_members=len(curves))


def recall_figure(curves: Sequence[CurveMember], title: str = "", indices: Iterable[int] | None = None) -> Figure:
    """Return accuracy over the distance between a token and its copy, for curves measured at one length. `indices`: as
    of `curve_figure`."""
    lines: list[Line] = []
    counts: list[int] = []
    for index, one in zip(indices or count(), curves, strict=False):
        if one.map is None or len(one.map.lengths) > 1:
            continue
        prefix = "" if len(curves) == 1 else f"{one.name}: "
        points = [point for depth in one.map.depths.tolist() for point in _measured(one, depth)]
        points.sort(key=lambda point: point["distance"])
        counts += [point["n"] for point in points]
        texts = [_text(one, point) for point in points]
        lines += _halves(index, prefix, one.name, "distance", points, texts)
        look: dict[str, Any] = {"kind": "index", "style": "dotted", "legend": "" if prefix else None}
        lines.append(Line.of(f"{prefix}memory index", points, "distance", "memory_index", index, texts, **look))
    return Figure(
        title,
        "distance between a token and its copy (tokens)",
        ACCURACY,
        lines,
        keys=_keys(curves, ("memory index", "dotted")),
        span=(-0.07, 1.07),
        num_members=len(curves),
        note=sample_size(counts, "text"),
    )


def map_figure(one: CurveMember, title: str = "") -> Heat:
    """Return the memory index over length and depth."""
    lengths, depths = one.everywhere.lengths.tolist(), one.everywhere.depths.tolist()
    points = {(depth, point["length"]): point for depth in depths for point in one.points(depth)}
    good = {at: (point["memory_index"], _text(one, point)) for at, point in points.items() if "copy" in point}
    failed = {at: why_missing(point) for at, point in points.items() if "copy" not in point and point["status"] != "ok"}
    note = sample_size((point["n"] for point in points.values() if "copy" in point), "text", intervals=False)
    return depth_map(title, lengths, depths, good, failed, "memory index", note)


def _text(one: CurveMember, point: Point) -> list[str]:
    """Return all that is known about a point, as lines."""
    lines = [one.name, f"length {point['length']:,}"]
    if one.map is not None:
        lines[1] += f", depth {depth_names(one.everywhere.depths.tolist())[point['depth']]}"
        lines.append(f"distance {point['distance']:,.0f} tokens")
    lines += [f"{name.replace('_', ' ')} {ranged(point, name)}" for name in ("copy", "control", "memory_index")]
    return [*lines, counted(point["n"], "repeat")]


def why_missing(point: Point) -> str:
    """Return the statuses of the rows of a point that was not measured, without their counts."""
    return ", ".join(part.partition(" ")[2] for part in str(point["status"]).split("; "))
