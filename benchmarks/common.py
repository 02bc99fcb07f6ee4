"""What benchmarks share: a small model of random weights, a process of its own, tables, intervals, and how they end."""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FREEING = {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}  # of glibc
Interval = tuple[float, float, float]  # a mean or another number, and its 95 % interval


class Letters:
    """Enough of a tokenizer: a letter a token."""

    bos_token_id, eos_token_id = 0, None

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def __len__(self) -> int:
        return self.vocabulary

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % self.vocabulary for letter in text]}

    def get_vocab(self) -> dict[str, int]:
        return {}


def small_llama(vocabulary: int = 32_000, **config: Any) -> Any:
    """A Llama of d 256, 4 layers, 4 heads of 64, fp32, random weights, on one thread."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 4, "max_position_embeddings": 1 << 20}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **(shape | config))).eval()


def small_lm(vocabulary: int, **config: Any) -> Any:
    """The same, as `farspan.load` returns a model, with a letter a token."""
    from farspan.lm import wrap

    return wrap(small_llama(vocabulary, **config), Letters(vocabulary), "benchmark")


def rows_of(task: Any, lm: Any, **what: Any) -> list[Any]:
    """The rows of a task under `full`, by `measure_cell`, in a run that is not kept."""
    from farspan.measuring.loop import measure_cell
    from farspan.methods import method
    from farspan.record import Run

    with tempfile.TemporaryDirectory() as folder, Run.open(Path(folder) / "run", {}) as run:
        return measure_cell(task, method("full"), lm, run, **what)


@contextmanager
def folder_or_scratch(out: Path | None) -> Iterator[Path]:
    """Yield the folder in which to keep what is measured; None: one that is deleted at the end."""
    with tempfile.TemporaryDirectory() as scratch:
        yield out or Path(scratch)


def random_text(vocabulary: int, length: int) -> Any:
    """One document of that many random tokens."""
    import numpy as np

    from farspan.text.corpora import Corpus

    tokens = np.random.default_rng(0).integers(1, vocabulary, length)
    return Corpus("random", "random", tokens, np.array([0, length]))


def least(run: Callable[[], Any], times: int) -> float:
    """CPU seconds of the fastest of some runs: what others do on the machine only adds."""
    seconds = []
    for _ in range(times):
        started = time.process_time()
        run()
        seconds.append(time.process_time() - started)
    return min(seconds)


def cpu_of(command: Sequence[str], **options: Any) -> float:
    """Run a process, with the options of `subprocess.run`, and return its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, **options)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def mebibytes(peak: Any) -> float:
    """The peak memory that `farspan.hf.device.peak_above` recorded."""
    assert peak.num_bytes is not None, "the peak is known on Linux only"
    return float(peak.num_bytes / 2**20)


def apart(script: str, *arguments: str, freeing: bool) -> Any:
    """The last line of what a script prints, read as JSON, from a process of its own.

    Args:
        freeing: with an allocator that gives every freed block back at once, so that a peak is what is held and not
            where it left holes. It costs time.
    """
    command = [sys.executable, script, *arguments]
    environment = os.environ | (FREEING if freeing else {})
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def interval(values: Any) -> Interval:
    """Return the mean of the values that were measured, and its 95 % interval by Student's t. NaN: not measured."""
    import numpy as np

    from farspan.stats import student_mean

    return student_mean(values[np.isfinite(values)])[:3]


def with_ends(value: Sequence[float], digits: int = 2, sign: str = "") -> str:
    """Return an `Interval` as text. `sign`: as in a format, such as "+"."""
    return "{:{s}.{d}f} [{:{s}.{d}f}, {:{s}.{d}f}]".format(*value, s=sign, d=digits)


def running_mean(one: Any, of: str) -> Any:
    """Return the mean `nats` or `hits` [texts, ends] of all tokens of a text up to each end, of `report.perplexity`."""
    import numpy as np

    ends = np.array(one.ends)
    return np.cumsum(one.by_bucket(of) * np.diff(ends, prepend=0), 1) / ends


def only_png(drawn: Sequence[Path]) -> Path:
    """Remove the SVG of a drawn picture, and return its PNG."""
    png, svg = drawn
    svg.unlink()
    return png


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


def parser_of(
    description: str | None, quick: str | None = None, check: str | None = "fail when a bound is missed"
) -> argparse.ArgumentParser:
    """Return the parser of a script with the options --quick and --check, each with its help; None: without it."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, text in (("--quick", quick), ("--check", check)):
        if text is not None:
            parser.add_argument(option, action="store_true", help=text)
    return parser


def run_script(main: Callable[[], Any]) -> None:
    """Run a script; an error of its input ends it with one line, as of the command `farspan`."""
    try:
        main()
    except (ValueError, OSError) as error:
        if os.environ.get("FARSPAN_DEBUG"):
            raise
        sys.exit(" ".join(f"error: {error}".splitlines()))


def missed(claims: Mapping[str, tuple[float, float]]) -> list[str]:
    """Print whether each claim holds, a value and the most it may be; return those that do not."""
    found = []
    for claim, (value, most) in claims.items():
        said = f"{claim} {value:.4g}, allowed {most:g}"
        holds = value <= most
        print(f"{'holds' if holds else 'MISSED'}: {said}")
        found += [] if holds else [said]
    return found


def outside(figures: Mapping[str, Any], bounds: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return a line for each figure that is not within its bounds, the least and the most that it may be."""
    return [
        f"{name} = {figures[name]:.3g}, allowed {least:g} to {most:g}"
        for name, (least, most) in bounds.items()
        if not least <= figures[name] <= most
    ]


def end(figures: Mapping[str, Any], missed: Sequence[str], check: bool) -> None:
    """Prints the figures as JSON, the last line; exits with 1 where bounds are missed and that was to be checked."""
    print(json.dumps({n: float(f"{value:.4g}") if isinstance(value, float) else value for n, value in figures.items()}))
    if check and missed:
        sys.exit("missed: " + "; ".join(missed))
