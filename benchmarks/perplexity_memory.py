"""The memory that perplexity of a long text takes, and a check that it equals the naive number.

    python benchmarks/perplexity_memory.py [--quick] [--check]

Perplexity at 16,384 tokens with a vocabulary of 32,000, by `measure` with the command's own chunk: of all tokens in one
pass, and of the last 256 after the others. Peak memory is what the process took above the loaded model, with an
allocator that gives every freed block back at once (and, for comparison, with glibc's own settings); it is compared
with what the logits of all tokens alone would take in fp32. The naive twin is one plain forward over all tokens and
log_softmax of all of its logits, in blocks of positions. Each way runs in a process of its own on one thread.
Model: d 256, 4 layers, 4 heads of 64, fp32, random weights. Last line: the figures as JSON.
"""

import argparse
import json
import time
from typing import Any

import numpy as np
import torch
from common import apart, end, mebibytes, outside, parser_of, random_text, rows_of, run_script, small_lm

VOCABULARY = 32_000
BUCKETS = 64  # of positions, each compared with the twin's
TARGETS = 256
BOUNDS = {"largest_difference": (0.0, 1e-5)}
OF_ALL_TOKENS = {"memory_share_all": (0.0, 0.1), "memory_share_fixed": (0.0, 0.1)}  # not under --quick


def build(length: int) -> tuple[Any, Any]:
    """The model, and a text of that many tokens."""
    lm = small_lm(VOCABULARY)
    with torch.no_grad():
        lm.model.lm_head.weight *= 5  # expectations that differ: nats from 5 to 20
    return lm, random_text(VOCABULARY, length)


def naive(lm: Any, text: Any) -> list[float]:
    """Nats of every token: one plain forward, log_softmax of all logits, 64 positions at a time."""
    ids = torch.tensor([[0, *text.tokens.tolist()]])
    nats = []
    with torch.no_grad():
        hidden = lm.model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[0]
        for first in range(0, len(hidden), 64):
            expected = lm.model.lm_head(hidden[first : first + 64]).log_softmax(-1)
            wanted = ids[0, 1 + first : 65 + first]
            nats += (-expected[torch.arange(len(wanted)), wanted]).tolist()
    return nats


def ours(lm: Any, task: Any, length: int) -> dict[str, Any]:
    """The scores of one row by `measure_cell`."""
    (row,) = rows_of(task, lm, lengths=(length,), repeats=1, chunk=task.chunk(lm, length))
    assert row.status == "ok", row.reason
    return row.scores


def child(way: str, length: int) -> dict[str, Any]:
    """One way of measuring, in this process."""
    from farspan.hf.device import peak_above
    from farspan.tasks.perplexity import BoundPerplexity

    lm, text = build(length)
    how = {"targets": "all", "buckets": BUCKETS} if way == "all" else {"target_tokens": TARGETS}
    task = BoundPerplexity(text=text, **how)
    if way != "naive":
        ours(lm, task, 2 * TARGETS)  # the self-check and the first forwards are not what is compared
    started = time.perf_counter()
    with peak_above(lm.device) as peak:
        scores: dict[str, Any] = ours(lm, task, length) if way != "naive" else {"each": naive(lm, text)}
    result: dict[str, Any] = {"seconds": time.perf_counter() - started, "peak_mib": mebibytes(peak)}
    if way == "naive":
        nats = np.array(scores["each"])
        return result | {"buckets": nats.reshape(BUCKETS, -1).mean(1).tolist(), "last": float(nats[-TARGETS:].mean())}
    if way == "all":
        return result | {"buckets": (np.array(scores["buckets"]["nats"]) / (length // BUCKETS)).tolist()}
    return result | {"last": scores["nats"]}


def main() -> None:
    parser = parser_of(__doc__, "4,096 tokens, at which no memory is judged")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    length = 4096 if options.quick else 16_384
    if options.child:
        print(json.dumps(child(options.child, length)))
        return

    results = {}
    for way, allocator in (("naive", "own"), *((way, kind) for way in ("all", "fixed") for kind in ("freeing", "own"))):
        quick = ["--quick"] if options.quick else []
        results[way, allocator] = r = apart(__file__, "--child", way, *quick, freeing=allocator == "freeing")
        print(f"{way:6} {allocator:8} {r['seconds']:7.1f} s  {r['peak_mib']:6.0f} MiB above the model", flush=True)

    twin = results["naive", "own"]
    logits = length * VOCABULARY * 4 / 2**20
    differences = [
        float(np.abs(np.subtract(results[way, allocator][what], twin[what])).max())
        for way, what in (("all", "buckets"), ("fixed", "last"))
        for allocator in ("freeing", "own")
    ]
    figures = {
        "length": length,
        "vocabulary": VOCABULARY,
        "logits_mib": logits,
        "memory_share_all": results["all", "freeing"]["peak_mib"] / logits,
        "memory_share_fixed": results["fixed", "freeing"]["peak_mib"] / logits,
        "memory_share_all_glibc": results["all", "own"]["peak_mib"] / logits,
        "memory_share_fixed_glibc": results["fixed", "own"]["peak_mib"] / logits,
        "keys_share": length * 4 * 2 * 256 * 4 / 2**20 / logits,
        "nats": float(np.mean(twin["buckets"])),
        "largest_difference": max(differences),
    }
    bounds = BOUNDS if options.quick else BOUNDS | OF_ALL_TOKENS
    end(figures, outside(figures, bounds), options.check)


if __name__ == "__main__":
    run_script(main)
