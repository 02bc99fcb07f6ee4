"""What a step of Sparse Memory Training costs: whether time and memory stay flat as documents grow (paper, table 5).

    python benchmarks/smt_step_time.py [--quick] [--check]

A step is all of it: sampling, one row of 4,096 tokens (and with `mixed`, the ordinary window beside it), forward,
backward, AdamW on queries and keys. Beside it, training on the full length with the same attention (SDPA) and the same
trained parameters. Documents are of 4K to 64K tokens. Seconds are CPU seconds of one thread, the least of several
rounds; each round takes all lengths, every other one in the opposite order, since other work on the machine comes and
goes. Peak memory is what a process of its own took above the loaded model, with an allocator that gives
every freed block back at once.
Model: d 128, 2 layers, 2 heads, vocabulary 2,048, fp32, random weights. Last line: the figures as JSON.
"""

import argparse
import json
import time
from typing import Any

import torch
from common import apart, end, mebibytes, outside, parser_of, random_text, run_script, small_llama, table

VOCABULARY = 2048
KINDS = {"smt": ("sparse", "off"), "mixed": ("sparse", "concat"), "full": ("full", "off")}  # draw and mixed
BOUNDS = {  # name -> (least, most)
    "smt_time_64k_to_8k": (0.0, 1.05),
    "mixed_time_64k_to_8k": (0.0, 1.05),
    "smt_memory_64k_to_8k": (0.95, 1.05),
    "mixed_memory_64k_to_8k": (0.95, 1.05),
    "full_time_16k_to_4k": (4.0, float("inf")),
}


class Steps:
    """Training steps of one kind at one length."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, kind: str, length: int, row: int) -> None:
        from farspan.train.draws import draw_named
        from farspan.train.schedule import Schedule
        from farspan.train.windows import SparseRows

        draw, mixed = KINDS[kind]
        schedule = Schedule((length,), None, 1000, False, 0)
        how: dict[str, Any] = {"targets": row // 2, "batch": 1, "separator": (0,), "seed": 0, "mixed": mixed}
        self.rows = SparseRows(random_text(VOCABULARY, 200_000), draw_named(draw), schedule, row=row, **how)
        self.model, self.optimizer, self.done = model, optimizer, 0

    def one(self) -> float:
        """CPU seconds of the next step."""
        from farspan.train.objective import terms
        from farspan.train.windows import collated

        started = time.process_time()
        batch = collated([self.rows[self.done]])
        self.optimizer.zero_grad()
        torch.stack(list(terms(self.model, self.model, batch).values())).sum().backward()
        self.optimizer.step()
        self.done += 1
        return time.process_time() - started


def build(row: int) -> tuple[Any, torch.optim.Optimizer]:
    from farspan.train.optimizer import OptimizerSettings
    from farspan.train.optimizer import build as build_optimizer
    from farspan.train.trained import TrainedSettings, choose

    shape = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 2, "num_attention_heads": 2}
    plain = small_llama(VOCABULARY, **shape, num_key_value_heads=2, max_position_embeddings=row)
    model, _ = choose(plain.train(), TrainedSettings())
    optimizer, _ = build_optimizer(model, OptimizerSettings(warmup_steps=0, decay_fraction=0), 1000)
    return model, optimizer


def memory(kind: str, length: int, row: int) -> float:
    """The MiB that a step takes above the loaded model, in this process."""
    from farspan.hf.device import peak_above

    steps = Steps(*build(row), kind, length, row)
    with peak_above(torch.device("cpu")) as peak:
        for _ in range(1 if kind == "full" else 2):  # the second finds the optimizer's moments
            steps.one()
    return mebibytes(peak)


def measured(row: int, sparse: list[int], full: list[int], rounds: int) -> dict[tuple[str, int], list[float]]:
    model, optimizer = build(row)
    wanted = [(kind, length) for length in sparse for kind in ("smt", "mixed")] + [("full", length) for length in full]
    steps = {one: Steps(model, optimizer, *one, row) for one in wanted}
    steps[wanted[0]].one()  # warms up
    found: dict[tuple[str, int], list[float]] = {one: [] for one in wanted}
    for turn in range(rounds):
        for one in wanted if turn % 2 == 0 else wanted[::-1]:
            if one[0] != "full" or turn < rounds // 3:
                found[one].append(steps[one].one())
    return found


def main() -> None:
    parser = parser_of(__doc__, "rows of 1,024 tokens, under a minute")
    parser.add_argument("--memory", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        kind, *numbers = options.memory
        print(json.dumps(memory(kind, *map(int, numbers))))
        return
    row = 1024 if options.quick else 4096
    sparse = [8192, 65536] if options.quick else [8192, 16384, 32768, 65536]
    full = [4096, 16384] if options.quick else [4096, 8192, 16384]
    rounds = 3 if options.quick else 6
    times = {one: min(seconds) for one, seconds in measured(row, sparse, full, rounds).items()}
    peaks = {(kind, n): apart(__file__, "--memory", kind, str(n), str(row), freeing=True) for kind, n in times}

    print(f"CPU seconds a step (MiB at its peak), rows of {row:,} tokens")
    lengths = sorted({length for _, length in times})
    names = {"full": "full length", "smt": "Sparse Memory Training", "mixed": "the same, mixed with the window"}
    lines = [
        [name, *(f"{times[kind, n]:.2f} ({peaks[kind, n]:.0f})" if (kind, n) in times else "" for n in lengths)]
        for kind, name in names.items()
    ]
    print(table(["", *(f"{length // 1024}K" for length in lengths)], lines))
    figures: dict[str, float] = {"full_time_16k_to_4k": times["full", 16384] / times["full", 4096]}
    for kind in ("smt", "mixed"):
        for what, values in (("time", times), ("memory", peaks)):
            figures[f"{kind}_{what}_64k_to_8k"] = values[kind, 65536] / values[kind, 8192]
    seconds = {f"{kind}_{n}_seconds": s for (kind, n), s in times.items()}
    end(figures | seconds, outside(figures, BOUNDS), options.check)


if __name__ == "__main__":
    run_script(main)
