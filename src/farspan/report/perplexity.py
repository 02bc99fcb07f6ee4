"""The report of perplexity: its gain over the shortest length, and its value by position."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from farspan.record import Row
from farspan.report.export import WHOSE, CsvTable, number, numbers, ranged, statuses, three_digits, whose
from farspan.report.figure import Figure, Line, sample_size
from farspan.report.interactive import on_page
from farspan.report.runs import Group, Member, groups_of_rows, renamed
from farspan.report.task_report import TaskReport
from farspan.stats import measured_mean
from farspan.terminal import Terminal

TARGETS = {
    "fixed": "the same tokens are scored at every length, and longer lengths put more context before them",
    "last": "the last tokens of each length are scored; the context begins at the beginning of the text",
    "all": "every token of a length is scored in one pass, so most of them have a shorter context",
}
NATS_COLUMNS = ("n", "nats", "nats_low", "nats_high")
ACCURACY_COLUMNS = ("accuracy", "accuracy_low", "accuracy_high")
PERPLEXITY_COLUMNS = (
    *WHOSE, "length", *NATS_COLUMNS, "perplexity", *ACCURACY_COLUMNS, "gain", "gain_low", "gain_high", "status",
)  # fmt: skip
POSITION_COLUMNS = (*WHOSE, "length", "begin", "end", *NATS_COLUMNS, *ACCURACY_COLUMNS)
FIGURES = {
    "accuracy": ("Accuracy", "Share of tokens to which the model gives the highest probability.", "accuracy"),
    "gain": (
        "Gain",
        "Nats per token less than the same tokens take at the shortest length, window by window. Models and methods "
        "without a result there are left out.",
        "gain (nats per token)",
    ),
}  # by number: heading, explanation and axis


Point = Mapping[str, Any]


class PerplexityMember(Member):
    """A member of a group of perplexity measurements."""

    @cached_property
    def _buckets(self) -> list[dict[str, Any]]:
        """The scores by position of the longest length measured; none where only some positions were scored."""
        longest = max((row.length for row in self.good), default=0)
        return [row.scores["buckets"] for row in self.good if row.length == longest and "buckets" in row.scores]

    @property
    def ends(self) -> list[int]:
        """Where the buckets of positions of the longest length measured end; empty where there are none."""
        return list(self._buckets[0]["ends"]) if self._buckets else []

    def by_bucket(self, score: str) -> np.ndarray:
        """Return "nats" or "hits" per token by [repeats, buckets]."""
        values = np.array([bucket[score] for bucket in self._buckets], float)
        return values.reshape(len(self._buckets), len(self.ends)) / np.diff([0, *self.ends])

    @cached_property
    def by_length(self) -> list[dict[str, Any]]:
        """The numbers of each length that has a result, with intervals, ready for JSON. The gain is the nats per token
        at the shortest length minus those at this length, over the same targets; None if the shortest failed."""
        found: list[dict[str, Any]] = []
        columns = [array.T for array in (self.values("nats"), self.values("accuracy"))]
        for length, nats, accuracy in zip(self.lengths, *columns, strict=True):
            if count := int(np.isfinite(nats).sum()):
                point = {"length": length, "repeats": count, **numbers("nats", nats, least=0.0)}
                point |= {
                    "perplexity": round(float(np.exp(measured_mean(nats))), 4),
                    **numbers("accuracy", accuracy, least=0.0, most=1.0),
                }
                if self.rows[0].settings["targets"] == "fixed":
                    point |= numbers("gain", columns[0][0] - nats)
                found.append(point)
        return found

    @cached_property
    def by_position(self) -> list[dict[str, Any]]:
        """The numbers of each range of positions in the longest text, ready for JSON."""
        columns = [self.by_bucket(score).T for score in ("nats", "hits")]
        return [
            {"begin": begin, "end": end}
            | numbers("nats", nats, least=0.0)
            | numbers("accuracy", accuracy, least=0.0, most=1.0)
            for begin, end, nats, accuracy in zip([0, *self.ends], self.ends, *columns, strict=False)
        ]


def series(rows: Iterable[Row]) -> list[PerplexityMember]:
    """Return the perplexities among the rows, with names for one table or picture."""
    return renamed(groups_of_rows(rows, "perplexity", PerplexityMember), PerplexityMember)


def as_data(found: Sequence[PerplexityMember]) -> list[dict[str, Any]]:
    """Return a summary by model, method and length, ready for JSON: intervals are null under two repeats."""
    return [
        {
            "model": one.model,
            "method": one.method,
            "task": "perplexity",
            "what": one.what,
            "failed": {str(length): status for length, status in one.failures.items()},
            "lengths": one.by_length,
            "positions": one.by_position,
        }
        for one in found
    ]


class PerplexityReport(TaskReport):
    """Perplexity: also nats per token and the gain over the shortest length; and by position in the longest text, where
    all tokens were scored."""

    name = picture = "perplexity"
    member = PerplexityMember

    @cached_property
    def members(self) -> list[PerplexityMember]:
        """All perplexities, with names for one table."""
        return renamed(self.groups, PerplexityMember)

    def print(self, console: Terminal) -> None:
        """Print a table for each member: nats per token with their 95 % interval, perplexity, accuracy and gain by
        length; and by position in the longest text, where all tokens were scored."""
        gain = False
        for one in (one for one in self.members if one.good):
            points = {point["length"]: point for point in one.by_length}
            gain |= (has_gain := any("gain" in point for point in points.values()))
            lines = [
                _line(f"{length:,}", points[length])
                if length in points
                else [f"{length:,}", one.failures.get(length, "missing")]
                for length in one.lengths
            ]
            head = ("nats/token", "perplexity", "accuracy")
            title = f"{one.name}: {one.what}; {sample_size((p['repeats'] for p in points.values()), 'example')}"
            console.print_table(title, ("length", *head, *(["gain"] if has_gain else [])), lines, num_keys=1)
            if one.ends:
                lines = [_line(f"{point['begin']:,} to {point['end'] - 1:,}", point) for point in one.by_position]
                console.print_table(f"by position in {one.ends[-1]:,} tokens", ("positions", *head), lines, num_keys=1)
        if gain:
            line = "gain: nats per token less than the same tokens take at the shortest length"
            console.print(line, style="dim", highlight=False)

    def as_data(self) -> dict[str, Any]:
        return {"perplexity": as_data(self.members)}

    def section(self, group: Group, number: int) -> dict[str, Any]:
        every = enumerate(group.members)
        members = [(index, one) for index, one in every if isinstance(one, PerplexityMember) and one.good]
        shortest = min((one.lengths[0] for _, one in members), default=0)
        figures = []
        for name, (heading, key, axis) in FIGURES.items():
            # gains from another length have another zero
            drawn = [(i, one) for i, one in members if name != "gain" or one.by_length[0]["length"] == shortest]
            if any(name in point for _, one in drawn for point in one.by_length):
                figures.append(on_page(f"{name}-{number}", heading, key, _by_length(drawn, name, axis)))
        if any(one.ends for _, one in members):
            key = "Nats per token by position in the longest text."
            figures.append(on_page(f"position-{number}", "By position", key, _by_position(members)))
        targets = next(row.settings["targets"] for one in group.members for row in one.rows)
        return {"about": TARGETS.get(targets, ""), "figures": figures}

    def csv_tables(self) -> dict[str, CsvTable]:
        """Return perplexity.csv, a line per run, model, method, targets and text, and length; and positions.csv, a line
        per range of positions in the longest text, for members that scored every token."""
        every = [one for group in self.groups for one in group.members]
        found = [one for one in every if isinstance(one, PerplexityMember) and one.rows]
        tables = {"perplexity.csv": CsvTable(PERPLEXITY_COLUMNS, [line for one in found for line in _lines(one)])}
        positions = [
            whose(one) | {"length": one.ends[-1], "n": len(one.by_bucket("nats"))} | point
            for one in found
            for point in one.by_position
        ]
        return tables | ({"positions.csv": CsvTable(POSITION_COLUMNS, positions)} if positions else {})


def _lines(one: PerplexityMember) -> Iterator[dict[str, Any]]:
    measured = {point["length"]: point for point in one.by_length}
    for length in one.lengths:
        point = dict(measured.get(length, {"length": length, "repeats": 0}))
        status = statuses(one.rows_at[length])
        yield whose(one) | {"n": point.pop("repeats"), "status": status} | point


def _line(where: str, point: Point) -> list[str]:
    """Return nats with their interval, perplexity, accuracy, and the gain where it is known."""
    cells = [where, ranged(point, "nats"), three_digits(float(np.exp(point["nats"]))), number(point["accuracy"])]
    return [*cells, ranged(point, "gain")] if "gain" in point else cells


def _by_length(members: Sequence[tuple[int, PerplexityMember]], what: str, axis: str) -> Figure:
    """Return accuracy, or gain, over length.

    Args:
        members: each with the index that gives its colour.
    """
    lines = []
    for index, one in members:
        texts = [[one.name, f"length {point['length']:,}", f"{what} {ranged(point, what)}"] for point in one.by_length]
        lines.append(Line.of(one.name, one.by_length, "length", what, index, texts, kind=what))
    ticks = sorted({length for _, one in members for length in one.lengths})
    return Figure("", "length (tokens)", axis, lines, log_x=True, ticks=ticks, num_members=len(members))


def _by_position(members: Sequence[tuple[int, PerplexityMember]]) -> Figure:
    """Return nats per token over the position in the longest text, for members that scored every token."""
    lines = []
    for index, one in members:
        texts = [
            [
                one.name,
                f"positions {point['begin']:,} to {point['end'] - 1:,} of {one.ends[-1]:,}",
                f"nats per token {ranged(point, 'nats')}",
                f"perplexity {three_digits(float(np.exp(point['nats'])))}",
                f"accuracy {point['accuracy']:.3f}",
            ]
            for point in one.by_position
        ]
        if one.ends:
            lines.append(Line.of(one.name, one.by_position, "end", "nats", index, texts, kind="position"))
    ticks = sorted({end for _, one in members for end in one.ends})
    x = "position in the text (tokens)"
    return Figure("", x, "nats per token", lines, log_x=True, ticks=ticks, num_members=len(members))
