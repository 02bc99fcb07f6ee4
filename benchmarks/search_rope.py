"""Does a search of RoPE frequencies by memory give the embedded model a longer half-life than untrained YaRN?

    python benchmarks/search_rope.py [--shape yarn] [--factor 4] [--max-nats 0.05] [--against FACTOR ...]
        [--out runs/search_rope] [--quick] [--check]

`RopeSearch` measures 200 candidates on texts of `builtin:train` and keeps the one with the highest memory index that
costs at most `--max-nats` per token inside the window. The factors found, untrained YaRN of the same factor and the
model's own RoPE are then measured on texts of `builtin:held-out`: memory lengths over lengths up to a whole context of
`factor` windows (probe of 32 + 96 tokens), and nats per token on windows of the trained length. Differences are paired
by text; those to untrained YaRN of the factors `--against` are printed as well.
Judged with --check: the CPU time of the search, and that the difference of the half-lives is significant. Resumable;
the CPU seconds of all sessions are added. Last line: the figures as JSON.
"""

import time
from pathlib import Path

import numpy as np
from common import end, interval, parser_of, run_script

from farspan import load, measure
from farspan.files import write
from farspan.measuring.loop import Watch
from farspan.measuring.search import RopeSearch
from farspan.methods import method
from farspan.report.search import draw_search
from farspan.stats.forgetting_curves import MeasuredCurve, curve, memory_index
from farspan.stats.memory_lengths import summarise
from farspan.stats.run_differences import Difference, differences
from farspan.tasks.curve import Curve

SECONDS = 20 * 60  # CPU time of 200 evaluations
LENGTHS = (64, 128, 256, 382, 512, 638, 766, 894, 1150, 1406, 1662, 1918)
PROBE = Curve("probe", warmup=32, scored=96)


class Clock:
    """CPU seconds of all sessions, in a file that survives a kill."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.before = float(file.read_text()) if file.exists() else 0.0
        self.started = time.process_time()

    @property
    def seconds(self) -> float:
        return self.before + time.process_time() - self.started

    def watch(self) -> Watch:
        """Return what writes the seconds with each row, and prints the lines of the search."""

        def row(*_: object) -> None:
            write(self.file, f"{self.seconds:.1f}")

        return Watch(row=row, notice=lambda line: print(line, flush=True))


def print_differences(how: str, yarn: MeasuredCurve, searched: MeasuredCurve) -> dict[str, Difference]:
    """Print the differences of the memory lengths, and return them by name."""
    print(f"differences to {how}:")
    found = differences(yarn, searched, names=("yarn", "searched"))
    for one in found:
        of_both = f"{one.values[0]:,.0f} -> {one.values[1]:,.0f}"
        print(f"{one.name}: {of_both}, {one.known} {one.interval}, p {one.p}")
    return {one.name: one for one in found}


def main() -> None:
    parser = parser_of(__doc__, "5 evaluations on 2 texts, 4 held-out texts")
    parser.add_argument("--shape", default="yarn")
    parser.add_argument("--factor", type=float, default=4.0)
    parser.add_argument("--max-nats", type=float, default=0.05, help="the bound inside the window")
    parser.add_argument("--against", type=float, nargs="*", default=[], help="factors of untrained YaRN, besides")
    parser.add_argument("--search-texts", type=int, default=4)
    parser.add_argument("--texts", type=int, default=24, help="held-out texts")
    parser.add_argument("--evaluations", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("runs/search_rope"))
    options = parser.parse_args()
    evaluations, search_texts, texts = options.evaluations, options.search_texts, options.texts
    if options.quick:
        evaluations, search_texts, texts = 5, 2, 4
    options.out.mkdir(parents=True, exist_ok=True)
    lm, clock = load("demo"), Clock(options.out / "cpu_seconds")
    shape = {"shape": options.shape, "factor": options.factor, "max_nats": options.max_nats}
    search = RopeSearch(**shape, evaluations=evaluations, repeats=search_texts, out=options.out / "search")
    found = search.run(lm, watch=clock.watch())
    seconds = clock.seconds
    draw_search(found)
    if found.best is None:
        raise SystemExit("no candidate keeps the bound")
    print(f"untrained YaRN: {found.yarn}\nbest, evaluation {found.best.number}: {found.best}", flush=True)

    yarn, *others = (str(method(f"rope:type=yarn,factor={one}")) for one in (options.factor, *options.against))
    searched = str(method(f"rope:type=factors,file={found.file}"))
    methods = ["full", yarn, searched, *others]
    held_out = {"text": "builtin:held-out", "repeats": texts}
    largest = options.factor * 512 - 130
    lengths = [n for n in (*LENGTHS, *(2 * n for n in LENGTHS if 2 * n > LENGTHS[-1])) if n <= largest]
    rows = measure([lm], methods, [PROBE], lengths=sorted(set(lengths)), out=options.out / "curve", **held_out).rows
    inside = measure([lm], methods, ["perplexity:targets=all"], lengths=[512], out=options.out / "nats", **held_out)
    curves = {how: curve([row for row in rows if row.method == how]) for how in methods}
    nats = {how: np.array([row.scores["nats"] for row in inside.rows if row.method == how]) for how in methods}
    for how in methods:
        numbers = summarise(curves[how])
        index = " ".join(f"{value:.3f}" for value in memory_index(curves[how]))
        print(f"{how}\n  half-life {numbers.half_life}, reach {numbers.reach}, span {numbers.span}\n  m {index}")
    print("lengths", *curves["full"].lengths)
    figures: dict[str, float | int | None] = {
        "cpu_seconds_of_the_search": seconds,
        "evaluations": len(found.tried),
        "best": found.best.number,
    }
    for how in methods[1:]:
        mean, low, high = interval(nats[how] - nats["full"])
        print(f"{how}: nats inside the window {mean:+.4f} ± {(high - low) / 2:.4f} to the model's own RoPE")
    for how in others:
        print_differences(how, curves[how], curves[searched])
    judged = print_differences(yarn, curves[yarn], curves[searched])
    figures |= {f"{name}_difference": one.value for name, one in judged.items()}
    half_life = judged["half_life"]
    figures |= {"half_life_p": half_life.p, "extra_nats": float((nats[searched] - nats["full"]).mean())}
    missed = []
    if not options.quick:
        if seconds > SECONDS:
            missed.append(f"the search took {seconds:,.0f} CPU seconds, bound {SECONDS:,}")
        if half_life.value <= 0 or half_life.p is None or half_life.p >= 0.05:
            missed.append(f"half-life {half_life.value:+,.0f} tokens, p = {half_life.p}")
    end(figures, missed, options.check)


if __name__ == "__main__":
    run_script(main)
