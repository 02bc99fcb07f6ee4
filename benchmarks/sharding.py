"""Shards: how evenly a large comparison is dealt, and the CPU time that dividing a run costs on one machine.

    python benchmarks/sharding.py [--quick] [--check]

`dealing` deals 14 models x 8 methods x 10 repeats to 128K tokens to 8, 64 and 1,000 shards. Models have the shapes of
published ones from 0.1 to 8 billion weights, and no weights. For each task alone and for all together: units of work;
imbalance, how much longer than the mean the longest shard is; and the longest shard over the work in one piece divided
by the shards, in which also the text that bands of lengths read again counts.

`overhead` measures the forgetting curve of the embedded model in one process and in two shards, one after the other,
each a process of its own, and compares their CPU seconds. Two shards pay the start of a process (imports, loading the
model) once more, and each deals the work. `fixed` is this part: the CPU seconds of the same commands repeated, when all
rows are there, above those of one process. It does not grow with the run. `rest` is what two shards take above one
process and `fixed`, as a share of one process. It has no bound here.

Last line: the figures as JSON. With --check the script fails where a dealing has an imbalance above 10 %, or where two
shards take more than 2 % more CPU seconds than one process.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import end

SHAPES = (  # layers, hidden size, heads, key-value heads, feed-forward size, vocabulary
    *((30, 576, 9, 3, 1536, 49_152), (24, 896, 14, 2, 4864, 151_936), (22, 2048, 32, 4, 5632, 32_000)),
    *((28, 1536, 12, 2, 8960, 151_936), (24, 2048, 32, 32, 8192, 50_304), (32, 3072, 32, 32, 8192, 32_064)),
    *((28, 3072, 24, 8, 8192, 128_256), (32, 4096, 32, 4, 11_008, 64_000), (32, 4096, 32, 32, 11_008, 32_000)),
    *((32, 4096, 32, 32, 11_008, 32_016), (32, 4096, 32, 8, 14_336, 32_000), (28, 3584, 28, 4, 18_944, 152_064)),
    *((32, 4096, 32, 8, 14_336, 128_256), (36, 4096, 32, 8, 12_288, 151_936)),
)
METHODS = ("full", "sinks:window=4092", "lambda_mask:window=4096", "topk:k=64", "snapkv:capacity=4096",
           "rope:type=linear,factor=4", "rope:type=ntk,factor=4", "rope:type=yarn,factor=4")  # fmt: skip
TASKS = ("curve:protocol=nested", "curve:protocol=probe", "perplexity")
COUNTS = (8, 64, 1000)
MOST_IMBALANCE, MOST_OVERHEAD = 0.10, 0.02
LONG_LENGTHS = tuple(8192 * i for i in range(1, 17))
LENGTHS, REPEATS = "256,512,1024,2048,4096", "12"


def models(quick: bool, folder: Path) -> list[str]:
    """Folders with the configs of the models, and the embedded model's tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig

    from farspan.loading.places import DEMO, folder_of

    tokenizer, names = AutoTokenizer.from_pretrained(folder_of(DEMO)), []
    for number, (layers, hidden, heads, pairs, wide, vocabulary) in enumerate(SHAPES[:: 5 if quick else 1]):
        shape = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
        shape |= {"num_key_value_heads": pairs, "intermediate_size": wide, "max_position_embeddings": 1 << 17}
        config = LlamaConfig(vocab_size=vocabulary, architectures=["LlamaForCausalLM"], dtype="bfloat16", **shape)
        names.append(str(folder / f"model-{number}"))
        config.save_pretrained(names[-1])
        tokenizer.save_pretrained(names[-1])
    return names


def dealing(quick: bool) -> dict[str, float]:
    """The imbalance by tasks and number of shards; prints a line for each."""
    from farspan.lm import Load
    from farspan.measuring.dealing import deal
    from farspan.measuring.setups import grid
    from farspan.measuring.sharding import sharding
    from farspan.methods import method

    chosen, figures = [method(text) for text in METHODS], dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        names = models(quick, Path(folder))
        for tasks in (TASKS,) if quick else (*((one,) for one in TASKS), TASKS):
            started = time.process_time()
            what = grid(names, tasks, text="random", lengths=LONG_LENGTHS, repeats=10)
            cells = [one.cell for one in sharding(names, chosen, what, (1, 1), Load()).contents]
            spent, whole = time.process_time() - started, sum(one.flops for one in cells)
            for count in COUNTS:
                started = time.process_time()
                dealt = deal(cells, count)
                taken = spent + time.process_time() - started
                name = "all" if tasks == TASKS else tasks[0]
                print(
                    f"{name}, {count:,} shards: {len(dealt.units):,} units, imbalance {dealt.imbalance:.1%}, longest "
                    f"{dealt.longest * count / whole:.2f} of the mean, {taken:.1f} CPU s to deal",
                    flush=True,
                )
                figures[f"imbalance, {name}, {count}"] = dealt.imbalance
            print(f"{name}: {whole:.3g} floating-point operations in all", flush=True)
            figures[f"operations, {name}"] = whole
    return figures


def seconds(*command: str) -> float:
    """CPU seconds of a command on one thread."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "farspan", *command]
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def overhead(quick: bool) -> dict[str, float]:
    lengths, repeats = ("64,128", "4") if quick else (LENGTHS, REPEATS)
    with tempfile.TemporaryDirectory() as folder:
        command = ("curve", "demo", "--protocol", "nested", "--lengths", lengths, "--repeats", repeats, "--batch", "4")
        one = (*command, "--out", str(Path(folder) / "one"))
        shards = [(*command, "--out", str(Path(folder) / "two"), "--shard", f"{number}/2") for number in (1, 2)]
        seconds(*command[:5], "64", "--repeats", "4", "--out", str(Path(folder) / "warm"))  # the text is tokenised
        whole, parts = seconds(*one), [seconds(*shard) for shard in shards]
        again, parts_again = seconds(*one), [seconds(*shard) for shard in shards]
    fixed = sum(parts_again) - again
    figures = {"one process": whole, "two shards": sum(parts), "one process again": again}
    rest = (sum(parts) - fixed) / whole - 1
    return figures | {"two shards again": sum(parts_again), "fixed": fixed, "rest": rest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three models, one task, a short curve")
    parser.add_argument("--check", action="store_true", help="fail where bounds are missed")
    given = parser.parse_args()
    figures = dealing(given.quick)
    figures |= overhead(given.quick)
    missed = [
        f"{name}: {value:.1%}, allowed {MOST_IMBALANCE:.0%}"
        for name, value in figures.items()
        if name.startswith("imbalance") and value > MOST_IMBALANCE
    ]
    if (overhead_of := figures["two shards"] / figures["one process"] - 1) > MOST_OVERHEAD:
        missed.append(f"CPU time of two shards: {overhead_of:.1%} more, allowed {MOST_OVERHEAD:.0%}")
    end(figures, missed, given.check)


if __name__ == "__main__":
    main()
