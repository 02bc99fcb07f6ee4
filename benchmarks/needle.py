"""What all needles cost on a real model to a length of 8,192 tokens, and how many it finds at which depth.

    python benchmarks/needle.py MODEL [--text FOLDER] [--lengths 2048 4096 8192] [--repeats 2] [--out FOLDER] [--check]
    python benchmarks/needle.py MODEL --ask generated
    python benchmarks/needle.py demo --quick

The four kinds of the task `needle`, forced, at five depths of each length (--quick: 1,024 and 2,048 tokens). All depths
of a length share one reading. `--ask generated` measures greedy generation, with the model's chat template.
In bfloat16, on one thread; CPU seconds of the whole measurement without loading. --check judges those of the forced
kinds. Last line: the figures as JSON.
"""

import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import end, parser_of, run_script

from farspan import load, measure
from farspan.measuring.plan import plan
from farspan.methods import method
from farspan.tasks import task
from farspan.tasks.needle import DEPTHS, KINDS, WAYS

BOUND = 600.0  # CPU seconds of all forced cells
BOOKS = Path(__file__).resolve().parents[2] / "shared" / "data" / "books"


def main() -> None:
    parser = parser_of(__doc__, "shorter lengths")
    parser.add_argument("model")
    parser.add_argument("--text", default=str(BOOKS) if BOOKS.is_dir() else "builtin")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192], help="tokens")
    parser.add_argument("--ask", nargs="+", choices=WAYS, default=["forced"])
    parser.add_argument("--out", type=Path, help="folder for rows and pictures; default a temporary one")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lm = load(options.model, dtype="bfloat16")
    lengths = [1024, 2048] if options.quick else options.lengths
    figures: dict[str, Any] = {"repeats": options.repeats, "cells": len(KINDS) * len(lengths) * len(DEPTHS)}
    out = options.out or Path(tempfile.mkdtemp())
    for ask in options.ask:
        total = 0.0
        for kind in KINDS:
            spec = f"needle:kind={kind},ask={ask}"
            started, begun = time.process_time(), time.perf_counter()
            folder = out / f"{ask}-{kind}"
            how: dict[str, Any] = {"lengths": lengths, "repeats": options.repeats}
            rows = measure([lm], ["full"], [spec], text=options.text, out=folder, **how).rows
            seconds, wall = time.process_time() - started, time.perf_counter() - begun
            total += seconds
            print(f"{spec}: {len(rows)} rows, {seconds:.0f} CPU seconds, {wall:.0f} seconds")
            for depth in DEPTHS:
                here = [[row for row in rows if (row.length, row.depth) == (n, depth)] for n in lengths]
                means = ["{:.2f}".format(sum(row.scores["right"] for row in cell) / len(cell)) for cell in here]
                print(f"  depth {depth:<5g} {'  '.join(means)}")
            flops = [
                plan(task(f"{spec},together={alike}").on(lm, options.text), method("full"), lm, **how).flops
                for alike in ("true", "false")
            ]
            figures |= {f"{ask}_{kind}_seconds": seconds, f"{ask}_{kind}_without_sharing": flops[1] / flops[0]}
            found = [row.scores["right"] for row in rows if row.length == lengths[-1]]
            figures[f"{ask}_{kind}_right"] = sum(found) / len(found)
        figures[f"{ask}_seconds"] = total
    taken = figures.get("forced_seconds", math.inf)  # not measured: not met
    end(
        figures,
        [f"all forced cells take {taken:.0f} CPU seconds, allowed {BOUND:.0f}"] * (taken > BOUND),
        options.check,
    )


if __name__ == "__main__":
    run_script(main)
