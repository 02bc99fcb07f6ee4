"""How far the time of a calibrated plan is from that of the run.

    python benchmarks/plan_accuracy.py [--model MODEL] [--dtype DTYPE] [--quick] [--check]

Plans and then measures forgetting curves (`nested` and `probe`) and perplexity, each with the default batch and chunk,
on one thread, and compares CPU seconds, of which other processes take none. The plan's own seconds are those of its
calibration. Last line: the figures as JSON.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import end, parser_of, run_script

LARGEST_ERROR = 0.25
LONGEST_PLAN = 20.0  # seconds


@dataclass(frozen=True)
class Case:
    task: str
    lengths: tuple[int, ...]
    repeats: int = 2
    method: str = "full"


QUICK = (
    Case("curve:protocol=nested", (64, 128, 256), 4),
    Case("curve:protocol=probe", (128, 256, 512), 4),
    Case("perplexity", (257, 512), 4),
    Case("curve:protocol=nested", (64, 128, 256), 4, "sinks:window=64"),
    Case("curve:protocol=probe", (512, 1024, 2048), 4, "replug:piece=128"),
    Case("curve:protocol=probe", (512, 1024, 2048), 4, "ape:piece=128"),
)
CASES = (
    Case("curve:protocol=nested", (512, 2048, 4096)),
    Case("curve:protocol=probe", (2048, 4096, 8192)),
    Case("perplexity", (2048, 8192)),
    Case("curve:protocol=nested", (512, 2048), method="sinks:window=1020"),
    Case("curve:protocol=probe", (2048, 4096), method="replug:piece=1024"),
)


def compared(lm: Any, case: Case) -> dict[str, float]:
    """CPU seconds of the run, those planned, and those that the plan took."""
    from farspan.measuring import calibration
    from farspan.measuring.loop import Watch, measure_cell
    from farspan.measuring.plan import plan
    from farspan.measuring.setups import grid
    from farspan.methods import method
    from farspan.record import Run

    calibration.clock = time.process_time
    how = method(case.method)
    what: dict[str, Any] = {"lengths": case.lengths, "repeats": case.repeats}
    (setup,) = grid([lm], [case.task], **what).setups(lm, Watch())
    plan(setup.bound, how, lm, **what)  # checks whether the model can be read in chunks, which a run does once
    started = time.process_time()
    cost = plan(setup.bound, how, lm, calibrate=True, **what)
    planning = time.process_time() - started
    assert cost.seconds is not None, "a calibrated plan has seconds"
    with tempfile.TemporaryDirectory() as folder, Run.open(Path(folder) / "run", {}) as run:
        started = time.process_time()
        measure_cell(setup.bound, how, lm, run, **what)
        seconds = time.process_time() - started
    return {"planned": cost.seconds, "seconds": seconds, "error": cost.seconds / seconds - 1, "planning": planning}


def main(given: Sequence[str] | None = None) -> None:
    parser = parser_of(
        __doc__, "short lengths, which the embedded model takes", "fail when an error is above a quarter"
    )
    parser.add_argument("--model", default="demo", help="folder, GGUF file or hub id; default the embedded model")
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args(given)

    import torch

    import farspan

    torch.set_num_threads(1)
    lm = farspan.load(options.model, dtype=options.dtype, device="cpu")
    figures, missed = {}, []
    for case in QUICK if options.quick else CASES:
        name = f"{case.task} {case.method} {','.join(map(str, case.lengths))}"
        figures[name] = found = compared(lm, case)
        print(
            f"{name:60} planned {found['planned']:8.2f}, took {found['seconds']:8.2f} CPU s: {found['error']:+.0%}, "
            f"planned in {found['planning']:.1f} s",
            flush=True,
        )
        missed += [f"{name}: {found['error']:+.0%}"] if abs(found["error"]) > LARGEST_ERROR else []
        missed += [f"{name}: planned in {found['planning']:.1f} s"] if found["planning"] > LONGEST_PLAN else []
    rounded = {name: {key: round(value, 3) for key, value in found.items()} for name, found in figures.items()}
    end(rounded, missed, options.check)


if __name__ == "__main__":
    run_script(main)
