"""Curves with their numbers, for pictures, tables and JSON; and those of several runs, grouped by what was asked."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from farspan import stats
from farspan.record import Row, latest, read_header, read_rows

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


def short_names(models: Iterable[str]) -> dict[str, str]:
    """Each model by the last part of its name, or all by their whole names where these would be the same."""
    short = {model: model.rstrip("/").rpartition("/")[2] for model in models}
    return short if len(set(short.values())) == len(short) else {model: model for model in short}


@dataclass(frozen=True)
class Series:
    """One curve, what it is of, and its numbers."""

    name: str  # tells it from the others it stands beside
    model: str
    method: str
    what: str  # protocol and texts
    curve: stats.Curve
    summary: stats.Summary | None  # None where every row failed
    trained_length: int | None = None  # tokens of the whole context
    map: stats.Map | None = None  # where several depths were asked for
    characters_per_token: float | None = None  # of the target text under the model's tokenizer


def series(rows: Iterable[Row], models: Mapping[str, Mapping[str, Any]]) -> list[Series]:
    """The curves among the rows, with their numbers. `models`: as run.json has them."""
    groups = {key: group for key, group in stats.by_curve(rows).items() if any(row.depth == 0 for row in group)}
    several = [len({key[part] for key in groups}) > 1 for part in range(3)]
    short = short_names(key[0] for key in groups)
    result = []
    for (model, method, what), group in groups.items():
        parts = [short[model]] if several[0] else []
        parts += [what] if several[2] or not (several[0] or several[1]) else []
        parts += [method] if several[1] else []
        curve = stats.curve(group)
        about = models.get(model, {})
        result.append(
            Series(
                " ".join(parts),
                model,
                method,
                what,
                curve,
                stats.summarise(curve) if curve.measured.any() else None,
                about.get("trained_length"),
                stats.memory_map(group) if any(row.depth for row in group) else None,
                about.get("characters_per_token", {}).get(group[0].settings.get("target_hash")),
            )
        )
    return result


def remarks(one: Series) -> list[str]:
    """What a reader of the numbers should know: why a length is censored, failures, contaminated windows."""
    s = one.summary
    assert s is not None
    lines = []
    for name in ("fine", "coarse", "half_life", "reach", "paper_fine", "paper_coarse"):
        length = getattr(s, name)
        if length.reason and (name in stats.CROSSINGS or length.low is not None):
            lines.append(f"{spoken(name)}: {length.reason}")
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


@dataclass(frozen=True)
class Source:
    """A run that was read."""

    name: str  # tells it from the others it was read with
    folder: Path
    header: dict[str, Any]  # its run.json
    rows: list[Row]  # the last of each measurement


@dataclass(frozen=True)
class Member:
    """One curve of one run, and the rows it is made of."""

    source: Source
    series: Series  # its name tells it from the others of its group
    rows: list[Row]

    def at_depth(self, depth: float) -> stats.Curve:
        """As if it were a curve: what was asked at one depth of the texts."""
        return stats.curve([replace(row, depth=0.0) for row in self.rows if row.depth == depth])


@dataclass(frozen=True)
class Group:
    """Curves whose numbers stand beside each other: one protocol, the same texts, one version of the task."""

    title: str
    members: list[Member]


def read_sources(folders: Sequence[str | Path], notice: Callable[[str], None] = lambda line: None) -> list[Source]:
    """Read runs; a folder named twice is read once. Runs without rows are left out, and so are folders that only hold
    folders of runs (`runs/*` names them too), each with a notice.

    Raises:
        ValueError: no folder, one that holds no run, or no run with rows.
    """
    if not folders:
        raise ValueError("no run was given: name one or more run folders")
    paths = list({Path(folder).resolve(): Path(folder) for folder in folders})
    names = _endings(paths)
    found = []
    for path, name in zip(paths, names, strict=True):
        if not (path / "run.json").exists() and any(path.glob("*/run.json")):
            notice(f"{path} is left out: its runs are in folders of their own. Name them: {path}/*")
            continue
        header, rows = read_header(path), latest(read_rows(path))
        if rows:
            found.append(Source(name, path, header, rows))
        else:
            notice(f"{path} is left out: it holds no rows yet")
    if not found:
        raise ValueError(
            f"{', '.join(map(str, paths))}: no run holds rows yet. Repeat the command of a run, or name others"
        )
    return found


def grouped(sources: Sequence[Source]) -> list[Group]:
    """The curves of some runs, those of one protocol, text and task version together, in the order they come.

    Raises:
        ValueError: a run that mixes settings within a curve.
    """
    found = []
    for source in sources:
        try:
            found.append((source, series(source.rows, source.header["models"])))
        except ValueError as error:
            raise ValueError(f"{source.folder}: {error}") from error
    return grouped_series(found)


def grouped_series(found: Iterable[tuple[Source, Iterable[Series]]]) -> list[Group]:
    """The same of curves that were made already, for each run."""
    groups: dict[tuple[str, int], list[Member]] = {}
    for source, curves in found:
        rows = stats.by_curve(source.rows)
        for one in curves:
            own = rows[one.model, one.method, one.what]
            version = own[0].version
            what = one.what.removesuffix(stats.version_label(version))  # of a run with several versions
            groups.setdefault((what, version), []).append(Member(source, one, own))
    several = {what for what, _ in groups if sum(what == other for other, _ in groups) > 1}
    return [
        Group(what + stats.version_label(version) if what in several else what, _named(members))
        for (what, version), members in groups.items()
    ]


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


def told_apart(members: Sequence[tuple[str, str, str]]) -> list[str]:
    """Names of (model, method, run): by model, by method where there are several, and by run where the same was
    measured in several."""
    short = short_names(model for model, _, _ in members)
    methods = {method for _, method, _ in members}
    who = [(model, method) for model, method, _ in members]
    names = []
    for model, method, run in members:
        parts = [short[model]]
        parts += [method] if len(methods) > 1 else []
        parts += [f"({run})"] if who.count((model, method)) > 1 else []
        names.append(" ".join(parts))
    return names


def _named(members: Sequence[Member]) -> list[Member]:
    names = told_apart([(one.series.model, one.series.method, one.source.name) for one in members])
    return [replace(one, series=replace(one.series, name=name)) for one, name in zip(members, names, strict=True)]


def _endings(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of some different paths that tell them apart."""
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names
