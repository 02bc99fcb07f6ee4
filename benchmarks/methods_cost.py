"""What reading with a method costs: whether time per token and memory stay flat, and what top-k adds.

    python benchmarks/methods_cost.py [--quick] [--check]

`sinks` and `lambda_mask` read 4 and 16 times their window; per token they are compared with a loop that feeds one token
at a time and trims the cache after each, which is what StreamingLLM's own script does (it also rotates every cached key
again at each step; the loop here does not, so it is faster than the original). `topk` (K = 500) reads 4,096 tokens and
is compared with `full` on transformers' eager attention. Each way runs in processes of its own on one thread; seconds
are CPU seconds, the least of three; peak memory is what the process took above the loaded model, in another process
whose allocator gives every freed block back at once.
Model: d 256, 4 layers, 4 heads of 64, fp32, random weights. Last line: the figures as JSON.
"""

import argparse
import json
import os

import torch
from common import FREEING, Letters, apart, end, least, mebibytes, parser_of, small_llama

VOCABULARY = 512
SINKS = 4
RUNS = 3  # of which the fastest counts
LOOP = 128  # tokens that are timed in the loop, after a full cache
BOUNDS = {  # name -> (least, most)
    "sinks_memory_16_to_4": (0.0, 1.05),
    "lambda_mask_memory_16_to_4": (0.0, 1.05),
    "sinks_time_16_to_4": (0.0, 1.1),
    "lambda_mask_time_16_to_4": (0.0, 1.1),
    "sinks_speed_to_loop": (5.0, float("inf")),
    "lambda_mask_speed_to_loop": (5.0, float("inf")),
    "topk_time_to_eager": (0.0, 1.5),
    "topk_memory_to_square": (0.0, 1.0),
}
WHOLE = ("topk_memory_to_square",)  # under --quick the square of 1,024 tokens is smaller than what else is held


def reading(way: str, length: int) -> dict[str, float]:
    """Seconds per token and peak MiB of reading a text once with a method."""
    from farspan.hf.device import peak_above
    from farspan.lm import wrap
    from farspan.methods import method

    attention, _, text = way.partition(" ")
    lm = wrap(small_llama(VOCABULARY, attn_implementation=attention), Letters(VOCABULARY), "benchmark")
    ids = torch.randint(1, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(0))
    with method(text).on(lm) as reader:
        reader.capacity = 0 if "window" in text else length
        reader.read(ids[:, :64])
        if os.environ.items() >= FREEING.items():
            with peak_above(lm.device) as peak:
                memory = reader.read(ids)
            kept = {"num_kept": memory.num_kept, "kept_mib": memory.num_bytes / 2**20}
            return {"peak_mib": mebibytes(peak), **kept}
        reader.read(ids)
        return {"microseconds": 1e6 * least(lambda: reader.read(ids), RUNS) / length}


def loop(window: int) -> dict[str, float]:
    """Seconds per token of one token at a time, the cache trimmed to the sinks and the last tokens after each."""
    from transformers import DynamicCache

    model = small_llama(VOCABULARY)
    ids = torch.randint(1, VOCABULARY, (1, SINKS + window + LOOP), generator=torch.Generator().manual_seed(0))
    cache = DynamicCache()
    with torch.no_grad():
        model.model(input_ids=ids[:, : SINKS + window - 1], past_key_values=cache)
        position = torch.tensor([[SINKS + window - 1]])

        def run() -> None:
            for i in range(SINKS + window - 1, SINKS + window - 1 + LOOP):
                model.model(input_ids=ids[:, i : i + 1], position_ids=position, past_key_values=cache)
                for layer in cache.layers:
                    layer.keys = torch.cat([layer.keys[:, :, :SINKS], layer.keys[:, :, SINKS + 1 :]], 2)
                    layer.values = torch.cat([layer.values[:, :, :SINKS], layer.values[:, :, SINKS + 1 :]], 2)

        seconds = least(run, RUNS)
    return {"microseconds": 1e6 * seconds / LOOP}


def main() -> None:
    parser = parser_of(__doc__, "a window of 128, top 125 of 1,024 tokens")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        way, number = options.child
        print(json.dumps(loop(int(number)) if way == "loop" else reading(way, int(number))))
        return
    window, k, length = (128, 125, 1024) if options.quick else (512, 500, 4096)

    def measured(way: str, number: int) -> dict[str, float]:
        result: dict[str, float] = {}
        for freeing in (False, True) if way != "loop" else (False,):
            result |= apart(__file__, "--child", way, str(number), freeing=freeing)
        print(f"{way:38} {number:6}  " + "  ".join(f"{key} {value:.1f}" for key, value in result.items()), flush=True)
        return result

    figures: dict[str, float] = {"window": window, "k": k, "length": length}
    one_by_one = measured("loop", window)["microseconds"]
    for name in ("sinks", "lambda_mask"):
        way = f"sdpa {name}:window={window},sinks={SINKS}"
        near, far = measured(way, 4 * window), measured(way, 16 * window)
        figures[f"{name}_memory_16_to_4"] = far["peak_mib"] / near["peak_mib"]
        figures[f"{name}_time_16_to_4"] = far["microseconds"] / near["microseconds"]
        figures[f"{name}_speed_to_loop"] = one_by_one / far["microseconds"]
    eager, topk = measured("eager full", length), measured(f"sdpa topk:k={k}", length)
    figures["topk_time_to_eager"] = topk["microseconds"] / eager["microseconds"]
    figures["topk_memory_to_square"] = topk["peak_mib"] / (4 * length**2 * 4 / 2**20)
    missed = [
        f"{n} = {figures[n]:.2f}, allowed {low} to {high}"
        for n, (low, high) in BOUNDS.items()
        if not low <= figures[n] <= high and not (options.quick and n in WHOLE)
    ]
    end(figures, missed, options.check)


if __name__ == "__main__":
    main()
