"""What it costs to score all options of an in-context-learning question, beside reading its prompt.

    python benchmarks/icl_cost.py [--quick] [--check] [--data FOLDER] [--tokenizer FOLDER]

BANKING77: a prompt of demonstrations of 2,048 tokens (--quick: 512) is read once, then its 77 options are scored on
that memory, and on a memory each of their own, which is what a script does that feeds prompt + option 77 times (timed
on a few of them). Model: d 256, 4 layers, 4 heads of 64, fp32, random weights, 32,000 entries; Mistral's tokenizer.
Cost only. CPU seconds on one thread, the least of some runs. Last line: the figures as JSON.
"""

import sys
from pathlib import Path

import torch
from common import end, least, parser_of, run_script, small_llama

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
BOUND = 2.0  # of the reading alone
RUNS = 5
NAIVE = 3  # options that are read with the whole prompt


def main() -> None:
    parser = parser_of(__doc__, "a prompt of 512 tokens, which is under a minute")
    parser.add_argument("--data", type=Path, default=SHARED / "icl" / "banking77")
    parser.add_argument("--tokenizer", type=Path, default=SHARED / "tokenizers" / "mistral-7b-v0.1")
    options = parser.parse_args()
    if not options.data.is_dir() or not options.tokenizer.is_dir():
        sys.exit(f"{options.data} and {options.tokenizer} are needed: give --data and --tokenizer")

    from transformers import AutoTokenizer

    from farspan.lm import wrap
    from farspan.methods import method
    from farspan.tasks.icl import Icl, nats_of_options

    known = AutoTokenizer.from_pretrained(options.tokenizer)
    lm = wrap(small_llama(len(known), max_position_embeddings=4096), known, "benchmark")
    asked = Icl(set="banking77", data=str(options.data)).on(lm, "")
    ids = asked.option_ids(lm)
    wanted, count = 512 if options.quick else 2048, 2
    while True:  # demonstrations until the prompt is long enough
        (example,) = asked.examples(lm, (count,), 1, 0)
        front, passages, query = example.payload.parts(asked.head, count)
        prompt = torch.cat([torch.from_numpy(part) for part in (front, *passages, query)])[None]
        if prompt.shape[1] >= wanted:
            break
        count += 1
    prompt = prompt[:, -wanted:]
    with method("full").on(lm) as reader:
        reader.capacity = wanted + max(map(len, ids))
        reading = least(lambda: reader.read(prompt), RUNS)
        memory = reader.read(prompt)
        scoring = least(lambda: nats_of_options(memory, ids), RUNS)
        each = least(lambda: [nats_of_options(reader.read(prompt), [one]) for one in ids[:NAIVE]], 2) / NAIVE
    figures = {
        "prompt_tokens": wanted,
        "demonstrations": count,
        "options": len(ids),
        "option_tokens": sum(map(len, ids)),
        "reading_seconds": reading,
        "scoring_seconds": scoring,
        "total_to_reading": (reading + scoring) / reading,
        "one_by_one_to_reading": len(ids) * each / reading,
    }
    for name, value in figures.items():
        print(f"{name:24} {value:.3f}" if isinstance(value, float) else f"{name:24} {value}")
    ratio = figures["total_to_reading"]
    # a prompt of 512 tokens is too short beside 275 tokens of options: --quick shows the figure and does not judge it
    judged = not options.quick and ratio > BOUND
    missed = [f"reading and scoring take {ratio:.2f} times the reading, allowed {BOUND}"] if judged else []
    end(figures, missed, options.check)


if __name__ == "__main__":
    run_script(main)
