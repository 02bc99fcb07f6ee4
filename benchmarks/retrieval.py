"""How fast passages are indexed and found, what a million of them take, and what they are worth to a model.

    python benchmarks/retrieval.py [FOLDER] [--passages 1000000] [--model FOLDER] [--cepe FOLDER] [--quick] [--check]

Cost. An index (BM25, passages of 100 words) of a folder of books, then 1,000 queries of 20 words and as many of about
256 tokens (200 words), for 10 and for 50 passages each; then an index of a million passages made of the same books over
and over, each time cut elsewhere, and 1,000 queries of it. Each index is built in a process of its own, whose peak
memory is recorded. One thread; seconds are CPU seconds, to which other work on the machine adds little.

Worth. Perplexity of 192 tokens of a text after k passages that were found by the 64 tokens before them (CEPE's table
2, made small), for a small model (--model; default the embedded one): passages before the text (`full`), RePlug,
and CEPE where a model is given (--cepe). The texts are files held out from the embedded model's training; passages are
of `others`, the files it was trained on, or of the `same` held-out files, so that other parts of the same file can be
found; passages that share 13 words in a row with the scored text are left out. Each is also measured with random
passages of the index: a gain above theirs is due to retrieval. Differences are paired by window; intervals are
Student's.

Last line: the figures as JSON. --check: exit 1 where a bound is missed, among them that 8 passages help every reader
but `full` more than none and more than random ones, in each index that was measured. --quick judges the cost alone: 8
windows are too few.
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import apart, end, interval, parser_of, run_script

from farspan.text.retrieval import Index, build, open_index

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
QUERIES = 1000
BUILD_SECONDS, SEARCH_SECONDS = 60.0, 5.0  # the claimed bounds
TEXT = "builtin:held-out+tests"
INDEXES = {"others": "builtin:train+tests", "same": TEXT}
SIZES = "window=256,query=64,passage_tokens=64"
PASSAGES = (0, 4, 8)
METHODS = ("full", "replug", "replug:weights=bm25")
CEPE = "cepe:chunk=64,decoder_window=320"  # the window whole in the decoder, passages in the encoder


def built(text: str, out: str) -> dict[str, float]:
    """Builds an index in a process of its own; its passages, seconds, peak memory and size on disk."""
    told = apart(__file__, text, "--build", out, freeing=False)
    size = sum(file.stat().st_size for file in Path(out).rglob("*") if file.is_file())
    return told | {"disk_gib": round(size / 2**30, 3)}


def build_here(text: str, out: str) -> None:
    started = seconds()
    index = build(text, out)
    print(json.dumps({"passages": len(index), **since(started), "peak_gib": peak_gib()}))


def peak_gib() -> float:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)


def seconds() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def since(started: tuple[float, float]) -> dict[str, float]:
    cpu, clock = (now - then for now, then in zip(seconds(), started, strict=True))
    return {"cpu_seconds": round(cpu, 2), "clock_seconds": round(clock, 2)}


def searched(index: Index, words: int, count: int) -> dict[str, float]:
    """Seconds of QUERIES queries made of the index's own passages; one to warm up goes before."""
    rng = np.random.default_rng(words)
    queries = []
    for number in rng.integers(len(index) - 3, size=QUERIES):
        text = " ".join(index.passage(int(number) + i) for i in range(3))
        queries.append(" ".join(text.split()[:words]))
    index.search(queries[:1], count)
    started = seconds()
    index.search(queries, count)
    return since(started)


def search_here(folder: str) -> None:
    index = open_index(folder)
    found = {f"{words} words, 10": searched(index, words, 10) for words in (20, 200)}
    print(json.dumps(found | {"peak_gib": peak_gib()}))


def repeated(folder: str, passages: int, place: Path) -> str:
    """The documents of a folder until they make as many passages, each time without some of their first words."""
    texts = [path.read_text("utf-8").split() for path in sorted(Path(folder).rglob("*.txt"))]
    place.mkdir()
    made = copy = 0
    while made < passages:
        for number, words in enumerate(texts):
            (place / f"{copy}-{number}.txt").write_text(" ".join(words[7 * copy :]))
            made += len(words) // 100
        copy += 1
    return str(place)


def cost(books: str, passages: int, scratch: Path) -> tuple[dict[str, Any], list[str]]:
    """The figures, and which bounds were missed."""
    small = built(books, f"{scratch}/books")
    index = open_index(scratch / "books")
    found = {f"{words} words, {count}": searched(index, words, count) for words in (20, 200) for count in (10, 50)}
    figures: dict[str, Any] = {"books": small, "1000 queries": found}
    if passages:
        text = repeated(books, passages, scratch / "many")
        figures["many"] = built(text, f"{scratch}/million")
        figures["many, 1000 queries"] = apart(__file__, "--search", f"{scratch}/million", freeing=False)
    missed = [f"the index took {small['cpu_seconds']} s"] if small["cpu_seconds"] > BUILD_SECONDS else []
    missed += [
        f"1,000 queries of {n}: {s['cpu_seconds']} s" for n, s in found.items() if s["cpu_seconds"] > SEARCH_SECONDS
    ]
    return figures, missed


def worth(
    model: str | None, cepe: str | None, indexes: list[str], repeats: int, scratch: Path
) -> tuple[dict[str, Any], list[str]]:
    """Nats by method, index and k, with paired differences to no passages and to random ones."""
    import torch

    from farspan import load, measure
    from farspan.demo import embedded_model

    torch.set_num_threads(1)
    lm = load(model, dtype="float32", device="cpu") if model else embedded_model()
    readers: list[tuple[Any, tuple[str, ...]]] = [(lm, METHODS)] + ([(cepe, (CEPE,))] if cepe else [])
    figures: dict[str, Any] = {}
    missed: list[str] = []
    for name in indexes:
        index = build(INDEXES[name], scratch / f"index-{name}", tokens=62, tokenizer=lm.tokenizer)
        nats: dict[str, dict[tuple[str, int], np.ndarray]] = {}
        for chosen in ("found", "random"):
            what = f"ralm:index={index.folder},{SIZES},passages={chosen}"
            for number, (reader, methods) in enumerate(readers):
                folder = scratch / f"run-{name}-{chosen}-{number}"
                options: dict[str, Any] = {"text": TEXT, "lengths": PASSAGES, "repeats": repeats, "out": folder}
                for row in measure([reader], methods, [what], **options).rows:
                    assert row.status == "ok", row.reason
                    each = nats.setdefault(row.method, {}).setdefault((chosen, row.length), np.full(repeats, np.nan))
                    each[row.repeat] = row.scores["nats"]
        for how, by in nats.items():
            for k in PASSAGES:
                (found, drawn), none = (by[chosen, k] for chosen in ("found", "random")), by["found", 0]
                told: dict[str, Any] = {"nats": round(float(found.mean()), 4), "random": round(float(drawn.mean()), 4)}
                for against, other in (("none", none), ("random", drawn)) if k else ():
                    told[f"less than {against}"] = [round(one, 4) for one in interval(other - found)]
                for against in ("none", "random") if how != "full" and k == PASSAGES[-1] else ():
                    mean, low, _ = told[f"less than {against}"]
                    if low <= 0:
                        missed.append(f"{how}, index of {name}: {k} passages save {mean} nats to {against}, from {low}")
                figures.setdefault(name, {}).setdefault(how, {})[str(k)] = told
                print(name, how, k, told, flush=True)
    return figures, missed


def main() -> None:
    parser = parser_of(__doc__, "without the large index, with 8 windows")
    parser.add_argument("folder", nargs="?", default=str(SHARED / "books"))
    parser.add_argument("--passages", type=int, default=1_000_000, help="of the large index; 0: without it")
    parser.add_argument("--model", help="folder of a small model; default the embedded one")
    parser.add_argument("--cepe", help="folder of a CEPE model with that decoder")
    parser.add_argument("--repeats", type=int, default=48, help="windows")
    parser.add_argument("--out", help="keep indexes and rows of the second half here, and go on from them")
    parser.add_argument("--only", choices=("cost", "worth"), help="one half of it")
    parser.add_argument("--index", action="append", choices=INDEXES, help="passages of these alone")
    parser.add_argument("--build", metavar="OUT", help=argparse.SUPPRESS)
    parser.add_argument("--search", metavar="INDEX", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.build:
        build_here(options.folder, options.build)
        return
    if options.search:
        search_here(options.search)
        return
    figures: dict[str, Any] = {}
    missed: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        if options.only != "worth":
            if not Path(options.folder).is_dir():
                sys.exit(f"{options.folder} is not there: give a folder of .txt files")
            told, failed = cost(options.folder, 0 if options.quick else options.passages, Path(scratch))
            figures["cost"], missed = told, missed + failed
            print(json.dumps(told), flush=True)
        if options.only != "cost":
            told, failed = worth(
                options.model,
                options.cepe,
                options.index or list(INDEXES),
                8 if options.quick else options.repeats,
                Path(options.out or scratch),
            )
            figures["worth"], missed = told, missed + ([] if options.quick else failed)
    end(figures, missed, options.check)


if __name__ == "__main__":
    run_script(main)
