"""The tasks side by side: what a small model reaches on each under every method, and what differs from full attention.

    python benchmarks/task_table.py [--cepe FOLDER] [--model FOLDER] [--out FOLDER] [--data FOLDER] [--task NAME]
                                    [--repeats N] [--quick]

The embedded model (or --model), and with --cepe a CEPE model with the same decoder, on the tasks of TASKS, each at
lengths inside the trained window and beyond it. Rows are kept in --out, and the same command goes on where it was
stopped; the table is made of the rows alone. Every cell of a line is of the same examples. Values are means with their
95 % intervals over examples (Wilson's for right or wrong, else Student's). ▲ better and ▼ worse than `full`: paired by
example, Student's t, p < 0.05 after Holm over the table. Prints the table in Markdown; last line: the figures as JSON.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import folder_or_scratch, parser_of, run_script, table

from farspan import measure
from farspan.demo import embedded_model
from farspan.lm import LM, load
from farspan.record import Row, read_header
from farspan.report.cells import Cell, cells
from farspan.stats import holm, student_mean
from farspan.tasks import task
from farspan.text.retrieval import build

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
TEXT = "builtin:held-out+tests"
FOUND = "builtin:train+tests"  # what passages are of
METHODS = ("full", "sinks:window=508", "rope:type=yarn,factor=4", "topk:k=64")
PASSAGES, DOCUMENT = "replug", "replug:piece=256,tail=64"  # of several passages, of one document
CEPE = "cepe:chunk=64,decoder_window=513"


@dataclass(frozen=True)
class Asked:
    """A task, where, how often, and how RePlug reads it."""

    task: str
    lengths: tuple[int, ...]
    repeats: int
    replug: str = DOCUMENT


TASKS = {
    "perplexity": Asked("perplexity", (512, 1024), 24),
    "own": Asked("own", (512, 1024), 24),
    "ralm": Asked("ralm:index={index},window=256,query=64,passage_tokens=64", (0, 4, 8), 32, PASSAGES),
    "sst2": Asked("icl:set=sst2,data={data}/icl/sst2", (2, 10), 60, PASSAGES),
    "trec_coarse": Asked("icl:set=trec_coarse,data={data}/icl/trec", (2, 10), 60, PASSAGES),
    "banking77": Asked("icl:set=banking77,data={data}/icl/banking77", (2, 10), 30, PASSAGES),
    "qmsum": Asked(
        "zeroscrolls:set=qmsum,data={data}/meetings/qmsum_val.jsonl,truncate=middle,new_tokens=48", (512, 2048), 16
    ),
}


def measured(
    name: str, asked: Asked, lm: LM, cepe: str | None, repeats: int | None, places: dict[str, Any]
) -> tuple[list[Row], dict[tuple[str, int], Cell]]:
    """The rows of one task, of all methods, and their cells by method and length."""
    tasks = [asked.task.format(**places)]
    what: dict[str, Any] = {"lengths": asked.lengths, "repeats": repeats or asked.repeats}
    what |= {"text": TEXT} if task(tasks[0]).reads_text else {}
    runs = [measure([lm], [*METHODS, asked.replug], tasks, out=places["out"] / name, **what)]
    if cepe:
        runs.append(measure([cepe], [CEPE], tasks, out=places["out"] / f"{name}-cepe", **what))
    found = [cell for run in runs for cell in cells(run.rows, read_header(run.folder))]
    return [row for run in runs for row in run.rows], {(cell.method, cell.length): cell for cell in found}


def compared(rows: Sequence[Row], score: str) -> dict[tuple[str, int], tuple[float, float, float, float]]:
    """The paired difference from `full` by method and length: mean, 95 % interval, p."""
    by: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        if row.status == "ok":
            by.setdefault((row.method, row.length), {})[row.example] = row.scores[score]
    found = {}
    for (how, length), mine in by.items():
        base = by.get(("full", length), {})
        both = [name for name in mine if name in base]
        if how != "full" and both:
            found[how, length] = student_mean(np.array([mine[name] - base[name] for name in both]))
    return found


def said(cell: Cell | None, mark: str) -> str:
    if cell is None or cell.value is None:
        return "–"
    digits = 2 if cell.value >= 2 else 3
    value, low, high = (
        f"{x:.{digits}f}".removeprefix("0") if x is not None else "" for x in (cell.value, cell.low, cell.high)
    )
    return f"{value} [{low}, {high}]{mark and ' ' + mark}"


def main() -> None:
    parser = parser_of(__doc__, "2 examples of each task, which is under a minute", check=None)
    parser.add_argument("--model", help="folder of a small model; default the embedded one")
    parser.add_argument("--cepe", help="folder of a CEPE model with that decoder")
    parser.add_argument("--out", type=Path, help="keep the runs here")
    parser.add_argument("--data", type=Path, default=SHARED, help="folder with icl/ and meetings/")
    parser.add_argument("--task", action="append", choices=TASKS, help="only these")
    parser.add_argument("--repeats", type=int, help="examples of every task")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lm = load(options.model, dtype="float32", device="cpu") if options.model else embedded_model()
    chosen = {name: one for name, one in TASKS.items() if name in (options.task or TASKS)}
    with folder_or_scratch(options.out) as out:
        places: dict[str, Any] = {"out": out, "data": options.data}
        if "ralm" in chosen:
            places["index"] = build(FOUND, out / "index", tokens=62, tokenizer=lm.tokenizer).folder
        results = {
            name: measured(name, one, lm, options.cepe, 2 if options.quick else options.repeats, places)
            for name, one in chosen.items()
        }
    figures: list[dict[str, Any]] = []
    differences: dict[tuple[str, str, int], tuple[float, float, float, float]] = {}
    columns = [*METHODS, "replug", *([CEPE] if options.cepe else [])]
    for name, one in chosen.items():
        quality = task(one.task.format(**places)).quality
        differences |= {(name, *key): value for key, value in compared(results[name][0], quality.score).items()}
    corrected = dict(zip(differences, holm([p for *_, p in differences.values()]), strict=True))
    lines: list[list[str]] = []
    for name, one in chosen.items():
        question = task(one.task.format(**places))
        _, found = results[name]
        names = {how.partition(":")[0]: how for how, _ in found}
        for length in one.lengths:
            line = [f"`{name}` ({question.quality.name})", f"{length:,} {question.unit}"]
            for column in columns:
                how = names.get(column.partition(":")[0], column)
                p = corrected.get((name, how, length))
                difference = differences.get((name, how, length))
                mark = ""
                if p is not None and difference is not None and p < 0.05:
                    mark = "▲" if (difference[0] > 0) == question.quality.higher_is_better else "▼"
                cell = found.get((how, length))
                line.append(said(cell, mark))
                figures.append(
                    {"task": name, "length": length, "method": how, "p": p, "difference": difference}
                    | ({"value": cell.value, "low": cell.low, "high": cell.high, "n": cell.n} if cell else {})
                    | ({"failed": cell.failed} if cell and cell.failed else {})
                )
            lines.append(line)
    print(table(["task (quality)", "at", *(f"`{one}`" for one in columns)], lines))
    print(json.dumps(figures))


if __name__ == "__main__":
    run_script(main)
