"""What reading with a method costs: inside the window, whether it stays flat beyond it, and what top-k adds.

    python benchmarks/methods_cost.py [--quick] [--check]

`sinks` and `lambda_mask` read 4 and 16 times their window; per token they are compared with a loop that feeds one token
at a time and trims the cache after each, which is what StreamingLLM's own script does (it also rotates every cached key
again at each step; the loop here does not, so it is faster than the original). `topk` (K = 500) reads 4,096 tokens and
is compared with `full` on transformers' eager attention. Each way runs in processes of its own on one thread; seconds
are CPU seconds, the least of three; peak memory is what the process took above the loaded model, in another process
whose allocator gives every freed block back at once.
The other methods read as many tokens as the model was trained on, and a quarter of them, in turns with `full` in one
process: the least of seven.
Model: d 256, 4 layers, 4 heads of 64, fp32, random weights. Last line: the figures as JSON.
"""

import argparse
import json
import math
import os
import tempfile
from functools import partial
from pathlib import Path

import torch
from common import FREEING, apart, end, least, mebibytes, outside, parser_of, run_script, small_llama, small_lm

VOCABULARY = 512
SINKS = 4
RUNS = 3  # of which the fastest counts
INSIDE_RUNS = 7
LOOP = 128  # tokens that are timed in the loop, after a full cache
INSIDE = (  # at most 1.15 times the CPU seconds of `full`; read in turns with `full`; {quarter}: of the trained length
    "selfextend:group=8",
    "dca",
    "temperature",
    "rope:type=truncated",
    "rope:type=factors,file={factors}",
    "ape:piece={quarter}",
    "tova:share=0.25",
    "knorm:share=0.25",
    "snapkv:capacity={quarter}",
)
BOUNDS = {  # name -> (least, most)
    "sinks_memory_16_to_4": (0.0, 1.05),
    "lambda_mask_memory_16_to_4": (0.0, 1.05),
    "sinks_time_16_to_4": (0.0, 1.1),
    "lambda_mask_time_16_to_4": (0.0, 1.1),
    "sinks_speed_to_loop": (5.0, float("inf")),
    "lambda_mask_speed_to_loop": (5.0, float("inf")),
    "topk_time_to_eager": (0.0, 1.5),
    "topk_memory_to_square": (0.0, 1.0),
    **{f"{name} inside": (0.0, 1.15) for name in INSIDE},
}
# under --quick most texts fit into one chunk, and so does the square of 1,024 tokens into what else is held
QUICK = ("sinks_speed_to_loop", "lambda_mask_speed_to_loop", "topk_time_to_eager")


def reading(way: str, length: int) -> dict[str, float]:
    """Seconds per token and peak MiB of reading a text once with a method."""
    from farspan.hf.device import peak_above
    from farspan.methods import method

    attention, _, text = way.partition(" ")
    lm = small_lm(VOCABULARY, attn_implementation=attention)
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


def inside(trained: int, folder: Path) -> dict[str, list[float]]:
    """CPU seconds of each of INSIDE over those of `full`, at a quarter of the trained length and at all of it."""
    from farspan.methods import method

    lm = small_lm(VOCABULARY, max_position_embeddings=trained)
    factors = folder / "factors.json"
    factors.write_text(json.dumps([1.0 + pair / 31 for pair in range(32)]))
    ratios: dict[str, list[float]] = {name: [] for name in INSIDE}
    for length in (trained // 4, trained):
        ids = torch.randint(1, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(0))
        seconds: dict[str, float] = {}
        for _ in range(INSIDE_RUNS):
            for name in ("full", *INSIDE):
                how = name.format(quarter=length // 4, factors=factors)
                with method(how).on(lm) as reader:
                    reader.capacity = length
                    reader.read(ids[:, :64])
                    seconds[name] = min(seconds.get(name, math.inf), least(partial(reader.read, ids), 1))
        for name in INSIDE:
            ratios[name].append(seconds[name] / seconds["full"])
    return ratios


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
    with tempfile.TemporaryDirectory() as folder:
        ratios = inside(1024 if options.quick else 4096, Path(folder))
    for name, (quarter, whole) in ratios.items():
        print(f"{name:38} {quarter:.2f} of full's time at a quarter of the trained length, {whole:.2f} at all of it")
    figures |= {f"{name} inside": max(both) for name, both in ratios.items()}
    bounds = {name: BOUNDS[name] for name in QUICK} if options.quick else BOUNDS
    end(figures, outside(figures, bounds), options.check)


if __name__ == "__main__":
    run_script(main)
