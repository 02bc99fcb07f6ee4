"""What changed between a baseline run and a run of the same measurements on another model: memory, quality and cost.

Every number has a tolerance. A change is

    equal       two one-sided tests (Schuirmann 1987) show that it is within the tolerance, p < 0.05: its
                90 % interval is within the tolerance
    worse       else, and beyond chance: p < 0.05, two-sided, after Holm's correction over all numbers
    better      likewise, to the other side
    undecided   else

Memory and quality are paired: differences of the same texts. Whether answers are `equal` is tested by the numbers of
them that changed where these are right or wrong, or graded and all unchanged: while few change, their spread alone
would show too much. Times also depend on what else the machine does, so a cost is `worse` or `better` only if its whole
95 % interval is beyond the tolerance. Costs are those that `farspan compare` measures apart from the tasks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import exp, floor, log, log1p
from typing import Any, Literal, TypeGuard

import numpy as np
from scipy.special import ndtri, stdtrit

from farspan.record import Row
from farspan.report.cells import by_example, in_nats, independent, limits, whole_examples
from farspan.report.curves import CurveMember, spoken
from farspan.report.header import COST
from farspan.report.kinds import MEMBERS
from farspan.report.notices import apart, machines_apart, same_weights
from farspan.report.runs import Group, Member, Source, cost_rows, grouped
from farspan.stats import (
    LEAST_PAIRS,
    LEVEL,
    Difference,
    differences,
    holm,
    mean_error,
    paired_tost,
    tost,
    two_sided,
    welch_error,
    within,
)

Verdict = Literal["equal", "better", "worse", "undecided"]
Kind = Literal["memory", "perplexity", "score", "cost"]

MEMORY = ("half_life", "reach", "span")
COSTS = {  # score: name, whether higher is better, size of the unit
    "prefill_seconds": ("prefill s", False, 1),
    "decode_rate": ("tokens/s out", True, 1),
    "context_bytes": ("context MiB", False, 2**20),
}
TOLERANCES: dict[Kind, float] = {"memory": 0.05, "perplexity": 0.02, "score": 0.05, "cost": 0.2}
NUMERICS = ("dtype", "attention")  # of a model; they change costs and, by rounding, all numbers


@dataclass(frozen=True)
class Estimate:
    """A difference with its 95 % interval and its tests."""

    value: float
    low: float | None = None  # None: unbounded, or unknown
    high: float | None = None
    p: float | None = None  # two-sided, against 0
    tost: float | None = None  # of two one-sided tests against ± margin


@dataclass(frozen=True)
class Change:
    """A number of a model compared with the baseline's. The difference and its margin are in tokens (memory), shares
    (scores), or, for perplexity and cost, the logarithm of the ratio."""

    kind: Kind
    name: str
    method: str
    task: str  # as it is spelled; of a cost ""
    length: int | None  # None: of the whole curve, or of all lengths
    baseline: float
    now: float
    difference: Estimate
    margin: float
    higher_is_better: bool
    pairs: int  # texts; for a cost, repeats, or tasks and lengths
    p_holm: float | None = None
    verdict: Verdict = "undecided"
    reason: str = ""  # why it is undecided, where the numbers do not show it
    censored: tuple[str, ...] = ()  # of "baseline" and "model": the memory length exceeds the lengths measured
    below: tuple[float, float] = (0.0, 0.0)  # tokens; the memory lengths are smaller than these; 0: measured


@dataclass(frozen=True)
class Comparison:
    """All changes between two runs."""

    changes: list[Change]
    remarks: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)  # numbers of the baseline that have none to compare with
    only_costs: bool = False  # the baseline measured nothing else

    @property
    def verdict(self) -> Verdict:
        """`worse` if any change is; else `undecided` if one of memory or quality is or has nothing to compare with,
        since costs are seldom decided; else `better` if any is; else `equal`. If only costs were measured, all of them
        count."""
        counted = [one for one in self.changes if self.only_costs or one.kind != "cost" or one.verdict == "worse"]
        found = {one.verdict for one in counted}
        found |= {"undecided"} if self.lacking or not found else set()
        order: tuple[Verdict, ...] = ("worse", "undecided", "better", "equal")
        return next(one for one in order if one in found)

    def as_data(self) -> dict[str, Any]:
        """Return verdict, changes and remarks, ready for JSON."""
        changes = [asdict(one) for one in self.changes]
        return {"verdict": self.verdict, "changes": changes, "remarks": [*self.lacking, *self.remarks]}


def compare(baseline: Source, now: Source, tolerances: Mapping[Kind, float] = TOLERANCES) -> Comparison:
    """Return the changes between two runs with the same settings, of one model each.

    Args:
        tolerances: for memory, perplexity and cost, a share of the baseline's value; for scores, a difference: 0.05 is
            five points of accuracy, or 0.05 nats.
    """
    found: list[Change] = []
    remarks, lacking = same_weights((baseline, now)), list[str]()
    theirs = {(group.spec, one.method): one for group in grouped([now], MEMBERS) for one in group.members if one.rows}
    groups = grouped([baseline], MEMBERS)
    only_costs = all(group.task == COST for group in groups)
    for group in groups:
        for one in (one for one in group.members if one.rows):
            if (other := theirs.pop((group.spec, one.method), None)) is None:
                lacking.append(f"{group.spec} {one.method} is not compared: the model has no rows")
            elif group.task == COST:  # compared below
                continue
            elif _is_curve(one) and _is_curve(other):
                found += _memory(one, other, group, tolerances["memory"], remarks, lacking)
            else:
                found += _quality(one, other, group, tolerances, lacking)
    lacking += [f"{spec} {how} is not compared: the baseline has no rows" for spec, how in theirs]
    about: list[dict[str, Any]] = [next(iter(source.header["models"].values()), {}) for source in (baseline, now)]
    different = machines_apart((baseline, now)) + apart(about, NUMERICS)
    if not cost_rows(baseline):
        remarks.append("cost is not compared: the baseline has none. `farspan compare` measures it")
    elif not cost_rows(now):
        remarks.append("cost is not compared: that of the model was not measured")
    elif different:
        remarks.append(f"cost is not compared: the runs or their sessions differ in {', '.join(different)}")
    else:
        found += _costs(baseline, now, log1p(tolerances["cost"]), lacking if only_costs else remarks)
    for name in NUMERICS:
        a, b = (one.get(name) for one in about)
        if a != b:
            remarks.append(f"{name}: the baseline has {a}, the model {b}. Give --{name} {a} to measure alike")
    corrected = holm([None if one.kind == "cost" else one.difference.p for one in found])
    return Comparison(
        [replace(one, p_holm=p, verdict=_verdict(one, p)) for one, p in zip(found, corrected, strict=True)],
        remarks,
        lacking,
        only_costs,
    )


def _is_curve(member: Member) -> TypeGuard[CurveMember]:
    """Return whether memory lengths can be compared: recall at one length has none."""
    return isinstance(member, CurveMember) and len({row.length for row in member.good if row.depth == 0}) > 1


def _memory(
    a: CurveMember, b: CurveMember, group: Group, tolerance: float, remarks: list[str], lacking: list[str]
) -> Iterator[Change]:
    """Yield the changes of the memory lengths; add to `remarks` and `lacking` what cannot be compared."""
    try:
        found = differences(a.curve, b.curve, names=("baseline", "model"))
    except ValueError as error:
        lacking.append(f"{group.spec} {a.method} is not compared: {error}")
        return
    alone = set(a.measured.lengths.tolist()) ^ set(b.measured.lengths.tolist())
    if alone and a.source.header["settings"]["lengths"] != "auto":  # which each curve chooses for itself
        at = ", ".join(f"{length:,}" for length in sorted(alone))
        lacking.append(f"{group.spec} {a.method} at {at} tokens is not compared: only one model has results there")
    for one in found:
        if one.name not in MEMORY:
            continue
        if len(one.censored) == 2 or not any(one.values):
            where = "beyond the lengths measured, of both models: the span compares them"
            if not one.censored:
                where = f"{'below the lengths measured, of' if any(one.below) else '0 in'} both models: not compared"
            remarks.append(f"{a.method}: {spoken(one.name)} is {where}")
            continue
        margin, count = tolerance * abs(one.values[0]), round(one.freedom) + 1
        is_bounded = one.low is not None and one.high is not None and not one.censored and not any(one.below)
        equivalence = None
        if is_bounded and margin > 0 and count >= LEAST_PAIRS:
            equivalence = tost(one.value, one.error, one.freedom, margin, count)
        yield Change(
            kind="memory",
            name=spoken(one.name),
            method=a.method,
            task=group.spec,
            length=None,
            baseline=one.values[0],
            now=one.values[1],
            difference=Estimate(one.value, one.low, one.high, one.p, equivalence),
            margin=margin,
            higher_is_better=True,
            pairs=one.pairs,
            reason=_beyond(one),
            censored=one.censored,
            below=one.below,
        )


def _beyond(one: Difference) -> str:
    """Return which memory length is outside the lengths measured, or may be; "" if none."""
    for of, below in zip(one.curves, one.below, strict=True):
        if below:
            return f"in the {of} it is below {below:,.0f}, the shortest length judged, so the change is only a bound"
    if one.censored:
        return f"in the {one.censored[0]} it exceeds the lengths measured, so the change is only a bound"
    if one.low is None or one.high is None:
        return "in part of the resamples it is beyond the lengths measured, so its interval is unbounded"
    return ""


def _quality(
    a: Member, b: Member, group: Group, tolerances: Mapping[Kind, float], lacking: list[str]
) -> Iterator[Change]:
    """Yield the change of the quality at each length, over the examples that both have; name in `lacking` the lengths
    where they share none."""
    quality = group.entry["quality"]
    if quality["higher_is_better"] is None:
        return
    kind: Kind = "perplexity" if quality["exp"] else "score"
    margin = log1p(tolerances[kind]) if quality["exp"] else tolerances[kind]
    for length in sorted({*a.lengths, *b.lengths}):
        before, after = (by_example(one.rows_at.get(length, ()), quality["score"]) for one in (a, b))
        if not (shared := whole_examples([key for key in before if key in after], group.entry)):
            if before or after:
                what = f"{group.spec} {a.method} at {length:,} {group.entry['unit']}"
                lacking.append(f"{what} is not compared: no example has a result of both models")
            continue
        first, second = (
            independent(((key[0], values[key]) for key in shared), group.entry) for values in (before, after)
        )
        means = [exp(one.mean()) if quality["exp"] else float(one.mean()) for one in (first, second)]
        changed = second - first
        # scores of whole answers, of which few may change much; those of curves and nats are means over many tokens
        is_answer = not (quality["exp"] or in_nats(quality["name"]) or isinstance(a, CurveMember))
        least, most = limits(np.concatenate([first, second]), quality)
        found = _paired(changed, margin, is_answer, most - least)
        is_open = is_answer and not changed.any() and found.tost is not None and found.tost >= LEVEL
        yield Change(
            kind=kind,
            name=quality["name"],
            method=a.method,
            task=group.spec,
            length=length,
            baseline=means[0],
            now=means[1],
            difference=found,
            margin=margin,
            higher_is_better=bool(quality["higher_is_better"]),
            pairs=len(first),
            reason=_unchanged(len(changed), margin) if is_open else "",
        )


def _unchanged(count: int, margin: float) -> str:
    """Return why `equal` is not shown although the scores of all answers are the same."""
    needed = floor(float(ndtri(LEVEL)) ** 2 * (1 - margin) / margin) + 1  # for which `paired_tost` is below LEVEL
    points = f"{100 * margin:g} points"
    return (
        f"the scores of all {count} answers are unchanged. `equal` within {points} then needs {needed:,}: measure the "
        "baseline with more --repeats, or give a larger --tolerance"
    )


def _paired(values: np.ndarray, margin: float, is_answer: bool, most: float) -> Estimate:
    """Return the mean of paired differences; it is tested only with LEAST_PAIRS values or more.

    Args:
        is_answer: they are of scores of answers, of which few may change: see `paired_tost`.
        most: the largest difference possible.
    """
    if len(values) < LEAST_PAIRS:
        return Estimate(float(values.mean()))
    value, error, freedom = mean_error(values)
    is_whole = is_answer and np.isin(values, (-1.0, 0.0, 1.0)).all()
    equal = paired_tost(values, margin) if is_whole else tost(value, error, freedom, margin, len(values))
    return _tested(value, error, freedom, len(values), equal, most)


def _tested(value: float, error: float, freedom: float, count: int, equal: float, most: float = np.inf) -> Estimate:
    """Return a difference with its interval, cut to ± `most`, and its tests. `equal`: p of the equivalence."""
    half = float(stdtrit(freedom, 1 - LEVEL / 2)) * error
    low, high = within(value - half, value + half, most)
    return Estimate(value, low, high, two_sided(value, error, freedom, count), equal)


def _costs(baseline: Source, now: Source, margin: float, remarks: list[str]) -> Iterator[Change]:
    """Yield the changes of the costs; note in `remarks` those of which one of the runs has too few measurements."""
    before, after = ({key[1:]: rows for key, rows in cost_rows(one).items()} for one in (baseline, now))
    for method, length in before:
        mine, lacking = after.get((method, length), []), dict[str, list[str]]()
        for score, (name, higher, unit) in COSTS.items():
            first, second = (_logs(rows, score) for rows in (before[method, length], mine))
            if (count := min(len(first), len(second))) < LEAST_PAIRS:
                lacking.setdefault("baseline" if len(first) < LEAST_PAIRS else "model", []).append(name)
                continue
            value, error, freedom = welch_error(first, second)
            found = _tested(value, error, freedom, count, tost(value, error, freedom, margin, count))
            # without the residue of the logarithm
            means = [round(exp(one.mean()) / unit, 6) for one in (first, second)]
            yield Change("cost", name, method, "", length, means[0], means[1], found, margin, higher, count)
        for whose, names in lacking.items():
            rows = mine if whose == "model" else before[method, length]
            why = next((f": {row.status}: {row.reason}" for row in rows if row.status != "ok"), "")
            few = f"the {whose} has fewer than {LEAST_PAIRS} measurements{why}"
            remarks.append(f"{method} {', '.join(names)} at {length:,} tokens: not compared, {few}")


def _logs(rows: Sequence[Row], score: str) -> np.ndarray:
    return np.array([log(row.scores[score]) for row in rows if row.status == "ok" and row.scores.get(score)])


def _verdict(one: Change, p: float | None) -> Verdict:
    found = one.difference
    if found.tost is not None and found.tost < LEVEL:
        return "equal"
    is_sure = p is not None and p < LEVEL
    if one.kind == "cost" and found.low is not None and found.high is not None:
        is_sure = found.low > one.margin or found.high < -one.margin
        if found.low == found.high and not is_sure:  # bytes, which do not vary
            return "equal"
    if not is_sure:
        return "undecided"
    return "better" if (found.value > 0) == one.higher_is_better else "worse"
