"""How often the 95 % intervals of memory lengths hold the truth, in simulations where the truth is known.

    python benchmarks/interval_coverage.py [--differences] [--quick] [--check]

The truth is that of the continuous curve: where the mean accuracy of all texts, as a function of every length, falls to
the threshold. It does not depend on the lengths that a design measures. A repeat r of a curve at length L, with memory
index m and control M of the world:

    control_r = M + e_r + small noise             e_r ~ N(0, text), common to all lengths and both halves of a target
    copy_r    = m_r(L) + (1 - m_r) control_r + noise      m_r: of the text, defined by the world; noise of each length

Worlds: steep, cliff, shallow, noisy, texts that differ (in control, in where their memory ends, in whether they are
remembered at all), a curve in two steps, jagged curves (a fixed random zigzag of the memory index, so that the curve
between two lengths is not a line), one that needs warm-up, plateaus just above or below a threshold, the published
curve of Llama-3-8B, and models without any memory. Noise has a standard deviation of 0.017 in accuracy (of the gap
in the published data), where the world has no other.

Designs: 8, 16 and 32 lengths with 4, 10 and 32 repeats; 16 lengths of which every fourth has 2 repeats, the others 6
and 10; and `--lengths auto`, by the functions of farspan.measuring.adaptive.
With --check the script fails where fewer than 90 % of the intervals of fine, coarse, half-life or reach hold the truth,
or where, without memory, fewer than 90 % of fine, coarse, half-life, reach, span, paper fine and paper coarse are 0
or have an interval that holds 0. The bound is the same for all. Last line: the figures as JSON.

With --differences: intervals of differences between two curves of the same texts, of pairs of worlds. --check then also
fails where more than 10 % of equal memory lengths are called different (p < 0.05).
"""

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from common import end, parser_of, run_script
from scipy.optimize import isotonic_regression

from farspan import stats
from farspan.lengths import spaced_lengths
from farspan.measuring.adaptive import coarse_lengths, end_of_amnesia, finer_lengths, undecided

PUBLISHED = Path(__file__).parent.parent / "tests" / "data" / "llama3_8b_forgetting_curve.json"
LONGEST = 16_384
EVERY = np.arange(16, LONGEST + 1, 16)  # lengths that stand for the continuous curve
POPULATION = 8_000  # texts whose mean is the truth
NUMBERS = stats.CROSSINGS
WITHOUT_MEMORY = ("fine", "coarse", "half_life", "reach", "span", "paper_fine", "paper_coarse")
BOUND = 0.90
EQUAL = 1.0  # tokens; the truths of two worlds that differ by no more are equal
GRIDS = (8, 16, 32)
REPEATS = (4, 10, 32)
UNEVEN = ((16, 6, 2), (16, 10, 2))
MOST = 32
BOOTSTRAPS = 400

Index = Callable[[np.ndarray, np.ndarray], np.ndarray]  # lengths [lengths], random numbers of texts [texts, 2] -> index


@dataclass(frozen=True)
class World:
    """What is true of a model and its texts."""

    index: Index
    control: float | Callable[[np.ndarray], np.ndarray] = 0.45
    text: float = 0.05  # standard deviation of the control between texts
    noise: float = 0.017  # of the copy half, at an accuracy of 0.5
    fading: bool = True  # noise vanishes towards an accuracy of 0 and 1
    remembers: bool = True
    least_repeats: int = 2  # fewer are simulated but not judged: see `worlds`

    def texts(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Random numbers of texts: one of the control, two of the memory."""
        return rng.standard_normal((count, 3))

    def measured(
        self, texts: np.ndarray, lengths: np.ndarray, rng: np.random.Generator, noise: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """Copy and control, texts x lengths."""
        level = self.control(lengths) if callable(self.control) else np.full(len(lengths), self.control)
        spread = self.text * texts[:, :1] * np.sqrt(4 * level * (1 - level))
        shape = (len(texts), len(lengths))
        control = np.clip(level + spread + (rng.normal(0, 0.005, shape) if noise else 0.0), 0.01, 0.95)
        m = self.index(lengths, texts[:, 1:])
        copy = m + (1 - m) * control
        sigma = self.noise * (np.sqrt(4 * copy * (1 - copy)) if self.fading else 1.0)
        return np.clip(copy + sigma * rng.standard_normal(shape), 0, 1), control

    @cached_property
    def truth(self) -> dict[str, tuple[float, bool]]:
        """Memory lengths of the continuous curve, and whether they are beyond the longest length."""
        if not self.remembers:
            return dict.fromkeys(NUMBERS, (0.0, False))
        rng = np.random.default_rng(0)
        sums = np.zeros((2, len(EVERY)))
        for _ in range(POPULATION // 500):
            sums += [half.sum(0) for half in self.measured(self.texts(500, rng), EVERY, rng)]
        copy, control = sums[:, None] / (POPULATION // 500 * 500)
        found = stats.headline(curve(EVERY, copy, control))
        return {name: found[name] for name in NUMBERS}


def falling(middle: float, scale: float, differ: float = 0.0) -> Index:
    """`differ`: tokens; standard deviation between texts of where their memory ends."""
    return lambda L, text: 1 / (1 + np.exp(np.clip((L - middle - differ * text[:, :1]) / scale, -500, 500)))


def jagged(base: Index, height: float, step: int, seed: int) -> Index:
    """Times a zigzag between knots `step` tokens apart, the same for all texts."""
    knots = np.arange(0, LONGEST + 2 * step, step)
    zigzag = 1 - height * np.abs(np.random.default_rng(seed).standard_normal(len(knots)))
    return lambda L, text: np.clip(base(L, text) * np.interp(L, knots, zigzag), 0, 1)


def mixed(one: Index, other: Index, share: float) -> Index:
    """Texts of two kinds; `share` of the first."""
    return lambda L, text: np.where(text[:, 1:2] < np.quantile(NORMAL, share), one(L, text), other(L, text))


NORMAL = np.random.default_rng(1).standard_normal(200_000)


def steps(*parts: tuple[int, float]) -> Index:
    """Plateaus: the index up to a length; 0 after the last. Falls within 40 tokens."""
    ends, levels = zip(*parts, strict=True)
    at = [0, *(x for end in ends for x in (end - 20, end + 20)), LONGEST * 2]
    values = [levels[0], *(v for a, b in zip(levels, (*levels[1:], 0.0), strict=True) for v in (a, b)), 0.0]
    return lambda L, text: np.broadcast_to(np.interp(L, at, values), (len(text), len(L)))


def warming(base: Index, tokens: float) -> Index:
    return lambda L, text: base(L, text) * (1 - 0.7 * np.exp(-L / tokens))


def published() -> tuple[Index, Callable[[np.ndarray], np.ndarray]]:
    """The means of the Llama-3-8B file; nothing is remembered from 7,230 tokens on."""
    points = json.loads(PUBLISHED.read_text())
    lengths = np.array([point["length"] for point in points])
    copy, control = (np.array([np.mean(point[half]) for point in points]) for half in ("copy_accs", "lm_accs"))
    control[0], copy[0] = control[1], copy[1]  # of 8 tokens 4 are scored
    index = isotonic_regression((copy - control) / (1 - control), increasing=False).x * (lengths < 7000)
    return (
        lambda L, text: np.broadcast_to(np.interp(L, lengths, index), (len(text), len(L))),
        lambda L: np.interp(L, lengths, control),
    )


def nothing(L: np.ndarray, text: np.ndarray) -> np.ndarray:
    return np.zeros((len(text), len(L)))


def worlds() -> dict[str, World]:
    usual = falling(5086, 291)
    index, control = published()
    return {
        "steep": World(falling(5086, 60)),
        "cliff": World(falling(5300, 4)),
        "shallow": World(falling(6000, 1200)),
        "constant noise": World(usual, fading=False),
        "noisy": World(usual, noise=0.08),
        "shallow, noisy": World(falling(6000, 1200), noise=0.08),
        "texts differ": World(falling(5086, 291, 200), text=0.15),
        "texts differ much": World(falling(6000, 400, 1500), 0.4, text=0.2),
        "control differs much": World(falling(5086, 900), text=0.35),
        # 0.7^4 = 24 % of the runs with 4 repeats hold no text of the first kind, so no method can be right in 90 %
        "two kinds of texts": World(mixed(falling(2500, 100), falling(9000, 300), 0.3), least_repeats=10),
        "two steps": World(steps((3100, 0.8), (9700, 0.3)), 0.2),
        "jagged": World(jagged(usual, 0.03, 150, 0)),
        "shallow, jagged": World(jagged(falling(6000, 1200), 0.06, 150, 1), noise=0.03),
        "jagged, coarsely": World(jagged(falling(5086, 600), 0.1, 700, 2)),
        "warm-up": World(warming(falling(4000, 150), 150)),
        "plateau above fine": World(steps((5100, 0.992)), 0.3, noise=0.03),
        "plateau below fine": World(steps((5100, 0.978)), 0.3, noise=0.03),
        "plateau above coarse": World(steps((5100, 0.9), (11_000, 0.04)), 0.3, noise=0.03),
        "published": World(index, control),
        "no memory, noise 0.02": World(nothing, noise=0.02, fading=False, remembers=False),
        "no memory, noise 0.035": World(nothing, 0.2, noise=0.035, fading=False, remembers=False),
        "no memory, noise 0.05": World(nothing, noise=0.05, fading=False, remembers=False),
        "no memory, texts differ": World(nothing, text=0.25, noise=0.05, remembers=False),
    }


def pairs() -> dict[str, tuple[World, World]]:
    usual, steep = World(falling(5086, 291)), World(falling(5086, 60))
    early, late = (World(falling(middle, 291, 200), text=0.15) for middle in (5086, 7000))
    return {
        "the same": (usual, usual),
        "one half-life, steep and shallow": (steep, World(falling(5086, 1200))),
        "one half-life, usual and shallow": (usual, World(falling(5086, 1200))),
        "steep, 314 tokens apart": (steep, World(falling(5400, 60))),
        "steep, 2,514 tokens apart": (steep, World(falling(7600, 60))),
        "usual, 3,914 tokens apart": (usual, World(falling(9000, 291))),
        "steep and shallow": (steep, World(falling(6000, 1200))),
        "texts differ": (early, late),
        "usual and jagged": (usual, World(jagged(falling(5086, 600), 0.1, 700, 2))),
    }


def curve(lengths: np.ndarray, copy: np.ndarray, control: np.ndarray) -> stats.MeasuredCurve:
    targets = np.repeat([[f"text {repeat}"] for repeat in range(len(copy))], len(lengths), 1)
    return stats.MeasuredCurve(lengths, lengths // 2, copy, control, {}, 2 * lengths, targets)


def fixed(world: World, design: tuple[int, ...], rng: np.random.Generator) -> stats.MeasuredCurve:
    """A curve of lengths and repeats, of which every fourth length has only so many as the design's third number."""
    points, repeats, *few = design
    lengths = np.array(spaced_lengths(LONGEST // points, LONGEST, points))
    halves = world.measured(world.texts(repeats, rng), lengths, rng)
    for half in halves if few else ():
        half[few[0] :, 1::4] = np.nan
    return curve(lengths, *halves)


def automatic(world: World, rng: np.random.Generator) -> stats.MeasuredCurve:
    """A curve as `--lengths auto` measures it."""
    texts = world.texts(MOST, rng)
    cells: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # length -> copy and control of all texts, NaN: not measured

    def measure(lengths: tuple[int, ...], repeats: int) -> None:
        new = world.measured(texts, np.array(lengths), rng)
        for column, length in enumerate(lengths):
            old = cells.setdefault(length, (np.full(MOST, np.nan), np.full(MOST, np.nan)))
            for half, values in zip(old, new, strict=True):
                missing = np.isnan(half[:repeats])
                half[:repeats][missing] = values[:repeats, column][missing]

    def found() -> stats.MeasuredCurve:
        lengths = sorted(cells)
        copy, control = (np.stack([cells[length][half] for length in lengths], 1) for half in (0, 1))
        some = np.isfinite(copy).any(1)
        return curve(np.array(lengths), copy[some], control[some])

    repeats = 4
    for length in coarse_lengths(LONGEST):
        measure((length,), repeats)
        if end_of_amnesia(found()):
            break
    while new := finer_lengths(found(), LONGEST):
        measure(new, repeats)
    while repeats < MOST and (more := undecided(found(), LONGEST, MOST)[0]):
        repeats += 4
        measure(more, repeats)
    return found()


def holds(length: stats.MemoryLength, truth: tuple[float, bool]) -> bool:
    true, beyond = truth
    if length.low is None or length.high is None:
        return length.value == true
    return length.low <= true and (length.interval_censored or (true <= length.high and not beyond))


def coverage(world: World, design: tuple[int, ...] | str, trials: int) -> dict[str, Any]:
    """Share of intervals that hold the truth and their median width, by number."""
    rng = np.random.default_rng([trials, sum(map(ord, str(design)))])
    names = NUMBERS if world.remembers else WITHOUT_MEMORY
    held, widths = (dict[str, list[float]]((name, []) for name in names) for _ in range(2))
    tokens = 0.0
    for _ in range(trials):
        one = automatic(world, rng) if isinstance(design, str) else fixed(world, design, rng)
        summary = stats.summarise(one, bootstraps=BOOTSTRAPS, seed=int(rng.integers(1 << 30)))
        tokens += float((np.isfinite(one.copy).sum(0) * one.lengths).sum()) / trials
        for name in names:
            length: stats.MemoryLength = getattr(summary, name)
            held[name].append(holds(length, world.truth.get(name, (0.0, False))))
            if length.low is not None and length.high is not None:
                widths[name].append((LONGEST if length.interval_censored else length.high) - length.low)
    return {
        "coverage": {name: round(float(np.mean(found)), 3) for name, found in held.items()},
        "width": {name: round(float(np.median(found))) if found else 0 for name, found in widths.items()},
        "tokens": round(tokens),
    }


def differences(worlds: tuple[World, World], points: int, repeats: int, trials: int) -> dict[str, Any]:
    """Share of intervals of a difference that hold the truth, their median width, and the share of p < 0.05, by number;
    unbounded intervals have no width."""
    rng = np.random.default_rng([trials, points, repeats])
    lengths = np.array(spaced_lengths(LONGEST // points, LONGEST, points))
    truth = {name: worlds[1].truth[name][0] - worlds[0].truth[name][0] for name in NUMBERS}
    found: dict[str, list[tuple[bool, float, bool]]] = {}
    for _ in range(trials):
        texts = worlds[0].texts(repeats, rng)
        both = [curve(lengths, *one.measured(texts, lengths, rng)) for one in worlds]
        for one in stats.differences(*both, bootstraps=BOOTSTRAPS, seed=int(rng.integers(1 << 30))):
            if one.name in truth:
                low, high = -np.inf if one.low is None else one.low, np.inf if one.high is None else one.high
                held = low <= truth[one.name] <= high
                found.setdefault(one.name, []).append((held, high - low, one.p is not None and one.p < 0.05))
    by_name = {name: [np.array(part) for part in zip(*each, strict=True)] for name, each in found.items()}
    return {
        "truth": {name: round(truth[name], 1) for name in by_name},
        "coverage": {name: round(float(held.mean()), 3) for name, (held, _, _) in by_name.items()},
        "width": {name: round(float(np.median(w[np.isfinite(w)]))) for name, (_, w, _) in by_name.items()},
        "different": {name: round(float(shown.mean()), 3) for name, (_, _, shown) in by_name.items()},
    }


def judge_differences(trials: int, quick: bool) -> tuple[dict[str, Any], list[str]]:
    """Simulate all pairs, and print a line for each design; return the figures and what misses a bound."""
    chance = 3 * np.sqrt(BOUND * (1 - BOUND) / trials) if quick else 0.0  # as in `judge_lengths`
    figures, missed = dict[str, Any](), list[str]()
    for name, worlds in pairs().items():
        for points, repeats in [(16, 4)] if quick else [(points, repeats) for points in GRIDS for repeats in REPEATS]:
            which = f"{name}, {points} x {repeats}"
            found = figures[which] = differences(worlds, points, repeats, trials)
            cells = (
                f"{number} {100 * held:5.1f} {found['width'][number]:6,} {found['different'][number]:5.3f}"
                for number, held in found["coverage"].items()
            )
            print(f"{which:45}" + "   ".join(cells), flush=True)
            for number, held in found["coverage"].items():
                if held < BOUND - chance:
                    missed.append(f"{which}: {number} {held:.1%}")
                if abs(found["truth"][number]) <= EQUAL and found["different"][number] > 1 - BOUND + chance:
                    missed.append(f"{which}: {number} called different in {found['different'][number]:.1%}")
    return figures, missed


def judge_lengths(trials: int, quick: bool, only: str) -> tuple[dict[str, Any], list[str]]:
    """As `judge_differences`, of single curves of the worlds whose name contains `only`."""
    grids = [(points, repeats) for points in GRIDS for repeats in REPEATS]
    designs: list[tuple[int, ...] | str] = [(16, 4), "auto"] if quick else [*grids, *UNEVEN, "auto"]
    # so few trials cannot tell 0.95 from 0.90: three standard deviations of chance are allowed
    least = BOUND - (3 * np.sqrt(BOUND * (1 - BOUND) / trials) if quick else 0.0)
    figures, missed = dict[str, Any](), list[str]()
    for name, world in worlds().items():
        if only not in name:
            continue
        truth = {number: f"{'>' if beyond else ''}{value:,.0f}" for number, (value, beyond) in world.truth.items()}
        print(f"{name}: {truth}", flush=True)
        for design in designs:
            found = coverage(world, design, trials)
            said = design if isinstance(design, str) else " x ".join(map(str, design[:2])) + ", 2" * (len(design) > 2)
            figures[f"{name}, {said}"] = found
            print(
                f"  {said:10}"
                + "".join(f"{n:>13} {100 * c:5.1f} {found['width'][n]:6,}" for n, c in found["coverage"].items()),
                flush=True,
            )
            if (4 if isinstance(design, str) else design[1]) >= world.least_repeats:
                missed += [f"{name}, {said}: {n} {c:.1%}" for n, c in found["coverage"].items() if c < least]
    return figures, missed


def main() -> None:
    parser = parser_of(__doc__, "20 trials of some designs", "fail when a coverage is below 90 %%")
    parser.add_argument("--world", default="", help="only the worlds whose name contains this")
    parser.add_argument("--trials", type=int, help="measurements simulated of each world and design")
    parser.add_argument("--differences", action="store_true", help="of two curves, instead of single ones")
    options = parser.parse_args()
    trials = options.trials or (20 if options.quick else 200)
    cpu = time.process_time()
    if options.differences:
        figures, missed = judge_differences(trials, options.quick)
    else:
        figures, missed = judge_lengths(trials, options.quick, options.world)
    about = {"trials": trials, "python": platform.python_version(), "cpus": os.cpu_count()}
    end(about | figures | {"cpu_seconds": round(time.process_time() - cpu), "missed": missed}, missed, options.check)


if __name__ == "__main__":
    run_script(main)
