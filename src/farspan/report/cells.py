"""The quality of every task of a run by model, method and length: means with intervals, paired differences, and costs.

The first model under the first method is the baseline. A cell is one model under one method at one task and length.
It wins or loses where the mean difference from the baseline over the same examples is not 0 (p of the paired t test
below 0.05 after Holm's correction over all cells of the task) and is more than rounding; otherwise no
difference is shown. Examples of models with another tokenizer consist of other tokens: such cells have no verdict.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from scipy.stats import binomtest

from farspan.record import ABSENT, NOT_FAILED, Row, by_key
from farspan.report.header import same_at_depths
from farspan.report.runs import Group, Member, Source, cost_rows, grouped
from farspan.stats import LEVEL, bands, holm, student_mean

COSTS = ("prefill_rate", "decode_rate", "prefill_seconds", "weight_bytes", "context_bytes", "activation_bytes")
SERVER = ("requests", "prompt_tokens", "cached_share")
NOT_RECORDED = ("run", "name", "cost_failed", "cost_reason")  # fields that only tables need
ROUNDING = 5e-4  # difference of scores (nats, shares): reading a model in two ways gives less, but in all examples
NOT_SHOWN = "not shown"  # the verdict where no difference from the baseline is
UNCORRECTED = "intervals are not corrected for the number of comparisons: p can be above 0.05 beside one without 0"
Interval = tuple[float | None, float | None]
Example = TypeVar("Example", bound=Hashable)


@dataclass(frozen=True)
class Cell:
    """One model under one method at one task and length. Bytes and rates are medians; None where not measured."""

    model: str
    method: str
    task: str  # as it is spelled
    length: int
    unit: str  # of the length
    quality: str  # what `value` is
    exp: bool  # of the mean over examples
    n: int = 0  # examples: texts of a forgetting curve, else texts and depths
    value: float | None = None  # mean over examples
    low: float | None = None  # its 95 % interval
    high: float | None = None
    pairs: int = 0  # examples shared with the baseline
    difference: float | None = None  # from the baseline, in the unit of the score (nats for perplexity)
    difference_low: float | None = None  # its 95 % interval
    difference_high: float | None = None
    p: float | None = None
    p_holm: float | None = None  # corrected over the task's cells
    verdict: str = ""  # win, loss, or not shown; "" of the baseline and where nothing is paired
    failed: str = ""  # status of the rows without a result
    reason: str = ""
    prefill_rate: float | None = None  # tokens per second
    decode_rate: float | None = None
    prefill_seconds: float | None = None  # to the first new token
    weight_bytes: float | None = None
    context_bytes: float | None = None
    activation_bytes: float | None = None
    run: str = ""
    name: str = ""  # of model, method and run: distinguishes it from the others at this task and length
    details: dict[str, float] = field(default_factory=dict)  # means of other scores
    context: float | None = None  # tokens of the whole prompt, mean
    tokens_per_second: float | None = None  # of the task itself
    kept: float | None = None  # tokens held, mean
    peak_bytes: int = 0
    requests: float | None = None  # to the server, mean per row
    prompt_tokens: float | None = None  # of these requests, mean per row
    cached_share: float | None = None  # share of the prompt tokens taken from the server's cache
    statuses: dict[str, int] = field(default_factory=dict)  # number of rows without a result, by status
    cost_failed: str = ""  # status of the rows of cost, if none was measured
    cost_reason: str = ""

    @property
    def whose(self) -> tuple[str, str, str]:
        return self.run, self.model, self.method

    @property
    def has_failed(self) -> bool:
        """Whether rows failed: those without key tokens, or without time, did not."""
        return self.failed not in ("", *NOT_FAILED)

    @property
    def memory(self) -> float | None:
        """Bytes that reading takes above the model."""
        if self.context_bytes is None or self.activation_bytes is None:
            return None
        return self.context_bytes + self.activation_bytes


def cells(rows: Iterable[Row], header: Mapping[str, Any]) -> list[Cell]:
    """Return all cells of one run, task by task, in the order in which they were requested.

    Args:
        header: run.json of the run, of any version.

    Raises:
        ValueError: a row of status "ok" without the score of its task.
    """
    return [cell for group in grouped([Source.of("", "", header, rows)]) for cell in cells_of(group)]


def cells_of(group: Group) -> list[Cell]:
    """Return the cells of one task: for each member, all lengths that any member was measured at, ascending.

    Raises:
        ValueError: a row of status "ok" without the score of its task.
    """
    lengths = sorted({row.length for one in group.members for row in one.rows})
    costs = {one.source.name: cost_rows(one.source) for one in group.members}
    first = group.members[0]
    depths = group.entry.get("depths")
    found = []
    for member in group.members:
        for length in lengths:
            rows, base = (
                [row for row in one.rows_at.get(length, []) if depths is None or row.depth in depths]
                for one in (member, first)
            )
            numbers = _numbers(rows, group.entry)
            if member is not first:
                numbers |= _difference(rows, base, group.entry)
            if group.entry["unit"] == "tokens":
                numbers |= _costs(costs[member.source.name].get((member.model, member.method, length), []))
            found.append(_cell(member, group, length, numbers))
    return judged(found, group)


def judged(found: Sequence[Cell], group: Group) -> list[Cell]:
    """Return cells of one task with p corrected over all of them, and their verdicts."""
    corrected = holm([cell.p for cell in found])
    better = group.entry["quality"]["higher_is_better"]
    return [
        replace(cell, p_holm=p, verdict=_verdict(cell, p, better)) for cell, p in zip(found, corrected, strict=True)
    ]


def _cell(member: Member, group: Group, length: int, numbers: Mapping[str, Any]) -> Cell:
    quality, unit = group.entry["quality"], group.entry["unit"]
    about = (member.model, member.method, group.spec, length, unit, quality["name"], quality["exp"])
    return Cell(*about, run=member.source.name, name=member.name, **numbers)


def _numbers(rows: Sequence[Row], entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a cell that its own rows give."""
    if not rows:
        return {}
    quality = entry["quality"]
    good = [row for row in rows if row.status == "ok"]
    bad = [row for row in rows if row.status != "ok"]
    failed = [row for row in bad if row.status not in ("refused", *ABSENT) or not good]
    failed.sort(key=lambda row: row.status in NOT_FAILED)  # failures first
    context, seconds = _mean(_number(row, "context") for row in good), sum(row.seconds for row in good)
    judged = paired_halves(rows)
    whole = set(whole_examples([((row.example, row.repeat), row.depth) for row in judged], entry))
    judged = [row for row in judged if ((row.example, row.repeat), row.depth) in whole]
    complete = judged + [row for row in rows if row.status in ABSENT]
    details = {name: _mean(_number(row, name) for row in complete) for name in entry.get("details", ())}
    found: dict[str, Any] = {
        "failed": failed[0].status if failed else "",
        "reason": failed[0].reason if failed else "",
        "details": {name: value for name, value in details.items() if value is not None},
        "context": context,
        "tokens_per_second": context * len(good) / seconds if context and seconds else None,
        "kept": _mean(row.num_kept for row in good),
        "peak_bytes": max(row.peak_bytes for row in rows),
        **_server(good),
        "statuses": dict(sorted(Counter(row.status for row in bad).items())),
    }
    if good:
        values = independent((((row.example, row.repeat), score_of(row, quality["score"])) for row in judged), entry)
        found["n"] = len(values)
        ends = interval_of(values, quality)
        for name, end in zip(("value", "low", "high"), (values.mean(), *ends), strict=True):
            found[name] = None if end is None else _finite(np.exp(end) if quality["exp"] else end)
    return found


def _server(rows: Sequence[Row]) -> dict[str, float | None]:
    """Return the fields that count the work of a server."""
    requests, sent, cached = (
        _mean(row.reading.get(name) for row in rows) for name in ("requests", "prompt_tokens", "cached_tokens")
    )
    return dict(zip(SERVER, (requests, sent, cached / sent if sent and cached is not None else None), strict=True))


def score_of(row: Row, score: str) -> float:
    """Return the score of a row that measures its quality.

    Raises:
        ValueError: the row has none.
    """
    value = _number(row, score)
    if value is None:
        raise ValueError(
            f"the row of {row.model} {row.method}, length {row.length:,}, repeat {row.repeat} has no score "
            f"{score!r}: delete it from rows*.jsonl to measure it again"
        )
    return value


def in_nats(quality: str) -> bool:
    """Return whether a quality is a difference in nats, not a share, by its name: runs record no unit of it."""
    return quality.startswith("nats ")


def in_seconds(quality: str) -> bool:
    """Return whether a quality is a time, by its name. Times also depend on what else the machine does."""
    return quality.startswith("seconds ")


def least_share(quality: Mapping[str, Any]) -> float:
    """Return the least value of a quality that is a share, or a difference of two."""
    return -1.0 if " - " in quality["score"] else 0.0


def _number(row: Row, name: str) -> float | None:
    """Return a score of a row, or its mean if it is a list by layer and head; None if it is no number.

    Args:
        name: its key, a path of keys separated by dots, or two of these with " - " between them: their difference.
    """
    if " - " in name:
        first, second = (_number(row, part) for part in name.split(" - "))
        return None if first is None or second is None else first - second
    value: Any = row.scores
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, list):
        try:
            return float(np.mean(np.array(value, float)))
        except (TypeError, ValueError):
            return None
    return None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def interval_of(values: np.ndarray, quality: Mapping[str, Any]) -> Interval:
    """Return the 95 % interval of a mean over examples: Wilson's where each is right or wrong, else Student's, cut to
    the values possible. None under two examples, and where other scores than right or wrong are all the same: their
    spread is unknown."""
    least, most = limits(values, quality)
    if most == 1 and not quality.get("graded", False) and np.isin(values, (0.0, 1.0)).all() and len(values) > 1:
        found = binomtest(int(values.sum()), len(values)).proportion_ci(method="wilson")
        return float(found.low), float(found.high)
    low, high = (float(side[0]) for side in bands(values[:, None], least, most))
    return (None, None) if np.isnan(low) else (low, high)


def limits(values: np.ndarray, quality: Mapping[str, Any]) -> tuple[float, float]:
    """Return the least and the largest value possible of a quality with these scores: 0 and 1 for shares, -1 and 1 for
    a difference of two, 0 and infinity for times and for the nats of a perplexity. Others have no limits: gains in
    nats, and numbers that are no shares, as scores outside of the limits of shares show."""
    if quality["exp"] or in_seconds(quality["name"]):
        return 0.0, np.inf
    if not in_nats(quality["name"]):
        least = least_share(quality)
        if ((values >= least) & (values <= 1)).all():
            return least, 1.0
    return -np.inf, np.inf


def paired_halves(rows: Iterable[Row]) -> list[Row]:
    """Return the good rows of one length. Those of a forgetting curve have the control of their own target, which was
    scored in the row of another repeat; targets that lack a half are left out, as in `farspan.stats.curve`, unless all
    do."""
    good = [row for row in rows if row.status == "ok"]
    of_curve = [row for row in good if "control_repeat" in row.scores]
    controls = {(row.scores["control_repeat"], row.depth): row.scores["control"] for row in of_curve}
    both = [row for row in good if (row.repeat, row.depth) in controls]
    return [replace(row, scores=row.scores | {"control": controls[row.repeat, row.depth]}) for row in both] or good


def by_example(rows: Iterable[Row], score: str) -> dict[tuple[str, float], float]:
    """Return a score of the good rows of one length by example and depth, the key by which differences are paired."""
    return {(row.example, row.depth): score_of(row, score) for row in paired_halves(rows)}


def whole_examples(places: Sequence[tuple[Example, float]], entry: Mapping[str, Any]) -> list[tuple[Example, float]]:
    """Return the examples and depths of those examples that have a score at every depth: only their means over depths
    can be compared, and automatic lengths measure some repeats at depth 0 alone. Return all if no example has all
    depths, or if a task asks for something else at each.

    Args:
        places: example and depth of each score of one length.
    """
    at = {one: set(depths) for one, depths in by_key(places if same_at_depths(entry) else ()).items()}
    every = set[float]().union(*at.values())
    return [place for place in places if at and at[place[0]] == every] or list(places)


def independent(scores: Iterable[tuple[Hashable, float]], entry: Mapping[str, Any]) -> np.ndarray:
    """Return the scores that intervals and tests take as independent: the mean over the depths of an example if these
    have the same answer, such as one number, or slices of one text; else all.

    Args:
        scores: each with its example.
        entry: of `settings.tasks`.
    """
    if not same_at_depths(entry):
        return np.array([score for _, score in scores])
    return np.array([np.mean(some) for some in by_key(scores).values()])


def _difference(mine: Sequence[Row], base: Sequence[Row], entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mean difference from the baseline over shared examples, with its interval and p."""
    good, theirs = (by_example(rows, entry["quality"]["score"]) for rows in (mine, base))
    if not good or not base:
        return {}
    both = whole_examples([key for key in good if key in theirs], entry)
    shared = independent(((key[0], good[key] - theirs[key]) for key in both), entry)
    least, most = limits(np.array([*good.values(), *theirs.values()]), entry["quality"])
    difference, low, high, p = map(_finite, student_mean(shared, most - least))
    numbers = {"difference": difference, "difference_low": low, "difference_high": high, "p": p}
    return {"pairs": len(shared)} | numbers


def _costs(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the medians of what was measured, or why nothing was."""
    measured = [row.scores for row in rows if row.status == "ok"]
    known = {name: [scores[name] for scores in measured if scores.get(name) is not None] for name in COSTS}
    found: dict[str, Any] = {name: float(np.median(values)) if values else None for name, values in known.items()}
    return found if measured or not rows else found | {"cost_failed": rows[0].status, "cost_reason": rows[0].reason}


def _verdict(cell: Cell, corrected: float | None, higher_is_better: bool | None) -> str:
    if corrected is None or cell.difference is None or higher_is_better is None or in_seconds(cell.quality):
        return ""
    if corrected >= LEVEL or abs(cell.difference) < ROUNDING:
        return NOT_SHOWN
    return "win" if (cell.difference > 0) == higher_is_better else "loss"


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def by_task(found: Sequence[Cell]) -> list[list[Cell]]:
    """Return the cells of each task together."""
    return list(by_key((cell.task, cell) for cell in found).values())


def by_member(found: Sequence[Cell]) -> list[list[Cell]]:
    """Return the cells of each model, method and run together."""
    return list(by_key((cell.whose, cell) for cell in found).values())


def failures(found: Sequence[Cell]) -> list[str]:
    """Return a line for each task, or cost, and reason with the models, methods and lengths that failed for it."""
    reasons: dict[tuple[str, str, str], dict[str, list[int]]] = {}
    for cell in found:
        key = cell.task, cell.failed, cell.reason
        if not cell.has_failed:
            key = "cost", cell.cost_failed, cell.cost_reason
        if key[1]:
            lengths = reasons.setdefault(key, {}).setdefault(f"{cell.model} {cell.method}", [])
            if cell.length not in lengths:  # tasks share their costs
                lengths.append(cell.length)
    lines = []
    for (task, status, reason), whose in reasons.items():
        at = by_key((", ".join(f"{length:,}" for length in lengths), name) for name, lengths in whose.items())
        where = "; ".join(f"{', '.join(names)} at {lengths}" for lengths, names in at.items())
        lines.append(f"{task}: {where}: {status}: {reason}")
    return lines


def at_longest_shared(group: Sequence[Cell]) -> list[Cell]:
    """Return the cells of the longest length at which the most members have a value and a cost."""
    known = [cell for cell in group if cell.value is not None and cell.prefill_seconds is not None]
    counts = Counter(cell.length for cell in known)
    longest = max(counts, key=lambda length: (counts[length], length), default=0)
    return [cell for cell in known if cell.length == longest]


def as_data(found: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return cells ready for JSON, rounded, those without rows left out."""
    names = ("model", "method", "task", "length", "value", "low", "high", "details", "context", "tokens_per_second")
    return [
        _rounded({name: getattr(one, name) for name in (*names, "kept", "peak_bytes", *SERVER)})
        | {"num_examples": one.n, "failed": one.statuses}
        for one in found
        if one.n or one.statuses
    ]


def as_plain(cell: Cell) -> dict[str, Any]:
    """Return a cell's fields, those that only tables need left out."""
    return {name: value for name, value in asdict(cell).items() if name not in NOT_RECORDED}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    return {key: _rounded(one) for key, one in value.items()} if isinstance(value, dict) else value
