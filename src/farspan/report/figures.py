"""Interactive figures as plotly.js takes them: plain dicts of traces and layout, drawn by the page.

Plotly reads a small HTML in names and hover texts, so what comes from outside is escaped here.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from farspan import stats
from farspan.report import compare, perplexity
from farspan.report.picture import COLOURS
from farspan.report.tables import Member, Series, trained_at

Figure = dict[str, Any]
SYMBOLS = {
    "circle": "●",
    "square": "■",
    "diamond": "◆",
    "triangle-up": "▲",
}  # the next one once the colours are used up
DARK = {"#000000": "#777777"}  # of the colours, the one that a dark page would swallow
FAILED = "#cc3311"
NEUTRAL = "#8a8a8a"
RECALL = [[0.0, "#ebe2d0"], [0.25, "#c9dbe4"], [0.5, "#83b3d3"], [0.75, "#3583b8"], [1.0, "#08386b"]]
MEASURES = {"nats": "nats per token", "accuracy": "accuracy", "gain": "gain (nats per token)"}


def colour(index: int) -> str:
    """Of the curve of that index in its group."""
    plain = COLOURS[index % len(COLOURS)]
    return DARK.get(plain, plain)


def symbol(index: int) -> tuple[str, str]:
    """Its marker: plotly's name for it, and as a character."""
    return list(SYMBOLS.items())[index // len(COLOURS) % len(SYMBOLS)]


def curve_figure(members: Sequence[Member]) -> Figure:
    """Accuracy over length: copy full, control dashed, 95 % bands, failed lengths as crosses, half-lives as diamonds,
    the trained context as a line."""
    traces: list[dict[str, Any]] = []
    for index, member in enumerate(members):
        one = member.series
        good = one.curve.kept(one.curve.measured)
        texts = _hover_texts(one.name, good)
        for values, kind in ((good.copy, "copy"), (good.control, "control")):
            traces += _band(good.lengths, stats.bands(values), index, kind)
            traces.append(
                _line(index, kind, good.lengths, stats.measured_mean(values), texts, dashed=kind == "control")
            )
        traces += _half_life(index, one, good) + _failed(index, one)
    return {"data": traces + _trained([m.series for m in members]), "layout": _layout("accuracy", members)}


def index_figure(members: Sequence[Member]) -> Figure:
    """Memory index over length, with the two thresholds that half-life and reach are read off at."""
    traces: list[dict[str, Any]] = []
    for index, member in enumerate(members):
        good = member.series.curve.kept(member.series.curve.measured)
        texts = _hover_texts(member.series.name, good)
        traces.append(_line(index, "index", good.lengths, stats.memory_index(good), texts))
    longest = max(float(member.series.curve.lengths[-1]) for member in members)
    shortest = min(float(member.series.curve.lengths[0]) for member in members)
    for level, name in ((stats.HALF_LIFE, "half-life"), (stats.REACH, "reach")):
        traces.append(_rule([shortest, longest], [level, level], name, "bottom left"))
    return {
        "data": traces + _trained([m.series for m in members], named=False),
        "layout": _layout("memory index", members),
    }


def map_figure(member: Member) -> Figure:
    """Memory index over length and depth: dark where the model remembers, empty where nothing was measured."""
    where = member.series.map
    assert where is not None
    shape = (len(where.depths), len(where.lengths))
    values, texts = np.full(shape, np.nan), np.full(shape, "not measured", dtype=object)
    columns = {int(length): column for column, length in enumerate(where.lengths)}
    for row, depth in enumerate(where.depths):
        at = member.at_depth(float(depth))
        for length, status in at.failures.items():
            texts[row, columns[length]] = f"length {length:,}, depth {depth:g}: {escape(status, quote=False)}"
        found = at.kept(at.measured)
        hovers = _hover_texts(member.series.name, found, where, row)
        for length, value, text in zip(found.lengths, stats.memory_index(found), hovers, strict=True):
            values[row, columns[length]], texts[row, columns[length]] = value, text
    heat = {
        "type": "heatmap",
        "x": [f"{length:,}" for length in where.lengths],
        "y": [f"{depth:g}" for depth in where.depths],
        "z": [_numbers(row) for row in values],
        "text": texts.tolist(),
        "hoverinfo": "text",
        "zmin": 0,
        "zmax": 1,
        "colorscale": RECALL,
        "xgap": 1,
        "ygap": 1,
        "colorbar": {"thickness": 10, "outlinewidth": 0, "title": {"text": "memory index", "side": "right"}},
    }
    layout = {
        "xaxis": {"type": "category", "title": {"text": "length (tokens)"}, "showgrid": False},
        "yaxis": {
            "type": "category",
            "title": {"text": "depth (0: beginning)"},
            "autorange": "reversed",
            "showgrid": False,
        },
        "height": 150 + 40 * len(where.depths),
    }
    return {"data": [heat], "layout": layout}


def recall_figure(members: Sequence[Member]) -> Figure:
    """Accuracy over the distance between a token and its copy, of those that were asked at one length only."""
    traces: list[dict[str, Any]] = []
    for index, member in enumerate(members):
        where = member.series.map
        if where is None or len(where.lengths) > 1:
            continue
        ats = [member.at_depth(float(depth)) for depth in where.depths]
        order = [i for i in np.argsort(where.distance[0]) if ats[i].measured.any()]
        distances = where.distance[0, order]
        texts = [_hover_texts(member.series.name, ats[i], where, int(i))[0] for i in order]
        for kind, values in (("copy", where.copy[:, 0, order]), ("control", where.control[:, 0, order])):
            means = stats.measured_mean(values)
            traces += _band(distances, stats.bands(values), index, kind)
            traces.append(_line(index, kind, distances, means, texts, dashed=kind == "control"))
    layout = _layout("accuracy", members)
    layout["xaxis"] |= {"title": {"text": "distance back to what is asked for (tokens)"}}
    return {"data": traces, "layout": layout}


def perplexity_figure(members: Sequence[perplexity.Member], what: str) -> Figure:
    """One of MEASURES over length, with 95 % bands, failed lengths as crosses, and the trained length as a line."""
    traces: list[dict[str, Any]] = []
    for index, member in enumerate(members):
        one = member.series
        if one.measured.any():
            lengths, values = one.lengths[one.measured], getattr(one, what)[:, one.measured]
            ends = stats.bands(values) if what == "accuracy" else stats.interval(values)
            traces += _band(lengths, ends, index, what)
            traces.append(_line(index, what, lengths, stats.measured_mean(values), _expectation_texts(one)))
    bottom, top = _span(traces)
    for index, member in enumerate(members):
        one = member.series
        partly = dict(zip(one.lengths.tolist(), one.measured.tolist(), strict=True))
        traces += _crosses(index, one.name, one.failures, partly, bottom)
    trained = sorted({member.trained_length for member in members if member.trained_length is not None})
    traces += [_rule([at, at], [bottom, top], f"{at:,} (trained)", "bottom left") for at in trained]
    lengths = sorted({int(length) for member in members for length in member.series.lengths})
    return {"data": traces, "layout": _log_layout(MEASURES[what], "length (tokens)", lengths, (bottom, top), members)}


def position_figure(members: Sequence[perplexity.Member]) -> Figure:
    """Nats per token over the position in the longest text, of those that scored every token."""
    traces: list[dict[str, Any]] = []
    ends: set[int] = set()
    for index, member in enumerate(members):
        one = member.series
        if not one.ends:
            continue
        ends |= set(one.ends)
        at, mean, interval = (
            np.array(one.ends),
            stats.measured_mean(one.position_nats),
            stats.interval(one.position_nats),
        )
        expected, accuracy = _with_ends(one.position_nats, interval), stats.measured_mean(one.position_accuracy)
        texts = [
            f"<b>{escape(one.name, quote=False)}</b><br>positions {begin:,} to {end - 1:,} of {one.ends[-1]:,}"
            f"<br>nats per token {expected[i]}<br>perplexity {perplexity.written(float(np.exp(mean[i])))}"
            f"<br>accuracy {accuracy[i]:.3f}"
            for i, (begin, end) in enumerate(zip([0, *one.ends], one.ends, strict=False))
        ]
        traces += _band(at, interval, index, "nats")
        traces.append(_line(index, "nats", at, mean, texts))
    layout = _log_layout(MEASURES["nats"], "position in the text (tokens)", sorted(ends), _span(traces), members)
    return {"data": traces, "layout": layout}


def _expectation_texts(one: perplexity.Series) -> list[str]:
    """A text for each length measured: all that is known of it."""
    nats, accuracy, gain = (values[:, one.measured] for values in (one.nats, one.accuracy, one.gain))
    expected, hit = _with_ends(nats, stats.interval(nats)), _with_ends(accuracy, stats.bands(accuracy))
    gained = _with_ends(gain, stats.interval(gain))
    perplexities, counts = np.exp(stats.measured_mean(nats)), np.isfinite(nats).sum(0)
    return [
        f"<b>{escape(one.name, quote=False)}</b><br>length {length:,}<br>nats per token {expected[i]}"
        f"<br>perplexity {perplexity.written(perplexities[i])}<br>accuracy {hit[i]}"
        f"{f'<br>gain {gained[i]}' if one.same_targets else ''}"
        f"<br>{counts[i]} {'window' if counts[i] == 1 else 'windows'}"
        for i, length in enumerate(one.lengths[one.measured])
    ]


def _with_ends(values: np.ndarray, ends: tuple[np.ndarray, np.ndarray]) -> list[str]:
    """Means over repeats with their intervals, where there are any."""
    return [
        f"{mean:.3f} [{low:.3f}, {high:.3f}]" if np.isfinite(low) else f"{mean:.3f}"
        for mean, low, high in zip(stats.measured_mean(values), *ends, strict=True)
    ]


def _span(traces: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """From a little below all lines and bands to a little above them."""
    values = [y for one in traces for y in one["y"] if y is not None]
    low, high = min(values, default=0.0), max(values, default=1.0)
    margin = 0.12 * (high - low) or 0.5
    return round(low - margin, 5), round(high + margin, 5)


def _log_layout(
    what: str, along: str, places: Sequence[int], span: tuple[float, float], members: Sequence[perplexity.Member]
) -> dict[str, Any]:
    xaxis: dict[str, Any] = {"type": "log", "title": {"text": along}}
    if len(places) <= 12:
        xaxis |= {"tickvals": list(places), "ticktext": [f"{place:,}" for place in places]}
    yaxis = {"title": {"text": what}, "range": list(span)}
    return {"xaxis": xaxis, "yaxis": yaxis, "height": 420, "curves": len(members)}


def _line(
    index: int, kind: str, x: np.ndarray, y: np.ndarray, texts: Sequence[str], dashed: bool = False
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": _numbers(x),
        "y": _numbers(y),
        "text": list(texts),
        "hoverinfo": "text",
        "line": {"color": colour(index), "width": 1.5 if dashed else 2.25, "dash": "dash" if dashed else "solid"},
        "marker": {"size": 4 if dashed else 6, "symbol": symbol(index)[0]},
        "meta": {"curve": index, "kind": kind},
    }


def _band(lengths: np.ndarray, ends: tuple[np.ndarray, np.ndarray], index: int, kind: str) -> list[dict[str, Any]]:
    low, high = ends
    known = np.isfinite(low)
    if known.sum() < 2:
        return []
    red, green, blue = (int(colour(index)[i : i + 2], 16) for i in (1, 3, 5))
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "x": _numbers(np.concatenate([lengths[known], lengths[known][::-1]])),
            "y": _numbers(np.concatenate([high[known], low[known][::-1]])),
            "fill": "toself",
            "fillcolor": f"rgba({red},{green},{blue},{0.09 if kind == 'control' else 0.16})",
            "line": {"width": 0},
            "hoverinfo": "skip",
            "meta": {"curve": index, "kind": "band", "of": kind},
        }
    ]


def _half_life(index: int, one: Series, good: stats.Curve) -> list[dict[str, Any]]:
    half = one.summary.half_life if one.summary else None
    if half is None or half.value == 0 or half.censored:
        return []
    bars: dict[str, Any] = {"visible": False}
    if half.low is not None and half.high is not None:
        ends = [half.high - half.value], [half.value - half.low]
        bars = {"visible": True, "symmetric": False, "array": ends[0], "arrayminus": ends[1], "thickness": 1.5}
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "x": [round(half.value, 1)],
            "y": _numbers(np.interp([half.value], good.lengths, stats.measured_mean(good.copy))),
            "error_x": bars,
            "text": [f"<b>{escape(one.name, quote=False)}</b><br>half-life {escape(str(half), quote=False)} tokens"],
            "hoverinfo": "text",
            "marker": {"color": colour(index), "symbol": "diamond-open", "size": 11, "line": {"width": 2}},
            "meta": {"curve": index, "kind": "half-life"},
        }
    ]


def _failed(index: int, one: Series) -> list[dict[str, Any]]:
    partly = dict(zip(one.curve.lengths.tolist(), one.curve.measured.tolist(), strict=True))
    return _crosses(index, one.name, one.curve.failures, partly, -0.03)


def _crosses(
    index: int, name: str, failed: Mapping[int, str], partly: Mapping[int, bool], height: float
) -> list[dict[str, Any]]:
    """Crosses at the bottom for lengths with failed rows, smaller where other repeats were measured."""
    failures = sorted(failed.items())
    if not failures:
        return []
    name = escape(name, quote=False)
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "x": [length for length, _ in failures],
            "y": [height] * len(failures),
            "text": [
                f"<b>{name}</b><br>length {length:,}: {'partly ' if partly[length] else ''}failed, "
                f"{escape(status, quote=False)}"
                for length, status in failures
            ],
            "hoverinfo": "text",
            "marker": {
                "color": FAILED,
                "symbol": "x-thin-open",
                "size": [6 if partly[length] else 10 for length, _ in failures],
                "line": {"width": 2},
            },
            "meta": {"curve": index, "kind": "failed"},
        }
    ]


def _trained(series: Sequence[Series], named: bool = True) -> list[dict[str, Any]]:
    places = {(trained_at(one), one.trained_length) for one in series}
    return [
        _rule([at, at], [0.0, 1.0], f"context {trained:,} (trained)" if named else "", "top left")
        for at, trained in sorted((at, trained) for at, trained in places if at is not None and trained is not None)
    ]


def _rule(x: list[float], y: list[float], name: str, place: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+text",
        "x": x,
        "y": y,
        "text": ["", name],
        "textposition": place,
        "textfont": {"color": NEUTRAL, "size": 11},
        "line": {"color": NEUTRAL, "width": 1, "dash": "dot"},
        "hoverinfo": "skip",
        "meta": {"kind": "rule"},
    }


def cost_figure(cells: Sequence[compare.Cell], cost: str, title: str) -> Figure | None:
    """Quality against one cost, a point with its interval for each cell; None where none has that cost."""
    traces = []
    for index, cell in enumerate(cells):
        value = compare.cost_of(cell, cost)
        if value is None or cell.value is None:
            continue
        error = {"type": "data", "symmetric": False, "visible": cell.low is not None}
        if cell.low is not None and cell.high is not None:
            error |= {"array": [cell.high - cell.value], "arrayminus": [cell.value - cell.low]}
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": [value],
                "y": [cell.value],
                "error_y": error,
                "marker": {"color": colour(index), "symbol": symbol(index)[0], "size": 11},
                "text": [f"{escape(cell.method)}<br>{escape(cell.model)}<br>{cell.value:,.4g} at {value:,.4g}"],
                "hoverinfo": "text",
            }
        )
    if not traces:
        return None
    layout = {
        "xaxis": {"title": {"text": title}, "rangemode": "tozero", "tickformat": ",.3~g"},
        "yaxis": {"title": {"text": escape(cells[0].quality)}, "type": "log" if cells[0].exp else "linear"},
        "height": 380,
        "curves": len(traces),
    }
    return {"data": traces, "layout": layout}


def _layout(what: str, members: Sequence[Member]) -> dict[str, Any]:
    return {
        "xaxis": {"title": {"text": "length of the text to be copied (tokens)"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": what}, "range": [-0.07, 1.07]},
        "height": 420,
        "curves": len(members),
    }


def _hover_texts(name: str, curve: stats.Curve, where: stats.Map | None = None, depth: int = 0) -> list[str]:
    """A text for each length: all that is known of it. `depth`: which one of the map, if there is one."""
    index = stats.memory_index(curve)
    copies, controls = (_with_ends(values, stats.bands(values)) for values in (curve.copy, curve.control))
    counts = np.isfinite(curve.copy).sum(0)
    texts = []
    for i, length in enumerate(curve.lengths):
        place = f"length {length:,}"
        if where is not None:
            distance = where.distance[where.lengths.tolist().index(length), depth]
            place += f", depth {where.depths[depth]:g}<br>distance {distance:,.0f} tokens"
        texts.append(
            f"<b>{escape(name, quote=False)}</b><br>{place}"
            f"<br>copy {copies[i]}<br>control {controls[i]}"
            f"<br>memory index {index[i]:.3f}<br>{counts[i]} {'repeat' if counts[i] == 1 else 'repeats'}"
        )
    return texts


def _numbers(values: np.ndarray | Sequence[float]) -> list[float | None]:
    """As JSON has them: no NaN, five digits behind the point."""
    return [round(float(value), 5) if np.isfinite(value) else None for value in values]
