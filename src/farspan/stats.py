"""From rows to memory lengths with intervals.

    C(L), M(L)   copy and control accuracy, means over repeats      G = C - M   gap
    m = G / (1 - M)   memory index: 1 = perfect recall, 0 = what guessing gives

Definitions of Liu et al. 2024, arXiv 2410.04727, section 3.3, as their Table 3 was made (`paper_fine`,
`paper_coarse`: the largest grid length that passes), and ours: a curve that cannot rise (isotonic regression over
the lengths from where it first passes), the crossing interpolated between its two points, and an interval from
a bootstrap over repeats. The largest of many noisy lengths that passes grows with the number of lengths
measured; a crossing does not.

The interval is value ± t · s: t is Student's quantile at the repeats the value rests on, s the standard deviation of
the value over curves drawn around the measured one by a multiplier bootstrap (after Wu 1986, Annals of Statistics 14):

    C*(L) = C(L) + Σ_r g_r (c_r(L) - C(L)) / sqrt(n (n - 1))      M*(L) likewise, g_r ~ N(0, 1)

One g_r for all that was asked of target r: both halves, all lengths. The n repeats at each length give C* the spread
that the mean of n has, few as they may be, and no length runs empty. Quantiles of resampled repeats need corrections
for few repeats and fail where many lengths in amnesia are fitted together: the value lies a little too far, the
resamples twice that, and under a steep curve `reach` lay in its interval 4 times in 5
(benchmarks/interval_coverage.md).
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
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
MIN_SCORED = 32  # tokens; a length with fewer says too little to judge a threshold by
CROSSINGS = ("fine", "coarse", "half_life", "reach")
BOOTSTRAPS = 2000
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
    for row in rows:
        if row.status == "ok":
            column = cells.lengths.tolist().index(row.length)
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
    """The rows that belong together, by (model, method, label of what was asked)."""
    rows = [row for row in latest(rows) if row.task == "curve"]
    settings: dict[str, list[dict[str, Any]]] = {}  # short label -> what goes by it under one model
    for row in rows:
        known = settings.setdefault(f"{row.model} {label(row.settings)}", [])
        if row.settings not in known:
            known.append(row.settings)
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        ambiguous = len(settings[f"{row.model} {label(row.settings)}"]) > 1
        groups.setdefault((row.model, row.method, label(row.settings, whole=ambiguous)), []).append(row)
    return groups


def _of_one_setting(rows: Iterable[Row]) -> list[Row]:
    rows = latest(rows)
    if not rows:
        raise ValueError("there are no rows, so there is no curve")
    kinds = {(row.model, row.method, row.task, row.version, str(row.settings)) for row in rows}
    if len(kinds) > 1:
        raise ValueError(f"these rows belong to {len(kinds)} curves; one at a time")
    return rows


def _cells(rows: Sequence[Row]) -> Map:
    lengths, depths = (sorted({getattr(row, name) for row in rows}) for name in ("length", "depth"))
    # a run that is not finished may hold a control whose own repeat has not come yet
    repeats = sorted({row.repeat for row in rows} | {r.scores["control_repeat"] for r in rows if r.status == "ok"})
    shape = (len(repeats), len(lengths), len(depths))
    copy, control, distance = np.full(shape, np.nan), np.full(shape, np.nan), np.full(shape[1:], np.nan)
    targets = np.full(shape[:2], "", dtype="U16")
    for row in rows:
        if row.status == "ok":
            targets[repeats.index(row.repeat), lengths.index(row.length)] = row.scores.get("target", "")
            cell = lengths.index(row.length), depths.index(row.depth)
            copy[repeats.index(row.repeat), *cell] = row.scores["copy"]
            # the control is paired with the copy of the same target, whichever repeat's memory it was asked of
            control[repeats.index(row.scores["control_repeat"]), *cell] = row.scores["control"]
            distance[cell] = row.scores.get("distance", row.length + 1)  # published files do not say
    return Map(np.array(lengths), np.array(depths), distance, copy, control, targets)


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
    repeats = whole_repeats(measured)
    drawn = headlines_drawn(measured, multipliers(len(measured.copy), bootstraps, seed)) if repeats > 1 else {}

    def length(name: str) -> MemoryLength:
        value, censored = values[name]
        reason = ended if censored else ""
        if value == 0.0:
            reason = f"nothing passes; the shortest length judged is {_first_judged(measured):,.0f}"
        if not drawn or not bootstraps:
            return MemoryLength(value, censored=censored, reason=reason)
        others, beyond = drawn[name]
        half = expansion(repeats_behind(measured, name, value)) * float(np.std(others))
        low, high = max(0.0, value - half), value + half
        over = float(np.mean(beyond)) > 0.025
        if high > measured.lengths[-1]:  # an area can be no larger than recalling everything
            high, over = measured.lengths[-1], over or name in CROSSINGS
        if value == 0.0:
            high = max(high, _first_judged(measured))
        return MemoryLength(value, low, float(high), censored, reason, over)

    contaminated = _contaminated(measured)
    clean = _without(measured, contaminated)
    G, m = gap(measured), memory_index(measured)
    judged = _judged(measured)
    (steep, steep_over), (flat, flat_over) = (_cliff_end(measured, m, level) for level in (0.9, 0.1))
    return Summary(
        paper_fine=_paper(measured, measured_mean(measured.copy) > FINE, ended),
        paper_coarse=_paper(measured, G > COARSE, ended),
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
        repeats=repeats,
        failed=curve.failures,
    )


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


def bracket(curve: Curve, name: str) -> tuple[int, int] | None:
    """The two measured lengths between which the curve falls to the threshold of `name`, one of CROSSINGS; None where
    it does not, or not among the lengths judged."""
    measured = curve.kept(curve.measured)
    value, censored = headline(measured)[name]
    if value == 0.0 or censored:
        return None
    lengths = measured.lengths
    after = int(np.searchsorted(lengths, value, side="left"))
    return int(lengths[max(after - 1, 0)]), int(lengths[after])


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
    """g of the bootstrap; curves of the same targets compared with each other share them."""
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
        "fine": _crossings(L, copy[:, judged], FINE, w),
        "coarse": _crossings(L, G[:, judged], COARSE, w),
        "half_life": _crossings(L, m[:, judged], HALF_LIFE, w),
        "reach": _crossings(L, m[:, judged], REACH, w),
        "span": (_areas(curve.lengths, m), beyond),
        "gap_area": (_areas(curve.lengths, G), beyond),
    }


def _crossings(
    lengths: np.ndarray, values: Float[np.ndarray, "samples lengths"], level: float, weights: np.ndarray
) -> tuple[Float[np.ndarray, "samples"], np.ndarray]:
    """Where the values fall to `level`, and whether only beyond the last length: warm-up cut off, isotonic fit, linear
    interpolation. 0 where nothing passes.

    The fit itself is not made. It is above the level up to where the sum of weight · (value - level) is largest, and
    on its two sides it is the least mean of what ends there and the largest of what begins there (Robertson, Wright and
    Dykstra 1988, Order Restricted Statistical Inference, section 1.4).
    """
    at = np.arange(len(lengths) + 1)
    warm = at[:-1] >= (values > level).argmax(1)[:, None]
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


def _paper(curve: Curve, passes: np.ndarray, ended: str) -> MemoryLength:
    """Section 3.3 as the authors' Table 3 was made: the largest length measured that passes, 0 if none does."""
    if not passes.any():
        return MemoryLength(0.0)
    last = int(np.flatnonzero(passes)[-1])
    censored = last == len(passes) - 1
    return MemoryLength(float(curve.lengths[last]), censored=censored, reason=ended if censored else "")


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
