"""Perplexity beyond the trained window, by method: the embedded model, trained on 512 tokens, reads up to 8 times that.

    python benchmarks/beyond_the_window.py [--quick] [--factor 8] [--out FOLDER]

Fixed targets: the last 128 tokens of each window of held-out text, after the 128 to 3,968 tokens before them.
Every method and length scores the same tokens, so differences are taken target by target. The RoPE methods are set for
the largest length, or by --factor; the windows fill the trained length. The script draws the picture of docs/methods.md
from the rows. Last line: the figures as JSON.
"""

import json
from pathlib import Path

import numpy as np
from common import folder_or_scratch, parser_of, run_script

from farspan import measure
from farspan.demo import embedded_model
from farspan.record import read_header
from farspan.report.cells import cells
from farspan.report.figures import quality_figure
from farspan.report.perplexity import series
from farspan.report.picture import draw_figure
from farspan.stats import interval, measured_mean

TEXT = "builtin:held-out+tests"
LENGTHS = (256, 512, 1024, 2048, 4096)
TRAINED = 512
TARGETS = 128
METHODS = (
    "full",
    "sinks:window=508,sinks=4",
    "lambda_mask:window=512,sinks=10",
    "rope:type=yarn,factor={factor}",
    "rope:type=ntk,factor={factor}",
    "rope:type=linear,factor={factor}",
)


def main() -> None:
    parser = parser_of(__doc__, "3 windows up to 2,048 tokens, not 48 up to 4,096", check=None)
    parser.add_argument("--factor", type=int, default=8, help="of the RoPE methods")
    parser.add_argument("--out", type=Path, help="keep the run and the picture here")
    options = parser.parse_args()
    lengths, repeats = (LENGTHS[:-1], 3) if options.quick else (LENGTHS, 48)
    with folder_or_scratch(options.out) as out:
        task = f"perplexity:target_tokens={TARGETS}"
        methods = [text.format(factor=options.factor) for text in METHODS]
        rows = measure([embedded_model()], methods, [task], text=TEXT, lengths=lengths, repeats=repeats, out=out).rows
        found = series(rows)
        title = f"Beyond the window: the embedded model ({found[0].what})"
        figure = quality_figure(cells(rows, read_header(out)), title, {TRAINED: TRAINED})
        print(draw_figure(figure, out, "perplexity")[0])

    full = next(one for one in found if one.method == "full")
    before = full.values("nats")[:, [lengths.index(TRAINED)]]
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for one in found:
        print(one.method)
        nats = one.values("nats")
        more = nats - before  # the same targets: pair by pair
        ends = np.stack([measured_mean(more), *interval(more)]).round(3).T
        for length, mean_nats, (mean, low, high) in zip(lengths, measured_mean(nats), ends.tolist(), strict=True):
            print(
                f"  {length:5}  {mean_nats:.3f} nats  {np.exp(mean_nats):8.2f}  {mean:+.3f} [{low:+.3f}, {high:+.3f}]"
            )
            told = {"nats": round(float(mean_nats), 3), "more": mean, "low": low, "high": high}
            figures.setdefault(one.method, {})[str(length)] = told
    print(json.dumps(figures))


if __name__ == "__main__":
    run_script(main)
