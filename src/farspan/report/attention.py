"""What a report shows of attention: shares by distance and by rank, by layer and head, and maps."""

from base64 import b64decode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure  # not pyplot, which would choose the backend of the whole program
from matplotlib.ticker import FuncFormatter
from rich.box import SIMPLE_HEAD
from rich.table import Table

from farspan.record import Row
from farspan.report.figure import COLOURS, Line
from farspan.report.figure import Figure as Described
from farspan.report.interactive import place
from farspan.report.perplexity import numbers
from farspan.report.picture import saved
from farspan.report.runs import Group, Member, Source, grouped, names_of, short_names
from farspan.stats import bands, interval, measured_mean
from farspan.terminal import Terminal

PICKS = ("distance", "bins", "rank", "pareto")
PARTS = {"all": "all keys", "rest": "without the first {sinks} tokens"}  # as rows call them, and in words
FAINTEST = 1e-6  # weight of a key at the lower end of a map's colours


@dataclass(frozen=True)
class At:
    """Attention of the queries at one length: shares [repeats, layers, heads, ...]."""

    length: int  # tokens a query may see, itself included
    ends: list[int]  # numbers of keys of `distance` and `rank`
    visible: list[int]  # keys, by layer: fewer where it has a window
    sinks: np.ndarray  # [repeats, layers, heads]: share of the first tokens
    shares: dict[str, dict[str, np.ndarray]]  # by part and pick; PARTS, PICKS
    map: np.ndarray | None  # [side, side]: share of a bin's queries that goes to a bin of keys; mean over repeats

    def of_layer(self, place: int) -> "At":
        """Return the same of one layer."""
        shares = {part: {pick: v[:, [place]] for pick, v in of.items()} for part, of in self.shares.items()}
        return replace(self, sinks=self.sinks[:, [place]], shares=shares, map=None)

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


@dataclass(frozen=True)
class Series:
    """Attention of one model under one method."""

    name: str  # distinguishes it from the others of its table or picture
    model: str
    method: str
    text: str
    settings: dict[str, Any]
    layers: list[int]
    at: list[At]  # by length, ascending
    failures: dict[int, str]  # length -> status of the rows that failed there


def series(rows: Iterable[Row]) -> list[Series]:
    """Return the attention of each model and method among the rows, with names that distinguish them."""
    source = Source.of("", "", {"settings": {}, "models": {}}, rows)
    return measured([group for group in grouped([source]) if group.task == "attention"])


def measured(groups: Sequence[Group]) -> list[Series]:
    """Return the members of some groups, with names for one picture."""
    members = [one for group in groups for one in group.members if one.rows]
    names = names_of([(one.model, one.method, one.rows[0].settings["text"]) for one in members])
    return [_series(name, one) for name, one in zip(names, members, strict=True)]


def _series(name: str, member: Member) -> Series:
    good = [row for row in member.rows if row.status == "ok"]
    lengths = sorted({row.length for row in good})
    return Series(
        name=name,
        model=member.model,
        method=member.method,
        text=member.rows[0].settings["text"],
        settings=member.rows[0].settings,
        layers=good[0].scores["layers"] if good else [],
        at=[_at(length, [row for row in good if row.length == length]) for length in lengths],
        failures={row.length: row.status for row in member.rows if row.status != "ok"},
    )


def _at(length: int, rows: Sequence[Row]) -> At:
    maps = [unpacked(row.scores["map"]) for row in rows if "map" in row.scores]
    return At(
        length=length,
        ends=rows[0].scores["ends"],
        visible=rows[0].scores["visible"],
        sinks=np.array([row.scores["sinks"] for row in rows]),
        shares={part: {pick: np.array([row.scores[part][pick] for row in rows]) for pick in PICKS} for part in PARTS},
        map=np.mean(maps, 0) if maps else None,
    )


def unpacked(text: str) -> np.ndarray:
    """A map [side, side] from its lower triangle, as a row holds it: little-endian float32 in base64, row by row."""
    values = np.frombuffer(b64decode(text), "<f4")
    side = int((np.sqrt(8 * len(values) + 1) - 1) / 2)
    map = np.zeros((side, side))
    map[np.tril_indices(side)] = values
    return map


def as_data(found: Sequence[Series]) -> list[dict[str, Any]]:
    """A summary by model, method and length, ready for JSON: means over layers and heads with intervals over repeats
    (null under two of them), and means over repeats by layer and head."""
    return [
        {
            "model": one.model,
            "method": one.method,
            "task": "attention",
            "text": one.text,
            "bin": one.settings["bin"],
            "num_sinks": one.settings["sinks"],
            "layers": one.layers,
            "failed": {str(length): status for length, status in one.failures.items()},
            "lengths": [
                {
                    "length": at.length,
                    "repeats": len(at.sinks),
                    "ends": at.ends,
                    "visible": at.visible,
                    **{key: value for name, of in at.headline().items() for key, value in numbers(name, of).items()},
                    "by_head": {
                        "sinks": _rounded(at.sinks.mean(0)),
                        **{
                            part: {pick: _rounded(values.mean(0)) for pick, values in at.shares[part].items()}
                            for part in PARTS
                        },
                    },
                }
                for at in one.at
            ],
        }
        for one in found
    ]


class AttentionResults:
    """Attention of one run, for a terminal and its folder."""

    def __init__(self, groups: Sequence[Group], folder: Path) -> None:
        self.folder, self.found = folder, measured(groups)

    def print(self, console: Terminal) -> None:
        if any(one.at for one in self.found):
            print_attention(self.found, console)

    def draw(self) -> list[Path]:
        if not any(one.at for one in self.found):
            return []
        texts = ", ".join(sorted({one.text.rstrip("/").rpartition("/")[2] or one.text for one in self.found}))
        names = ", ".join(short_names(one.model for one in self.found).values())
        return draw_attention(self.found, self.folder, f"Attention of {names} ({texts})")

    def as_data(self) -> dict[str, Any]:
        return {"attention": as_data(self.found)}


def print_attention(found: Sequence[Series], console: Terminal) -> None:
    """A table for each series: shares with their 95 % interval by length, means over layers and heads; and the
    layers one by one at the longest length."""
    for one in found:
        sinks, bin = one.settings["sinks"], one.settings["bin"]
        columns = ["top 25 %", "·rest", f"{sinks} sinks", f"nearest {bin:,}", "·rest"]
        title = f"{one.name}: share of attention (means over layers and heads, 95 % intervals)"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
        for column in ("query at", *columns):
            table.add_column(column, justify="right")
        for at in one.at:
            table.add_row(f"{at.length:,}", *(_said(value) for value in at.headline().values()))
        for length, status in sorted(one.failures.items()):
            table.add_row(f"{length:,}", status)
        console.print(table)
        if not one.at:
            continue
        last = one.at[-1]
        table = Table(title=f"by layer at {last.length:,} tokens", title_justify="left", box=SIMPLE_HEAD)
        for column in ("layer", "keys it sees", *columns):
            table.add_column(column, justify="right")
        for at_layer, layer in enumerate(one.layers):
            means = (f"{value.mean():.3f}" for value in last.of_layer(at_layer).headline().values())
            table.add_row(str(layer), f"{last.visible[at_layer]:,}", *means)
        console.print(table)
    line = "top 25 %: the heaviest quarter of the keys a query sees, head by head; rest: without the sinks"
    console.print(line, style="dim", highlight=False)


def draw_attention(found: Sequence[Series], folder: str | Path, title: str) -> list[Path]:
    """Draws attention.png (shares by distance, by rank and by bin), attention-heads.png (by layer and head) and, where
    there are maps, attention-map.png, each also as SVG; returns the paths.

    Of one series all lengths are drawn, of several the longest that all of them have.
    """
    found = [one for one in found if one.at]
    paths = _draw_shares(found, Path(folder), title)
    paths += _draw_heads(found, Path(folder), title)
    if any(_longest(one, found).map is not None for one in found):
        paths += _draw_maps(found, Path(folder), title)
    return paths


def _longest(one: Series, found: Sequence[Series]) -> At:
    """Its attention at the longest length that all series have, or at its own longest."""
    common = set.intersection(*({at.length for at in other.at} for other in found))
    return next((at for at in reversed(one.at) if at.length in common), one.at[-1])


def _draw_shares(found: Sequence[Series], folder: Path, title: str) -> list[Path]:
    figure = Figure(figsize=(13, 7.5), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(2, 3)
    if len(found) == 1:
        lengths = len(found[0].at)
        lines: list[tuple[str, Any, Series, At]] = [
            (f"query at {at.length:,}", colormaps["viridis_r"](0.15 + 0.85 * i / max(1, lengths - 1)), found[0], at)
            for i, at in enumerate(found[0].at)
        ]
    else:
        lines = [
            (f"{one.name}, query at {at.length:,}", COLOURS[i % len(COLOURS)], one, at)
            for i, one in enumerate(found)
            for at in [_longest(one, found)]
        ]
    for (part, words), (by_distance, by_rank, by_bin) in zip(PARTS.items(), panels, strict=True):
        for number, (label, colour, one, at) in enumerate(lines):
            shares = {pick: values.mean((1, 2)) for pick, values in at.shares[part].items()}  # [repeats, ...]
            for axes, pick in ((by_distance, "distance"), (by_rank, "rank")):
                _line(axes, np.array(at.ends), shares[pick], colour, label)
            keys = max(at.visible) - (0 if part == "all" else one.settings["sinks"])
            by_rank.plot(-(-keys // 4), measured_mean(shares["pareto"]), "o", color=colour, markersize=6)
            bin, bins = one.settings["bin"], shares["bins"].shape[1]
            width = 0.8 / len(lines)
            low, high = interval(shares["bins"])
            mean = measured_mean(shares["bins"])
            by_bin.bar(
                (np.arange(bins) + 0.1 + width * (number + 0.5)) * bin, mean, width * bin, color=colour,
                yerr=None if np.isnan(low).all() else [mean - low, high - mean], error_kw={"elinewidth": 0.8},
            )  # fmt: skip
        about = words.format(sinks=lines[0][2].settings["sinks"])
        by_distance.set(xlabel="nearest keys (tokens)", ylabel=f"share of attention,\n{about}")
        by_rank.set(xlabel="heaviest keys (tokens; ●: a quarter of all)")
        by_bin.set(xlabel=f"distance (tokens, bins of {lines[0][2].settings['bin']:,})", ylim=(0, None))
        for axes in (by_distance, by_rank):
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
            axes.set_ylim(0, 1.02)
        for axes in (by_distance, by_rank, by_bin):
            axes.grid(alpha=0.25)
    panels[0, 0].set_title("by distance")
    panels[0, 1].set_title("by rank, each head's own")
    panels[0, 2].set_title("by bin of distance")
    panels[0, 1].legend(fontsize=8, loc="lower right")
    return saved(figure, folder, "attention")


def _line(axes: Axes, x: np.ndarray, values: np.ndarray, colour: Any, label: str) -> None:
    """The mean over repeats [repeats, points] with its interval."""
    axes.plot(x, measured_mean(values), ".-", color=colour, label=label, linewidth=1.4)
    low, high = interval(values)
    if not np.isnan(low).all():
        axes.fill_between(x, np.clip(low, 0, 1), np.clip(high, 0, 1), color=colour, alpha=0.2, linewidth=0)


def _draw_heads(found: Sequence[Series], folder: Path, title: str) -> list[Path]:
    """Heat maps of layers and heads, a column for each series."""
    chosen = [_longest(one, found) for one in found]
    sinks = found[0].settings["sinks"]
    rows = {
        "heaviest 25 % of the keys": [at.shares["all"]["pareto"].mean(0) for at in chosen],
        f"the same without {sinks} sinks": [at.shares["rest"]["pareto"].mean(0) for at in chosen],
        f"the first {sinks} tokens": [at.sinks.mean(0) for at in chosen],
        f"farther than {found[0].settings['bin']:,} tokens": [
            1 - at.shares["all"]["bins"][..., 0].mean(0) for at in chosen
        ],
    }
    figure = Figure(figsize=(max(7, 4 * len(found) + 1), 11), layout="constrained")
    figure.suptitle(f"{title}\nshare of attention by layer and head")
    panels = figure.subplots(len(rows), len(found), squeeze=False)
    for line, (words, values) in zip(panels, rows.items(), strict=True):
        for axes, one, at, value in zip(line, found, chosen, values, strict=True):
            image = axes.imshow(value, vmin=0, vmax=1, cmap="viridis", aspect="auto", interpolation="nearest")
            step = -(-len(one.layers) // 8)
            axes.set_yticks(range(0, len(one.layers), step), [str(layer) for layer in one.layers[::step]])
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.set(ylabel="layer", title=f"{one.name}, query at {at.length:,}:\n{words} (mean {value.mean():.3f})")
            axes.title.set_fontsize(9)
        figure.colorbar(image, ax=line.tolist())
    for axes in panels[-1]:
        axes.set_xlabel("head")
    return saved(figure, folder, "attention-heads")


def _draw_maps(found: Sequence[Series], folder: Path, title: str) -> list[Path]:
    """Maps beside each other, in one scale of colours: the mean weight of a key, over repeats, layers and heads."""
    drawn = [(one, at) for one in found if (at := _longest(one, found)).map is not None]
    figure = Figure(figsize=(5.4 * len(drawn) + 1, 5.6), layout="constrained")
    figure.suptitle(f"{title}\nmean weight of a key")
    panels = figure.subplots(1, len(drawn), squeeze=False)[0]
    weights = []
    for _, at in drawn:
        assert at.map is not None
        width = -(-at.length // len(at.map))
        weights.append(np.where(np.tri(len(at.map)) > 0, at.map / width, np.nan))
    smallest = min(float(np.nanmin(np.where(value > 0, value, np.nan))) for value in weights)
    faintest = max(FAINTEST, smallest)
    norm = LogNorm(faintest, max(float(np.nanmax(value)) for value in weights))
    for axes, (one, at), value in zip(panels, drawn, weights, strict=True):
        side = len(value) * -(-at.length // len(value))
        shown = np.where(np.isfinite(value), np.maximum(value, faintest), np.nan)
        image = axes.imshow(shown, norm=norm, cmap="magma", interpolation="nearest", extent=(0, side, side, 0))
        axes.set(xlabel="key (tokens from the beginning)", ylabel="query", title=one.name)
    figure.colorbar(image, ax=panels.tolist(), shrink=0.8)
    return saved(figure, folder, "attention-map")


def _rounded(values: np.ndarray) -> list[Any]:
    rounded: list[Any] = values.round(6).tolist()
    return rounded


def _said(values: np.ndarray) -> str:
    half = float(interval(values)[1] - measured_mean(values))
    return f"{measured_mean(values):.3f}" + ("" if np.isnan(half) else f"±{half:.3f}".replace("±0", "±"))


# on the page


def section(group: Group, number: int) -> dict[str, Any]:
    """Return what the page shows of a group besides its quality: shares by distance and by rank, and by layer."""
    found = [(index, _series(one.name, one)) for index, one in enumerate(group.members) if one.rows]
    drawn = [(index, one) for index, one in found if one.at]
    headings = {"distance": "Share of the nearest keys", "rank": "Share of the heaviest keys, each head's own"}
    key = "Solid: all keys. Dashed: without the first tokens of the text (sinks)."
    figures = [
        place(f"{pick}-{number}", heading, key, _shares(drawn, pick)) for pick, heading in headings.items() if drawn
    ]
    about = "the share of attention of the heaviest quarter of the keys that a query sees, head by head"
    tables = [
        {
            "title": f"By layer: {one.name}, {one.at[-1].length:,} tokens",
            "head": ["layer", *(name.replace("_", " ") for name in one.at[-1].headline())],
            "lines": [
                [str(layer), *(f"{value.mean():.3f}" for value in one.at[-1].of_layer(at).headline().values())]
                for at, layer in enumerate(one.layers)
            ],
        }
        for _, one in drawn
    ]
    return {"kind": "attention", "about": about, "figures": figures, "tables": tables}


def _shares(found: Sequence[tuple[int, Series]], pick: str) -> Described:
    """Return the share of the nearest, or of the heaviest, keys over their number, at the longest length of each."""
    lines = []
    for index, one in found:
        at = one.at[-1]
        for part, style in (("all", "solid"), ("rest", "dashed")):
            values = at.shares[part][pick].mean((1, 2))
            low, high = bands(values)
            what = PARTS[part].format(sinks=one.settings["sinks"])
            texts = [
                [f"{one.name}, query at {at.length:,}", f"{end:,} keys", f"{what}: {mean:.3f}"]
                for end, mean in zip(at.ends, measured_mean(values), strict=True)
            ]
            kind = "copy" if part == "all" else "control"
            lines.append(
                Line(one.name, at.ends, measured_mean(values), index, low, high, texts, kind, style)  # type: ignore[arg-type]
            )
    ends = sorted({end for _, one in found for end in one.at[-1].ends})
    x = "nearest keys (tokens)" if pick == "distance" else "heaviest keys (tokens)"
    return Described("", x, "share of attention", lines, log_x=True, ticks=ends, span=(0, 1.02), num_members=len(found))
