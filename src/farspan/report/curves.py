"""Forgetting curves with their numbers, for pictures, tables and JSON."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from farspan import stats
from farspan.record import Row
from farspan.report.runs import Group, Member, Source, grouped, names_of

APART = 0.25  # of a memory length; lengths further apart than this leave it open
HEADLINE = {
    "fine": "copies 99 %",
    "coarse": "copies 1 point better than it guesses",
    "half_life": "recalls half of what it could not guess",
    "reach": "recalls a twentieth of it",
    "span": "tokens remembered in all",
    "paper_fine": "as fine, largest length that passes",
    "paper_coarse": "as coarse, largest length that passes",
}


def spoken(name: str) -> str:
    """The name of a number as it is written: half-life, paper fine."""
    return name.replace("half_life", "half-life").replace("_", " ")


@dataclass(frozen=True)
class Series:
    """One curve, what it is of, and its numbers."""

    name: str  # distinguishes it from the others of its table or picture
    model: str
    method: str
    what: str  # protocol and texts
    curve: stats.MeasuredCurve
    summary: stats.Summary | None  # None where every row failed
    trained_length: int | None = None  # tokens of the whole context
    map: stats.Map | None = None  # where several depths were measured
    characters_per_token: float | None = None  # of the target text under the model's tokenizer


@dataclass(frozen=True)
class Measured:
    """The curve of one member of a group."""

    member: Member
    series: Series

    def at_depth(self, depth: float) -> stats.MeasuredCurve:
        """Return the curve of the rows at one depth of the texts, as if it were their beginning."""
        return stats.curve([replace(row, depth=0.0) for row in self.member.rows if row.depth == depth])


_MEASURED: WeakKeyDictionary[Group, list[Measured]] = WeakKeyDictionary()  # intervals take a while


def measured(group: Group) -> list[Measured]:
    """Return the curves of a group of forgetting curves; members without rows at the beginning of a text have none."""
    if group not in _MEASURED:
        _MEASURED[group] = list(_measured(group))
    return _MEASURED[group]


def _measured(group: Group) -> Iterator[Measured]:
    for member in group.members:
        rows = member.rows
        if not any(row.depth == 0 for row in rows):
            continue
        curve = stats.curve(rows)
        about = member.source.header["models"].get(member.model, {})
        one = Series(
            member.name,
            member.model,
            member.method,
            group.title,
            curve,
            stats.summarise(curve) if curve.measured.any() else None,
            member.trained_length,
            stats.memory_map(rows) if any(row.depth for row in rows) else None,
            about.get("characters_per_token", {}).get(rows[0].settings.get("target_hash")),
        )
        yield Measured(member, one)


def series(rows: Iterable[Row], models: Mapping[str, Mapping[str, Any]]) -> list[Series]:
    """Return the curves among the rows, with their numbers. `models`: as run.json has them."""
    source = Source.of("", "", {"settings": {}, "models": models}, rows)
    return named([one.series for group in grouped([source]) if group.task == "curve" for one in measured(group)])


def named(curves: Sequence[Series]) -> list[Series]:
    """Return the curves with names for one table or picture."""
    names = names_of([(one.model, one.method, one.what) for one in curves])
    return [replace(one, name=name) for one, name in zip(curves, names, strict=True)]


def remarks(one: Series) -> list[str]:
    """Return what a reader of the numbers should know: why a length is censored, failures, contaminated windows."""
    s = one.summary
    assert s is not None
    reasons: dict[str, list[str]] = {}
    for name in ("fine", "coarse", "half_life", "reach", "paper_fine", "paper_coarse"):
        length = getattr(s, name)
        if length.reason and (name in stats.CROSSINGS or length.low is not None):
            reasons.setdefault(length.reason, []).append(spoken(name))
    lines = [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
    lines += _too_coarse(one)
    if s.failed:
        failed = ", ".join(f"{length:,} ({why})" for length, why in sorted(s.failed.items()))
        lines.append(f"lengths with missing rows: {failed}")
    if s.contaminated:
        without = s.without_contaminated.get("half_life")
        lines.append(
            f"{len(s.contaminated)} of the windows have a control out of line with the others (text known by heart, or "
            f"boilerplate){'' if without is None else f'; without them half-life is {without:,.0f}'}"
        )
    if s.nonmonotone > 0.1:
        lines.append(f"the curve rises by up to {s.nonmonotone:.2f} above its non-rising fit: look at the picture")
    return [f"{one.name}: {line}" for line in lines]


def _too_coarse(one: Series) -> list[str]:
    """Which memory lengths fall between lengths so far apart that the distance, not chance, makes their interval."""
    good = one.curve.kept(one.curve.measured)
    apart = []
    for name in ("half_life", "reach"):
        length: stats.MemoryLength = getattr(one.summary, name)
        if length.censored or length.low is None or length.value == 0.0:
            continue
        before, after = stats.between(good, length.value)
        if after - before > APART * length.value:
            apart.append(f"{spoken(name)} is between {before:,} and {after:,}")
    if not apart:
        return []
    return [f"the lengths are too far apart to locate it better: {', '.join(apart)}; measure lengths between these"]


def as_data(curves: Sequence[Series]) -> list[dict[str, Any]]:
    """Every curve with its points and its numbers, ready for JSON."""
    found = []
    for one in curves:
        entry: dict[str, Any] = {"model": one.model, "method": one.method, "task": "curve", "what": one.what}
        entry["failed"] = {str(length): status for length, status in one.curve.failures.items()}
        if one.summary is not None:
            good = one.curve.kept(one.curve.measured)
            entry |= {
                "lengths": good.lengths.tolist(),
                "copy": stats.measured_mean(good.copy).round(6).tolist(),
                "control": stats.measured_mean(good.control).round(6).tolist(),
                "summary": one.summary.as_dict(),
            }
        found.append(entry)
    return found


def trained_at(one: Series) -> float | None:
    """The length whose whole context is as long as the model was trained on, by the two lengths measured next to it;
    None where that is unknown."""
    curve = one.curve.kept(one.curve.measured)
    if one.trained_length is None or len(curve.lengths) < 2:
        return None
    after = int(np.clip(np.searchsorted(curve.context, one.trained_length), 1, len(curve.lengths) - 1))
    (left, right), (short, long) = curve.context[after - 1 : after + 1], curve.lengths[after - 1 : after + 1]
    return float(short + (one.trained_length - left) * (long - short) / (right - left))


def in_characters(length: stats.MemoryLength, one: Series) -> stats.MemoryLength | None:
    """A memory length in characters of the target text; None where their number is unknown."""
    per_token = one.characters_per_token
    if per_token is None:
        return None
    low, high = (None if end is None else end * per_token for end in (length.low, length.high))
    return replace(length, value=length.value * per_token, low=low, high=high)
