"""How much cheaper farspan's forgetting curve is than the authors' procedure.

    python benchmarks/curve_speed.py [--quick] [--check]

The naive twin runs two full forwards per repeat and length at batch 1 with all logits, which is what the authors'
script does. Each way of measuring runs in a process of its own, on one thread; CPU seconds are the process's, peak
memory is what it took above the loaded model. The arithmetic bound is the ratio of floating-point operations.
Model: d 256, 4 layers, vocabulary 32,000, fp32, random weights, text of few tokens. `nested` is compared on the same
sequences, hit for hit; `probe` scores 256 tokens at each length instead of half of it, after 128 to warm up.

`auto` is compared with 32 lengths x 10 repeats on the embedded model and shuffled text, by tokens fed: the intervals
of half-life and of reach must overlap. Ratios at the shape of an 8B model are arithmetic, by the formula that
the plan uses. Last line: the figures as JSON.
"""

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from common import apart, end, mebibytes, outside, parser_of, random_text, rows_of, run_script, small_llama

VOCABULARY = 32_000
FEW = 12  # different tokens in the text
BOUNDS = {  # name -> (least, most)
    "cpu_ratio": (2.0, math.inf),
    "probe_cpu_ratio": (5.0, math.inf),
    "memory_ratio": (4.0, math.inf),
    "auto_token_ratio": (3.0, math.inf),
    "plan_error": (0.0, 0.25),
    "hits_that_differ": (0, 0),
}
MEMORY_WAY = "nested, batch 1, chunk 256"
AUTHORS_POINTS, AUTHORS_REPEATS = 32, 10
SHAPE_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}


def build() -> tuple[Any, Any]:
    """The model with a tokenizer, and a text."""
    import torch
    from transformers import AutoTokenizer

    from farspan.hf.chunks import CHECK_TEXT
    from farspan.lm import wrap
    from farspan.train.batches import train_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        train_tokenizer([CHECK_TEXT], 260, Path(folder))
        tokenizer = AutoTokenizer.from_pretrained(folder)
    model = small_llama(VOCABULARY, max_position_embeddings=8192)
    with torch.no_grad():
        model.lm_head.weight[FEW:] *= 0.05  # few tokens, and a head that prefers them: some are hit
    return wrap(model, tokenizer, "benchmark"), random_text(FEW, 200_000)


def naive(lm: Any, task: Any, lengths: tuple[int, ...], repeats: int) -> dict[str, float]:
    """Two forwards of [bos] P [bos] S each, all logits, argmax, by length."""
    import torch

    hits: dict[str, float] = {}
    separator = list(task.separator(lm))
    with torch.no_grad():
        for example in task.examples(lm, lengths, repeats, 0):
            for length in lengths:
                target, other = example.payload.target[:length].tolist(), example.payload.other[:length].tolist()
                for name, first, second in (("copy", target, target), ("control", target, other)):
                    ids = [*separator, *first, *separator, *second, *separator]
                    best = lm.model(input_ids=torch.tensor([ids])).logits.argmax(-1)[0].tolist()
                    scored = math.ceil(length / 2)
                    begin = len(ids) - 1 - scored
                    right = sum(best[i - 1] == ids[i] for i in range(begin, begin + scored))
                    key = f"{name} {length}"
                    hits[key] = hits.get(key, 0.0) + right
    return hits


def ours(lm: Any, task: Any, lengths: tuple[int, ...], repeats: int, **options: Any) -> dict[str, float]:
    """The same hits by `measure`."""
    hits: dict[str, float] = {}
    for row in rows_of(task, lm, lengths=lengths, repeats=repeats, **options):
        for name in ("copy", "control"):
            key = f"{name} {row.length}"
            hits[key] = hits.get(key, 0.0) + round(row.scores[name] * row.scores["scored"])
    return hits


WAYS = {
    "naive": {},
    "nested": {"batch": 3, "chunk": 512},
    MEMORY_WAY: {"batch": 1, "chunk": 256},
    "probe": {"batch": 3, "chunk": 512},
}


def child(way: str, lengths: tuple[int, ...], repeats: int) -> dict[str, Any]:
    """One way of measuring, in this process."""
    from farspan.hf.device import peak_above
    from farspan.measuring.plan import plan
    from farspan.methods import method
    from farspan.tasks.curve import BoundCurve

    lm, corpus = build()
    task = BoundCurve(target=corpus, protocol="probe" if way == "probe" else "nested")
    result: dict[str, Any] = {"way": way}
    if way != "naive":
        ours(lm, task, (8,), 2, **WAYS[way])  # the self-check and the first forwards are not what is compared
    run = naive if way == "naive" else ours
    with peak_above(lm.device) as peak:
        started, cpu = time.perf_counter(), time.process_time()
        result["hits"] = run(lm, task, lengths, repeats, **WAYS[way])
        result["seconds"], result["cpu_seconds"] = time.perf_counter() - started, time.process_time() - cpu
    result["peak_mib"] = mebibytes(peak)
    if way != "naive":
        cost = plan(task, method("full"), lm, lengths=lengths, repeats=repeats, calibrate=True, **WAYS[way])
        result |= {"planned_seconds": cost.seconds, "flops": cost.flops, "tokens": cost.tokens}
    else:
        result |= {"flops": naive_flops(lm, lengths, repeats)}
    return result


def naive_flops(lm: Any, lengths: tuple[int, ...], repeats: int) -> float:
    texts = [2 * length + 3 for length in lengths]
    return 2.0 * repeats * sum(lm.flops(0, tokens, tokens) for tokens in texts)


def automatic(quick: bool) -> dict[str, Any]:
    """Tokens that `--lengths auto` feeds, against 32 lengths x 10 repeats, and whether both say the same."""
    from farspan import hf, measure, stats
    from farspan.demo import embedded_model

    fed = 0
    step = hf.Stream.step

    def counting(stream: Any, ids: Any) -> Any:
        nonlocal fed
        fed += ids.numel()
        return step(stream, ids)

    lm = embedded_model()
    longest = 255 if quick else 511
    fixed = tuple(longest * i // AUTHORS_POINTS for i in range(1, AUTHORS_POINTS + 1))
    figures: dict[str, Any] = {}
    found = {}
    with tempfile.TemporaryDirectory() as folder, patch.object(hf.Stream, "step", counting):
        for name, lengths in (("auto", "auto"), ("fixed", fixed)):
            measure([lm], ["full"], ["curve"], lengths=(8, 16), repeats=2, out=Path(folder) / f"warm-{name}")
            fed = 0
            repeats = AUTHORS_REPEATS if name == "fixed" else None
            what: dict[str, Any] = {"text": "shuffled:builtin:held-out+tests", "lengths": lengths, "repeats": repeats}
            rows = measure([lm], ["full"], ["curve"], out=Path(folder) / name, **what).rows
            figures[f"{name}_tokens"], found[name] = fed, stats.summarise(stats.curve(rows))
    agree = True
    for name in ("half_life", "reach"):
        a, b = (getattr(found[way], name) for way in ("auto", "fixed"))
        figures[f"auto_{name}"], figures[f"fixed_{name}"] = str(a), str(b)
        agree &= a.low <= b.high and b.low <= a.high
    return figures | {
        "auto_token_ratio": figures["fixed_tokens"] / figures["auto_tokens"],
        "auto_agrees": bool(agree),
    }


def ratio_at_8b(longest: int) -> float:
    """Operations of the authors' procedure over those of a probe of 512 + 1,024 tokens, 32 lengths, 8B shape."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from farspan import hf

    config = LlamaConfig(vocab_size=128_256, num_key_value_heads=8, tie_word_embeddings=False, **SHAPE_8B)
    with torch.device("meta"):
        per_token, per_pairs, per_scored = hf.flops(LlamaForCausalLM(config))
    lengths = [8 + (longest - 8) * i // (AUTHORS_POINTS - 1) for i in range(AUTHORS_POINTS)]

    def causal(before: int, tokens: int, scored: int) -> float:
        # without the half of the last square that causality leaves out
        pairs = tokens * (before + tokens) - tokens * tokens / 2
        return per_token * tokens + per_pairs[None] * pairs + per_scored * scored

    authors = sum(2 * causal(0, 2 * length + 3, 2 * length + 3) for length in lengths)
    probe = causal(0, longest, 0)
    probe += sum(2 * causal(n, min(1536, n), min(1024, (n + 1) // 2)) for n in lengths)
    return authors / probe


def main() -> None:
    parser = parser_of(__doc__, "lengths to 512, two repeats")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    longest, repeats = (512, 2) if options.quick else (2048, 3)
    lengths = tuple(longest * i // 16 for i in range(1, 17))
    if options.child:
        print(json.dumps(child(options.child, lengths, repeats)))
        return

    results = {}
    for way in WAYS:
        quick = ["--quick"] if options.quick else []
        results[way] = r = apart(__file__, "--child", way, *quick, freeing=way == MEMORY_WAY)
        print(f"{way:28} {r['cpu_seconds']:7.1f} CPU s  {r['peak_mib']:6.0f} MiB above the model", flush=True)

    twin, full, lean, probe = (results[way] for way in WAYS)
    total = sum(twin["hits"].values())
    figures = {
        "cpu_ratio": twin["cpu_seconds"] / full["cpu_seconds"],
        "arithmetic_bound": twin["flops"] / full["flops"],
        "probe_cpu_ratio": twin["cpu_seconds"] / probe["cpu_seconds"],
        "probe_arithmetic_bound": twin["flops"] / probe["flops"],
        "memory_ratio": twin["peak_mib"] / lean["peak_mib"],
        "plan_error": abs(full["planned_seconds"] / full["seconds"] - 1),
        "hits_that_differ": sum(abs(twin["hits"][key] - full["hits"][key]) for key in twin["hits"]),
        "hits_compared": total,
        "longest": longest,
        "repeats": repeats,
        **automatic(options.quick),
        **{f"ratio_8b_{longest // 1024}k": ratio_at_8b(longest) for longest in (16_384, 65_536, 131_072)},
    }
    disagree = [] if figures["auto_agrees"] else ["auto and the fixed grid disagree"]
    end(figures, outside(figures, BOUNDS) + disagree, options.check)


if __name__ == "__main__":
    run_script(main)
