"""How often the 95 % intervals of memory lengths hold the truth, in simulation where it is known.

    python benchmarks/interval_coverage.py [--quick] [--check]

A repeat r of a curve, at length L, with memory index m and control M as given:

    control_r = M + e_r + small noise             e_r ~ N(0, text), common to all lengths and both halves of a target
    copy_r    = m(L - s_r) + (1 - m) control_r + noise      s_r ~ N(0, shift) tokens, common to all lengths

Noise of the copy half has a standard deviation of 0.017 (of the gap in the published Llama-3-8B data), constant or,
as there, vanishing towards 0 and 1. The truth is what farspan's definitions say of the mean of 100,000 repeats at
the same lengths. Designs: a number of repeats at each of 32 lengths to 16,000; and adaptive ones, with 4 repeats to
begin with and 4 more at a time at the two lengths around half-life and reach, until the interval is narrower than
a 32nd of the longest length or 5 % of the value, or 32 repeats: at the 32 lengths, or at few that are refined first.
In brackets what was used before: percentiles of resampled repeats, widened for their number. Last line: the
figures as JSON.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import end
from scipy.optimize import isotonic_regression
from scipy.stats import t as student

from farspan import stats

PUBLISHED = Path(__file__).parent.parent / "tests" / "data" / "llama3_8b_forgetting_curve.json"
LONGEST = 16_384
EVERY = np.arange(64, LONGEST + 1, 64)  # lengths that an adaptive design may choose from
GRID = np.linspace(8, 16_000, 32, dtype=int)
COARSE_GRID = tuple(sorted({LONGEST >> i for i in range(9)} | {LONGEST * i // 8 for i in range(1, 9)}))
NUMBERS = ("fine", "half_life", "reach", "span", "coarse")
BOUNDS = dict.fromkeys(NUMBERS, (0.90, 0.99)) | {"coarse": (0.90, 1.0)}  # 1 point is less than the noise
POPULATION = 100_000
MOST = 32


@dataclass(frozen=True)
class World:
    """What is true of a model and its texts."""

    index: Callable[[np.ndarray], np.ndarray]  # memory index at lengths
    control: Callable[[np.ndarray], np.ndarray]
    text: float  # standard deviation of the control between texts
    shift: float = 0.0  # tokens; of where the memory of a text ends
    fading: bool = True  # noise vanishes towards an accuracy of 0 and 1

    def repeats(self, count: int, lengths: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Copy and control, repeats x lengths."""
        level = self.control(lengths)
        text = rng.normal(0, self.text, (count, 1)) * np.sqrt(4 * level * (1 - level))
        control = np.clip(level + text + rng.normal(0, 0.005, (count, len(lengths))), 0.01, 0.95)
        m = self.index(lengths - rng.normal(0, self.shift, (count, 1)))
        copy = m + (1 - m) * control
        noise = 0.017 * (np.sqrt(4 * copy * (1 - copy)) if self.fading else 1.0)
        return np.clip(copy + noise * rng.standard_normal(copy.shape), 0, 1), control

    def truth(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean copy and control, 1 x lengths."""
        rng = np.random.default_rng(0)
        parts = [[half.mean(0) for half in self.repeats(POPULATION // 50, lengths, rng)] for _ in range(50)]
        copy, control = np.mean(parts, 0)
        return copy[None], control[None]


def falling(middle: float, scale: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda lengths: 1 / (1 + np.exp((lengths - middle) / scale))


def constant(value: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda lengths: np.full(len(lengths), value)


def published() -> World:
    """The means of the Llama-3-8B file, made smooth; nothing is remembered from 7,230 tokens on."""
    points = json.loads(PUBLISHED.read_text())
    lengths = np.array([point["length"] for point in points])
    copy, control = (np.array([np.mean(point[half]) for point in points]) for half in ("copy_accs", "lm_accs"))
    control[0], copy[0] = control[1], copy[1]  # of 8 tokens 4 are scored
    index = isotonic_regression((copy - control) / (1 - control), increasing=False).x * (lengths < 7000)
    return World(lambda at: np.interp(at, lengths, index), lambda at: np.interp(at, lengths, control), 0.05)


def worlds() -> dict[str, World]:
    plateau = constant(0.45)
    return {
        "published": published(),
        "constant noise": World(falling(5086, 291), plateau, 0.05, fading=False),
        "steep": World(falling(5086, 60), plateau, 0.05),
        "shallow": World(falling(6000, 1200), plateau, 0.05),
        "texts differ": World(falling(5086, 291), plateau, 0.15, 200),
        "shallow, texts differ": World(falling(6000, 1200), constant(0.4), 0.2, 400),
    }


def curve(lengths: np.ndarray, copy: np.ndarray, control: np.ndarray) -> stats.Curve:
    return stats.Curve(lengths, lengths, copy, control, {}, 2 * lengths, np.full(copy.shape, ""))


def adaptive(world: World, grid: Sequence[int], lengths: np.ndarray, rng: np.random.Generator, *, refine: bool) -> Any:
    """A curve measured at some of `lengths`, more lengths and repeats where thresholds are."""
    at = np.isin(lengths, grid)
    copy, control = world.repeats(4, lengths, rng)

    def found() -> stats.Curve:
        return curve(lengths[at], copy[:, at], control[:, at])

    while refine:
        brackets = [stats.bracket(found(), name) for name in ("fine", "half_life", "reach")]
        wide = [b for b in brackets if b is not None and b[1] - b[0] > lengths[-1] / 32]
        new = {int(lengths[np.abs(lengths - (low + high) / 2).argmin()]) for low, high in wide} - set(lengths[at])
        if not new:
            break
        at |= np.isin(lengths, list(new))
    while len(copy) < MOST:
        summary, more = stats.summarise(found(), bootstraps=400, seed=int(rng.integers(1 << 30))), set()
        for name in ("half_life", "reach"):
            length, bracket = getattr(summary, name), stats.bracket(found(), name)
            if bracket is not None and length.high - length.low > max(lengths[-1] / 32, 0.05 * length.value):
                more |= set(bracket)
        if not more:
            break
        fresh = world.repeats(4, lengths, rng)
        for half in fresh:
            half[:, ~np.isin(lengths, list(more))] = np.nan
        copy, control = np.concatenate([copy, fresh[0]]), np.concatenate([control, fresh[1]])
    return found()


def before(one: stats.Curve, rng: np.random.Generator) -> dict[str, tuple[float, float]]:
    """Percentiles of the numbers of 400 resamples, moved away from the value as few repeats ask."""
    n = len(one.copy)
    draws = rng.integers(0, n, (400, n))
    wider = student.ppf(0.975, n - 1) / student.ppf(0.975, np.inf) * np.sqrt(n / (n - 1))
    samples = stats._headlines(one, one.copy[draws].mean(1), one.control[draws].mean(1))
    result = {}
    for name, (value, _) in stats.headline(one).items():
        low, high = np.quantile(samples[name][0], [0.025, 0.975])
        result[name] = value - wider * (value - low), value + wider * (high - value)
    return result


def coverage(world: World, design: int | str, trials: int) -> dict[str, dict[str, float]]:
    """Share of intervals that hold the truth, by number; their mean width; and the same of what was used before."""
    rng = np.random.default_rng([trials, sum(map(ord, str(design)))])
    lengths = EVERY if design == "adaptive lengths" else GRID
    C, M = world.truth(lengths)
    hits, widths, old = (dict.fromkeys(NUMBERS, 0.0) for _ in range(3))
    repeats = 0.0
    for _ in range(trials):
        if isinstance(design, int):
            one = curve(GRID, *world.repeats(design, GRID, rng))
        else:
            refine = design == "adaptive lengths"
            one = adaptive(world, COARSE_GRID if refine else GRID.tolist(), lengths, rng, refine=refine)
        at = np.isin(lengths, one.lengths)
        truth = stats.headline(curve(one.lengths, C[:, at], M[:, at]))
        summary = stats.summarise(one, bootstraps=400, seed=int(rng.integers(1 << 30)))
        percentiles = before(one, rng) if isinstance(design, int) else {}
        repeats += len(one.copy) / trials
        for name in NUMBERS:
            length, true = getattr(summary, name), truth[name][0]
            hits[name] += (length.low <= true and (true <= length.high or length.interval_censored)) / trials
            widths[name] += (length.high - length.low) / trials
            if percentiles:
                old[name] += (percentiles[name][0] <= true <= percentiles[name][1]) / trials
    return {"coverage": hits, "width": widths, "repeats": {"most": repeats}} | (
        {"before": old} if isinstance(design, int) else {}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="60 trials, fewer designs")
    parser.add_argument("--check", action="store_true", help="fail when a coverage is out of bounds")
    options = parser.parse_args()
    trials = 60 if options.quick else 1000
    designs: tuple[int | str, ...] = (4, 5, 10, 30, "adaptive repeats", "adaptive lengths")
    if options.quick:
        designs = (4, 10, "adaptive repeats")
    figures: dict[str, Any] = {"trials": trials}
    missed = []
    print(f"{'':22}{'repeats':>18}" + "".join(f"{name:>22}" for name in NUMBERS) + "   coverage % (before), mean width")
    for name, world in worlds().items():
        for design in designs:
            found = coverage(world, design, trials)
            figures[f"{name}, {design}"] = {
                what: {number: round(value, 3) for number, value in by.items()} for what, by in found.items()
            }
            cells = []
            for number in NUMBERS:
                share = found["coverage"][number]
                was = f"({100 * found['before'][number]:.0f}) " if "before" in found else ""
                cells.append(f"{100 * share:.1f} {was}{found['width'][number]:,.0f}")
                low, high = BOUNDS[number]
                chance = 3 * np.sqrt(0.05 * 0.95 / trials) if options.quick else 0.0
                if not low - chance <= share <= high + chance:
                    missed.append(f"{name}, {design}: {number} {share:.1%}")
            print(f"{name:22}{design!s:>18}" + "".join(f"{cell:>22}" for cell in cells), flush=True)
    end(figures | {"missed": missed}, missed, options.check)


if __name__ == "__main__":
    main()
