"""How fast passages are indexed and found, and what a million of them take.

An index (BM25, passages of 100 words) of a folder of books, 1,000 queries of 20 words and as many of about 256 tokens
(200 words), 10 and 50 passages each; then, unless --quick, an index of a million passages made of the same books over
and over, each time cut elsewhere. Each index is built in a process of its own, whose peak memory is said. All of it
runs on one thread; seconds are of the processor, to which other work on the machine adds little, with those of the
clock beside them.

    python benchmarks/retrieval.py FOLDER [--quick] [--check]
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from farspan.retrieve import Index, build, open_index

QUERIES = 1000
BUILD_SECONDS, SEARCH_SECONDS = 60.0, 5.0  # the claimed bounds
MILLION = 1_000_000


def built(text: str, out: str) -> dict[str, float]:
    """Builds an index in a process of its own; its passages, seconds, peak memory and size on disk."""
    done = subprocess.run([sys.executable, __file__, text, "--build", out], capture_output=True, text=True, check=True)
    size = sum(file.stat().st_size for file in Path(out).rglob("*") if file.is_file())
    return json.loads(done.stdout.splitlines()[-1]) | {"disk_gib": round(size / 2**30, 3)}


def build_here(text: str, out: str) -> None:
    started = seconds()
    index = build(text, out)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"passages": len(index), **since(started), "peak_gib": round(peak, 2)}))


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--quick", action="store_true", help="without the million")
    parser.add_argument("--check", action="store_true", help="exit 1 when a claimed bound is missed")
    parser.add_argument("--build", metavar="OUT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.build:
        build_here(options.folder, options.build)
        return
    with tempfile.TemporaryDirectory() as folder:
        books = built(options.folder, f"{folder}/books")
        index = open_index(f"{folder}/books")
        found = {f"{words} words, {count}": searched(index, words, count) for words in (20, 200) for count in (10, 50)}
        figures: dict[str, object] = {"books": books, "1000 queries": found}
        if not options.quick:
            text = repeated(options.folder, MILLION, Path(folder) / "many")
            figures["million"] = built(text, f"{folder}/million")
            figures["million, 1000 queries"] = {"20 words, 10": searched(open_index(f"{folder}/million"), 20, 10)}
    slowest = max(one["cpu_seconds"] for one in found.values())
    missed = books["cpu_seconds"] > BUILD_SECONDS or slowest > SEARCH_SECONDS
    print(json.dumps(figures | {"bounds_met": not missed}))
    if options.check and missed:
        sys.exit(1)


if __name__ == "__main__":
    main()
