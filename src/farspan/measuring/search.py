"""Search the RoPE frequencies with which a model remembers most, with a bound on their cost inside its window.

    maximise   mean over lengths L of m(L), the memory index of the forgetting curve
    subject to nats(candidate) - nats(own RoPE) <= max_nats, per token on windows of the trained length

m is (C - M) / (1 - M) of `farspan.stats.forgetting_curves`, measured with protocol `probe`. A candidate is a point of
[0, 1]^n. All candidates, the model's own RoPE and untrained YaRN are measured on the same tokens. Two shapes:

`yarn`     n = 3: the two ends of YaRN's ramp (rotations in the trained length) and its attention scale, at its factor
           s. Every coordinate of YaRN itself is 0.5.
`factors`  n = K + 1: log λ at K pairs, evenly spaced from the first to the last, and the attention scale. λ of the
           pairs between is interpolated; it never falls from one pair to the next (as in LongRoPE, Ding et al. 2024,
           arXiv 2402.13753) and is between 1 and 2 s. K is at most 8: a search of some hundred evaluations cannot
           choose 32 or more factors one by one.

The optimiser is CMA-ES (package `cma`, extra `search`). It only uses the order of its values: candidates within the
bound come first, ordered by memory; the others follow, ordered by how far they exceed the bound (Deb 2000, An efficient
constraint handling method for genetic algorithms).

A search is a run: rows of each candidate under the method `rope:type=factors,file=OUT/candidates/NUMBER.json`. To
resume it, the optimiser is replayed from its seed with the rows measured so far.
"""

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from farspan import hf
from farspan.extras import optional_import
from farspan.files import expanded, read_json, write
from farspan.hf.attend import frequencies
from farspan.hf.training import set_aside
from farspan.lengths import check_lengths
from farspan.lm import LM
from farspan.measuring.loader import Load
from farspan.measuring.loop import Watch, measure_cell
from farspan.measuring.one_model import begin_model
from farspan.measuring.plan import Planned, check_timing, plan_alike, rows_so_far
from farspan.measuring.setups import Grid, Setup
from farspan.methods import Method, method
from farspan.methods.rope import BETA_FAST, BETA_SLOW, LARGEST_FACTOR, Rope, yarn, yarn_scale
from farspan.record import Row, Run, by_key, default_folder
from farspan.report.progress import LINE_EVERY
from farspan.report.search import Searched, Tried
from farspan.specs import check_known
from farspan.stats.forgetting_curves import curve, memory_index
from farspan.tasks.curve import BoundCurve, Curve
from farspan.tasks.perplexity import Perplexity

SHAPES = ("yarn", "factors")
NAME = "farspan search rope"
KNOTS = 8  # pairs whose factor is a coordinate of `factors`
SLOW = BETA_SLOW / 16, BETA_SLOW * 16  # rotations
RATIO = 1.0, float(BETA_FAST**2)  # ratio of the ramp's two ends; 32 in YaRN
SCALE = 1.5  # the attention scale is YaRN's, divided or multiplied by at most this
STEP = 0.15  # standard deviation of the first candidates around YaRN, in the unit cube
DIGITS = 7  # of the numbers in a file of factors
NOT_FINITE = 1e6  # loss of a candidate without finite numbers, above all others
BAD_NAME = ",+"  # separate the settings and parts of a method


@dataclass(frozen=True)
class Space:
    """The candidates of a model: points of [0, 1]^n, and the factors that they encode."""

    shape: str  # one of SHAPES
    theta: float
    pairs: int
    original: int  # tokens; the trained length
    factor: float  # s

    @property
    def start(self) -> Float[np.ndarray, "n"]:
        """The point of YaRN; for `factors`, the point with YaRN's factors at the knots."""
        if self.shape == "yarn":
            return np.full(3, 0.5)
        of_yarn = np.log(self._factors_of_yarn(BETA_FAST, BETA_SLOW))[self._knots] / self._largest
        return np.append(np.clip(of_yarn, 0.0, 1.0), 0.5)

    def parameters(self, point: Float[np.ndarray, "n"]) -> dict[str, Any]:
        """Return the content of a file of factors: `rope_parameters` of transformers' longrope."""
        if self.shape == "yarn":
            slow = _between(*SLOW, point[0])
            factors = self._factors_of_yarn(slow * _between(*RATIO, point[1]), slow)
        else:
            known = np.maximum.accumulate(point[:-1]) * self._largest
            factors = np.exp(np.interp(np.arange(self.pairs), self._knots, known))
        return self._file(factors, yarn_scale(self.factor) * _between(1 / SCALE, SCALE, point[-1]))

    def untrained(self) -> dict[str, Any]:
        """Return YaRN itself as the content of a file of factors."""
        return self._file(self._factors_of_yarn(BETA_FAST, BETA_SLOW), yarn_scale(self.factor))

    def _file(self, factors: np.ndarray, scale: float) -> dict[str, Any]:
        written = [_rounded(value) for value in factors]
        return {
            "rope_type": "longrope",
            "rope_theta": self.theta,
            "factor": self.factor,
            "original_max_position_embeddings": self.original,
            "attention_factor": _rounded(scale),
            "short_factor": written,  # used by transformers up to the trained length, by this method at all lengths
            "long_factor": written,
        }

    def _factors_of_yarn(self, fast: float, slow: float) -> Float[np.ndarray, "pairs"]:
        scaled = yarn(self.theta, 2 * self.pairs, self.factor, self.original, fast, slow)
        return (frequencies(self.theta, 2 * self.pairs).double() / scaled.double()).numpy()

    @property
    def _largest(self) -> float:
        """The logarithm of the largest factor."""
        return math.log(2 * self.factor)

    @cached_property
    def _knots(self) -> np.ndarray:
        return np.linspace(0, self.pairs - 1, min(KNOTS, self.pairs)).round().astype(int)


@dataclass(frozen=True, kw_only=True)
class RopeSearch:
    """A search of the RoPE of a model, with these settings.

    Raises:
        ValueError: settings that make no sense, or no package `cma`.
    """

    shape: str = "yarn"  # or "factors", see the module
    factor: float = 4.0  # YaRN's, for texts that many times as long as the trained length
    evaluations: int = 200  # candidates to measure, the model's own RoPE and YaRN not counted
    max_nats: float = 0.05  # the largest increase of nats per token on windows of the trained length
    text: str = "builtin:train"  # to predict and to copy; results on it are optimistic: confirm them on another text
    target_text: str | None = None  # to copy instead, such as "shuffled"
    # tokens, ascending; default: whole contexts of 1, 2, 4, ... trained lengths, up to `factor` of them
    lengths: Sequence[int] | None = None
    repeats: int = 8  # texts, at each length
    warmup: int | None = None  # tokens of a probe, as of `farspan.tasks.curve.Curve`
    scored: int | None = None
    seed: int = 0
    out: str | Path | None = None  # the run folder; default: one under runs/, the same for the same settings
    batch: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        check_known("shape", self.shape, SHAPES)
        if not (1 < self.factor <= LARGEST_FACTOR):
            raise ValueError(
                f"factor: got {self.factor:g}, expected more than 1, at most {LARGEST_FACTOR:,} (--factor)"
            )
        if self.evaluations < 1:
            raise ValueError(f"evaluations: got {self.evaluations}, expected at least 1 (--evaluations)")
        if not 0 <= self.max_nats < math.inf:
            raise ValueError(f"max_nats: got {self.max_nats:g}, expected nats per token, 0 or more (--max-nats)")
        if self.out is not None and set(BAD_NAME) & set(str(self.out)):
            raise ValueError(f"{self.out}: a method cannot name a file there: choose a folder without , and + (out)")
        if self.lengths is not None:
            check_lengths(self.lengths)
        optional_import("cma", "search")

    def run(self, model: str | LM, *, loader: Load | None = None, watch: Watch | None = None) -> Searched:
        """Search into the run folder. Repeating the call resumes a stopped search; with more evaluations it goes on.

        Args:
            watch: called with each row, and with a line for each better candidate and generation.

        Raises:
            ValueError: lengths inside the window only, a model without RoPE, with several or with a scaled one, a
                served model, a text too short, or a folder with another run.
            OSError: the disk is full.
        """
        lm, watch = (loader or Load()).to_measure(model), watch or Watch()
        space, what, folder, header = self._on(lm)
        with Run.open(folder, header) as run, set_aside(lm.model):
            setups = _pair(begin_model(lm, what, run, (), watch), lm, what)
            search = _Search(lm, run, space, setups, float(self.max_nats), self.seed, watch)
            return search.results(self.evaluations)

    def plan(
        self, model: str | LM, *, loader: Load | None = None, calibrate: bool = False, tflops: float | None = None
    ) -> list[Planned]:
        """Return the cost of `run`, of the memory and of the nats inside the window: at most, since the optimiser may
        converge before all evaluations.

        Args:
            calibrate, tflops: as of `farspan.measuring.grid.plans`.

        Raises:
            ValueError: as `run`; or both `calibrate` and `tflops`, or `tflops` that is not a positive number.
        """
        check_timing(calibrate, tflops)
        lm = (loader or Load())(model, weights=calibrate)
        _, what, folder, header = self._on(lm)
        rows = by_key(((row.model, row.method, row.measurement), row) for row in rows_so_far(folder, header))
        yarn = Rope("yarn", self.factor)
        measured = [method("full"), yarn, *(_candidate(folder, number + 1) for number in range(self.evaluations))]
        found = []
        for one in _pair(what.setups(lm, Watch()), lm, what):
            each = [rows.get((lm.name, str(how), one.bound.measurement), []) for how in measured]
            timed: dict[str, Any] = {"calibrate": calibrate, "tflops": tflops, **one.sizes(lm)}
            cost = plan_alike(one.bound, yarn, lm, one.examples(lm, self.seed), self.repeats, each, **timed)
            found.append(Planned(lm.name, NAME, one.what, None, cost))
        return found

    def _on(self, lm: LM) -> tuple[Space, Grid, Path, dict[str, Any]]:
        """Return the candidates of a model, what is measured of each, and the folder of the run with its settings."""
        if lm.own_reader() is not None:
            raise ValueError(f"{lm.name} runs on a server, whose RoPE cannot be changed: give its folder or hub id")
        theta, own = hf.plain_rope(lm.model, name=NAME)
        if lm.trained_length is None:
            raise ValueError(f"the config of {lm.name} has no trained length: give it (--trained-length TOKENS)")
        space = Space(self.shape, theta, len(own), lm.trained_length, float(self.factor))
        task = Curve("probe", self.warmup, self.scored, target_text=self.target_text)
        task = task.resolved(self.lengths or (int(self.factor * lm.trained_length),), (lm.trained_length,))
        chosen = tuple(self.lengths) if self.lengths else windows(task, lm, self.factor)
        task.check(chosen)
        tasks = task, Perplexity("all")
        how: dict[str, Any] = {"cost": False, "compared": False, "batch": self.batch, "chunk": self.chunk}
        what = Grid(tasks, self.text, chosen, self.repeats, self.seed, trained=(lm.trained_length,), **how)
        searched = {"shape": self.shape, "factor": float(self.factor), "max_nats": float(self.max_nats)}
        header = what.header | {"search": searched, "methods": [NAME]}
        folder = expanded(self.out) if self.out is not None else default_folder("search", [lm.name], header)
        return space, what, folder, header


def windows(task: Curve, lm: LM, factor: float) -> tuple[int, ...]:
    """Return the lengths whose whole contexts are 1, 2, 4, ... and last `factor` trained lengths."""
    bound, trained = replace(task, target_text=None).on(lm, "random"), lm.trained_length  # the same for every text
    assert isinstance(bound, BoundCurve)
    assert trained is not None
    whole = [trained << i for i in range(int(math.log2(factor)) + 1)]
    contexts = sorted({*whole, int(trained * factor)})
    return tuple(sorted({max(1, bound.largest_length(lm, context)) for context in contexts}))


def _pair(setups: Sequence[Setup], lm: LM, what: Grid) -> tuple[Setup, Setup]:
    """Return the setups of the memory and of the nats inside the window.

    Raises:
        ValueError: the longest text, with its copy, is no longer than the trained length.
    """
    memory, nats = setups
    assert memory.lengths is not None
    assert lm.trained_length is not None
    example = memory.examples(lm, what.seed)[0]
    context = memory.bound.num_tokens(lm, example, memory.lengths[-1])
    if context <= lm.trained_length:
        raise ValueError(
            f"lengths to {memory.lengths[-1]:,} tokens are inside the window: the longest context is {context:,} of "
            f"its {lm.trained_length:,} tokens. Give a length of {lm.trained_length:,} or more (--lengths)"
        )
    return memory, replace(nats, lengths=(lm.trained_length,))


def _place(folder: Path, number: int) -> Path:
    """Return the file of a candidate."""
    return folder / "candidates" / f"{number:04}.json"


def _candidate(folder: Path, number: int) -> Rope:
    return Rope("factors", file=str(_place(folder, number)))


@dataclass
class _Search:
    """A search of one model in an open run."""

    lm: LM
    run: Run
    space: Space
    setups: tuple[Setup, Setup]  # the memory, and the nats inside the window
    max_nats: float
    seed: int
    watch: Watch

    def results(self, evaluations: int) -> Searched:
        """Measure the missing rows, and write the factors of the best candidate."""
        own = self._measured(0, method("full"), None)
        if own.nats is None:
            raise ValueError(f"{self.lm.name} gives no finite numbers with its own RoPE: try --dtype float32")
        yarn = self._measured(0, Rope("yarn", self.space.factor), own.nats)
        self.watch.notice(f"untrained YaRN by {self.space.factor:g}: {yarn}")
        tried: list[Tried] = []
        best = yarn if yarn.within(self.max_nats) else None
        printed = time.monotonic()
        for one in self._candidates(own.nats, evaluations):
            tried.append(one)
            better = one.within(self.max_nats) and (best is None or one.memory > best.memory)
            best = one if better else best
            if better or time.monotonic() - printed > LINE_EVERY:
                printed = time.monotonic()
                self.watch.notice(f"evaluation {one.number}/{evaluations}: {one}{', the best so far' * better}")
        lengths = self.setups[0].lengths
        assert lengths is not None
        file = None if best is None else self._write(best)
        folder = self.run.folder
        return Searched(folder, self.space.shape, lengths, self.max_nats, own, yarn, tuple(tried), best, file)

    def _candidates(self, own_nats: float, evaluations: int) -> Iterator[Tried]:
        """Yield the candidates of the optimiser, measured."""
        optimiser = cma_es(self.space.start, self.seed)
        number = 0
        while not (why := optimiser.stop()):
            points, values = optimiser.ask(), []
            for point in points:
                if number == evaluations:
                    return
                number += 1
                self._write_candidate(number, point)
                one = self._measured(number, _candidate(self.run.folder, number), own_nats)
                values.append(loss(one, self.max_nats))
                yield one
            optimiser.tell(points, values)
        self.watch.notice(f"the optimiser has converged after {number:,} evaluations ({', '.join(why)})")

    def _write_candidate(self, number: int, point: np.ndarray) -> None:
        """Write the file of a candidate, if it does not exist."""
        file, wanted = _place(self.run.folder, number), self.space.parameters(point)
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            write(file, json.dumps(wanted) + "\n")
        held = read_json(file)
        same = isinstance(held, dict) and held.keys() == wanted.keys()
        # another processor may round differently
        if not same or not all(_alike(held[name], value) for name, value in wanted.items()):
            raise ValueError(
                f"{file} holds other factors than the optimiser proposes: it was edited, or written with another "
                "version of the package cma. Choose another folder (out)"
            )

    def _write(self, best: Tried) -> Path:
        """Write the factors of the best candidate, and return their file."""
        file = self.run.folder / "factors.json"
        parameters = read_json(_place(self.run.folder, best.number)) if best.number else self.space.untrained()
        write(file, json.dumps(parameters, indent=1) + "\n")
        return file

    def _measured(self, number: int, how: Method, own_nats: float | None) -> Tried:
        """Return a candidate with its numbers; rows of the run are not measured again."""
        memory, inside = (self._rows(one, how) for one in self.setups)
        for row in (*memory, *inside):
            if row.status not in ("ok", "nan"):
                raise ValueError(f"{how} at {row.length:,} tokens: {row.status}: {row.reason}. Repeat the command")
        if any(row.status == "nan" for row in (*memory, *inside)):
            return Tried(number, str(how), None, None, None)
        nats = float(np.mean([row.scores["nats"] for row in inside]))
        by_length = tuple(float(value) for value in memory_index(curve(memory)))
        return Tried(number, str(how), by_length, nats, nats - (nats if own_nats is None else own_nats))

    def _rows(self, one: Setup, how: Method) -> list[Row]:
        assert one.lengths is not None
        assert one.repeats is not None
        return measure_cell(
            one.bound,
            how,
            self.lm,
            self.run,
            lengths=one.lengths,
            repeats=one.repeats,
            seed=self.seed,
            watch=self.watch,
            **one.sizes(self.lm),
        )


def cma_es(start: np.ndarray, seed: int) -> Any:
    """Return CMA-ES in the unit cube. Its random numbers are its own: numpy's global generator is left alone."""
    cma, rng = optional_import("cma", "search"), np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape)

    quiet = {"verbose": -9, "verb_log": 0, "verb_disp": 0, "signals_filename": ""}
    return cma.CMAEvolutionStrategy(start, STEP, {"bounds": [0, 1], "randn": normal, "seed": np.nan, **quiet})


def loss(one: Tried, max_nats: float) -> float:
    """Return the value by which candidates are ordered: the negative memory index within the bound; beyond it a larger
    value, which grows with the nats beyond the bound."""
    if one.increase is None:
        return NOT_FINITE
    return -one.memory if one.within(max_nats) else min(1.0 + one.increase - max_nats, NOT_FINITE)


def _between(low: float, high: float, share: float) -> float:
    """Return the value at a share of the way from low to high, on a logarithmic scale."""
    return float(low * (high / low) ** share)


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _alike(held: Any, wanted: Any) -> bool:
    if isinstance(wanted, str):
        return bool(held == wanted)
    try:
        return bool(np.shape(held) == np.shape(wanted) and np.allclose(held, wanted, rtol=1e-4, atol=0))
    except (TypeError, ValueError):
        return False
