"""Forgetting curves with their numbers, for pictures, tables and JSON."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

import numpy as np

from farspan import stats
from farspan.record import Row, by_key
from farspan.report.export import counted, statuses
from farspan.report.runs import Member, groups_of_rows, renamed

APART = 0.25  # share of a memory length; lengths further apart do not locate it
HEADLINE = {
    "half_life": "recalls half of what it could not guess",
    "reach": "recalls a twentieth of it",
    "span": "tokens remembered in all",
    "fine": "copies 99 %",
    "coarse": "copies 1 point better than it guesses",
    "paper_fine": "as fine, largest length that passes",
    "paper_coarse": "as coarse, largest length that passes",
}
Point = dict[str, Any]


def spoken(name: str) -> str:
    """Return the name of a number as it is printed: half-life, paper fine."""
    return name.replace("half_life", "half-life").replace("_", " ")


class CurveMember(Member):
    """A member of a group of forgetting curves, with rows at the beginning of a text."""

    @cached_property
    def curve(self) -> stats.MeasuredCurve:
        return stats.curve(self.rows)

    @cached_property
    def measured(self) -> stats.MeasuredCurve:
        """The curve at the lengths that have a result."""
        return self.curve.kept(self.curve.measured)

    @cached_property
    def summary(self) -> stats.Summary | None:
        """The memory lengths; None where every row failed."""
        return stats.summarise(self.curve) if self.curve.measured.any() else None

    @cached_property
    def everywhere(self) -> stats.Map:
        """Recall over length and depth; a curve without depths has one depth."""
        return stats.memory_map(self.rows)

    @property
    def map(self) -> stats.Map | None:
        """Recall over length and depth; None where only the beginning of the texts was measured."""
        return self.everywhere if any(row.depth for row in self.rows) else None

    @property
    def is_recall(self) -> bool:
        """Whether recall was measured at several depths of one length: it has no memory lengths."""
        return self.map is not None and len(self.map.lengths) == 1

    @property
    def characters_per_token(self) -> float | None:
        """Characters per token of the target text under the model's tokenizer; None where unknown."""
        known = self.about_model.get("characters_per_token", {}).get(self.rows[0].settings.get("target_hash"))
        return None if known is None else float(known)

    @property
    def trained_at(self) -> float | None:
        """See `Member`; interpolated between measured lengths."""
        curve = self.measured
        if self.trained_length is None or len(curve.lengths) < 2:
            return None
        after = int(np.clip(np.searchsorted(curve.context, self.trained_length), 1, len(curve.lengths) - 1))
        (left, right), (short, long) = curve.context[after - 1 : after + 1], curve.lengths[after - 1 : after + 1]
        return float(short + (self.trained_length - left) * (long - short) / (right - left))

    def points(self, depth: float = 0.0) -> list[Point]:
        """Return the numbers at each length and one depth of the texts, under the names of the columns of curves.csv.
        Points without a result have a count of 0 and the statuses of their rows."""
        rows = [replace(row, depth=0.0) for row in self.rows if row.depth == depth]
        curve = stats.curve(rows)
        column = self.everywhere.depths.tolist().index(depth)
        distance = dict(zip(self.everywhere.lengths.tolist(), self.everywhere.distance[:, column], strict=True))
        numbers = {
            name: (stats.measured_mean(values), *stats.bands(values))
            for name, values in (("copy", curve.copy), ("control", curve.control))
        }
        index = stats.bands(stats.index_by_repeat(curve), -np.inf)  # below 0 where the copy is worse than the control
        numbers["memory_index"] = stats.memory_index(curve), *index
        found = []
        for i, length in enumerate(curve.lengths.tolist()):
            point = {"length": length, "depth": depth, "n": int(np.isfinite(curve.copy[:, i]).sum())}
            point["status"] = statuses(row for row in rows if row.length == length)
            if curve.measured[i]:
                point |= {"scored": int(curve.scored[i]), "context": int(curve.context[i])}
                point["distance"] = float(distance[length])
                for name, number in numbers.items():
                    value, low, high = (float(values[i]) for values in number)
                    point |= {name: value, f"{name}_low": low, f"{name}_high": high}
            found.append(point)
        return found

    def in_characters(self, length: stats.MemoryLength) -> stats.MemoryLength | None:
        """Return a memory length in characters of the target text; None where their number is unknown."""
        scale = self.characters_per_token
        if scale is None:
            return None
        ends = length.low, length.high, length.below
        low, high, below = (None if end is None else end * scale for end in ends)
        return replace(length, value=length.value * scale, low=low, high=high, below=below)


def curves_of(members: Iterable[Member]) -> list[CurveMember]:
    """Return the members that have rows at the beginning of a text."""
    return [one for one in members if isinstance(one, CurveMember) and any(row.depth == 0 for row in one.rows)]


def series(rows: Iterable[Row], models: Mapping[str, Mapping[str, Any]]) -> list[CurveMember]:
    """Return the curves among the rows, with names for one table or picture. `models`: as run.json records them."""
    return curves_of(renamed(groups_of_rows(rows, "curve", CurveMember, models), CurveMember))


def verdict(one: CurveMember) -> str:
    """Return in one sentence how far back a model remembers."""
    s = one.summary
    assert s is not None
    half, reach = s.half_life, s.reach
    unguessed, longest = "the tokens that it could not guess", one.measured.lengths[-1]
    if reach.value == 0.0:
        text = f"recalls less than a twentieth of {unguessed} at every length measured"
    elif half.censored:
        text = f"recalls at least half of {unguessed} up to {half.value:,.0f} tokens, the longest length measured"
    elif half.value == 0.0:
        text = f"recalls less than half of {unguessed} at every length measured"
    else:
        text = f"recalls at least half of {unguessed} up to {half.value:,.0f} tokens"
    if reach.value and not half.censored:
        beyond = f"up to {longest:,}, the longest length measured" if reach.censored else f"up to {reach.value:,.0f}"
        text += f", and at least a twentieth of them {beyond}"
    if filled := trained_length_filled(one):
        text += f" ({filled})"
    return f"{one.name}: {text}"


def trained_length_filled(one: CurveMember) -> str:
    """Return in a few words at which of the lengths measured a text and its copy exceed the trained length; "" if at
    none, or unknown."""
    curve, trained = one.measured, one.trained_length
    if trained is None or curve.context[-1] < trained:
        return ""
    if curve.context[0] > trained:
        return f"a text and its copy exceed the trained length of {trained:,} tokens at {curve.lengths[0]:,}"
    at = one.trained_at
    return "" if at is None else f"a text and its copy fill the trained length of {trained:,} tokens at {at:,.0f}"


def remarks(one: CurveMember, names: Iterable[str] = HEADLINE) -> list[str]:
    """Return remarks on the numbers of a curve: why a length is censored, failures, contaminated windows.

    Args:
        names: the memory lengths that the reader sees.
    """
    s = one.summary
    assert s is not None
    lengths = [(name, getattr(s, name)) for name in names if name != "span"]
    shown = ((name, one.reason) for name, one in lengths if name in stats.CROSSINGS or one.low is not None)
    reasons = by_key((reason, spoken(name)) for name, reason in shown if reason)
    lines = [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
    lines += _how_to_narrow(one)
    if s.failed:
        failed = ", ".join(f"{length:,} ({why})" for length, why in sorted(s.failed.items()))
        lines.append(f"lengths with missing rows: {failed}")
    if s.contaminated:
        line = f"{counted(len(s.contaminated), 'window')} with a control unlike that of the others"
        line += " (memorised text, or boilerplate)"
        if s.without_contaminated:
            value, censored = s.without_contaminated["half_life"]
            below = None if value else stats.shortest_judged(one.measured)
            line += f"; without, half-life is {stats.MemoryLength(value, censored=censored, below=below)}"
        lines.append(line)
    if s.nonmonotone > 0.1:
        lines.append(f"the curve rises by up to {s.nonmonotone:.2f} above its non-rising fit: look at the picture")
    return [f"{one.name}: {line}" for line in lines]


def _how_to_narrow(one: CurveMember) -> list[str]:
    """Return what narrows the intervals of memory lengths between measured lengths that are far apart: more lengths, or
    more repeats where the interval by chance is as wide as the distance between these lengths."""
    coarse: dict[str, tuple[int, int]] = {}
    for name in ("half_life", "reach"):
        length: stats.MemoryLength = getattr(one.summary, name)
        if length.censored or length.low is None or length.value == 0.0:
            continue
        before, after = stats.between(one.measured, length.value)
        if after - before > APART * length.value:
            coarse[name] = before, after
    chance = stats.by_chance(one.measured) if coarse else {}
    apart, by_chance = [], []
    for name, (before, after) in coarse.items():
        low, high, _ = chance[name]
        if getattr(one.summary, name).reason or high - low >= after - before:  # the reason: no memory was shown
            by_chance.append(spoken(name))
        else:
            apart.append(f"{spoken(name)} is between {before:,} and {after:,}")
    lines = []
    if apart:
        text = "the lengths are too far apart to locate it better"
        lines.append(f"{text}: {', '.join(apart)}; measure lengths between these")
    if by_chance:
        lines.append(
            f"{', '.join(by_chance)}: the interval is wide because texts differ; measure more of them (--repeats)"
        )
    return lines


def as_data(curves: Sequence[CurveMember]) -> list[dict[str, Any]]:
    """Return every curve with its points and its memory lengths, ready for JSON; of recall by distance, which has none,
    the points by depth."""
    found = []
    for one in curves:
        entry: dict[str, Any] = {"model": one.model, "method": one.method, "task": "curve", "what": one.what}
        entry["failed"] = {str(length): status for length, status in one.curve.failures.items()}
        if one.is_recall:
            every = (point for depth in one.everywhere.depths.tolist() for point in one.points(depth))
            entry["recall"] = [
                {name: round(value, 6) if isinstance(value, float) else value for name, value in point.items()}
                for point in every
            ]
        elif one.summary is not None:
            entry["lengths"] = one.measured.lengths.tolist()
            for half in ("copy", "control"):
                entry[half] = stats.measured_mean(getattr(one.measured, half)).round(6).tolist()
            entry["summary"] = asdict(one.summary)
        found.append(entry)
    return found
