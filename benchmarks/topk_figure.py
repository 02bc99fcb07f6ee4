"""Perplexity and accuracy over K: how many keys a query needs, as figure 5 of SMT (appendix B.3).

    python benchmarks/topk_figure.py [--quick] [--model MODEL] [--text TEXT] [--out FOLDER]

`topk:k=K` for K = 1, 2, 4, ... and `full`, on the same target tokens: the last 64 of each window of the text, after
contexts of several lengths up to what the model was trained on. The paper shows GPT-2 on LongBench, one line a data
set; here a line is a length. Differences from `full` are taken target by target. Draws the picture from the rows. Last
line: the figures as JSON.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import folder_or_scratch, only_png, parser_of, run_script

from farspan import measure
from farspan.demo import embedded_model
from farspan.measuring.loader import Load
from farspan.report.figure import Figure, Line
from farspan.report.perplexity import PerplexityMember, series
from farspan.report.picture import draw_grid
from farspan.stats import bands, interval, measured_mean

TARGETS = 64


def draw(full: PerplexityMember, topk: Sequence[PerplexityMember], ks: Sequence[int], path: Path, title: str) -> None:
    """Draw perplexity and accuracy over K, a line for each length, and dotted what full attention gives."""
    perplexity, share = list[Line](), list[Line]()
    for at, length in enumerate(full.lengths):
        nats, accuracy = (np.stack([one.values(of)[:, at] for one in topk], 1) for of in ("nats", "accuracy"))
        for lines, middle, ends, whole in (
            (
                perplexity,
                np.exp(measured_mean(nats)),
                np.exp(interval(nats)),
                np.exp(measured_mean(full.values("nats"))),
            ),
            (share, measured_mean(accuracy), bands(accuracy), measured_mean(full.values("accuracy"))),
        ):
            lines.append(Line(f"{length:,} tokens", ks, middle, at, *ends))
            lines.append(Line("", (ks[0], ks[-1]), (whole[at],) * 2, at, style="dotted"))
    tops = [float(value) for line in perplexity for value in line.y]
    look: dict[str, Any] = {"log_x": True, "ticks": ks, "num_members": len(full.lengths)}
    x, about = "K: keys of each query and head", "dotted: full attention"
    left = Figure("Perplexity", x, "perplexity", perplexity, log_y=max(tops) > 20 * min(tops), note=about, **look)
    right = Figure("Accuracy", x, "accuracy (share of tokens that are the likeliest)", share, note=about, **look)
    only_png(draw_grid([[left, right]], path.parent, path.stem, title, size=(5.5, 4.8)))


def main() -> None:
    parser = parser_of(__doc__, "4 windows and every other K instead of 48 and each", check=None)
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--text", default="builtin:held-out+tests")
    parser.add_argument("--out", type=Path, help="keep the run and the picture here")
    options = parser.parse_args()
    lm = Load(dtype="float32")(options.model) if options.model else embedded_model()
    longest = lm.trained_length or 512
    lengths = tuple(longest // part for part in (4, 2, 1))
    ks = [1 << power for power in range(0, longest.bit_length() - 1, 2 if options.quick else 1)]
    methods = ["full", *(f"topk:k={k}" for k in ks)]
    what = {"text": options.text, "lengths": lengths, "repeats": 4 if options.quick else 48}
    task = f"perplexity:target_tokens={TARGETS}"
    with folder_or_scratch(options.out) as out:
        full, *topk = series(measure([lm], methods, [task], out=out, **what).rows)
        path = out / "topk.png"
        draw(full, topk, ks, path, f"Top-k attention: {Path(lm.name).name} ({full.what})")
        print(path)

    figures: dict[str, dict[str, dict[str, float]]] = {}
    for at, length in enumerate(lengths):
        print(f"{length:,} tokens: full {measured_mean(full.values('nats'))[at]:.3f} nats")
        for k, one in zip(ks, topk, strict=True):
            told = {name: float(measured_mean(one.values(name))[at]) for name in ("nats", "accuracy")}
            for name in ("nats", "accuracy"):
                own, whole = one.values(name), full.values(name)
                more = own[:, at] - whole[:, at]  # the same targets: pair by pair
                ends = (measured_mean(more), *interval(more))
                told |= {f"{name}_more{end}": float(v) for end, v in zip(("", "_low", "_high"), ends, strict=True)}
            told = {name: round(value, 3) for name, value in told.items()}
            figures.setdefault(str(length), {})[str(k)] = told
            print(
                f"  k {k:4}  {told['nats']:.3f} nats  {told['nats_more']:+.3f} [{told['nats_more_low']:+.3f}, "
                f"{told['nats_more_high']:+.3f}]  accuracy {told['accuracy']:.3f}  {told['accuracy_more']:+.3f} "
                f"[{told['accuracy_more_low']:+.3f}, {told['accuracy_more_high']:+.3f}]"
            )
    print(json.dumps(figures))


if __name__ == "__main__":
    run_script(main)
