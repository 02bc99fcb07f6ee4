"""What reading with a method costs: whether time per token and memory stay flat, and what top-k adds.

    python benchmarks/methods_cost.py [--quick] [--check]

`sinks` and `lambda_mask` read 4 and 16 times their window; per token they are compared with a loop that feeds one token
at a time and trims the cache after each, which is what StreamingLLM's own script does (it also rotates every cached key
anew at each step; the loop here does not, so it is faster than the original). `topk` (K = 500) reads 4,096 tokens and
is compared with `full` on transformers' eager attention. Each way runs in processes of its own on one thread; seconds
are CPU seconds, the least of three; peak memory is what the process took above the loaded model, in another process
whose allocator gives every freed block back at once.
Model: d 256, 4 layers, 4 heads of 64, fp32, random weights. Last line: the figures as JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

VOCABULARY = 512
SINKS = 4
FREEING = {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}  # of glibc
LOOP = 128  # tokens that are timed in the loop, behind a full cache
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


def build(attention: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    from farspan.lm import wrap

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1 << 20,
        attn_implementation=attention,
    )
    return wrap(LlamaForCausalLM(config).eval(), Letters(), "benchmark")


class Letters(SimpleNamespace):
    """Enough of a tokenizer: a letter a token."""

    bos_token_id = 0

    def __len__(self) -> int:
        return VOCABULARY

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % VOCABULARY for letter in text]}

    def get_vocab(self) -> dict[str, int]:
        return {}


def peak_kibibytes() -> int:
    """The most this process has held, VmHWM."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def least(run: Callable[[], Any], times: int = 3) -> float:
    """CPU seconds of the fastest of some runs: what others do on the machine only adds."""
    seconds = []
    for _ in range(times):
        started = time.process_time()
        run()
        seconds.append(time.process_time() - started)
    return min(seconds)


def reading(way: str, length: int) -> dict[str, float]:
    """Seconds per token and peak MiB of reading a text once with a method."""
    from farspan.methods import method

    attention, _, text = way.partition(" ")
    lm = build(attention)
    ids = torch.randint(1, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(0))
    with method(text).on(lm) as reader:
        reader.capacity = 0 if "window" in text else length
        reader.read(ids[:, :64])
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = peak_kibibytes()
        memory = reader.read(ids)
        peak = (peak_kibibytes() - before) / 1024
        kept = {"num_kept": memory.num_kept, "kept_mib": memory.num_bytes / 2**20}
        del memory
        if "MALLOC_MMAP_THRESHOLD_" in os.environ:
            return {"peak_mib": peak, **kept}
        return {"microseconds": 1e6 * least(lambda: reader.read(ids)) / length}


def loop(window: int) -> dict[str, float]:
    """Seconds per token of one token at a time, the cache trimmed to the sinks and the last tokens after each."""
    from transformers import DynamicCache

    model = build("sdpa").model
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

        seconds = least(run)
    return {"microseconds": 1e6 * seconds / LOOP}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a window of 128, top 125 of 1,024 tokens")
    parser.add_argument("--check", action="store_true", help="fail when a bound is missed")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        way, number = options.child
        print(json.dumps(loop(int(number)) if way == "loop" else reading(way, int(number))))
        return
    window, k, length = (128, 125, 1024) if options.quick else (512, 500, 4096)

    def measured(way: str, number: int) -> dict[str, float]:
        command = [sys.executable, __file__, "--child", way, str(number)]
        result: dict[str, float] = {}
        for settings in ({}, FREEING) if way != "loop" else ({},):
            environment = {**os.environ, **settings}
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            result |= json.loads(done.stdout.splitlines()[-1])
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
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))
    missed = [
        f"{n} = {figures[n]:.2f}, allowed {low} to {high}"
        for n, (low, high) in BOUNDS.items()
        if not low <= figures[n] <= high
    ]
    if options.check and missed:
        sys.exit("missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
