"""What attention statistics of a long text take in memory, and that they are those of the model's own weights.

    python benchmarks/attention_memory.py [--quick] [--check]

Statistics of four queries, by all layers and heads, and a map of 128 × 128 bins over 32,768 tokens, by `measure` as the
command calls it. Peak memory is what the process took above the loaded model (VmHWM); all weights of the text would
take layers · heads · tokens² · 4 bytes. On 1,024 tokens the Pareto numbers, the bins of distance and the map are
compared with those of the weights that transformers gives out (eager, `output_attentions`). One thread.
Model: d 256, 4 layers, 8 heads of 32 on 4 key heads, fp32, random weights. Last line: the figures as JSON.
"""

import argparse
import json
import time
from typing import Any

import numpy as np
import torch
from common import apart, end, mebibytes, outside, parser_of, random_text, rows_of, run_script, small_lm

VOCABULARY = 32_000
LAYERS, HEADS = 4, 8
BIN = 1024  # tokens
COMPARED = 1024  # tokens
BOUNDS = {"peak_gib": (0.0, 2.0), "largest_difference": (0.0, 1e-6)}


def build(length: int) -> tuple[Any, Any]:
    """The model, and a text of that many tokens."""
    lm = small_lm(VOCABULARY, num_hidden_layers=LAYERS, num_attention_heads=HEADS)
    with torch.no_grad():
        for layer in lm.model.model.layers:
            layer.self_attn.q_proj.weight *= 6  # weights that differ: the heaviest quarter holds about half
    return lm, random_text(VOCABULARY, length)


def looked_at(lm: Any, text: Any, lengths: tuple[int, ...], bin: int) -> tuple[list[Any], dict[str, list[int]]]:
    """The rows of one repeat, and the tokens of each example."""
    from farspan.tasks.attention import BoundAttention

    task = BoundAttention(text=text, bin=bin)
    rows = rows_of(task, lm, lengths=lengths, repeats=1, batch=1)
    assert all(row.status == "ok" for row in rows)
    return rows, {e.id: [0, *e.payload.tolist()] for e in task.examples(lm, lengths, 1, 0)}


def largest_difference(lm: Any, text: Any) -> tuple[float, float]:
    """To the model's own weights on a short text; and the mean Pareto number."""
    from farspan.report.attention import unpacked

    bin, bins = COMPARED // 4, 128
    (row,), ids = looked_at(lm, text, (COMPARED,), bin)
    lm.model.set_attn_implementation("eager")
    with torch.no_grad():
        found = lm.model(input_ids=torch.tensor([ids[row.example]]), use_cache=False, output_attentions=True)
    weights = torch.stack(found.attentions)[:, 0].double()  # [layers, heads, queries, keys]
    query = weights[:, :, -1]
    pareto = query.sort(-1, descending=True).values[..., : COMPARED // 4].sum(-1)
    by_bin = query.flip(-1).unflatten(-1, (4, bin)).sum(-1)
    whole = weights.mean((0, 1)).unflatten(0, (bins, -1)).mean(1).unflatten(-1, (bins, -1)).sum(-1)
    apart = [
        np.abs(np.array(row.scores["all"]["pareto"]) - pareto.numpy()).max(),
        np.abs(np.array(row.scores["all"]["bins"]) - by_bin.numpy()).max(),
        np.abs(unpacked(row.scores["map"]) - whole.numpy()).max(),
    ]
    return float(max(apart)), float(pareto.mean())


def child(length: int) -> dict[str, Any]:
    """The statistics of a text of this length, in this process."""
    from farspan.hf.device import peak_above

    lm, text = build(length)
    looked_at(lm, text, (64, 128), 32)  # the self-check and the first forwards are not what is measured
    started = time.perf_counter()
    with peak_above(lm.device) as peak:
        rows, _ = looked_at(lm, text, (length // 8, length // 4, length // 2, length), BIN)
    seconds, row = time.perf_counter() - started, json.dumps(rows[-1].scores)
    return {"seconds": seconds, "peak_gib": mebibytes(peak) / 2**10, "row_kilobytes": len(row) / 1000}


def main() -> None:
    parser = parser_of(__doc__, "4,096 tokens; the bound is for 32,768")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    length = 4096 if options.quick else 32_768
    if options.child:
        print(json.dumps(child(length)))
        return

    result = apart(__file__, "--child", *(["--quick"] if options.quick else []), freeing=False)
    difference, pareto = largest_difference(*build(4 * COMPARED))
    weights = LAYERS * HEADS * length**2 * 4 / 2**30
    figures = {
        "length": length,
        **result,
        "all_weights_gib": weights,
        "keys_gib": length * LAYERS * 2 * 4 * 32 * 4 / 2**30,
        "largest_difference": difference,
        "pareto": pareto,
    }
    print(f"{length:,} tokens: {result['peak_gib']:.2f} GiB above the model, {result['seconds']:.0f} s;", end=" ")
    print(f"all weights would take {weights:,.0f} GiB")
    end(figures, outside(figures, BOUNDS), options.check)


if __name__ == "__main__":
    run_script(main)
