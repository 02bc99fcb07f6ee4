"""Memory lengths of a curve (see `farspan.stats.forgetting_curves`), with intervals.

Definitions of Liu et al. 2024, arXiv 2410.04727, section 3.3, as in their Table 3 (`paper_fine`, `paper_coarse`: the
largest grid length that passes), and ours: fit a curve that cannot rise (isotonic regression over the lengths), and
interpolate its crossing between two points. The largest of many noisy lengths that passes grows with the number of
lengths measured; a crossing does not. Only `fine` leaves out the lengths before the first that passes: a copy needs
some tokens to find its place in the text. If the other thresholds did so too, a model without memory would get a memory
length from the first length that passes by chance.

The 95 % interval of a crossing is made in three steps (coverage: benchmarks/interval_coverage.md):

1. Chance: value ± t · s. t is Student's quantile for the repeats the value depends on, s the standard deviation of the
   value over curves sampled around the measured one by a multiplier bootstrap (after Wu 1986, Annals of Statistics 14):

       C*(L) = C(L) + Σ_r g_r (c_r(L) - C(L)) / sqrt(n (n - 1))      G*(L), m*(L) likewise, g_r ~ N(0, 1)

   with the values of the memory index of `index_by_repeat`: a ratio of C* - M* and 1 - M* would have no finite spread.
   One g_r for all values of target r, at all lengths. The n repeats at each length give C* the spread of a
   mean of n, for any n, and no length loses all its repeats.
2. Interpolation: both ends move outwards to the next measured length. Between two measured lengths only the order is
   known, so the crossing is interval-censored there.
3. Existence: the lower end is 0 unless a joint test over all lengths (`exceeds`) shows, at 5 %, that the gap
   exceeds 0 (for `fine`: the copy 0.99) at some length. If the crossing may be beyond the last length, its spread
   cannot be sampled; the lower end is then at most the length to which that test, at 10 %, shows the threshold
   exceeded.

To allow for texts unlike all repeats, the outer ends of `fine`, `coarse`, `half_life` and `reach` move further in step
1 (`_unseen_texts`). The interval of an area uses step 1 only.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.special import stdtrit

from farspan.stats.forgetting_curves import (
    MeasuredCurve,
    between,
    contaminated_windows,
    gap,
    index_of,
    is_judged,
    memory_index,
    repeats_at,
    shortest_judged,
    whole_repeats,
    without_windows,
)
from farspan.stats.headlines import (
    BOOTSTRAPS,
    COARSE,
    CROSSINGS,
    FINE,
    HALF_LIFE,
    REACH,
    crossings,
    expansion,
    headline,
    headlines_sampled,
    isotonic,
    multipliers,
    repeats_of,
)
from farspan.stats.intervals import has_no_width, measured_mean
from farspan.stats.joint_test import established, exceeds

UNSURE = "its interval begins at 0: {} texts do not show (joint test, 95 %) that {} at any length"
JOINT_LEVEL = 0.05  # one-sided, of the test for any memory
CENSORED_LEVEL = 0.1  # likewise, of the lower end of a value that may be beyond the last length


@dataclass(frozen=True)
class MemoryLength:
    """A length in tokens with its 95 % interval."""

    value: float
    low: float | None = None
    high: float | None = None
    censored: bool = False  # the true value is larger
    reason: str = ""  # why the measurement ended there, or why the value is 0
    interval_censored: bool = False  # the upper end of the interval is larger than `high`
    below: float | None = None  # tokens; the true value is smaller, and `value` is 0

    def __str__(self) -> str:
        text = f"{'>' if self.censored else ''}{self.value:z,.0f}" if self.below is None else f"<{self.below:,.0f}"
        if self.low is not None and self.high is not None:
            text += f" [{self.low:z,.0f}, {'>' if self.interval_censored else ''}{self.high:z,.0f}]"
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
    cliff: float | None  # tokens from memory index 0.9 to 0.1; None unless it crosses both
    nonmonotone: float  # largest rise of the memory index above the fit, over the lengths judged
    contaminated: list[dict[str, Any]]  # windows with an outlying control
    # the headline values without these, and whether each is censored; empty if none or all windows are contaminated
    without_contaminated: dict[str, tuple[float, bool]]
    repeats: int
    failed: dict[int, str]


def summarise(curve: MeasuredCurve, *, seed: int = 0, bootstraps: int = BOOTSTRAPS) -> Summary:
    """Return all numbers of a curve, from the lengths that have good rows.

    Raises:
        ValueError: no good row at any length.
    """
    if not curve.measured.any():
        raise ValueError(f"no length was measured; the rows have status {sorted(set(curve.failures.values()))}")
    ended = _why_it_ended(curve)
    measured = curve.kept(curve.measured)
    values = headline(measured)
    chance = by_chance(measured, seed=seed, bootstraps=bootstraps)
    tested = {name: "fine" if name == "fine" else "gap" for name in CROSSINGS}
    shown = {of: not chance or exceeds(measured, of, JOINT_LEVEL) for of in ("fine", "gap")}
    whats = {"fine": "copy accuracy exceeds 99 %", "gap": "copy accuracy exceeds the control"}
    unsure = {of: UNSURE.format(whole_repeats(measured), what) for of, what in whats.items()}

    def length(name: str) -> MemoryLength:
        value, censored = values[name]
        reason, below = ended if censored else "", None
        if name in CROSSINGS and value == 0.0:
            below = shortest_judged(measured)
            reason = f"below the threshold already at {below:,.0f}, the shortest length judged: measure shorter ones"
        elif name in CROSSINGS and name in chance and not shown[tested[name]]:
            reason = "; ".join(part for part in (reason, unsure[tested[name]]) if part)
        if name not in chance:
            return MemoryLength(value, censored=censored, reason=reason, below=below)
        low, high, over = chance[name]
        if name in CROSSINGS:
            low, high, over = _outwards(measured, low, high, over)
            low = min(low, established(measured, name, CENSORED_LEVEL)) if over else low
            low = low if shown[tested[name]] else 0.0
        return MemoryLength(value, low, high, censored, reason, over, below)

    def paper(passes: np.ndarray, name: str) -> MemoryLength:
        """Return the largest length measured that passes, 0 if none does: section 3.3, as in the authors' Table 3. They
        give no interval; ours begins at 0 if the joint test finds no length that passes."""
        if not passes.any():
            return MemoryLength(0.0)
        last = int(np.flatnonzero(passes)[-1])
        found = MemoryLength(float(measured.lengths[last]), censored=last == len(passes) - 1)
        reason = ended if found.censored else ""
        if shown[tested[name]]:
            return replace(found, reason=reason)
        reason = "; ".join(part for part in (reason, unsure[tested[name]]) if part)
        return replace(found, low=0.0, high=found.value, interval_censored=found.censored, reason=reason)

    windows = contaminated_windows(measured)
    clean = without_windows(measured, windows)
    numbers = measured.numbers or range(len(windows))
    G, m = gap(measured), memory_index(measured)
    judged = is_judged(measured)
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
        nonmonotone=float(max(0.0, np.max(m[judged] - isotonic(m[judged], repeats_at(measured)[judged])))),
        contaminated=[
            {
                "length": int(measured.lengths[column]),
                "repeat": numbers[row],
                "control": float(measured.control[row, column]),
            }
            for column, row in np.argwhere(windows.T)
        ],
        without_contaminated=headline(clean) if windows.any() and clean.measured.any() else {},
        repeats=whole_repeats(measured),
        failed=curve.failures,
    )


def by_chance(
    curve: MeasuredCurve, *, seed: int = 0, bootstraps: int = BOOTSTRAPS
) -> dict[str, tuple[float, float, bool]]:
    """Return, by name, both ends of value ± t · s within the lengths, extended for unseen texts, and whether the upper
    end may be beyond the last length: the spread between texts, without the uncertainty of interpolation between
    lengths. For a curve with a good row at every length; empty under two repeats or without bootstraps. Where the
    spread is unknown, values are left out: crossings between lengths of which one has a single repeat, and areas that
    all repeats have.

    Ends are cut to the values that are possible, which keeps the coverage: crossings to 0 and the last length, areas to
    the last length, and that of the gap to minus the last length. The lower end of an area is not cut to 0: the area
    itself is below 0 where a copy is predicted worse than it is guessed.
    """
    if whole_repeats(curve) < 2 or not bootstraps:
        return {}
    sampled = headlines_sampled(curve, multipliers(len(curve.copy), bootstraps, seed))
    unseen = _unseen_texts(curve)
    found = {}
    for name, (value, censored) in headline(curve).items():
        around = np.isin(curve.lengths, between(curve, value))
        if name in CROSSINGS and not censored and curve.whole[:, around].sum(0).min() < 2:
            continue
        others, beyond = sampled[name]
        half = expansion(repeats_of(curve, name, value)) * float(np.std(others))
        low, high, over = value - half, value + half, float(np.mean(beyond)) > 0.025
        if name not in CROSSINGS and has_no_width(value, low, high):
            continue
        if name in CROSSINGS and value > 0.0:
            low, high = low - (name == "fine") * unseen[name], high + (name != "fine") * unseen[name]
        if high > curve.lengths[-1]:  # an area can be no larger than recalling everything
            high, over = float(curve.lengths[-1]), over or name in CROSSINGS
        # the gap is at least -1; the memory index has no least value
        least = 0.0 if name in CROSSINGS else -float(curve.lengths[-1]) if name == "gap_area" else -np.inf
        found[name] = max(least, low), high, over
    return found


def _unseen_texts(curve: MeasuredCurve) -> dict[str, float]:
    """Return, by name, how far (tokens) the outer end of a crossing's interval moves for texts unlike all repeats.

    A mean crosses a threshold when a share p of all texts is forgotten first (`fine`) or last (`coarse`, `half_life`,
    `reach`). With probability (1 - p)^n none of n repeats is such a text, and their spread does not show it. The
    interval is extended by this probability times t · the standard deviation of the repeats' own half-lives.
    """
    complete = curve.whole.all(1)
    copy, control = curve.copy[complete], curve.control[complete]
    if len(copy) < 2:
        return dict.fromkeys(CROSSINGS, 0.0)
    judged = is_judged(curve)
    index = index_of(copy, control)[:, judged]
    ends, _ = crossings(curve.lengths[judged], index, HALF_LIFE, np.ones(index.shape[1]))
    spread = float(stdtrit(len(ends) - 1, 0.95)) * float(np.std(ends, ddof=1))
    left = max(1e-3, 1.0 - float(measured_mean(curve.control)[judged].mean()))
    shares = {"fine": (1 - FINE) / left, "coarse": COARSE / left, "half_life": HALF_LIFE, "reach": REACH}
    return {name: spread * max(0.0, 1.0 - share) ** len(ends) for name, share in shares.items()}


def _outwards(curve: MeasuredCurve, low: float, high: float, over: bool) -> tuple[float, float, bool]:
    """Return an interval of a crossing moved outwards to lengths used for thresholds: where a crossing is between two
    of them is unknown."""
    lengths = np.concatenate([[0.0], curve.lengths[is_judged(curve)]])
    # at the last length the curve is above the threshold for certain: the crossing is beyond it
    before = len(lengths) - 1 if low >= lengths[-1] else int(np.searchsorted(lengths, low, side="left")) - 1
    after = max(1, int(np.searchsorted(lengths, high, side="left")))
    over = over or after >= len(lengths)
    return float(lengths[max(before, 0)]), float(lengths[-1] if over else lengths[after]), over


def _cliff_end(curve: MeasuredCurve, m: Float[np.ndarray, "lengths"], level: float) -> tuple[float, bool]:
    judged = is_judged(curve)
    value, censored = crossings(curve.lengths[judged], m[None, judged], level, repeats_at(curve)[judged])
    return float(value[0]), bool(censored[0])


def _why_it_ended(curve: MeasuredCurve) -> str:
    last = curve.lengths[curve.measured][-1]
    later = [status for length, status in sorted(curve.failures.items()) if length > last]
    return {
        "oom": "out of memory",
        "budget": "the time given ran out",
        "too_long": "the model's positions end",
        "nan": "NaN logits",
    }.get(later[0] if later else "", "the longest length measured")
