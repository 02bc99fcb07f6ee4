"""The figures that any task has: quality by length, and quality against cost."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from farspan.report.cells import Cell, at_longest_shared, by_member, cells_of, in_seconds
from farspan.report.export import capitalised, counted, details_of, length_in, quality_of, with_interval
from farspan.report.figure import Failed, Figure, Heat, Line, Rule, pareto_front, sample_size
from farspan.report.picture import draw_figure
from farspan.report.runs import Group, short_names

MIB = 2**20
PRICES = {
    "seconds": "seconds to the first token",
    "rate": "tokens read per second",
    "memory": "memory above the model (MiB)",
}
DECADE = 10  # costs further apart are drawn on a logarithmic axis


def quality_figure(found: Sequence[Cell], title: str, trained: Mapping[int, float]) -> Figure:
    """Return the quality of one task over length, a line with its intervals for each member. For perplexity, the mean
    nats are drawn, with perplexity on the right.

    Args:
        found: cells of one task.
        trained: tokens of context that models were trained on, each drawn as a line at a length.
    """
    exp, unit = found[0].exp, found[0].unit
    lines, failed = [], []
    for index, cells in enumerate(by_member(found)):
        good = [cell for cell in cells if cell.value is not None]
        mean, low, high = (np.array([getattr(c, name) for c in good], float) for name in ("value", "low", "high"))
        if exp:
            mean, low, high = np.log(mean), np.log(low), np.log(high)
        name = good[0].name if good else cells[0].name
        texts = [point(cell) for cell in good]
        if good:
            lines.append(Line(name, [c.length for c in good], mean, index, low, high, texts, "quality"))
        bad = {cell.length: cell.failed for cell in cells if cell.failed}
        if bad:
            partly = frozenset(cell.length for cell in good)
            whole = sorted({status for length, status in bad.items() if length not in partly})
            failed.append(Failed(name, f"{name}: no result, {', '.join(whole)}" if whole else "", index, bad, partly))
    lengths = sorted({cell.length for cell in found})
    return Figure(
        title=title,
        x="length (tokens)" if unit == "tokens" else length_in(unit),
        y="nats per token" if exp else found[0].quality,
        lines=lines,
        failed=failed,
        rules=[Rule(f"context = {tokens:,} (trained)", x=at) for tokens, at in sorted(trained.items())],
        log_x=unit == "tokens",
        ticks=lengths,
        exp=found[0].quality if exp else "",
        num_members=len(by_member(found)),
        note=sample_size((cell.n for cell in found if cell.value is not None), "example"),
    )


def draw_quality(groups: Sequence[Group], folder: str | Path, name: str) -> list[Path]:
    """Draw the quality of each group over length into NAME.png, NAME-2.png and so on, each also as SVG; groups without
    a result are left out. Return the paths."""
    paths = []
    for number, group in enumerate(groups, 1):
        if figure := group_figure(group):
            paths += draw_figure(figure, folder, name if number == 1 else f"{name}-{number}")
    return paths


def depth_map(
    title: str,
    lengths: Sequence[int],
    depths: Sequence[float],
    points: Mapping[tuple[float, int], tuple[float, Sequence[str]]],
    failed: Mapping[tuple[float, int], str],
    scale: str,
    note: str,
) -> Heat:
    """Return values over length and depth.

    Args:
        points: the values that were measured, with their hover texts, by depth and length.
        failed: why other values are missing, by depth and length.
        scale: what the values are.
        note: number of texts per mean.
    """
    names = list(depth_names(depths).values())
    values = np.full((len(depths), len(lengths)), np.nan)
    texts: list[list[Sequence[str]]] = [[["not measured"]] * len(lengths) for _ in depths]
    for row, depth in enumerate(depths):
        for column, length in enumerate(lengths):
            if (depth, length) in points:
                values[row, column], texts[row][column] = points[depth, length]
            elif (depth, length) in failed:
                texts[row][column] = [f"length {length:,}, depth {names[row]}: {failed[depth, length]}"]
    columns = [f"{length:,}" for length in lengths]
    note += "; blank: no result" if np.isnan(values).any() else ""
    return Heat(title, "length (tokens)", "depth (0: beginning)", values, columns, names, scale, texts, note=note)


def depth_names(depths: Sequence[float]) -> dict[float, str]:
    """Write each depth with two digits after the point, or with as many as distinguish them."""
    names: dict[float, str] = {}
    for digits in range(2, 18):
        names = {depth: f"{depth:.{digits}f}".rstrip("0").rstrip(".") for depth in depths}
        if len(set(names.values())) == len(names):
            break
    return names


def group_figure(group: Group) -> Figure | None:
    """Return the quality of a group over length; None if it has no result."""
    drawn = [one for one in group.members if one.good]
    if not drawn:
        return None
    models = ", ".join(sorted(short_names(one.model for one in drawn).values()))
    quality = group.entry["quality"]["name"]
    title = f"{capitalised(quality)} of {models} ({group.title})"
    return quality_figure(cells_of(group), title, trained_places(group))


def trained_places(group: Group) -> dict[int, float]:
    """Return, by the trained length of the models in tokens, the length of the task whose whole context has as many."""
    members = group.members if group.entry["unit"] == "tokens" else []
    return {one.trained_length: at for one in members if one.trained_length and (at := one.trained_at) is not None}


def point(cell: Cell) -> list[str]:
    """Return all that is known about a cell, as lines."""
    lines = [cell.name, f"length {cell.length:,}" if cell.unit == "tokens" else f"{cell.length:,} {cell.unit}"]
    if cell.exp and cell.value is not None:
        ends = [None if end is None else float(np.log(end)) for end in (cell.low, cell.high)]
        lines.append(f"nats per token {with_interval(float(np.log(cell.value)), ends[0], ends[1])}")
    lines.append(f"{cell.quality} {quality_of(cell)}")
    lines += details_of(cell)
    if cell.difference is not None:
        ends = [cell.difference_low, cell.difference_high]
        lines.append(f"difference {with_interval(cell.difference, ends[0], ends[1], sign='+')} {cell.verdict}".rstrip())
    return [*lines, counted(cell.n, "example")]


def cost_of(cell: Cell, price: str) -> float | None:
    """Return one of PRICES."""
    if price == "memory":
        return None if cell.memory is None else cell.memory / MIB
    return cell.prefill_seconds if price == "seconds" else cell.prefill_rate


def cost_figure(found: Sequence[Cell], price: str, higher_is_better: bool | None) -> Figure | None:
    """Return quality against one of PRICES, a point with its interval for each cell at the longest length that most
    members share, and their Pareto front; None if no cell has that cost, or if the quality is itself the seconds to the
    first token and the cost a time.

    Args:
        found: cells of one task.
        higher_is_better: of the quality; None: neither is, so there is no front.
    """
    chosen = at_longest_shared(found)
    if chosen and in_seconds(chosen[0].quality) and price != "memory":
        return None
    order = [cells[0].whose for cells in by_member(found)]
    lines = []
    for cell in chosen:
        cost = cost_of(cell, price)
        if cost is None or cell.value is None:
            continue
        text = [cell.name, f"{cell.quality} {quality_of(cell)}", f"{cost:,.4g}"]
        low, high = (np.array([end], float) for end in (cell.low, cell.high))
        lines.append(
            Line(cell.name, [cost], [cell.value], order.index(cell.whose), low, high, [text], "cost", "points")
        )
    if not lines:
        return None
    costs = [float(line.x[0]) for line in lines if line.x[0]]
    points = [(float(line.x[0]), float(line.y[0])) for line in lines]
    has_front = len(lines) > 1 and higher_is_better is not None
    return Figure(
        title=f"{capitalised(chosen[0].quality)} at {chosen[0].length:,} {chosen[0].unit}",
        x=PRICES[price],
        y=chosen[0].quality,
        lines=lines,
        log_x=bool(costs) and max(costs) > DECADE * min(costs),
        counts=False,
        log_y=chosen[0].exp,
        num_members=len(order),
        height=380,
        note=sample_size((cell.n for cell in chosen), "example"),
        front=pareto_front(points, price == "rate", bool(higher_is_better)) if has_front else None,
    )
