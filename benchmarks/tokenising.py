"""What tokenising a long text takes, in memory and CPU time, and that its tokens are those of the whole.

    python benchmarks/tokenising.py [--text FOLDER] [--tokenizer FOLDER] [--quick] [--check]

Each text is one .txt file, made of the text of FOLDER over and over (default: the built-in text) and removed
afterwards. `farspan.text.corpora.load` reads it with an empty cache, in a separate process: peak memory is the resident
memory above that after loading the tokenizer. `lines`: 1 GB with its lines; `one line`: 100 MB without any; `whole`:
4 MB, given to the tokenizer as one string, as it was before documents were cut, with how many of the tokens differ
from those that `load` gives. Last line: the figures as JSON.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

from common import apart, end, outside, parser_of, run_script

SIZES = {"lines": 1_000_000_000, "one line": 100_000_000, "whole": 4_000_000}  # bytes, about
QUICK = {"lines": 30_000_000, "one line": 10_000_000, "whole": 1_000_000}
BOUNDS = {"most_gb": (0.0, 1.5), "cost_share": (0.0, 1.6), "tokens_that_differ": (0, 0)}


def write(path: Path, text: str, size: int, one_line: bool) -> None:
    """Fills a file with the text, each time with another first line, so that nothing is periodic."""
    from farspan.text.documents import read_texts

    written = turn = 0
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            for document in read_texts(text):
                turn += 1
                block = f"\n{turn}\n{document}"[: size - written]
                written += file.write(" ".join(block.split()) + " " if one_line else block)
                if written >= size:
                    break


def resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measured(path: str, tokenizer_folder: str, whole: bool) -> dict[str, float]:
    import numpy as np
    from transformers import AutoTokenizer

    from farspan.text.corpora import load

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer("warm up")
    before, started, clock = resident(), time.process_time(), time.perf_counter()
    text = load(path, tokenizer)
    figures = {
        "seconds_cpu": time.process_time() - started,
        "seconds": time.perf_counter() - clock,
        "peak_bytes": resident() - before,
        "tokens": len(text.tokens),
    }
    if whole:
        given = Path(path).read_text("utf-8")
        before, started = resident(), time.process_time()
        ids = tokenizer(given, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
        expected = np.asarray(ids)
        figures["seconds_cpu_whole"] = time.process_time() - started
        figures["peak_bytes_whole"] = resident() - before
        same = len(expected) == len(text.tokens)
        figures["differ"] = int((expected != text.tokens).sum()) if same else max(len(expected), len(text.tokens))
    return figures


def main() -> None:
    parser = parser_of(__doc__, "smaller texts")
    parser.add_argument("--text", default="builtin")
    parser.add_argument("--tokenizer", default=str(Path(__file__).parents[1] / "src" / "farspan" / "assets" / "demo"))
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        path, kind = given.measure
        print(json.dumps(measured(path, given.tokenizer, kind == "whole")))
        return
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
        os.environ["FARSPAN_CACHE"] = folder
        for kind, size in (QUICK if given.quick else SIZES).items():
            path = Path(folder) / "text.txt"
            write(path, given.text, size, kind == "one line")
            found = apart(__file__, "--tokenizer", given.tokenizer, "--measure", str(path), kind, freeing=False)
            name = kind.replace(" ", "_")
            figures |= {f"{name}_{key}": value for key, value in found.items()} | {f"{name}_bytes": path.stat().st_size}
            print(
                f"{kind}: {path.stat().st_size / 1e6:,.0f} MB, {found['tokens']:,} tokens, "
                f"{found['peak_bytes'] / 1e6:,.0f} MB above the tokenizer, {found['seconds_cpu']:,.0f} s CPU",
                file=sys.stderr,
            )
    figures["most_gb"] = max(figures["lines_peak_bytes"], figures["one_line_peak_bytes"]) / 1e9
    figures["cost_share"] = figures["whole_seconds_cpu"] / figures["whole_seconds_cpu_whole"]
    figures["tokens_that_differ"] = figures["whole_differ"]
    end(figures, outside(figures, BOUNDS), given.check)


if __name__ == "__main__":
    run_script(main)
