"""What a report shows, section by section, as plain texts: what the page's template and its Markdown are given."""

import shlex
from collections.abc import Iterator, Sequence
from math import isfinite
from typing import Any

from farspan.paired import Difference, said
from farspan.report import figures
from farspan.report.contrasts import TextTest, group_differences, text_tests
from farspan.report.example import Example, examples
from farspan.report.export import failures
from farspan.report.tables import HEADLINE, Group, Member, Source, in_characters, remarks
from farspan.stats import MemoryLength, bands, measured_mean, memory_index

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


def contents(sources: Sequence[Source], groups: Sequence[Group]) -> dict[str, Any]:
    """Everything that is shown, under the names that the template knows."""
    members = [one for group in groups for one in group.members]
    return {
        "title": _title(sources),
        "groups": [_section(group, number) for number, group in enumerate(groups, 1)],
        "meanings": HEADLINE,
        "text_tests": [_text_test(one) for one in text_tests(members)],
        "examples": _examples(sources),
        "failures": failures(sources),
        "sources": [_provenance(source) for source in sources],
        "empty": [source.name for source in sources if all(source is not one.source for one in members)],
    }


def _title(sources: Sequence[Source]) -> str:
    names = sorted({row.model.rstrip("/").rpartition("/")[2] for source in sources for row in source.rows})
    if len(names) == 1:
        return f"How far back {names[0]} remembers"
    whose = f"{len(names)} models" if len(names) > 3 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f"How far back {whose} remember"


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
    line: dict[str, Any] = {
        "name": series.name,
        "model": series.model,
        "method": series.method,
        "run": one.source.name,
        "colour": figures.colour(index),
        "glyph": figures.symbol(index)[1],
        "trained": series.trained_length,
        "cells": None,
        "failed": ", ".join(sorted(set(series.curve.failures.values()))),
    }
    if series.summary is not None:
        half = in_characters(series.summary.half_life, series)
        cells = {name: _cell(getattr(series.summary, name)) for name in names}
        cells["half_life"]["characters"] = _cell(half)["value"] if half is not None and half.value else ""
        line |= {"cells": list(cells.values()), "repeats": series.summary.repeats}
    return line


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
        f"{row.settings.get('target_text')} ({name})": row.settings[name]
        for row in source.rows
        for name in ("target_hash", "prefix_hash")
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
