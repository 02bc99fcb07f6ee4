"""Measure a fixed set of numbers of the embedded model in fp32, and compare them with those of another version.

    PYTHONPATH=OLD/src python benchmarks/same_numbers.py --out old.json
    PYTHONPATH=NEW/src python benchmarks/same_numbers.py --out new.json --against old.json

Every score of every row is compared exactly, hits and nats alike; seconds, bytes and the names of models and texts are
not. Use the same machine, the same packages and the same text for both. One thread, batches of four: about one CPU
minute. Exits with 1 if a number differs or is missing.
"""

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
SHOWN = 40  # differences that are printed
METHODS = ("full", "sinks:window=252", "lambda_mask:window=256", "rope:type=yarn,factor=4", "topk:k=16")
LABELS = {"good": ("a fine day", "I like this", "well made", "what a joy", "pure delight", "it works"),
          "bad": ("a dull day", "I hate this", "badly made", "what a bore", "pure misery", "it fails"),
          "odd": ("a strange day", "I wonder", "curiously made", "what is it", "pure riddle", "it hums")}  # fmt: skip


def commands(text: str, icl: Path) -> dict[str, list[str]]:
    """The measurements by name: the command line of each after the model's folder."""
    curve = ["curve", "--repeats", "6", "--text", text, "--lengths"]
    perplexity = ["perplexity", "--repeats", "6", "--text", text, "--lengths", "256,512,1024", "--target-tokens", "64"]
    return {
        "curve nested": [*curve, "32,100,254,400,511"],
        "curve nested shuffled": [*curve, "32,100,254", "--target-text", "shuffled"],
        "curve nested prefix": [*curve, "32,100,254", "--prefix-text", "random"],
        "curve nested prefix of its own": [*curve, "32,100,254", "--prefix-text", text],
        "curve paper": [*curve, "32,100,254", "--protocol", "paper"],
        "curve probe": [*curve, "96,254,511", "--protocol", "probe", "--warmup", "16", "--scored", "32"],
        "curve depths": [*curve, "254,400", "--warmup", "16", "--scored", "32", "--depths", "3"],
        "recall": ["recall", "--repeats", "6", "--text", text],
        "perplexity fixed": [*perplexity, *(part for how in METHODS for part in ("--method", how))],
        "perplexity last": [*perplexity, "--targets", "last"],
        "perplexity all": [*perplexity[:-2], "--targets", "all"],
        "attention": ["attention", "--repeats", "2", "--text", text, "--lengths", "128,512", "--map-bins", "16"],
        "own": ["task", "own", "--repeats", "4", "--text", text, "--lengths", "512,1024"],
        "icl": ["task", f"icl:set=sst5,data={icl},scoring=both", "--repeats", "6", "--lengths", "0,3,8"],
        "compare": [
            "compare", "--no-cost", "--repeats", "4", "--text", text, "--lengths", "400,511",
            "--task", "perplexity:target_tokens=64", "--task", "curve:protocol=nested",
            *(part for how in METHODS for part in ("--method", how)),
        ],
    }  # fmt: skip


def write_icl(folder: Path) -> Path:
    """A classification set of fifteen demonstrations and nine questions, in the columns of sst5."""
    names = dict(zip(LABELS, ("very positive", "very negative", "neutral"), strict=True))
    rows = [{"text": text, "label": names[label]} for label, texts in LABELS.items() for text in texts]
    folder.mkdir()
    for split, part in (("train", slice(None)), ("validation", slice(1, None, 2))):
        lines = [json.dumps(row | {"text": f"{row['text']}, {split}"}) + "\n" for row in rows[part]]
        (folder / f"{split}.jsonl").write_text("".join(lines))
    return folder


def measured(text: str) -> dict[str, Any]:
    """The scores of each row, by measurement, method, task, length, repeat and depth."""
    import farspan
    from farspan.cli import app

    model = str(files("farspan") / "assets" / "demo")
    scores: dict[str, Any] = {}
    print(f"farspan of {Path(farspan.__file__).parent}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as scratch:
        for name, (command, *options) in commands(text, write_icl(Path(scratch) / "data")).items():
            started, out = time.process_time(), Path(scratch) / name.replace(" ", "-")
            where = [options.pop(0)] if command == "task" else []
            line = [command, *where, model, *options, "--out", str(out), "--dtype", "float32", "--batch", "4", "--json"]
            said = io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
                app(line, standalone_mode=False)
            lines = (out / "rows.jsonl").read_text().splitlines() if (out / "rows.jsonl").exists() else []
            for row in map(json.loads, lines):
                task, what = row["task"], " ".join(f"{key} {row[key]}" for key in ("length", "repeat", "depth"))
                scores[f"{name} | {row['method']} | {task} | {what}"] = row["scores"] | {"status": row["status"]}
            print(f"{name}: {len(lines)} rows, {time.process_time() - started:.0f} CPU s", file=sys.stderr)
            if not lines:
                print(said.getvalue(), file=sys.stderr)
    return scores


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The single numbers and words of nested scores, each with its path."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if parts is None:
        yield name, value
    else:
        for key, part in parts:
            yield from flat(part, f"{name}.{key}" if name else str(key))


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """A line for each number that differs or is missing; numbers that are new are counted in one line each."""
    found, added = [], dict[str, int]()
    for row, before in old.items():
        if row not in new:
            found.append(f"{row}: row is missing")
            continue
        was, now = dict(flat(before)), dict(flat(new[row]))
        for key, value in was.items():
            if key not in now or now[key] != value:
                found.append(f"{row}: {key} was {value}, is {now.get(key, 'missing')}")
        for key in now.keys() - was.keys():
            added[key] = added.get(key, 0) + 1
    print(f"{len(old)} rows compared, {len(new.keys() - old.keys())} rows are new")
    for key, count in sorted(added.items())[:SHOWN]:
        print(f"score {key} is new in {count} rows")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", default="builtin", help="as --text of the commands")
    parser.add_argument("--out", type=Path, required=True, help="file for the scores, JSON")
    parser.add_argument("--against", type=Path, help="file of another version")
    options = parser.parse_args()
    options.out.write_text(json.dumps(measured(options.text), indent=0))
    if options.against:
        found = differences(json.loads(options.against.read_text()), json.loads(options.out.read_text()))
        print("\n".join(found[:SHOWN]))
        sys.exit(f"{len(found)} numbers differ" if found else 0)


if __name__ == "__main__":
    main()
