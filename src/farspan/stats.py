"""From rows to memory lengths with intervals.

    C(L), M(L)   copy and control accuracy, means over repeats      G = C - M   gap
    m = G / (1 - M)   memory index: 1 = perfect recall, 0 = what guessing gives

Definitions of Liu et al. 2024, arXiv 2410.04727, section 3.3, as their Table 3 was made (`paper_fine`,
`paper_coarse`: the largest grid length that passes), and ours: a curve that cannot rise (isotonic regression over
the lengths) and the crossing interpolated between its two points. The largest of many noisy lengths that passes grows
with the number of lengths measured; a crossing does not. `fine` alone leaves out the lengths before the first that
passes: a copy needs some tokens to find its place in the text. For the other thresholds this would take the first
lucky length of a model without memory for the beginning of its memory.

The 95 % interval of a crossing is made in three steps (coverage: benchmarks/interval_coverage.md):

1. Chance: value ± t · s. t is Student's quantile for the repeats the value depends on, s the standard deviation of the
   value over curves drawn around the measured one by a multiplier bootstrap (after Wu 1986, Annals of Statistics 14):

       C*(L) = C(L) + Σ_r g_r (c_r(L) - C(L)) / sqrt(n (n - 1))      M*(L) likewise, g_r ~ N(0, 1)

   One g_r for all scores of target r: both halves, all lengths. The n repeats at each length give C* the spread that
   the mean of n has, however few they are, and no length loses all its repeats.
2. Interpolation: both ends move outwards to the next measured length. Between two measured lengths only the order is
   known, so the crossing is interval-censored there.
3. Existence: the lower end is 0 unless a joint test over all lengths rejects, at 5 %, that the gap exceeds 0 nowhere
   (for `fine`: the copy 0.99; `established`). Where the crossing may lie beyond the last length, no spread of crossings
   can be drawn; the lower end is then at most the length to which that test, at 10 %, shows the threshold exceeded.

For texts that none of the repeats is like, the outer ends of `fine`, `coarse` and `reach` move further in step 1
(`_unseen_texts`). The interval of an area is step 1 alone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import isotonic_regression
from scipy.stats import t as student

from farspan.record import Row, latest

FINE = 0.99  # copy accuracy
COARSE = 0.01  # gap
HALF_LIFE = 0.5  # memory index
REACH = 0.05  # memory index
UNSURE = "its interval begins at 0: a joint test does not show with 95 % confidence that {} at any length"
MIN_SCORED = 32  # tokens; a length with fewer says too little to judge a threshold by
CROSSINGS = ("fine", "coarse", "half_life", "reach")
LEVELS = {"fine": FINE, "coarse": COARSE, "half_life": HALF_LIFE, "reach": REACH}
BOOTSTRAPS = 2000
DRAWN = 40_000_000  # random numbers of one bootstrap, at most (320 MB)
JOINT_LEVEL = 0.05  # one-sided, of the test that there is any memory
CENSORED_LEVEL = 0.1  # likewise, of the lower end of what may lie beyond the last length
JOINT_SAMPLES = 4000  # simulated to calibrate that test
JOINT_REPEATS = 40  # more are calibrated as if there were so many, which is slightly conservative
CONTAMINATED_CONTROL = 0.8
CONTAMINATED_LEAST = 0.05  # above the others; where nothing can be guessed, less is noise
CONTAMINATED_MADS = 4.0  # each 1.4826 of them a standard deviation of normal noise


@dataclass(frozen=True)
class Curve:
    """The measured accuracies of one model under one method and one protocol."""

    lengths: Int[np.ndarray, "lengths"]
    scored: Int[np.ndarray, "lengths"]  # tokens scored at each length
    copy: Float[np.ndarray, "repeats lengths"]  # NaN where a row failed
    control: Float[np.ndarray, "repeats lengths"]
    failures: dict[int, str]  # length -> status of the rows that failed there
    context: Int[np.ndarray, "lengths"]  # tokens of the whole context
    targets: np.ndarray  # str [repeats, lengths]: whose copy and control these are; empty where no row says

    @property
    def measured(self) -> np.ndarray:
        """Which lengths have at least one good row."""
        return np.isfinite(self.copy).any(0) & np.isfinite(self.control).any(0)

    def kept(self, which: np.ndarray) -> "Curve":
        return Curve(
            self.lengths[which],
            self.scored[which],
            self.copy[:, which],
            self.control[:, which],
            self.failures,
            self.context[which],
            self.targets[:, which],
        )


@dataclass(frozen=True)
class Map:
    """Recall over length and depth of one model under one method and one protocol."""

    lengths: Int[np.ndarray, "lengths"]
    depths: Float[np.ndarray, "depths"]  # 0 the beginning of the text, 1 its end
    distance: Float[np.ndarray, "lengths depths"]  # tokens from a token to its copy; NaN where nothing was measured
    copy: Float[np.ndarray, "repeats lengths depths"]  # NaN where a row failed
    control: Float[np.ndarray, "repeats lengths depths"]
    targets: np.ndarray  # str [repeats, lengths]

    @property
    def memory_index(self) -> Float[np.ndarray, "lengths depths"]:
        """Over all repeats; NaN where nothing was measured."""
        control = measured_mean(self.control)
        left = 1.0 - control
        return np.divide(measured_mean(self.copy) - control, left, out=np.zeros_like(left), where=left != 0)


@dataclass(frozen=True)
class MemoryLength:
    """A length in tokens with its 95 % interval."""

    value: float
    low: float | None = None
    high: float | None = None
    censored: bool = False  # the true value is larger
    reason: str = ""  # why the measurement ended there, or why the value is 0
    interval_censored: bool = False  # so is the upper end of the interval

    def __str__(self) -> str:
        text = f"{'>' if self.censored else ''}{self.value:,.0f}"
        if self.low is not None and self.high is not None:
            text += f" [{self.low:,.0f}, {'>' if self.interval_censored else ''}{self.high:,.0f}]"
        return text


@dataclass(frozen=True)
class Summary:
    """The numbers of one curve. Lengths in tokens."""

    paper_fine: MemoryLength
    paper_coarse: MemoryLength
    fine: MemoryLength
    coarse: MemoryLength
    half_life: MemoryLength
    reach: MemoryLength
    span: MemoryLength  # area under the memory index: tokens effectively remembered
    gap_area: MemoryLength  # area under the gap
    cliff: float | None  # tokens from memory index 0.9 to 0.1; None where it crosses neither
    nonmonotone: float  # largest rise of the memory index above the fit, over the lengths judged
    contaminated: list[dict[str, Any]]  # windows whose control is out of line
    without_contaminated: dict[str, float]  # the headline values without these; empty where none or all are
    repeats: int
    failed: dict[int, str]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def curve(rows: Iterable[Row]) -> Curve:
    """The curve of rows of one model, method and task setting: what was asked from the beginning of the texts.

    Raises:
        ValueError: no rows, or rows of several curves.
    """
    rows = [row for row in _of_one_setting(rows) if row.depth == 0]
    if not rows:
        raise ValueError("no row asks for the beginning of a text (depth 0), so there is no curve")
    cells = _cells(rows)
    failures = {row.length: row.status for row in rows if row.status != "ok"}
    scored, context = (np.zeros(len(cells.lengths), int) for _ in range(2))
    columns = {length: column for column, length in enumerate(cells.lengths.tolist())}
    for row in rows:
        if row.status == "ok":
            column = columns[row.length]
            scored[column], context[column] = row.scores["scored"], row.scores["context"]
    return Curve(cells.lengths, scored, cells.copy[:, :, 0], cells.control[:, :, 0], failures, context, cells.targets)


def memory_map(rows: Iterable[Row]) -> Map:
    """Recall over length and depth, of rows of one model, method and task setting.

    Raises:
        ValueError: no rows, or rows of several curves.
    """
    return _cells(_of_one_setting(rows))


def curves(rows: Iterable[Row]) -> dict[tuple[str, str, str], Curve]:
    """All curves among the rows, by (model, method, label of what was asked)."""
    return {key: curve(group) for key, group in by_curve(rows).items() if any(row.depth == 0 for row in group)}


def by_curve(rows: Iterable[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """The rows of each curve, by (model, method, label of protocol and texts). Where a run holds several versions
    of the task for one question, the label names the version: their numbers are not comparable."""
    alike: dict[tuple[Any, ...], list[Row]] = {}  # rows that were read share their settings: each is looked at once
    for row in latest(rows):
        if row.task == "curve":
            alike.setdefault((row.model, row.method, row.version, id(row.settings)), []).append(row)
    settings: dict[str, list[dict[str, Any]]] = {}  # short label -> the settings it stands for under one model
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
    """The end of a curve's label where one run holds several versions of the task."""
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
        raise ValueError(
            f"the rows belong to {len(kinds)} curves: got {', '.join(map(_curve_said, kinds))}, expected one. "
            "Separate them with stats.by_curve."
        )
    return rows


def _curve_said(kind: tuple[Any, ...]) -> str:
    model, method, task, version, _ = kind
    return f"{model} {method} {task} version {version}"


def _cells(rows: Sequence[Row]) -> Map:
    # a run that is not finished may hold a control whose own repeat has not come yet
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
            # the control is paired with the copy of the same target, whichever repeat's memory was read for it
            control[repeats[row.scores["control_repeat"]], *cell] = row.scores["control"]
            distance[cell] = row.scores.get("distance", row.length + 1)  # published files do not say
    # A failed row leaves one target without its copy and another without its control. Neither target counts, so that
    # the gap is of the same targets; a run that has just begun may have no target with both, and then all count.
    both = np.isfinite(copy) & np.isfinite(control)
    alone = ~both & both.any(0)
    copy[alone], control[alone] = np.nan, np.nan
    return Map(np.array(list(lengths)), np.array(list(depths)), distance, copy, control, targets)


def label(settings: dict[str, Any], *, whole: bool = False) -> str:
    """Protocol and texts of a curve in a few words; numbers are comparable under one label only. `whole`: with the
    texts' paths, where their last parts are the same."""

    def named(text: str) -> str:
        return text if whole else short_text(text)

    protocol = settings["protocol"]
    if protocol == "probe":
        protocol += f" {settings['warmup']}+{settings['scored']}"
    text = f"{protocol}{' (authors)' if settings.get('compat') else ''}, {named(settings['target_text'])}"
    return text + (f" behind {named(settings['prefix_text'])}" if settings.get("prefix_text") else "")


def perplexity_label(settings: dict[str, Any]) -> str:
    """What perplexity was taken of, in a few words; numbers are comparable under one label only."""
    text = short_text(settings["text"])
    if settings["targets"] == "all":
        return f"all tokens, {text}"
    return f"last {settings['target_tokens']} tokens{', fixed' if settings['targets'] == 'fixed' else ''}, {text}"


def short_text(text: str) -> str:
    """The last part of a path; sources like builtin:tests and hub ids whole."""
    return text if ":" in text or text.count("/") == 1 else text.rstrip("/").rpartition("/")[2]


def summarise(curve: Curve, *, seed: int = 0, bootstraps: int = BOOTSTRAPS) -> Summary:
    """All numbers of a curve, from the lengths that have good rows.

    Raises:
        ValueError: no good row at any length.
    """
    if not curve.measured.any():
        raise ValueError(f"no length was measured; the rows say {sorted(set(curve.failures.values()))}")
    ended = _why_it_ended(curve)
    measured = curve.kept(curve.measured)
    values = headline(measured)
    chance = by_chance(measured, seed=seed, bootstraps=bootstraps)
    tested = {name: "fine" if name == "fine" else "gap" for name in CROSSINGS}
    shown = {of: not chance or established(measured, of, JOINT_LEVEL) > 0 for of in ("fine", "gap")}
    unsure = {"fine": UNSURE.format("copy accuracy exceeds 99 %"), "gap": UNSURE.format("the gap exceeds 0")}

    def length(name: str) -> MemoryLength:
        value, censored = values[name]
        reason = ended if censored else ""
        if name in CROSSINGS and value == 0.0:
            reason = f"no length exceeds the threshold; the shortest length judged is {_first_judged(measured):,.0f}"
        elif name in CROSSINGS and not shown[tested[name]]:
            reason = "; ".join(part for part in (reason, unsure[tested[name]]) if part)
        if not chance:
            return MemoryLength(value, censored=censored, reason=reason)
        low, high, over = chance[name]
        if name in CROSSINGS:
            low, high, over = _outwards(measured, low, high, over)
            low = min(low, established(measured, name, CENSORED_LEVEL)) if over else low
            low = low if shown[tested[name]] else 0.0
        return MemoryLength(value, low, high, censored, reason, over)

    def paper(passes: np.ndarray, name: str) -> MemoryLength:
        """Section 3.3 as the authors' Table 3 was made: the largest length measured that passes, 0 if none does. They
        give no interval; ours is from 0 where the joint test finds no length that passes."""
        if not passes.any():
            return MemoryLength(0.0)
        last = int(np.flatnonzero(passes)[-1])
        found = MemoryLength(float(measured.lengths[last]), censored=last == len(passes) - 1)
        reason = ended if found.censored else ""
        if shown[tested[name]]:
            return replace(found, reason=reason)
        reason = "; ".join(part for part in (reason, unsure[tested[name]]) if part)
        return replace(found, low=0.0, high=found.value, interval_censored=found.censored, reason=reason)

    contaminated = _contaminated(measured)
    clean = _without(measured, contaminated)
    G, m = gap(measured), memory_index(measured)
    judged = _judged(measured)
    (steep, steep_over), (flat, flat_over) = (_cliff_end(measured, m, level) for level in (0.9, 0.1))
    return Summary(
        paper_fine=paper(measured_mean(measured.copy) > FINE, "fine"),
        paper_coarse=paper(G > COARSE, "coarse"),
        fine=length("fine"),
        coarse=length("coarse"),
        half_life=length("half_life"),
        reach=length("reach"),
        span=length("span"),
        gap_area=length("gap_area"),
        cliff=None if steep_over or flat_over or not steep or not flat else flat - steep,
        nonmonotone=float(max(0.0, np.max(m[judged] - _isotonic(m[judged], _weights(measured)[judged])))),
        contaminated=contaminated,
        without_contaminated=(
            {name: value for name, (value, _) in headline(clean).items()}
            if contaminated and clean.measured.any()
            else {}
        ),
        repeats=whole_repeats(measured),
        failed=curve.failures,
    )


def by_chance(curve: Curve, *, seed: int = 0, bootstraps: int = BOOTSTRAPS) -> dict[str, tuple[float, float, bool]]:
    """Both ends of value ± t · s by name, and whether the upper end may lie beyond the last length: what other texts
    would change, without what interpolation between the lengths leaves open. Of a curve with a good row at every
    length; empty under two repeats or without bootstraps."""
    if whole_repeats(curve) < 2 or not bootstraps:
        return {}
    drawn = headlines_drawn(curve, multipliers(len(curve.copy), bootstraps, seed))
    unseen = _unseen_texts(curve)
    found = {}
    for name, (value, _) in headline(curve).items():
        others, beyond = drawn[name]
        half = expansion(repeats_behind(curve, name, value)) * float(np.std(others))
        low, high, over = value - half, value + half, float(np.mean(beyond)) > 0.025
        if name in CROSSINGS and value > 0.0:
            low, high = low - (name == "fine") * unseen[name], high + (name != "fine") * unseen[name]
        if high > curve.lengths[-1]:  # an area can be no larger than recalling everything
            high, over = float(curve.lengths[-1]), over or name in CROSSINGS
        found[name] = max(0.0, low) if name in CROSSINGS else low, high, over
    return found


def _unseen_texts(curve: Curve) -> dict[str, float]:
    """How far the outer end of a crossing's interval moves (tokens) for texts that no repeat is like, by name.

    Where a mean falls to an extreme threshold is decided by the few texts that are forgotten first (`fine`) or last
    (`coarse`, `reach`): a share p of all texts is enough. With the probability (1 - p)^n none of n repeats is such a
    text, and their spread does not show it. So much of t · the standard deviation between the repeats' own half-lives
    is added.
    """
    complete = (np.isfinite(curve.copy) & np.isfinite(curve.control)).all(1)
    copy, control = curve.copy[complete], curve.control[complete]
    if len(copy) < 2:
        return dict.fromkeys(CROSSINGS, 0.0)
    judged = _judged(curve)
    index = np.divide(copy - control, 1.0 - control, out=np.zeros_like(copy), where=control < 1)[:, judged]
    ends, _ = _crossings(curve.lengths[judged], index, HALF_LIFE, np.ones(index.shape[1]))
    spread = float(student.ppf(0.95, len(ends) - 1)) * float(np.std(ends, ddof=1))
    left = max(1e-3, 1.0 - float(measured_mean(curve.control)[judged].mean()))
    shares = {"fine": (1 - FINE) / left, "coarse": COARSE / left, "half_life": HALF_LIFE, "reach": REACH}
    return {name: spread * max(0.0, 1.0 - share) ** len(ends) for name, share in shares.items()}


def _outwards(curve: Curve, low: float, high: float, over: bool) -> tuple[float, float, bool]:
    """An interval of a crossing moved outwards to lengths that were judged: between two of them only the order of the
    values is known, not where in between the curve crosses."""
    lengths = np.concatenate([[0.0], curve.lengths[_judged(curve)]])
    # at the last length the curve is above the threshold for certain: the crossing lies beyond it
    before = len(lengths) - 1 if low >= lengths[-1] else int(np.searchsorted(lengths, low, side="left")) - 1
    after = max(1, int(np.searchsorted(lengths, high, side="left")))
    over = over or after >= len(lengths)
    return float(lengths[max(before, 0)]), float(lengths[-1] if over else lengths[after]), over


def established(curve: Curve, name: str, level: float) -> float:
    """The longest length judged up to which a joint test shows that the curve of `name`, one of CROSSINGS, exceeds its
    threshold there or later, or for "gap" that the gap exceeds 0: one-sided at `level`, over repeats. 0 where it shows
    none, and under two repeats.

    For a repeat r at length L, d = c - 0.99 for `fine`, c - M for "gap", c - M - 0.01 for `coarse`, else
    (c - M) - threshold · (1 - M), whose mean exceeds 0 exactly where the curve exceeds its threshold. That no length
    from L on exceeds it is rejected by the largest Student's t of means of d over windows of lengths: those that begin
    at L, and for `fine`, which may need warm-up, also short ones that begin later. Lengths are tested in order to the
    first not rejected, so that all of them together err with the probability of one test. The quantile is simulated
    under independent normal noise; noise that lengths share makes the windows more alike and the test conservative.
    """
    judged = _judged(curve)
    lengths, copy, control = curve.lengths[judged], curve.copy[:, judged], curve.control[:, judged]
    if name == "fine":
        excess = copy - FINE
    else:
        excess = copy - control - LEVELS.get(name, 0.0) * (1.0 if name == "coarse" else 1.0 - control)
    count = np.isfinite(excess).sum(0)
    lengths, excess, count = lengths[count > 1], excess[:, count > 1], count[count > 1]
    if len(count) == 0:
        return 0.0
    mean = measured_mean(excess)
    deviation = np.where(np.isfinite(excess), excess - mean, 0.0) / np.sqrt(count * (count - 1))
    limit = _joint_quantile(min(int(count.min()), JOINT_REPEATS), len(count), name == "fine", level)
    found = 0.0
    for first in range(len(count)):
        begins, ends = _windows(len(count) - first, anywhere=name == "fine")
        means = _window_sums(mean[first:], begins, ends)
        error = np.sqrt((_window_sums(deviation[:, first:], begins, ends) ** 2).sum(0))
        t = np.divide(means, error, out=np.where(means > 0, np.inf, -np.inf), where=error > 1e-12)
        if t.max() <= limit:
            break
        found = float(lengths[first])
    return found


def _windows(lengths: int, *, anywhere: bool) -> tuple[np.ndarray, np.ndarray]:
    """First and last + 1 of the windows of the joint test: all that begin at the first length; `anywhere`: also those
    of 1, 2, 4, ... lengths that begin at any."""
    found = [(0, end) for end in range(1, lengths + 1)]
    size = 1
    while anywhere and size < lengths:
        found += [(begin, begin + size) for begin in range(1, lengths - size + 1)]
        size *= 2
    begins, ends = np.array(found).T
    return begins, ends


def _window_sums(values: Float[np.ndarray, "*samples lengths"], begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    sums = np.concatenate([np.zeros((*values.shape[:-1], 1)), np.cumsum(values, -1)], -1)
    return sums[..., ends] - sums[..., begins]


@lru_cache(maxsize=256)
def _joint_quantile(repeats: int, lengths: int, anywhere: bool, level: float) -> float:
    """1 - level quantile of the joint test's statistic where nothing is there to be found."""
    rng = np.random.default_rng(0)
    begins, ends = _windows(lengths, anywhere=anywhere)
    largest = []
    for _ in range(JOINT_SAMPLES // 200):
        sums = _window_sums(rng.standard_normal((200, repeats, lengths)), begins, ends)
        largest.append((sums.mean(1) / (sums.std(1, ddof=1) / np.sqrt(repeats))).max(1))
    return float(np.quantile(np.concatenate(largest), 1 - level))


def measured_mean(values: Float[np.ndarray, "repeats *cells"]) -> Float[np.ndarray, "*cells"]:
    """Means over the repeats that have a value; NaN where none has."""
    found = np.isfinite(values)
    count = found.sum(0)
    return np.divide(np.where(found, values, 0.0).sum(0), count, out=np.full(count.shape, np.nan), where=count > 0)


def gap(curve: Curve) -> Float[np.ndarray, "lengths"]:
    return measured_mean(curve.copy) - measured_mean(curve.control)


def memory_index(curve: Curve) -> Float[np.ndarray, "lengths"]:
    """(C - M) / (1 - M); 0 where the control is perfect and leaves nothing to remember."""
    left = 1.0 - measured_mean(curve.control)
    return np.divide(gap(curve), left, out=np.zeros_like(left), where=left > 0)


def index_upper(curve: Curve) -> Float[np.ndarray, "lengths"]:
    """The upper end of the one-sided 95 % interval (Student's) of the memory index; NaN under two repeats."""
    _, upper = interval(curve.copy - curve.control, 0.9)
    left = 1.0 - measured_mean(curve.control)
    return np.divide(upper, left, out=np.where(np.isnan(upper), np.nan, 0.0), where=left > 0)


def interval(
    values: Float[np.ndarray, "repeats *cells"], share: float = 0.95
) -> tuple[Float[np.ndarray, "*cells"], Float[np.ndarray, "*cells"]]:
    """The interval (Student's) of the mean over repeats that holds it with that probability, in each cell; NaN under
    two repeats."""
    count = np.isfinite(values).sum(0)
    mean = measured_mean(values)
    freedom = np.maximum(count - 1, 1)
    error = np.sqrt(measured_mean((values - mean) ** 2) / freedom)
    half = np.where(count > 1, student.ppf(0.5 + share / 2, freedom) * error, np.nan)
    return np.asarray(mean - half), np.asarray(mean + half)  # arrays also where there is one cell


def bands(values: Float[np.ndarray, "repeats *cells"]) -> tuple[np.ndarray, np.ndarray]:
    """The 95 % interval of a mean accuracy, which lies between 0 and 1."""
    low, high = interval(values)
    return np.clip(low, 0.0, 1.0), np.clip(high, 0.0, 1.0)


def between(curve: Curve, length: float) -> tuple[int, int]:
    """The measured lengths before and after a length, which may be the second of them; the outermost two, or the first
    or last twice, where it is outside."""
    after = min(int(np.searchsorted(curve.lengths, length, side="left")), len(curve.lengths) - 1)
    return int(curve.lengths[max(after - 1, 0)]), int(curve.lengths[after])


def unpacked(hits: str, scored: int) -> np.ndarray:
    """Hits per token as 0 and 1, in order, from how rows hold them: bits, first token first, as hexadecimal."""
    return np.unpackbits(np.frombuffer(bytes.fromhex(hits), dtype=np.uint8), count=scored)


def headline(curve: Curve) -> dict[str, tuple[float, bool]]:
    """Value and whether it is right-censored, by name, of a curve with a good row at every length."""
    found = _headlines(curve, measured_mean(curve.copy)[None], measured_mean(curve.control)[None])
    return {name: (float(values[0]), bool(censored[0])) for name, (values, censored) in found.items()}


def headlines_drawn(
    curve: Curve, multipliers: Float[np.ndarray, "samples repeats"]
) -> dict[str, tuple[Float[np.ndarray, "samples"], np.ndarray]]:
    """The same of curves drawn around that curve, one for each row of multipliers."""
    return _headlines(curve, _drawn(curve.copy, multipliers), _drawn(curve.control, multipliers))


def multipliers(repeats: int, count: int, seed: int) -> Float[np.ndarray, "samples repeats"]:
    """g of the bootstrap; curves of the same targets compared with each other share them. Thousands of repeats get
    fewer samples, so that all fit in memory."""
    count = min(count, max(100, DRAWN // max(1, repeats)))
    return np.random.default_rng(seed).standard_normal((count, repeats))


def _drawn(
    values: Float[np.ndarray, "repeats lengths"], multipliers: Float[np.ndarray, "samples repeats"]
) -> Float[np.ndarray, "samples lengths"]:
    """C* or M* of the bootstrap. A length with one repeat has no spread to draw from: it stays."""
    mean, count = measured_mean(values), np.isfinite(values).sum(0)
    deviation = np.where(np.isfinite(values), values - mean, 0.0) / np.sqrt(np.maximum(count * (count - 1), 1))
    return mean + multipliers @ deviation


def _headlines(
    curve: Curve, copy: Float[np.ndarray, "samples lengths"], control: Float[np.ndarray, "samples lengths"]
) -> dict[str, tuple[Float[np.ndarray, "samples"], np.ndarray]]:
    """Of many pairs of mean curves at the lengths of `curve`."""
    G, left = copy - control, 1.0 - control
    m = np.divide(G, left, out=np.zeros_like(left), where=left > 0)
    judged = _judged(curve)
    L, w = curve.lengths[judged], _weights(curve)[judged]
    beyond = m[:, -1] > REACH
    return {
        "fine": _crossings(L, copy[:, judged], FINE, w, warm_up=True),
        "coarse": _crossings(L, G[:, judged], COARSE, w),
        "half_life": _crossings(L, m[:, judged], HALF_LIFE, w),
        "reach": _crossings(L, m[:, judged], REACH, w),
        "span": (_areas(curve.lengths, m), beyond),
        "gap_area": (_areas(curve.lengths, G), beyond),
    }


def _crossings(
    lengths: np.ndarray,
    values: Float[np.ndarray, "samples lengths"],
    level: float,
    weights: np.ndarray,
    *,
    warm_up: bool = False,
) -> tuple[Float[np.ndarray, "samples"], np.ndarray]:
    """Where the values fall to `level`, and whether only beyond the last length: isotonic fit, linear interpolation; 0
    where the fit exceeds it nowhere. `warm_up`: of the lengths from the first that exceeds the level.

    The fit itself is not made. It is above the level up to where the sum of weight · (value - level) is largest, and
    on its two sides it is the least mean of what ends there and the largest of what begins there (Robertson, Wright and
    Dykstra 1988, Order Restricted Statistical Inference, section 1.4).
    """
    at = np.arange(len(lengths) + 1)
    warm = (at[:-1] >= (values > level).argmax(1)[:, None]) if warm_up else np.ones(values.shape, bool)
    sums = np.zeros((2, len(values), len(at)))  # of weight · (value - level) and of weight, before each length
    np.cumsum([warm * weights * (values - level), warm * weights], axis=2, out=sums[:, :, 1:])
    end = sums[0].argmax(1)  # lengths up to the crossing
    result = np.concatenate([[0], lengths])[end].astype(float)
    inside = np.flatnonzero((end > 0) & (end < len(lengths)))
    excess, weight = sums[:, inside] - sums[:, inside, end[inside]][:, :, None]
    side = at - end[inside, None]
    mean = np.divide(excess, weight, out=np.zeros_like(excess), where=side != 0)
    above, below = np.where(side < 0, mean, np.inf).min(1), np.where(side > 0, mean, -np.inf).max(1)
    result[inside] += above / (above - below) * (lengths[end[inside]] - lengths[end[inside] - 1])
    return result, end == len(lengths)


def _cliff_end(curve: Curve, m: Float[np.ndarray, "lengths"], level: float) -> tuple[float, bool]:
    judged = _judged(curve)
    value, censored = _crossings(curve.lengths[judged], m[None, judged], level, _weights(curve)[judged])
    return float(value[0]), bool(censored[0])


def _isotonic(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return isotonic_regression(values, weights=weights, increasing=False).x


def _areas(lengths: np.ndarray, values: Float[np.ndarray, "samples lengths"]) -> Float[np.ndarray, "samples"]:
    """∫ dL from 0 to the last length; before the first one the value there holds."""
    return np.trapezoid(np.concatenate([values[:, :1], values], 1), np.concatenate([[0], lengths]))


def _weights(curve: Curve) -> np.ndarray:
    """Repeats with a value: texts differ by more than the tokens of one text."""
    return np.isfinite(curve.copy).sum(0).astype(float)


def _why_it_ended(curve: Curve) -> str:
    last = curve.lengths[curve.measured][-1]
    later = [status for length, status in sorted(curve.failures.items()) if length > last]
    return {
        "oom": "out of memory",
        "budget": "the time given ran out",
        "too_long": "the model's positions end",
        "nan": "NaN logits",
    }.get(later[0] if later else "", "the longest length measured")


def _judged(curve: Curve) -> np.ndarray:
    """Which lengths a threshold is judged at: those with enough scored tokens, or all when none has."""
    enough = curve.scored >= MIN_SCORED
    return enough if enough.any() else np.ones_like(enough)


def _first_judged(curve: Curve) -> float:
    return float(curve.lengths[_judged(curve)][0])


def whole_repeats(curve: Curve) -> int:
    """Repeats that say something by themselves: not those that failed everywhere or have only one of their halves."""
    return int((np.isfinite(curve.copy) & np.isfinite(curve.control)).any(1).sum())


def expansion(repeats: int) -> float:
    """Standard errors from a value to an end of its 95 % interval: Student's quantile."""
    return float(student.ppf(0.975, repeats - 1))


def repeats_near(curve: Curve, length: float) -> int:
    """Repeats at the two measured lengths around a value, the fewer of both; at least 2."""
    after = min(int(np.searchsorted(curve.lengths, length)), len(curve.lengths) - 1)
    return max(2, int(_weights(curve)[max(after - 1, 0) : after + 1].min()))


def repeats_behind(curve: Curve, name: str, value: float) -> int:
    """How many repeats a headline value rests on: those near a crossing; for an area, which all lengths share,
    the median over lengths."""
    near = repeats_near(curve, value) if name in CROSSINGS else int(np.median(_weights(curve)))
    return max(2, min(near, whole_repeats(curve)))


def _contaminated(curve: Curve) -> list[dict[str, Any]]:
    """Windows a model can guess far better than the others: boilerplate, or text it knows by heart."""
    found = []
    for column, length in enumerate(curve.lengths):
        values = curve.control[:, column]
        middle = np.nanmedian(values)
        spread = np.nanmedian(np.abs(values - middle))
        for repeat, value in enumerate(values):
            far = max(CONTAMINATED_MADS * 1.4826 * spread, CONTAMINATED_LEAST)
            out_of_line = len(values) > 2 and spread > 0 and value - middle > far
            if value > CONTAMINATED_CONTROL or out_of_line:
                found.append({"length": int(length), "repeat": repeat, "control": float(value)})
    return found


def _without(curve: Curve, windows: Sequence[dict[str, Any]]) -> Curve:
    copy, control = curve.copy.copy(), curve.control.copy()
    for window in windows:
        column = int(np.flatnonzero(curve.lengths == window["length"])[0])
        copy[window["repeat"], column] = control[window["repeat"], column] = np.nan
    clean = replace(curve, copy=copy, control=control)
    return clean.kept(clean.measured)
