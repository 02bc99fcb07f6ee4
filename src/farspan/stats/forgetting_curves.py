"""Forgetting curves from rows: accuracy of the copy and of the control by length, for each repeat.

    C(L), M(L)   copy and control accuracy, means over repeats      G = C - M   gap
    m = G / (1 - M)   memory index: 1 = perfect recall, 0 = guessing

Liu et al. 2024, arXiv 2410.04727, section 3.3.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from farspan.record import Row, by_key, latest
from farspan.stats.intervals import measured_mean
from farspan.text.names import title_of

MIN_SCORED = 32  # tokens; a length with fewer is too noisy for a threshold
CONTAMINATED_CONTROL = 0.8
CONTAMINATED_LEAST = 0.05  # accuracy above the others; with few correct guesses, smaller differences are noise
CONTAMINATED_MADS = 4.0  # 1.4826 of them are a standard deviation of normal noise


@dataclass(frozen=True)
class MeasuredCurve:
    """The measured accuracies of one model with one method and one protocol."""

    lengths: Int[np.ndarray, "lengths"]
    scored: Int[np.ndarray, "lengths"]  # tokens scored at each length
    copy: Float[np.ndarray, "repeats lengths"]  # NaN where a row failed
    control: Float[np.ndarray, "repeats lengths"]
    failures: dict[int, str]  # length -> status of the rows that failed there
    context: Int[np.ndarray, "lengths"]  # tokens of the whole context
    targets: np.ndarray  # str [repeats, lengths]: the target of each copy and control; empty if no row names it
    numbers: tuple[int, ...] = ()  # of the repeats, in the rows; default 0, 1, …

    @property
    def measured(self) -> np.ndarray:
        """A mask of the lengths that have at least one good row."""
        return np.isfinite(self.copy).any(0) & np.isfinite(self.control).any(0)

    @property
    def whole(self) -> Bool[np.ndarray, "repeats lengths"]:
        """A mask of the repeats and lengths that have both halves."""
        return np.isfinite(self.copy) & np.isfinite(self.control)

    def kept(self, which: np.ndarray) -> "MeasuredCurve":
        """Return the curve at the lengths of this mask."""
        by_length = {name: getattr(self, name)[which] for name in ("lengths", "scored", "context")}
        by_repeat = {name: getattr(self, name)[:, which] for name in ("copy", "control", "targets")}
        return replace(self, **by_length, **by_repeat)


@dataclass(frozen=True)
class Map:
    """Recall over length and depth of one model with one method and one protocol."""

    lengths: Int[np.ndarray, "lengths"]
    depths: Float[np.ndarray, "depths"]  # 0 the beginning of the text, 1 its end
    distance: Float[np.ndarray, "lengths depths"]  # tokens from a token to its copy; NaN where nothing was measured
    copy: Float[np.ndarray, "repeats lengths depths"]  # NaN where a row failed
    control: Float[np.ndarray, "repeats lengths depths"]
    targets: np.ndarray  # str [repeats, lengths]
    numbers: tuple[int, ...]  # of the repeats, in the rows

    @property
    def memory_index(self) -> Float[np.ndarray, "lengths depths"]:
        """The memory index over all repeats; NaN where nothing was measured."""
        return index_of(measured_mean(self.copy), measured_mean(self.control))


def curve(rows: Iterable[Row]) -> MeasuredCurve:
    """Return the curve of rows of one model, method and task setting, at depth 0 (the beginning of the texts).

    Raises:
        ValueError: no rows, or rows of several curves.
    """
    rows = [row for row in _of_one_setting(rows) if row.depth == 0]
    if not rows:
        raise ValueError("no row is at the beginning of a text (depth 0), so there is no curve")
    cells = _cells(rows)
    failures = {row.length: row.status for row in rows if row.status != "ok"}
    scored, context = (np.zeros(len(cells.lengths), int) for _ in range(2))
    columns = {length: column for column, length in enumerate(cells.lengths.tolist())}
    for row in rows:
        if row.status == "ok":
            column = columns[row.length]
            scored[column], context[column] = row.scores["scored"], row.scores["context"]
    halves = cells.copy[:, :, 0], cells.control[:, :, 0]
    return MeasuredCurve(cells.lengths, scored, *halves, failures, context, cells.targets, cells.numbers)


def memory_map(rows: Iterable[Row]) -> Map:
    """Return recall over length and depth, from rows of one model, method and task setting.

    Raises:
        ValueError: no rows, or rows of several curves.
    """
    return _cells(_of_one_setting(rows))


def curves(rows: Iterable[Row]) -> dict[tuple[str, str, str], MeasuredCurve]:
    """Return all curves among the rows, by (model, method, label)."""
    return {key: curve(group) for key, group in by_curve(rows).items() if any(row.depth == 0 for row in group)}


def by_curve(rows: Iterable[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """Return the rows of each curve, by (model, method, label of protocol and texts). Where a run holds several
    versions of the task with one label, the label names the version: their numbers are not comparable."""
    # rows read from a file share settings objects: each is compared once
    mine = (row for row in latest(rows) if row.task == "curve")
    alike = by_key(((row.model, row.method, row.version, id(row.settings)), row) for row in mine)
    settings: dict[str, list[dict[str, Any]]] = {}  # short label -> its settings under one model
    versions: dict[str, set[int]] = {}
    for row, *_ in alike.values():
        short = f"{row.model} {label(row.settings)}"
        known = settings.setdefault(short, [])
        if row.settings not in known:
            known.append(row.settings)
        versions.setdefault(short, set()).add(row.version)
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for part in alike.values():
        row = part[0]
        short = f"{row.model} {label(row.settings)}"
        what = label(row.settings, whole=len(settings[short]) > 1)
        if len(versions[short]) > 1:
            what += version_label(row.version)
        groups.setdefault((row.model, row.method, what), []).extend(part)
    return groups


def version_label(version: int) -> str:
    """Return the end of a curve's label where one run holds several versions of the task."""
    return f" (task version {version})"


def _of_one_setting(rows: Iterable[Row]) -> list[Row]:
    rows = latest(rows)
    if not rows:
        raise ValueError("there are no rows, so there is no curve")
    kinds: list[tuple[Any, ...]] = []
    for row in rows:
        kind = (row.model, row.method, row.task, row.version, row.settings)
        if kind not in kinds:
            kinds.append(kind)
    if len(kinds) > 1:
        named = ", ".join(f"{model} {method} {task} version {version}" for model, method, task, version, _ in kinds)
        raise ValueError(
            f"the rows belong to {len(kinds)} curves: got {named}, expected one. Separate them with by_curve."
        )
    return rows


def _cells(rows: Sequence[Row]) -> Map:
    # an unfinished run may hold a control whose own repeat is not measured yet
    numbers = {row.repeat for row in rows} | {row.scores["control_repeat"] for row in rows if row.status == "ok"}
    repeats = {number: place for place, number in enumerate(sorted(numbers))}
    lengths, depths = (
        {value: place for place, value in enumerate(sorted({getattr(row, name) for row in rows}))}
        for name in ("length", "depth")
    )
    shape = (len(repeats), len(lengths), len(depths))
    copy, control, distance = np.full(shape, np.nan), np.full(shape, np.nan), np.full(shape[1:], np.nan)
    targets = np.full(shape[:2], "", dtype="U16")
    for row in rows:
        if row.status == "ok":
            targets[repeats[row.repeat], lengths[row.length]] = row.scores.get("target", "")
            cell = lengths[row.length], depths[row.depth]
            copy[repeats[row.repeat], *cell] = row.scores["copy"]
            # the control is paired with the copy of the same target, from whichever repeat's memory it was scored
            control[repeats[row.scores["control_repeat"]], *cell] = row.scores["control"]
            distance[cell] = row.scores.get("distance", row.length + 1)  # missing in published files
    # A failed row leaves one target without its copy and another without its control. Neither is used, so that copy and
    # control have the same targets. A run that has just begun may have no target with both; then all are used.
    both = np.isfinite(copy) & np.isfinite(control)
    alone = ~both & both.any(0)
    copy[alone], control[alone] = np.nan, np.nan
    return Map(np.array(list(lengths)), np.array(list(depths)), distance, copy, control, targets, tuple(repeats))


def label(settings: dict[str, Any], *, whole: bool = False) -> str:
    """Return protocol and texts of a curve in a few words; only numbers with the same label are comparable. `whole`:
    with the texts' paths, if their last parts are the same."""
    named = str if whole else short_text
    protocol = settings["protocol"]
    if protocol == "probe":
        protocol += f" {settings['warmup']}+{settings['scored']}"
    text = f"{protocol}{' (authors)' if settings.get('compat') else ''}, {named(settings['target_text'])}"
    return text + (f" after {named(settings['prefix_text'])}" if settings.get("prefix_text") else "")


def perplexity_label(settings: dict[str, Any], *, whole: bool = False) -> str:
    """Return the targets and text of a perplexity in a few words; only numbers with the same label are comparable.
    `whole`: as of `label`."""
    text = settings["text"] if whole else short_text(settings["text"])
    if settings["targets"] == "all":
        return f"all tokens, {text}"
    return f"last {settings['target_tokens']} tokens{', fixed' if settings['targets'] == 'fixed' else ''}, {text}"


def short_text(text: str) -> str:
    """Return the last part of a path, or `a list of documents`; names such as builtin:tests and hub ids whole."""
    if (title := title_of(text)) != text:
        return title
    return text if ":" in text or text.count("/") == 1 else text.rstrip("/").rpartition("/")[2]


def gap(curve: MeasuredCurve) -> Float[np.ndarray, "lengths"]:
    """Return C - M."""
    return measured_mean(curve.copy) - measured_mean(curve.control)


def memory_index(curve: MeasuredCurve) -> Float[np.ndarray, "lengths"]:
    """Return the memory index of the mean accuracies; NaN where nothing was measured."""
    return index_of(measured_mean(curve.copy), measured_mean(curve.control))


def index_of(copy: Float[np.ndarray, "*cells"], control: Float[np.ndarray, "*cells"]) -> Float[np.ndarray, "*cells"]:
    """Return (C - M) / (1 - M); 0 where the control is perfect and leaves nothing to remember."""
    left = 1.0 - control
    return np.divide(copy - control, left, out=np.zeros_like(left), where=left != 0)


def index_by_repeat(curve: MeasuredCurve) -> Float[np.ndarray, "repeats lengths"]:
    """Return values whose mean over repeats is the memory index, with the spread of its jackknife pseudo-values (Tukey
    1958, Annals of Mathematical Statistics 29).

    The index is a ratio of means. Its value in one repeat is not defined where that repeat's control is perfect. Its
    spread is over repeats with both halves; a length without any has one value, as if of one repeat.
    """
    remembered, left = curve.copy - curve.control, 1.0 - curve.control
    count, index = np.isfinite(remembered).sum(0), memory_index(curve)
    rest, rest_left = np.nansum(remembered, 0) - remembered, np.nansum(left, 0) - left
    without = np.divide(rest, rest_left, out=np.where(np.isnan(rest), np.nan, 0.0), where=rest_left > 1e-9)
    deviations = (1 - count) * without
    found = deviations - measured_mean(deviations) + index
    found[0, count == 0] = index[count == 0]
    return found


def between(curve: MeasuredCurve, length: float) -> tuple[int, int]:
    """Return the two measured lengths around a length: below it, and at or above it. Beyond the last length, return the
    last two; up to the first, the first twice."""
    after = min(int(np.searchsorted(curve.lengths, length, side="left")), len(curve.lengths) - 1)
    return int(curve.lengths[max(after - 1, 0)]), int(curve.lengths[after])


def unpacked(hits: str, scored: int) -> np.ndarray:
    """Return hits per token as 0 and 1, in order, from their form in rows: bits, first token first, in hexadecimal."""
    return np.unpackbits(np.frombuffer(bytes.fromhex(hits), dtype=np.uint8), count=scored)


def is_judged(curve: MeasuredCurve) -> np.ndarray:
    """Return a mask of the lengths used for thresholds: those with enough scored tokens, or all if no length has."""
    enough = curve.scored >= MIN_SCORED
    return enough if enough.any() else np.ones_like(enough)


def shortest_judged(curve: MeasuredCurve) -> float:
    """Return the shortest length used for thresholds: a crossing before it is somewhere below it."""
    return float(curve.lengths[is_judged(curve)][0])


def repeats_at(curve: MeasuredCurve) -> np.ndarray:
    """Return the number of repeats with a value at each length, the weights of a fit."""
    return np.isfinite(curve.copy).sum(0).astype(float)


def whole_repeats(curve: MeasuredCurve) -> int:
    """Return the number of repeats that have both halves at some length."""
    return int(curve.whole.any(1).sum())


def repeats_near(curve: MeasuredCurve, length: float) -> int:
    """Return the number of repeats at the two measured lengths around a value, whichever is smaller; at least 2."""
    return max(2, int(repeats_at(curve)[np.isin(curve.lengths, between(curve, length))].min()))


def contaminated_windows(curve: MeasuredCurve) -> Bool[np.ndarray, "repeats lengths"]:
    """Return a mask of the windows that a model guesses nearly whole, or far better than the others: boilerplate, or
    memorised text."""
    found = np.zeros(curve.control.shape, bool)
    for column, values in enumerate(curve.control.T):
        middle = np.nanmedian(values)
        spread = np.nanmedian(np.abs(values - middle))
        far = max(CONTAMINATED_MADS * 1.4826 * spread, CONTAMINATED_LEAST)
        out_of_line = values - middle > far if len(values) > 2 and spread > 0 else False
        found[:, column] = (values > CONTAMINATED_CONTROL) | out_of_line
    return found


def without_windows(curve: MeasuredCurve, windows: Bool[np.ndarray, "repeats lengths"]) -> MeasuredCurve:
    copy, control = (np.where(windows, np.nan, half) for half in (curve.copy, curve.control))
    clean = replace(curve, copy=copy, control=control)
    return clean.kept(clean.measured)
