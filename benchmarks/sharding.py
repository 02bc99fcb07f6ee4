"""Shards: how evenly a large comparison is dealt, and the CPU time that dividing a run costs on one machine.

    python benchmarks/sharding.py [--quick] [--check]

`dealing` deals 14 models x 8 methods x 10 repeats to 128K tokens to 8, 64 and 1,000 shards. Models have the shapes of
published ones from 0.1 to 8 billion weights, and no weights. For each task alone and for all together: units of work;
the longest shard, and the longest repeat: the costliest text of the costliest model at all its lengths, in one piece.
Both are divided by the mean, which is the work in one piece divided by the shards.

`overhead` measures the forgetting curve of the embedded model in one process and in two shards, one after the other,
each a process of its own, and compares their CPU seconds. Two shards start a process once more (imports, loading and
checking the model) and each deals the work, which does not grow with the run. The run takes about 15 CPU minutes, so
that this part is small, as in any run that is worth dividing.

Last line: the figures as JSON. With --check the script fails where the longest shard has more than 10 % more than the
mean and also more than the longest repeat, or where two shards take more than 2 % more CPU seconds than one process.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import cpu_of, end, parser_of, run_script

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
LENGTHS, REPEATS = "256,512,1024,2048,4096", "120"


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
    """The longest shard and repeat by tasks and number of shards; prints a line for each."""
    from farspan.measuring.dealing import deal
    from farspan.measuring.loader import Load
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
            most = max(max(one.repeats) for one in cells)
            for count in COUNTS:
                started = time.process_time()
                dealt = deal(cells, count)
                taken = spent + time.process_time() - started
                name = "all" if tasks == TASKS else tasks[0]
                longest, repeat = dealt.longest * count / whole, most * count / whole
                print(
                    f"{name}, {count:,} shards: {len(dealt.units):,} units, longest shard {longest:.3f}, longest "
                    f"repeat {repeat:.3f}, {taken:.1f} CPU s to deal",
                    flush=True,
                )
                figures |= {f"longest shard, {name}, {count}": longest, f"longest repeat, {name}, {count}": repeat}
            print(f"{name}: {whole:.3g} floating-point operations in all", flush=True)
            figures[f"operations, {name}"] = whole
    return figures


def seconds(*command: str) -> float:
    """CPU seconds of a command on one thread."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "farspan", *command]
    return cpu_of(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)


def overhead(quick: bool) -> dict[str, float]:
    lengths, repeats = ("64,128", "4") if quick else (LENGTHS, REPEATS)
    with tempfile.TemporaryDirectory() as folder:
        command = ("curve", "demo", "--protocol", "nested", "--lengths", lengths, "--repeats", repeats, "--batch", "4")
        one = (*command, "--out", str(Path(folder) / "one"))
        shards = [(*command, "--out", str(Path(folder) / "two"), "--shard", f"{number}/2") for number in (1, 2)]
        seconds(*command[:5], "64", "--repeats", "4", "--out", str(Path(folder) / "warm"))  # the text is tokenised
        return {"one process": seconds(*one), "two shards": sum(seconds(*shard) for shard in shards)}


def main() -> None:
    parser = parser_of(__doc__, "three models, one task, a short curve")
    given = parser.parse_args()
    figures = dealing(given.quick)
    figures |= overhead(given.quick)
    missed = []
    for name in [name for name in figures if name.startswith("longest shard")]:
        allowed = max(1 + MOST_IMBALANCE, figures[name.replace("shard", "repeat")])
        if figures[name] > allowed:
            missed.append(f"{name}: {figures[name]:.3f} of the mean, allowed {allowed:.3f}")
    if (overhead_of := figures["two shards"] / figures["one process"] - 1) > MOST_OVERHEAD:
        missed.append(f"CPU time of two shards: {overhead_of:.1%} more, allowed {MOST_OVERHEAD:.0%}")
    end(figures, missed, given.check)


if __name__ == "__main__":
    run_script(main)
