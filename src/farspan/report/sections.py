"""What a report shows, section by section, as plain texts: what the page's template and its Markdown are given."""

import shlex
from collections.abc import Iterator, Sequence
from math import exp, isfinite
from typing import Any

from farspan.report import compare, figures, perplexity
from farspan.report.contrasts import TextTest, group_differences, said, text_tests
from farspan.report.example import Example, examples
from farspan.report.export import failures
from farspan.report.tables import HEADLINE, Group, Member, Series, Source, in_characters, remarks, short_names
from farspan.stats import Difference, MemoryLength, bands, interval, measured_mean, memory_index

COLUMNS = ("fine", "coarse", "half_life", "reach", "span")
PAPER_COLUMNS = ("paper_fine", "paper_coarse")
FOLD = 600  # tokens of an example that stand open
EXAMPLES = 1_000_000  # characters of all examples together; the page stays small
PROTOCOLS = {
    "nested": "a text is read and then asked for whole, its last half scored; one text serves all lengths",
    "paper": "a text is read and then asked for whole, its last half scored; a fresh text at each length, "
    "as Liu et al. 2024 did",
    "probe": "of the text that was read a slice is asked for: tokens to warm up + tokens scored",
}
TARGETS = {
    "fixed": "the same tokens are scored at every length; their context grows to the left",
    "last": "the last tokens of each length are scored: other ones at each, behind a context that begins where the "
    "text does",
    "all": "every token of a length is scored in one pass; most of them have a shorter context",
}


def contents(
    sources: Sequence[Source], groups: Sequence[Group], expected: Sequence[perplexity.Group]
) -> dict[str, Any]:
    """Everything that is shown, under the names that the template knows."""
    members = [one for group in groups for one in group.members]
    shown = [one.source for one in members] + [one.source for group in expected for one in group.members]
    return {
        "title": _title(sources, remembers=bool(groups) or not expected),
        "perplexity": [_expected(group, number) for number, group in enumerate(expected, len(groups) + 1)],
        "groups": [_section(group, number) for number, group in enumerate(groups, 1)],
        "comparisons": [one for source in sources for one in _comparison(source)],
        "meanings": HEADLINE,
        "text_tests": [_text_test(one) for one in text_tests(members)],
        "examples": _examples(sources),
        "failures": failures(sources),
        "sources": [_provenance(source) for source in sources],
        "empty": [source.name for source in sources if all(source is not one for one in shown)],
    }


def _comparison(source: Source) -> list[dict[str, Any]]:
    """A table and a picture of quality against cost for each task of a comparison; nothing of other runs."""
    if source.header["settings"].get("task") != "compare":
        return []
    found = []
    for number, group in enumerate(compare.by_task(compare.cells(source.rows, source.header))):
        head, lines = compare.lines(group)
        shared = compare.at_longest_shared(group)
        drawn = {
            f"{price}-{source.name}-{number}": figures.cost_figure(shared, price, title)
            for price, title in compare.PRICES.items()
        }
        found.append(
            {
                "id": f"comparison-{source.name}-{number}",
                "title": f"{group[0].task}: {group[0].quality} by {group[0].unit}",
                "run": source.name,
                "head": head,
                "lines": lines,
                "legend": compare.legend(group),
                "failures": compare.failures(group),
                "cost_at": f"{shared[0].length:,} {shared[0].unit}" if shared else "",
                "points": [
                    {"name": cell.method, "colour": figures.colour(i), "glyph": figures.symbol(i)[1]}
                    for i, cell in enumerate(shared)
                ],
                "figures": {place: figure for place, figure in drawn.items() if figure},
            }
        )
    return found


def _title(sources: Sequence[Source], *, remembers: bool) -> str:
    names = sorted(short_names(row.model for source in sources for row in source.rows).values())
    whose = f"{len(names)} models"
    if len(names) <= 3:
        whose = " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)
    if not remembers:
        return f"Perplexity of {whose}"
    return f"How far back {whose} {'remembers' if len(names) == 1 else 'remember'}"


def _section(group: Group, number: int) -> dict[str, Any]:
    """What the page shows of one group. Figures are keyed by the id of their place."""
    members = group.members
    measured = [one for one in members if one.series.summary is not None]
    several = [one for one in members if len(one.series.curve.lengths) > 1]
    places: dict[str, Any] = {}
    if several or not any(one.series.map for one in members):
        # all of them, so that a curve has the colour of its line in the table
        places[f"curve-{number}"] = figures.curve_figure(members)
        if measured:
            places[f"index-{number}"] = figures.index_figure(members)
    if any(one.series.map is not None and len(one.series.map.lengths) == 1 for one in members):
        places[f"recall-{number}"] = figures.recall_figure(members)
    maps = []
    for place, one in enumerate(members):
        if one.series.map is not None and len(one.series.map.lengths) > 1:
            maps.append({"id": f"map-{number}-{place}", "name": one.series.name})
            places[f"map-{number}-{place}"] = figures.map_figure(one)
    names = (*COLUMNS, *PAPER_COLUMNS) if group.title.startswith("paper") else COLUMNS
    protocol = group.title.partition(",")[0].partition(" ")[0]
    return {
        "id": f"group-{number}",
        "number": number,
        "title": group.title,
        "protocol": PROTOCOLS.get(protocol, ""),
        "columns": names,
        "methods": sorted({one.series.method for one in members}),
        "lines": [_line(one, index, names) for index, one in enumerate(members)],
        "remarks": [line for one in measured for line in remarks(one.series)],
        "figures": places,
        "maps": maps,
        "recall": [] if several else [line for one in members for line in _recall(one)],
        "differences": [_difference(one) for one in group_differences(group)],
    }


def _expected(group: perplexity.Group, number: int) -> dict[str, Any]:
    """What the page shows of one group of perplexities."""
    members = group.members
    measured = [one.series for one in members if one.series.measured.any()]
    whats = ("nats", "accuracy", *(["gain"] if any(one.same_targets for one in measured) else []))
    places = {f"{what}-{number}": figures.perplexity_figure(members, what) for what in whats} if measured else {}
    if any(one.ends for one in measured):
        places[f"position-{number}"] = figures.position_figure(members)
    lengths = sorted({int(length) for one in members for length in one.series.lengths})
    return {
        "id": f"group-{number}",
        "number": number,
        "title": group.title,
        "targets": TARGETS[group.targets],
        "lengths": [f"{length:,}" for length in lengths],
        "methods": sorted({one.series.method for one in members}),
        "lines": [
            _whose(one.source, one.series, one.trained_length, index)
            | {"cells": [_expectation(one.series, length) for length in lengths]}
            for index, one in enumerate(members)
        ],
        "figures": places,
    }


def _expectation(one: perplexity.Series, length: int) -> dict[str, str]:
    """Nats with their interval, perplexity and accuracy at a length; why not, where a row failed; else nothing."""
    here = one.lengths == length
    if not one.measured[here].any():
        return _shown(one.failures.get(length, "")) | {"perplexity": "", "accuracy": ""}
    nats, accuracy = one.nats[:, here], one.accuracy[:, here]
    mean, (low,), (high,) = float(measured_mean(nats)[0]), *interval(nats)
    cell = _shown(f"{mean:.3f}", f"[{low:.3f}, {high:.3f}]" if isfinite(low) else "")
    return cell | {"perplexity": perplexity.written(exp(mean)), "accuracy": f"{measured_mean(accuracy)[0]:.3f}"}


def _recall(one: Member) -> Iterator[dict[str, Any]]:
    """The lines of a table of recall by distance, of a map at one length; none where there is no map."""
    if one.series.map is None:
        return
    for depth, distance in zip(one.series.map.depths.tolist(), one.series.map.distance[0], strict=True):
        at = one.at_depth(depth)
        line: dict[str, Any] = {"name": one.series.name, "depth": f"{depth:g}", "cells": []}
        if at.measured.any():
            line["distance"] = f"{distance:,.0f}"
            for values in (at.copy, at.control):
                (low,), (high,) = bands(values)
                interval = f"[{low:.3f}, {high:.3f}]" if isfinite(low) else ""
                line["cells"].append(_shown(f"{measured_mean(values)[0]:.3f}", interval))
            line["cells"].append(_shown(f"{memory_index(at)[0]:.3f}"))
        else:
            line["distance"] = ", ".join(at.failures.values())
        yield line


def _difference(one: Difference) -> dict[str, str]:
    low, high = (f"{end:+,.0f}" if end is not None else sign for end, sign in ((one.low, "-∞"), (one.high, "∞")))
    return {
        "first": one.curves[0],
        "second": one.curves[1],
        "name": one.name.replace("_", "-"),
        "value": f"{one.value:+,.0f} {'' if one.unit == 'tokens' else one.unit}".strip(),
        "interval": f"[{low}, {high}]",
        "p": _p(one.p),
        "pairs": f"{one.pairs:,}" if one.pairs else "unpaired",
    }


def _p(p: float | None) -> str:
    return "unknown" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def _text_test(one: TextTest) -> dict[str, Any]:
    """A table over lengths, its numbers in points of accuracy."""
    lines = []
    for at in one.result.lengths:
        ends = [f"{100 * end:+.1f}" for end in (at.low, at.high) if end is not None]
        lines.append(
            {
                "length": f"{at.length:,}",
                "means": [f"{100 * at.means[source]:.1f}" for source in one.result.sources],
                "value": at.reason if at.difference is None else f"{100 * at.difference:+.1f}",
                "interval": f"[{', '.join(ends)}]" if ends else "",
                "p": [_p(p) for p in (at.paired_holm, at.tost_holm, at.anova_holm, at.kruskal_holm)],
                "verdict": at.verdict,
            }
        )
    return {"about": one, "said": said(one.result), "lines": lines}


def _line(one: Member, index: int, names: Sequence[str]) -> dict[str, Any]:
    """A line of the table of memory lengths."""
    series = one.series
    line = _whose(one.source, series, series.trained_length, index)
    line |= {"cells": None, "failed": ", ".join(sorted(set(series.curve.failures.values())))}
    if series.summary is not None:
        half = in_characters(series.summary.half_life, series)
        cells = {name: _cell(getattr(series.summary, name)) for name in names}
        cells["half_life"]["characters"] = _cell(half)["value"] if half is not None and half.value else ""
        line |= {"cells": list(cells.values()), "repeats": series.summary.repeats}
    return line


def _whose(source: Source, series: Series | perplexity.Series, trained: int | None, index: int) -> dict[str, Any]:
    """How a line of a table begins; its mark is that of its curve."""
    return {
        "name": series.name,
        "model": series.model,
        "method": series.method,
        "run": source.name,
        "colour": figures.colour(index),
        "glyph": figures.symbol(index)[1],
        "trained": trained,
    }


def _cell(length: MemoryLength) -> dict[str, str]:
    value, _, interval = str(length).partition(" ")
    why = length.reason
    if length.censored:
        why = f"more than was measured; what ended the measurement: {length.reason}"
    return _shown(value, interval, why)


def _shown(value: str, interval: str = "", why: str = "") -> dict[str, str]:
    """What a cell of a table holds."""
    return {"value": value, "interval": interval, "why": why, "characters": ""}


def _examples(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """The first example of each run; those past a size are only named."""
    shown: list[dict[str, Any]] = []
    used = 0
    for example in (example for source in sources for example in examples(source)):
        used += sum(len(piece.text) for piece in example.pieces)
        shown.append({"about": example, "run": example.source.name, "open": example.num_tokens <= FOLD})
        shown[-1] |= {"pieces": example.pieces if used <= EXAMPLES else [], "share": _share(example)}
    return shown


def _share(example: Example) -> str:
    return "" if example.num_hits is None else f"{example.num_hits / example.num_scored:.0%}"


def _provenance(source: Source) -> dict[str, Any]:
    """Settings, models and sessions of a run as names and texts."""
    header = source.header
    texts = {
        f"{row.settings.get('text', row.settings.get('target_text'))} ({name})": row.settings[name]
        for row in source.rows
        for name in ("target_hash", "prefix_hash", "text_hash")
        if row.settings.get(name)
    }
    sessions = [
        {
            "command": shlex.join(str(part) for part in session.get("command", [])),
            "details": list(_flat({name: value for name, value in session.items() if name != "command"})),
        }
        for session in header["sessions"]
    ]
    return {
        "name": source.name,
        "folder": str(source.folder),
        "rows": len(source.rows),
        "settings": list(_flat(header["settings"])),
        "models": [(name, list(_flat(identity))) for name, identity in header["models"].items()],
        "texts": list(texts.items()),
        "sessions": sessions,
    }


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    elif value not in (None, [], ""):
        yield name, ", ".join(str(item) for item in value) if isinstance(value, list) else str(value)
