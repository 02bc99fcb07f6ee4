"""CPU seconds to resume and to report runs of 200,000 rows.

    python benchmarks/many_rows.py [--quick] [--check]

Two runs of the embedded model: `one`, a curve of 32 lengths and 6,250 repeats, and `many`, 200 curves (10 methods x 20
texts) of 25 lengths and 40 repeats. `farspan curve` writes them itself, with hits of random numbers in place of the
model's, since 200,000 examples would take the model hours. `resume` is the same command repeated: it finds every row,
measures nothing, and prints, draws and compares what the run holds. `report` is `farspan report`. Each is a process of
its own, and all of it counts: importing torch and transformers, loading the model, pictures. Texts are tokenised
before. `read` is `farspan.record.read_rows` alone. Last line: the figures as JSON. With --check the script fails where
resume or report take 60 CPU seconds or more, or where resume measured a row again.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import cpu_of, end, least, parser_of, run_script

BOUND = 60.0  # CPU seconds
MIDDLE = 0.4  # of the longest length: where half of what cannot be guessed is recalled
RUNS = {"one": (1, 1, 32, 16, 6250), "many": (20, 10, 25, 16, 40)}  # texts, methods, lengths, tokens between, repeats
QUICK = {"one": (1, 1, 32, 16, 312), "many": (2, 4, 25, 16, 40)}


def made_up(task: Any, reader: Any, batch: Sequence[Any]) -> Iterator[Any]:
    """In place of `farspan.tasks.curve.Curve.run`: what it yields, with random hits."""
    from farspan.tasks import Result

    for length in batch[0].lengths:
        for example in batch:
            rng = np.random.default_rng([int(example.id, 16), length])
            scored = task.slice_at(length, 0.0)[2]
            index = 1 / (1 + np.exp((length / example.lengths[-1] - MIDDLE) * 10))
            values: dict[str, Any] = {"scored": scored, "context": 2 * length + 2, "distance": length + 1}
            for name, share in (("copy", index + (1 - index) * 0.4), ("control", 0.4)):
                hits = rng.random(scored) < share
                values |= {name: float(hits.mean()), f"{name}_nats": float(rng.random())}
                values[f"{name}_hits"] = np.packbits(hits).tobytes().hex()
            values |= {"target": example.id, "control_repeat": example.payload.other_repeat}
            yield Result(example, length, 0.0, values, num_seen=length, num_kept=length)


def write_text(path: Path, tokens: int, seed: int) -> str:
    """A text of random words, with as many tokens or more."""
    letters = np.random.default_rng(seed).integers(ord("a"), ord("z") + 1, (tokens, 3)).astype(np.uint8)
    path.write_text(" ".join(bytes(word).decode() for word in letters))
    return str(path)


def seconds(*command: str) -> float:
    """CPU seconds of a process; what it prints goes to stderr."""
    return cpu_of([sys.executable, *command], stdout=sys.stderr, stderr=subprocess.DEVNULL)


def main() -> None:
    if sys.argv[1:2] == ["--write"]:
        from farspan.cli import app
        from farspan.tasks.curve import BoundCurve

        BoundCurve.run = made_up  # type: ignore[method-assign, assignment]
        app(sys.argv[2:])
        return
    parser = parser_of(__doc__, "a twentieth of the rows", "fail where resume or report take too long")
    given = parser.parse_args()
    from farspan.record import read_rows

    figures: dict[str, float] = {"cpus": os.cpu_count() or 0}
    missed = []
    with tempfile.TemporaryDirectory(dir=Path.home()) as place:
        folder = Path(place)
        os.environ["FARSPAN_CACHE"] = str(folder / "cache")
        for name, (texts, methods, points, step, repeats) in (QUICK if given.quick else RUNS).items():
            command = ["curve", "demo", "--lengths", f"{step}:{step * points}", "--points", str(points)]
            command += ["--repeats", str(repeats), "--out", str(folder / name)]
            for text in range(texts):
                command += ["--target-text", write_text(folder / f"{name}{text}.txt", repeats * step * points, text)]
            for window in range(methods):
                command += ["--method", f"sinks:window={64 + window}" if window else "full"]
            figures[f"{name}_write"] = seconds(__file__, "--write", *command, "--batch", "40")
            rows = len(read_rows(folder / name))
            figures[f"{name}_rows"] = rows
            figures[f"{name}_read"] = least(partial(read_rows, folder / name), 1)
            figures[f"{name}_resume"] = seconds("-m", "farspan", *command)
            figures[f"{name}_report"] = seconds(
                "-m", "farspan", "report", str(folder / name), "--out", str(folder / "r")
            )
            print({key: round(value, 1) for key, value in figures.items() if key.startswith(name)}, flush=True)
            if (now := len(read_rows(folder / name))) != rows or rows != texts * methods * points * repeats:
                missed.append(f"{name}: {rows:,} rows, and {now:,} after resuming")
            missed += [
                f"{name}_{what} {figures[f'{name}_{what}']:.0f} s"
                for what in ("resume", "report")
                if figures[f"{name}_{what}"] >= BOUND
            ]
    end(figures, missed, given.check)


if __name__ == "__main__":
    run_script(main)
