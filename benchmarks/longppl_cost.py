"""What the two readings of LongPPL cost, beside the long one alone.

    python benchmarks/longppl_cost.py [--check]

The embedded model (trained on 512 tokens), windows of Python's library, 8 examples together as a run reads them,
targets=fixed: the task `longppl` with its defaults against the task `perplexity` with the same targets, at single
lengths and at three lengths together, which share one short reading. CPU seconds on one thread, the least of some runs;
tokens and floating-point operations are those of `--plan`. Last line: the figures as JSON.
"""

from collections.abc import Sequence

import torch
from common import end, least, parser_of, run_script

BOUND = 1.3  # of the long reading
LENGTHS: Sequence[tuple[int, ...]] = ((512,), (1024,), (2048,), (4096,), (512, 1024, 2048))
REPEATS = 8
RUNS = 5


def main() -> None:
    parser = parser_of(__doc__, check="fail when the bound is missed")
    options = parser.parse_args()

    from farspan.lm import load
    from farspan.measuring.plan import plan
    from farspan.methods import method
    from farspan.tasks.longppl import LongPPL
    from farspan.tasks.perplexity import Perplexity

    torch.set_num_threads(1)
    lm, how = load("demo"), method("full")
    figures: dict[str, float] = {}
    missed = []
    print(f"{'lengths':16} {'CPU s, long':>12} {'both':>8} {'ratio':>6} {'tokens':>7} {'FLOPs':>6}")
    for lengths in LENGTHS:
        settings = LongPPL().resolved(lengths, ())
        both, long = settings.on(lm, "builtin"), Perplexity(target_tokens=settings.target_tokens).on(lm, "builtin")
        costs = [plan(one, how, lm, lengths=lengths, repeats=REPEATS) for one in (both, long)]
        with how.on(lm) as reader:
            examples = [one.examples(lm, lengths, REPEATS, 0) for one in (both, long)]
            for one, some in zip((both, long), examples, strict=True):
                list(one.run(reader, some))  # the first run is slower
            seconds = [
                least(lambda one=one, some=some: list(one.run(reader, some)), RUNS)  # type: ignore[misc]
                for one, some in zip((both, long), examples, strict=True)
            ]
        ratios = {
            "seconds": seconds[0] / seconds[1],
            "tokens": costs[0].tokens / costs[1].tokens,
            "flops": costs[0].flops / costs[1].flops,
        }
        name = "+".join(map(str, lengths))
        print(f"{name:16} {seconds[1]:12.4f} {seconds[0]:8.4f} " + " ".join(f"{r:6.3f}" for r in ratios.values()))
        figures |= {f"{what}_{name}": ratio for what, ratio in ratios.items()}
        missed += [
            f"{what} at {name}: {ratio:.2f} times the long reading, allowed {BOUND}"
            for what, ratio in ratios.items()
            if ratio > BOUND
        ]
    end(figures, missed, options.check)


if __name__ == "__main__":
    run_script(main)
