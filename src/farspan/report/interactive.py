"""Figures in the form of plotly.js, which draws them on the page: plain dicts of traces and layout.

Plotly interprets some HTML in names and hover texts, so all text is escaped here.
"""

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from farspan.report import figure
from farspan.report.export import csv_link, figure_table
from farspan.report.figure import FEW_TICKS, INTERVALS, MARKED, RECALL, Failed, Figure, Heat, Line, Rule, log_numbers

DARK = {"#000000": "#777777"}  # the colour that is invisible on a dark page
NEUTRAL = "#8a8a8a"
BUTTONS = 26  # pixels above a figure for plotly's buttons
LINE = 16  # pixels of a line of labels of rules
LABEL = 0.35  # width of the text of a rule on a phone, as a share of the figure
DASHES = {"solid": "solid", "dashed": "dash", "dotted": "dot"}


def colour(index: int) -> str:
    """Return the colour of a member on the page, which may be dark."""
    plain = figure.colour(index)
    return DARK.get(plain, plain)


def as_plotly(one: Figure) -> dict[str, Any]:
    """Return a figure as data and layout."""
    bottom, top = one.limits
    traces = [
        trace for line in one.lines for trace in (*(_band(line) if one.has_bands else ()), _line(line, one.has_bands))
    ]
    if one.front is not None:
        corners = dict(zip("xy", map(_for_json, one.front.T), strict=True))
        line = {"color": NEUTRAL, "width": 1, "dash": "dash"}
        traces.append({"type": "scatter", "mode": "lines", **corners, "line": line, "hoverinfo": "skip"})
    heights = (bottom + share * (top - bottom) for share in one.failed_heights)
    traces += map(_crosses, one.failed, heights)
    x = [float(place) for line in one.lines for place in line.x] or [0.0, 1.0]
    x += [rule.x for rule in one.rules if rule.x is not None]
    rows = _rows(one.rules, x)
    traces += [_rule(rule, (min(x), max(x)), (bottom, top), rows.get(rule, 0)) for rule in one.rules]
    xaxis: dict[str, Any] = {"title": {"text": escape(one.x)}}
    xaxis |= {"type": "log"} if one.log_x else {"rangemode": "tozero"}
    if one.log_x and len(one.ticks) <= FEW_TICKS:
        xaxis |= {"tickvals": list(one.ticks), "ticktext": [f"{tick:,}" for tick in one.ticks]}
    if not one.counts:
        xaxis |= {"tickformat": ",.3~r"} | (_log_axis([line.x for line in one.lines]) if one.log_x else {})
    yaxis: dict[str, Any] = {"title": {"text": escape(one.y)}}
    of_y = [values for line in one.lines for values in (line.y, *line.ends)]
    yaxis |= {"type": "log"} | _log_axis(of_y) if one.log_y else {"range": [bottom, top]}
    beside = any(rule.y is not None for rule in one.rules)
    above = BUTTONS + LINE * (1 + max(rows.values())) if rows else BUTTONS
    margin = {"l": 8, "r": 52 if beside else 8, "t": above, "b": 8}
    layout = {"xaxis": xaxis, "yaxis": yaxis, "height": one.height, "margin": margin}
    return {"data": traces, "layout": layout}


def _log_axis(of: Sequence[np.ndarray | Sequence[float]]) -> dict[str, Any]:
    """Return the range of a logarithmic axis with its numbers."""
    values = np.concatenate([np.asarray(one, float) for one in of])
    values = np.log10(values[np.isfinite(values) & (values > 0)])
    if not values.size:
        return {"nticks": 5}
    margin = 0.06 * np.ptp(values) or 0.3
    low, high = values.min() - margin, values.max() + margin
    at = log_numbers(10**low, 10**high)
    return {"range": _for_json([low, high]), "tickvals": at, "ticktext": [f"{one:,.10g}" for one in at]}


def on_page(name: str, heading: str, key: str, one: Figure | Heat, kind: str = "lines") -> dict[str, Any]:
    """Return a figure for the page, with its heading, its explanation and its numbers; `name` is the id of its
    element."""
    drawn = _heat(one) if isinstance(one, Heat) else as_plotly(one)
    is_map = isinstance(one, Heat)
    about = {"id": name, "heading": heading, "key": f"{key} {one.note.removesuffix(INTERVALS)}".strip()}
    about |= {"kind": "map" if is_map else kind, "intervals": INTERVALS * one.note.endswith(INTERVALS)}
    about["alt"] = f"{heading}: {'map' if is_map else 'chart'} of {one.description}"
    return {**about, "csv": csv_link(figure_table(one)), **drawn}


def _heat(one: Heat) -> dict[str, Any]:
    trace = {
        "type": "heatmap",
        "x": list(one.columns),
        "y": list(one.rows),
        "z": [_for_json(row) for row in one.values],
        "text": [[hover(text) for text in row] for row in one.texts],
        "hoverinfo": "text",
        "zmin": one.span[0],
        "zmax": one.span[1],
        "colorscale": [[i / (len(RECALL) - 1), colour] for i, colour in enumerate(RECALL)],
        "xgap": 1,
        "ygap": 1,
        "colorbar": {"thickness": 10, "outlinewidth": 0, "title": {"text": escape(one.scale), "side": "right"}},
    }
    x, y = ({"type": "category", "title": {"text": escape(text)}, "showgrid": False} for text in (one.x, one.y))
    layout = {"xaxis": x, "yaxis": y | {"autorange": "reversed"}, "height": 150 + 40 * len(one.rows)}
    return {"data": [trace], "layout": layout}


def _line(line: Line, has_bands: bool) -> dict[str, Any]:
    dashed, alone = line.style != "solid", line.alone
    marker: dict[str, Any] = {"size": 11 if alone else 6 if dashed else 8, "symbol": figure.shape(line.index)[1]}
    marker |= {} if alone else {"maxdisplayed": MARKED}
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "markers" if alone else "lines+markers",
        "x": _for_json(line.x),
        "y": _for_json(line.y),
        "text": [hover(text) for text in line.texts],
        "hoverinfo": "text",
        "marker": marker,
        "meta": {"curve": line.index, "kind": line.kind},
    }
    if alone:
        marker["color"] = colour(line.index)
    else:
        width = 1.5 if dashed else 2.25
        trace["line"] = {"color": colour(line.index), "width": width, "dash": DASHES[line.style]}
    if line.style == "mark":
        marker |= {"symbol": f"{marker['symbol']}-open", "line": {"width": 2}}
    if alone or not has_bands or not _band(line):
        axis, values = ("error_x", line.x) if line.style == "mark" else ("error_y", line.y)
        first, step = line.marked
        shown = np.arange(len(values)) % step == first
        down, up = (_for_json(np.abs(np.where(shown, end - values, np.nan))) for end in line.ends)
        if any(end is not None for end in up):
            trace[axis] = {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "thickness": 1.2}
    return trace


def _band(line: Line) -> list[dict[str, Any]]:
    x, (low, high) = np.asarray(line.x, float), line.ends
    known = np.isfinite(low)
    if line.alone or known.sum() < 2:
        return []
    red, green, blue = (int(colour(line.index)[i : i + 2], 16) for i in (1, 3, 5))
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "x": _for_json(np.concatenate([x[known], x[known][::-1]])),
            "y": _for_json(np.concatenate([high[known], low[known][::-1]])),
            "fill": "toself",
            "fillcolor": f"rgba({red},{green},{blue},{0.16 if line.style == 'solid' else 0.09})",
            "line": {"width": 0},
            "hoverinfo": "skip",
            "meta": {"curve": line.index, "kind": "band", "of": line.kind},
        }
    ]


def _crosses(failed: Failed, height: float) -> dict[str, Any]:
    """Return crosses within the marker of the member, smaller where other rows of a length were measured.

    Args:
        height: in the unit of the y axis.
    """
    lengths = sorted(failed.statuses)
    partly = [length in failed.partly for length in lengths]
    texts = [
        hover([failed.name, f"length {length:,}: {'partly ' if part else ''}failed, {failed.statuses[length]}"])
        for length, part in zip(lengths, partly, strict=True)
    ]
    sizes = [8 if part else 12 for part in partly]
    symbols = [f"{figure.shape(failed.index)[1]}-open", "x-thin-open"]  # both at each length
    return {
        "type": "scatter",
        "mode": "markers",
        "x": lengths * 2,
        "y": [height] * len(lengths) * 2,
        "text": texts * 2,
        "hoverinfo": "text",
        "marker": {
            "color": colour(failed.index),
            "symbol": [symbol for symbol in symbols for _ in lengths],
            "size": [*sizes, *(size / 2 for size in sizes)],
            "line": {"width": 1.5},
        },
        "meta": {"curve": failed.index, "kind": "failed"},
    }


def _rows(rules: Sequence[Rule], x: Sequence[float]) -> dict[Rule, int]:
    """Return the row above the figure for the text of each rule: none overlap, on a linear or a logarithmic axis."""
    rows: dict[Rule, int] = {}
    ends: list[float] = []  # of the rows so far
    for rule in sorted((rule for rule in rules if rule.x and rule.text), key=lambda rule: rule.x or 0.0):
        at = rule.x or 0.0
        width = 1.5 * LABEL if _is_last(at, max(x)) else LABEL  # from the middle of one text to the end of the next
        rows[rule] = next((row for row, end in enumerate(ends) if _apart(end, at, x, width)), len(ends))
        ends[rows[rule] : rows[rule] + 1] = [at]
    return rows


def _apart(one: float, other: float, x: Sequence[float], width: float) -> bool:
    """Return whether texts at two places do not overlap, even on a phone."""
    least, most = max(1e-9, min(x)), max(x)
    return other - one > width * most and np.log(other / one) > width * np.log(most / least)


def _is_last(at: float, most: float) -> bool:
    """Return whether a text in the middle above this place would leave the figure on the right."""
    return at > (1 - LABEL / 2) * most


def _rule(rule: Rule, along: tuple[float, float], up: tuple[float, float], row: int) -> dict[str, Any]:
    """Return a rule with its text outside the axes, where it hides nothing: above them, or right of them.

    Args:
        row: of the text above the axes, from 0.
    """
    x, y = ([rule.x] * 2, list(up)) if rule.x is not None else (list(along), [rule.y] * 2)
    text = escape(rule.text, quote=False)
    text = "\u00a0\u00a0" + text if rule.x is None else text + "<br>\u00a0" * row
    place = "middle right" if rule.x is None else "top left" if _is_last(rule.x, along[1]) else "top center"
    return {
        "type": "scatter",
        "mode": "lines+text",
        "x": x,
        "y": y,
        "text": ["", text],
        "textposition": place,
        "textfont": {"size": 11},  # in the colour of the page's text
        "cliponaxis": False,
        "line": {"color": NEUTRAL, "width": 1, "dash": "dot"},
        "hoverinfo": "skip",
        "meta": {"kind": "rule"},
    }


def hover(lines: Sequence[str]) -> str:
    """Return the hover text of a point: a name in bold and a line for each number, or one line alone."""
    first, *rest = (escape(line, quote=False) for line in lines)
    return "<br>".join([f"<b>{first}</b>", *rest]) if rest else first


def _for_json(values: np.ndarray | Sequence[float]) -> list[float | None]:
    """Return numbers for JSON: None for NaN, five digits after the point."""
    return [round(float(value), 5) if np.isfinite(value) else None for value in values]
