"""How long a GPU reads one text under each method, by the tokens of a forward pass, with and without fused attention.

    python benchmarks/gpu_reading.py --model FOLDER [--tokens 32768] [--chunks 1024 4096 16384] [--methods full dca ...]
    python benchmarks/gpu_reading.py --quick

The model has the config and tokenizer of FOLDER and random weights, in bfloat16: only seconds and memory are measured.
Each cell is one reading after a shorter one. `plain` computes the attention that farspan replaces as matrix products
and, under `full`, with transformers' mask of all pairs. --quick runs a few tokens of the embedded model on a CPU.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from common import end, parser_of, run_script, table
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from farspan.hf import attend, prefix, remap
from farspan.hf.device import peak_above, wait
from farspan.lm import LM, wrap
from farspan.loading.places import DEMO, folder_of
from farspan.methods import ape, method

METHODS = ("full", "rope:type=yarn,factor=8", "sinks", "lambda_mask", "dca", "selfextend:group=8", "replug", "ape")
USERS = (attend, prefix, remap, ape)  # the modules that ask whether torch's fused kernels take a call


@contextmanager
def unfused() -> Iterator[None]:
    with ExitStack() as patches:
        for module in USERS:
            patches.enter_context(patch.object(module, "takes", lambda *tensors: False))
        yield


def read(lm: LM, how: str, chunk: int, ids: torch.Tensor) -> tuple[float, float]:
    """Return the seconds of one reading, and its peak memory in GiB."""
    with torch.no_grad(), method(how).on(lm) as reader:
        reader.chunk = chunk
        reader.read(ids[:, : ids.shape[1] // 16])
        wait(lm.device)
        with peak_above(lm.device) as peak:
            started = time.perf_counter()
            memory = reader.read(ids)
            wait(lm.device)
            seconds = time.perf_counter() - started
        del memory
    return seconds, (peak.num_bytes or 0) / 2**30


def main() -> None:
    parser = parser_of(__doc__, "256 tokens of the embedded model, on a CPU", check=None)
    parser.add_argument("--model", help="a folder with config and tokenizer")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1024, 4096, 16384], help="tokens of a forward pass")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    options = parser.parse_args()
    device, tokens, chunks, methods = "cuda", options.tokens, options.chunks, options.methods
    if options.quick:
        device, tokens, chunks, methods = "cpu", 256, [64, 256], METHODS[:3]
    elif not (options.model and torch.cuda.is_available()):
        parser.error("give --model FOLDER on a machine with an NVIDIA GPU, or --quick")
    folder = folder_of(DEMO) if options.quick else options.model
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    lm = wrap(model.to(device, torch.bfloat16).eval(), AutoTokenizer.from_pretrained(folder), "random")
    ids = torch.randint(5, lm.vocabulary, (1, tokens), device=device)
    figures: dict[str, float] = {}
    lines = []
    for how in methods:
        with unfused():
            cells = {"plain": read(lm, how, chunks[0], ids)}
        cells |= {f"{chunk:,}": read(lm, how, chunk, ids) for chunk in chunks}
        lines.append([f"`{how}`", *(f"{seconds:.2f} s, {gib:.1f} GiB" for seconds, gib in cells.values())])
        figures |= {f"{how} {name}": cell[0] for name, cell in cells.items()}
    print(table(["", f"plain, {chunks[0]:,}", *(f"fused, {chunk:,}" for chunk in chunks)], lines))
    end(figures, [], check=False)


if __name__ == "__main__":
    run_script(main)
