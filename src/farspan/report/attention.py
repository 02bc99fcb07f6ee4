"""The report of attention: shares by distance and by rank, by layer and head, and maps."""

from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from farspan.record import Row
from farspan.report.export import bounds, counted, number, numbers
from farspan.report.figure import Figure, Heat, Line, sample_size
from farspan.report.interactive import on_page
from farspan.report.picture import draw_grid
from farspan.report.runs import Group, Member, groups_of_rows, renamed, short_names
from farspan.report.task_report import TaskReport
from farspan.stats import bands, measured_mean, short_text
from farspan.terminal import Terminal

PICKS = ("distance", "bins", "rank", "pareto")
PARTS = {"all": "all keys", "rest": "without the first {sinks} tokens"}  # the name in rows, and the description
AXES = {
    "distance": "nearest keys (tokens)",
    "rank": "heaviest keys (tokens; hollow: a quarter of all)",
    "bins": "distance (tokens; middle of a bin of {bin:,})",
}
FAINTEST = 1e-6  # weight of a key at the lower end of a map's colours
NOTE = (
    "heaviest quarter: of the keys that the query sees, head by head; without sinks: of the attention to all keys but "
    "the sinks"
)


@dataclass(frozen=True)
class At:
    """Attention of the queries at one length: shares [repeats, layers, heads, ...]."""

    length: int  # tokens a query may see, itself included
    ends: list[int]  # numbers of keys of `distance` and `rank`
    visible: list[int]  # keys, by layer: fewer where it has a window
    sinks: np.ndarray  # [repeats, layers, heads]: share of the first tokens
    shares: dict[str, dict[str, np.ndarray]]  # by part and pick; PARTS, PICKS
    map: np.ndarray | None  # [side, side]: share that a bin of queries gives to a bin of keys; mean over repeats

    @classmethod
    def of(cls, length: int, rows: Sequence[Row]) -> "At":
        """Return the attention of the rows of one length."""
        maps = [unpacked(row.scores["map"]) for row in rows if "map" in row.scores]
        shares = {part: {pick: np.array([row.scores[part][pick] for row in rows]) for pick in PICKS} for part in PARTS}
        ends, visible = (rows[0].scores[name] for name in ("ends", "visible"))
        sinks = np.array([row.scores["sinks"] for row in rows])
        return cls(length, ends, visible, sinks, shares, np.mean(maps, 0) if maps else None)

    def of_layer(self, index: int) -> "At":
        """Return the attention of one layer, by its index among the measured layers."""
        shares = {part: {pick: v[:, [index]] for pick, v in of.items()} for part, of in self.shares.items()}
        return replace(self, sinks=self.sinks[:, [index]], shares=shares, map=None)

    def headline(self) -> dict[str, np.ndarray]:
        """Return the numbers of a table by name: [repeats], means over layers and heads."""
        every, rest = self.shares["all"], self.shares["rest"]
        values = {
            "pareto": every["pareto"],
            "pareto_rest": rest["pareto"],
            "sinks": self.sinks,
            "nearest_bin": every["bins"][..., 0],
            "nearest_bin_rest": rest["bins"][..., 0],
        }
        return {name: value.mean((1, 2)) for name, value in values.items()}

    def as_data(self) -> dict[str, Any]:
        """Return means over layers and heads with intervals over repeats (None under two of them), and means over
        repeats by layer and head, ready for JSON."""
        found = {"length": self.length, "repeats": len(self.sinks), "ends": self.ends, "visible": self.visible}
        for name, values in self.headline().items():
            found |= numbers(name, values, least=0.0, most=1.0)
        by_head: dict[str, Any] = {"sinks": self.sinks.mean(0).round(6).tolist()}
        for part, of in self.shares.items():
            by_head[part] = {pick: values.mean(0).round(6).tolist() for pick, values in of.items()}
        return found | {"by_head": by_head}


class AttentionMember(Member):
    """A member of a group of attention measurements."""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of its rows: `text`, `bin` and `sinks` among them."""
        return self.rows[0].settings

    @property
    def layers(self) -> list[int]:
        """The numbers of the measured layers."""
        return list(self.good[0].scores["layers"]) if self.good else []

    @cached_property
    def at(self) -> list[At]:
        """Attention by length, ascending."""
        lengths = sorted({row.length for row in self.good})
        return [At.of(length, [row for row in self.good if row.length == length]) for length in lengths]

    @property
    def heads(self) -> list[str]:
        """The heads of the columns of `At.headline`, which are shares."""
        sinks, near = f"first {counted(self.settings['sinks'], 'token')}", f"nearest {self.settings['bin']:,} tokens"
        without = "without sinks"
        return ["heaviest quarter", f"heaviest quarter {without}", f"{sinks} (sinks)", near, f"{near} {without}"]

    @property
    def heads_by_layer(self) -> list[str]:
        """The heads of the columns of `lines_by_layer`."""
        return ["layer", "visible keys", *self.heads]

    def lines_by_layer(self) -> Iterator[list[str]]:
        """Yield the lines of a table by layer at the longest length: layer, keys that it sees, and the headline."""
        last = self.at[-1]
        for index, layer in enumerate(self.layers):
            means = (f"{value.mean():.3f}" for value in last.of_layer(index).headline().values())
            yield [str(layer), f"{last.visible[index]:,}", *means]


def series(rows: Iterable[Row]) -> list[AttentionMember]:
    """Return the attention of each model and method among the rows, with names for one table or picture."""
    return renamed(groups_of_rows(rows, "attention", AttentionMember), AttentionMember)


def unpacked(text: str) -> np.ndarray:
    """Return a map [side, side] from its lower triangle, as a row holds it: little-endian float32 in base64, row by
    row."""
    values = np.frombuffer(b64decode(text), "<f4")
    side = int((np.sqrt(8 * len(values) + 1) - 1) / 2)
    map = np.zeros((side, side))
    map[np.tril_indices(side)] = values
    return map


class AttentionReport(TaskReport):
    """Attention: shares by distance and by rank, by layer and head, and maps."""

    name, member = "attention", AttentionMember

    @cached_property
    def members(self) -> list[AttentionMember]:
        """All members, with names for one table or picture."""
        return renamed(self.groups, AttentionMember)

    def print(self, console: Terminal) -> None:
        """Print a table for each member: shares with their 95 % interval by length, means over layers and heads; and
        the layers one by one at the longest length."""
        measured = any(one.good for one in self.members)
        for one in self.members if measured else []:
            lines = [[f"{at.length:,}", *map(_short, at.headline().values())] for at in one.at]
            lines += [[f"{length:,}", status] for length, status in sorted(one.failures.items())]
            size = sample_size((len(at.sinks) for at in one.at), "text")
            title = ", ".join(filter(None, (f"{one.name}: share of attention", "means over layers and heads", size)))
            console.print_table(title, ("query at token", *one.heads), lines, num_keys=1)
            if one.at:
                console.print_table(_by_layer(one), one.heads_by_layer, one.lines_by_layer(), num_keys=1)
        if measured:
            console.print(NOTE, style="dim", highlight=False)

    def draw(self) -> list[Path]:
        """Draw attention.png (shares by distance, by rank and by bin), attention-heads.png (by layer and head) and,
        where there are maps, attention-map.png, each also as SVG. For one member all lengths are drawn, for several the
        longest that all of them have."""
        drawn = [one for one in self.members if one.at]
        if not drawn:
            return []
        texts = sorted({short_text(one.settings["text"]) for one in drawn})
        names = ", ".join(short_names(one.model for one in drawn).values())
        title = f"Attention of {names} ({', '.join(texts)})"
        common = set.intersection(*({at.length for at in one.at} for one in drawn))
        chosen = [(one, max(one.at, key=lambda at: (at.length in common, at.length))) for one in drawn]
        lines = chosen if len(drawn) > 1 else [(drawn[0], at) for at in drawn[0].at]
        shares = [[share_figure(list(enumerate(lines)), pick, [part]) for pick in AXES] for part in PARTS]
        paths = draw_grid(shares, self.folder, "attention", title)
        heads = [[_heads(one, at, words) for one, at in chosen] for words in HEADS]
        about = "share of attention by layer and head"
        paths += draw_grid(heads, self.folder, "attention-heads", f"{title}\n{about}", (4.5, 2.9))
        if maps := [(one, at, at.map) for one, at in chosen if at.map is not None]:
            found = [_map(one, at, map) for one, at, map in maps]
            span = min(one.span[0] for one in found), max(one.span[1] for one in found)
            figures = [replace(one, span=span) for one in found]
            paths += draw_grid([figures], self.folder, "attention-map", f"{title}\nmean weight of a key", (6.0, 5.0))
        return paths

    def as_data(self) -> dict[str, Any]:
        about = [
            {
                "model": one.model,
                "method": one.method,
                "task": "attention",
                "text": one.settings["text"],
                "bin": one.settings["bin"],
                "num_sinks": one.settings["sinks"],
                "layers": one.layers,
                "failed": {str(length): status for length, status in one.failures.items()},
                "lengths": [at.as_data() for at in one.at],
            }
            for one in self.members
        ]
        return {"attention": about}

    def section(self, group: Group, number: int) -> dict[str, Any]:
        every = enumerate(group.members)
        last = [(index, (one, one.at[-1])) for index, one in every if isinstance(one, AttentionMember) and one.at]
        headings = {"distance": "Share of the nearest keys", "rank": "Share of the heaviest keys, each head's own"}
        key = "Solid: all keys. Dashed: without the first tokens of the text (sinks)."
        figures = [
            on_page(f"{pick}-{number}", heading, key, share_figure(last, pick))
            for pick, heading in headings.items()
            if last
        ]
        about = "the share of attention of the heaviest quarter of the keys that a query sees, head by head"
        tables = [
            {
                "title": f"{_by_layer(one)} ({NOTE})",
                "head": one.heads_by_layer,
                "lines": list(one.lines_by_layer()),
            }
            for _, (one, _) in last
        ]
        return {"about": about, "figures": figures, "tables": tables}


def _by_layer(one: AttentionMember) -> str:
    """Return the title of the table by layer."""
    return f"{one.name}: share of attention by layer, query at token {one.at[-1].length:,}, means over heads"


def _short(values: np.ndarray) -> str:
    """Return the mean share of some repeats, and its 95 % interval in a line below it."""
    low, high = map(float, bands(values))
    return f"{values.mean():.3f}\n{bounds(low, high)}".rstrip()


# figures


def share_figure(
    chosen: Sequence[tuple[int, tuple[AttentionMember, At]]], pick: str, parts: Sequence[str] = tuple(PARTS)
) -> Figure:
    """Return the share of attention of the nearest keys, of the heaviest keys, or of each bin of distances.

    Args:
        chosen: the members and lengths to draw, each with the index of its colour.
        pick: one of AXES.
        parts: of PARTS; "rest" is dashed.
    """
    lines, marks, ticks = [], [], set[int]()
    for index, (one, at) in chosen:
        sinks, bin = one.settings["sinks"], one.settings["bin"]
        for part in parts:
            shares = {name: values.mean((1, 2)) for name, values in at.shares[part].items()}  # [repeats, ...]
            whole = [int((i + 0.5) * bin) for i in range(shares["bins"].shape[1])] if pick == "bins" else at.ends
            points = [
                {"x": x} | numbers("share", of, least=0.0, most=1.0)
                for x, of in zip(whole, shares[pick].T, strict=True)
            ]
            name, what = f"{one.name}, query at {at.length:,}", PARTS[part].format(**one.settings)
            near = "at a distance of about {:,} tokens" if pick == "bins" else "{:,} keys"
            texts = [[name, near.format(point["x"]), f"{what}: {number(point['share'])}"] for point in points]
            look = {"kind": "copy"} if part == "all" else {"kind": "control", "style": "dashed"}
            lines.append(Line.of(name, points, "x", "share", index, texts, **look))
            ticks |= set(whole)
            if pick == "rank":
                keys = -(-(max(at.visible) - (sinks if part == "rest" else 0)) // 4)
                share = float(measured_mean(shares["pareto"]))
                text = [name, f"a quarter of all, {keys:,} keys", f"{what}: {number(share)}"]
                marks.append(Line("", [keys], [share], index, texts=[text], kind=look["kind"], style="mark"))
    settings = chosen[0][1][0].settings
    about = f",\n{PARTS[parts[0]].format(**settings)}" if len(parts) == 1 else ""
    x, y, ends = AXES[pick].format(**settings), f"share of attention{about}", sorted(ticks)
    note = sample_size((len(at.sinks) for _, (_, at) in chosen), "text")
    return Figure(
        "", x, y, [*lines, *marks], log_x=pick != "bins", ticks=ends, span=(0, 1.02), num_members=len(chosen), note=note
    )


HEADS: dict[str, Callable[[At], np.ndarray]] = {
    "heaviest 25 % of the keys": lambda at: at.shares["all"]["pareto"],
    "the same without {sinks} sinks": lambda at: at.shares["rest"]["pareto"],
    "the first {sinks} tokens": lambda at: at.sinks,
    "farther than {bin:,} tokens": lambda at: 1 - at.shares["all"]["bins"][..., 0],
}  # by description: shares [repeats, layers, heads]


def _heads(one: AttentionMember, at: At, words: str) -> Heat:
    """Return one of HEADS by layer and head."""
    values = HEADS[words](at).mean(0)
    about = words.format(**one.settings)
    title = f"{one.name}, query at {at.length:,}:\n{about} (mean {values.mean():.3f})"
    return Heat(title, "head", "layer", values, [*map(str, range(values.shape[1]))], [*map(str, one.layers)], "share")


def _map(one: AttentionMember, at: At, map: np.ndarray) -> Heat:
    """Return the mean weight of a key, over repeats, layers and heads; the colours span its own weights."""
    width = -(-at.length // len(map))  # tokens of a bin
    values = np.where(np.tri(len(map)) > 0, map / width, np.nan)
    span = max(FAINTEST, float(np.nanmin(np.where(values > 0, values, np.nan)))), float(np.nanmax(values))
    starts = [f"{i * width:,}" for i in range(len(map))]
    x = "key (tokens from the beginning)"
    return Heat(one.name, x, "query", values, starts, starts, "weight", span=span, log=True)
