"""Measure every task and method on the embedded model (CEPE on one of random weights made of it) in fp32, and compare
the rows with those of another version.

    PYTHONPATH=OLD/src python benchmarks/same_numbers.py --out old.json
    PYTHONPATH=NEW/src python benchmarks/same_numbers.py --out new.json --against old.json

Every value of every row is compared exactly: scores, settings, hashes of examples, tokens seen and kept. Seconds, bytes
and the names of models are not. Use the same machine, packages and text for both, and the same --scratch folder, since
rows name the files of their data. One thread, batches of four: about four CPU minutes. A stopped run continues: what
its --out holds is not measured again. `--rates` compares scores alone, of rows with the same length, repeat and depth:
for versions whose records differ. Exits with 1 on a difference, or if a task or method of the version has no row.
"""

import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from common import parser_of, run_script

os.environ["OMP_NUM_THREADS"] = "1"
SHOWN = 40  # differences that are printed
SIZED = ("full", "sinks:window=252", "lambda_mask:window=256", "rope:type=yarn,factor=4", "topk:k=16")
MIXED = ("full", "replug", "sinks:window=252")
EVERY = (
    "full", "sinks:window=20,sinks=3", "sinks:window=20,sinks=3,stride=8", "lambda_mask:window=20,sinks=3",
    "selfextend:group=3,window=14", "dca:chunk=13,local=3", "rope:type=linear,factor=4", "rope:type=ntk,factor=4",
    "rope:type=yarn,factor=4,original=128", "rope:type=truncated,original=64", "rope:type=dynamic,original=40",
    "topk:k=6", "snapkv:capacity=20,window=6,kernel=3", "snapkv:capacity=20,window=6,kernel=5,pool=mean",
    "tova:capacity=12", "tova:share=0.2", "knorm:capacity=12", "knorm:share=0.2", "temperature:original=10",
    "replug:piece=16", "ape:temperature=0.5,scale=0.8", "ape:piece=16",
)  # fmt: skip
UNCOMPARED = ("model", "seconds", "peak_bytes")  # of a row
LABELS = {"good": ("a fine day", "I like this", "well made", "what a joy", "pure delight", "it works"),
          "bad": ("a dull day", "I hate this", "badly made", "what a bore", "pure misery", "it fails"),
          "odd": ("a strange day", "I wonder", "curiously made", "what is it", "pure riddle", "it hums")}  # fmt: skip


def commands(text: str, data: Path) -> dict[str, list[str]]:
    """The measurements by name: the command line of each after the model's folder."""
    methods = [part for how in EVERY for part in ("--method", how)]
    icl, answers = data / "icl", ["--lengths", "480", "--repeats", "2"]
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
        "perplexity fixed": [*perplexity, *(part for how in SIZED for part in ("--method", how))],
        "perplexity last": [*perplexity, "--targets", "last"],
        "perplexity all": [*perplexity[:-2], "--targets", "all"],
        "attention": ["attention", "--repeats", "2", "--text", text, "--lengths", "128,512", "--map-bins", "16"],
        "own": ["task", "own", "--repeats", "4", "--text", text, "--lengths", "512,1024"],
        "longppl": ["task", "longppl:short=64", "--repeats", "4", "--text", text, "--lengths", "256,511"],
        "mentions": ["task", "mentions:distance=100,target_tokens=100", "--repeats", "4", "--text", text,
                     "--lengths", "300,511"],
        "passkey": ["task", "passkey:depths=2", "--repeats", "4", "--lengths", "400,511"],
        "needle": ["task", "needle:kind=multikey,depths=0+1", "--repeats", "4", "--text", text, "--lengths", "640"],
        "needle generated": ["task", "needle:ask=generated,depths=0+1,new_tokens=24", "--repeats", "2", "--text", text,
                             "--lengths", "640"],
        "longbench2": ["task", f"longbench2:data={data / 'longbench2.jsonl'},truncate=middle", *answers],
        "icl": ["task", f"icl:set=sst5,data={icl},scoring=both", "--repeats", "6", "--lengths", "0,3,8"],
        "curve auto": ["curve", "--repeats", "4", "--text", text, "--lengths", "auto"],
        "qa": ["task", f"qa:data={data / 'qa.jsonl'},shots=1,new_tokens=4", "--repeats", "3", "--lengths", "0,2",
               *(part for how in MIXED for part in ("--method", how))],
        "ralm": ["task", f"ralm:index={data / 'index'},window=64,query=16", "--repeats", "3", "--lengths", "0,2",
                 "--text", text, *(part for how in MIXED for part in ("--method", how))],
        "zeroscrolls": ["task", f"zeroscrolls:set=qmsum,data={data / 'qmsum.jsonl'},new_tokens=4,truncate=middle",
                        *answers],
        "longbench": ["task", f"longbench:set=qasper,view=answers,data={data / 'qasper.jsonl'},new_tokens=4,"
                      "truncate=middle", *answers],
        "longbench text": ["task", f"longbench:set=qasper,data={data / 'qasper.jsonl'}", "--lengths", "64,128",
                           "--repeats", "2"],
        "methods": ["compare", "--no-cost", "--repeats", "4", "--text", text, "--lengths", "256,511",
                    "--task", "perplexity:target_tokens=64", "--task", "curve:protocol=nested", *methods],
        "cepe": ["compare", "--no-cost", "--repeats", "4", "--text", text, "--lengths", "256,511", "--task",
                 "perplexity:target_tokens=64", "--task", "curve:protocol=nested",
                 "--method", "cepe:chunk=64,decoder_window=128"],
        "compare": [
            "compare", "--no-cost", "--repeats", "4", "--text", text, "--lengths", "400,511",
            "--task", "perplexity:target_tokens=64", "--task", "curve:protocol=nested",
            *(part for how in SIZED for part in ("--method", how)),
        ],
    }  # fmt: skip


def write_data(folder: Path) -> Path:
    """A classification set of fifteen demonstrations and nine questions, in the columns of sst5; questions with
    passages; documents with questions in the forms of SCROLLS and LongBench; and an index of the documents."""
    names = dict(zip(LABELS, ("very positive", "very negative", "neutral"), strict=True))
    rows = [{"text": text, "label": names[label]} for label, texts in LABELS.items() for text in texts]
    files: dict[str, list[dict[str, Any]]] = {
        f"icl/{split}.jsonl": [row | {"text": f"{row['text']}, {split}"} for row in part]
        for split, part in (("train", rows), ("validation", rows[1::2]))
    }
    towns = ("Ambleside", "Borrowdale", "Coniston", "Dunmail")
    facts = [f"The river at {town} is {8 + i} miles long, and its bridge has {i + 2} arches. " for i, town in
             enumerate(towns)]  # fmt: skip
    asked = [(f"How long is the river at {town}?", f"{8 + i} miles") for i, town in enumerate(towns)]
    ctxs = [{"title": town, "text": fact, "score": 1.0 + i} for i, (town, fact) in
            enumerate(zip(towns, facts, strict=True))]  # fmt: skip
    files["qa.jsonl"] = [{"question": q, "answers": [a], "ctxs": ctxs} for q, a in asked]
    document = "".join(facts) * 6
    files["qmsum.jsonl"] = [{"id": str(i), "input": f"{q}\n\n{document}", "output": a} for i, (q, a) in
                            enumerate(asked)]  # fmt: skip
    files["qasper.jsonl"] = [{"context": document, "input": q, "answers": [a], "all_classes": None, "_id": str(i),
                              "dataset": "qasper"} for i, (q, a) in enumerate(asked)]  # fmt: skip
    files["longbench2.jsonl"] = [
        {"_id": str(i), "domain": "d", "sub_domain": "s", "difficulty": "easy", "length": "short", "question": q,
         "answer": "ABCD"[i], "context": document, **{f"choice_{letter}": a for letter, (_, a) in
         zip("ABCD", asked, strict=True)}} for i, (q, _) in enumerate(asked)
    ]  # fmt: skip
    files["passages.jsonl"] = [{"text": fact * 3} for fact in facts]
    for name, lines in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def write_cepe(base: str, folder: Path) -> Path:
    """A CEPE model of the base with an encoder and cross-attention of random weights, the same for all versions."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaModel

    from farspan import cepe

    if not folder.exists():
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        tokens = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "max_position_embeddings": 64}
        decoder = AutoModelForCausalLM.from_pretrained(base)
        encoder = LlamaModel(LlamaConfig(vocab_size=decoder.config.vocab_size, **sizes, **tokens))
        model = cepe.from_base(decoder, encoder)
        for cross in model.cross_attentions():
            torch.nn.init.normal_(cross.o_proj.weight, std=0.1)
        AutoTokenizer.from_pretrained(base).save_pretrained(folder)
        model.save_pretrained(folder)
    return folder


def measured(text: str, scratch: Path, out: Path) -> dict[str, Any]:
    """The values of each row, by measurement, method, task, settings, length, repeat and depth; also written to `out`,
    whose measurements are not repeated."""
    import farspan
    from farspan.cli import app
    from farspan.methods import METHODS
    from farspan.tasks import TASKS

    base = str(files("farspan") / "assets" / "demo")
    scores: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    print(f"farspan of {Path(farspan.__file__).parent}", file=sys.stderr)
    data = write_data(scratch / "data")
    models = {"cepe": str(write_cepe(base, scratch / "cepe"))}
    shutil.rmtree(scratch / "runs", ignore_errors=True)
    index = ["index", "--text", str(data / "passages.jsonl"), "--out", str(data / "index"), "--words", "20"]
    quietly(app, index)
    for name, (command, *options) in commands(text, data).items():
        if any(row.startswith(f"{name} | ") for row in scores):
            continue
        started, folder = time.process_time(), scratch / "runs" / name.replace(" ", "-")
        where = [options.pop(0)] if command == "task" else []
        line = [command, *where, models.get(name, base), *options]
        said = quietly(app, [*line, "--out", str(folder), "--dtype", "float32", "--batch", "4", "--json"])
        lines = (folder / "rows.jsonl").read_text().splitlines() if (folder / "rows.jsonl").exists() else []
        for row in map(json.loads, lines):
            what = " ".join(f"{key} {row[key]}" for key in ("length", "repeat", "depth"))
            values = {key: value for key, value in row.items() if key not in UNCOMPARED}
            scores[f"{name} | {row['method']} | {row['task']} | {what}"] = values
        out.write_text(json.dumps(scores, indent=0))
        print(f"{name}: {len(lines)} rows, {time.process_time() - started:.0f} CPU s", file=sys.stderr)
        if not lines:
            print(said, file=sys.stderr)
    rows = [row.split(" | ") for row in scores if scores[row]["status"] == "ok"]
    known = {part.partition(":")[0] for _, method, _, _ in rows for part in method.split("+")}
    known |= {row[2] for row in rows} | {row[0] for row in rows if row[0] == "recall"}  # whose rows are of curve
    if missing := sorted({*METHODS, *TASKS} - known):
        sys.exit(f"nothing measured of {', '.join(missing)}")
    return scores


def quietly(app: Any, line: list[str]) -> str:
    """Run a command line and return what it prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        app(line, standalone_mode=False)
    return said.getvalue()


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The single numbers and words of nested scores, each with its path."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if parts is None:
        yield name, value
    else:
        for key, part in parts:
            yield from flat(part, f"{name}.{key}" if name else str(key))


def differences(old: dict[str, Any], new: dict[str, Any], rates: bool) -> list[str]:
    """A line for each number that differs or is missing; numbers that are new are counted in one line each."""
    found, added = [], dict[str, int]()
    for row, before in old.items():
        if row not in new:
            found.append(f"{row}: row is missing")
            continue
        was, now = (dict(flat(values)) for values in (before, new[row]))
        if rates:
            was = {key: value for key, value in was.items() if key.startswith(("scores.", "status"))}
        for key, value in was.items():
            if key not in now or now[key] != value:
                found.append(f"{row}: {key} was {value}, is {now.get(key, 'missing')}")
        for key in now.keys() - was.keys():
            added[key] = added.get(key, 0) + 1
    print(f"{len(old)} rows compared, {len(new.keys() - old.keys())} rows are new")
    for key, count in sorted(added.items())[:SHOWN]:
        print(f"value {key} is new in {count} rows")
    return found


def main() -> None:
    parser = parser_of(__doc__, check=None)
    parser.add_argument("--text", default="builtin", help="as --text of the commands")
    parser.add_argument("--out", type=Path, required=True, help="file for the scores, JSON")
    parser.add_argument("--against", type=Path, help="file of another version")
    parser.add_argument("--rates", action="store_true", help="compare scores alone")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "same-numbers", help="folder")
    options = parser.parse_args()
    new = measured(options.text, options.scratch, options.out)
    if options.against:
        old = json.loads(options.against.read_text())
        found = differences(old, new, options.rates)
        print("\n".join(found[:SHOWN]))
        sys.exit(f"{len(found)} numbers differ" if found else 0)


if __name__ == "__main__":
    run_script(main)
