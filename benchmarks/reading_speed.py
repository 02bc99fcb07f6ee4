"""What farspan's reading costs beside one plain forward, and a nested forgetting curve beside its naive twin.

    python benchmarks/reading_speed.py --model MODEL [--dtypes float32 bfloat16] [--threads 1 2] [--contexts 2048 8192]
        [--runs 3] [--check]
    python benchmarks/reading_speed.py --model MODEL --profile [--dtypes ...] [--threads 1] [--contexts 2048]
    python benchmarks/reading_speed.py --quick

`plain` is one forward of the model with its own SDPA over all tokens, with logits of the last position only; `read` is
`reader.read` of the same tokens under `full`, in farspan's chunks. The two alternate in one process.

`twin` is a nested curve of 4 lengths and 2 repeats as anyone would write it: one plain forward for each length, repeat
and half, with logits of the scored part only. `nested` is the same curve by `farspan.measure` with `batch=1`, on the
same sequences; hits are compared one by one. The largest length fills the context.

Operations are those that any exact method must do: the matrices for each token, the pairs of a token and those it sees,
and the output head at scored positions. The arithmetic bound of `nested` is its operations by the rate at which `plain`
does its own, on as many tokens as the context has. (By the plan's formula, which also counts pairs that the mask hides,
`plain` would seem to do twice as many pairs as it does: that ratio is given as `nested_to_bound_by_plan`.)

Seconds are the least of the runs: CPU seconds with one thread, since others on the machine only add to wall time, and
wall seconds with more. Peak memory is what a process took above the loaded model, in a process apart. Text: files of
Python's own library, joined in one file, so that the search for them is not timed. Last line: the figures as JSON.
--profile prints only which share of the CPU time of one `read` each of torch's operators takes by itself; nothing is
judged.
--check fails where a bound is missed at a context of 2,048 or more: reading at most 1.15 times `plain`, `nested` at
least 80 % of its bound, all hits equal in float32.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from common import apart, end, mebibytes, parser_of, run_script, table

READ_BOUND = 1.15  # at most: seconds of `read` over those of `plain`
NESTED_BOUND = 0.8  # at least: of the arithmetic bound
JUDGED = 2048  # tokens of context from which on the bounds hold; below, Python's share is too large
POINTS, REPEATS = 4, 2
SHOWN = 12  # operators of a profile
TEXT = "builtin:held-out+tests"
ENOUGH = 2_000_000  # characters


def write_text(path: Path) -> None:
    from farspan.text.documents import read_texts

    with path.open("w") as file:
        for document in read_texts(TEXT):
            file.write(document)
            if file.tell() > ENOUGH:
                break


def seconds(run: Callable[[], Any]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def operations(lm: Any, before: int, tokens: int, scored: int) -> float:
    from farspan import hf

    per_token, per_pair, per_scored = hf.flops(lm.model)
    seen = np.arange(before + 1, before + tokens + 1)  # of each token, with itself
    pairs = sum(each * float(np.minimum(seen, window or before + tokens).sum()) for window, each in per_pair.items())
    return per_token * tokens + pairs + per_scored * scored


def reading(lm: Any, text: str, context: int, runs: int, ways: list[str]) -> dict[str, Any]:
    """Seconds or peak MiB of one plain forward and of reading."""
    import torch

    from farspan.hf.device import peak_above
    from farspan.methods import method
    from farspan.text.corpora import load

    ids = torch.from_numpy(load(text, lm.tokenizer).windows(context, 1, 0)[0]).long()[None]

    def plain() -> None:
        with torch.no_grad():
            lm.model(input_ids=ids, use_cache=False, logits_to_keep=1)

    with method("full").on(lm) as reader:
        reader.capacity = context
        run = {"plain": plain, "read": lambda: reader.read(ids)}
        run[ways[0]]()
        if len(ways) == 1:
            with peak_above(lm.device) as peak:
                run[ways[0]]()
            return {"peak_mib": mebibytes(peak)}
        times = [[seconds(run[way]) for way in ways] for _ in range(runs)]
        chunk = reader.chunk
    found = {
        way: {"wall": min(t[i][0] for t in times), "cpu": min(t[i][1] for t in times)} for i, way in enumerate(ways)
    }
    return found | {"chunk": chunk, "operations": operations(lm, 0, context, 1), "by_plan": lm.flops(0, context, 1)}


def shares(lm: Any, text: str, context: int) -> list[tuple[str, int, float]]:
    """Operators of one reading, each with its calls and its share of the CPU time, largest first."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from farspan.methods import method
    from farspan.text.corpora import load

    ids = torch.from_numpy(load(text, lm.tokenizer).windows(context, 1, 0)[0]).long()[None]
    with method("full").on(lm) as reader:
        reader.capacity = context
        reader.read(ids[:, : min(context, 256)])  # what only the first reading does
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            reader.read(ids)
    found = profiled.key_averages()
    total = sum(one.self_cpu_time_total for one in found)
    ordered = sorted(found, key=lambda one: -one.self_cpu_time_total)
    return [(one.key, one.count, one.self_cpu_time_total / total) for one in ordered]


def twin(lm: Any, task: Any, lengths: tuple[int, ...]) -> dict[str, str]:
    """Hits by half, repeat and length, packed, as in a row's `copy_hits`."""
    import torch

    separator = list(task.separator(lm))
    hits = {}
    for example in task.examples(lm, lengths, REPEATS, 0):
        for length in lengths:
            read = example.payload.target[:length].tolist()
            scored = task.slice_at(length, 0.0)[2]
            for half, asked in (("copy", read), ("control", example.payload.other[:length].tolist())):
                ids = torch.tensor([[*separator, *read, *separator, *asked]])
                with torch.no_grad():
                    logits = lm.model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=scored).logits
                right = logits[0].argmax(-1) == ids[0, -scored:]
                hits[f"{half} {example.repeat} {length}"] = np.packbits(right.numpy()).tobytes().hex()
    return hits


def nested(lm: Any, text: str, lengths: tuple[int, ...]) -> dict[str, str]:
    from farspan import measure
    from farspan.tasks.curve import Curve

    with tempfile.TemporaryDirectory() as folder:
        measured = measure(
            [lm],
            ["full"],
            [Curve(protocol="nested")],
            text=text,
            lengths=lengths,
            repeats=REPEATS,
            batch=1,
            out=Path(folder) / "run",
        )
    return {
        f"{half} {row.repeat} {row.length}": row.scores[f"{half}_hits"]
        for row in measured.rows
        for half in ("copy", "control")
    }


def curve(lm: Any, text: str, context: int, runs: int, way: str) -> dict[str, Any]:
    """Seconds, peak MiB and hits of a nested curve."""
    from farspan.hf.device import peak_above
    from farspan.measuring.operations import flops_of
    from farspan.methods import method
    from farspan.tasks.curve import Curve

    task = Curve(protocol="nested").on(lm, text)
    longest = task.largest_length(lm, context)
    lengths = tuple(longest * i // POINTS for i in range(1, POINTS + 1))
    run = (lambda lengths: twin(lm, task, lengths)) if way == "twin" else lambda lengths: nested(lm, text, lengths)
    run(tuple(length // 16 for length in lengths))  # the self-check and the first forwards are not what is compared
    hits: dict[str, str] = {}
    with peak_above(lm.device) as peak:
        times = [seconds(lambda: hits.update(run(lengths))) for _ in range(runs)]
    found: dict[str, Any] = {"wall": min(t[0] for t in times), "cpu": min(t[1] for t in times)}
    found |= {"peak_mib": mebibytes(peak), "hits": hits}
    work = [w for example in task.examples(lm, lengths, REPEATS, 0) for w in task.work(lm, example)]
    with method("full").on(lm) as reader:
        found["operations"] = sum(w.num_rows * operations(lm, w.num_before, w.num_tokens, w.num_scored) for w in work)
        found["by_plan"] = sum(map(flops_of(reader), work))
    return found


def child(way: str, model: str, text: str, dtype: Any, threads: int, context: int, runs: int) -> dict[str, Any]:
    import torch

    import farspan

    torch.set_num_threads(threads)
    lm = farspan.load(model, dtype=dtype, device="cpu")
    if way == "profile":
        return {"shares": shares(lm, text, context)}
    if way in ("twin", "nested"):
        return curve(lm, text, context, runs, way)
    return reading(lm, text, context, runs, way.split("+"))


def compared(found: dict[str, dict[str, Any]], clock: str) -> dict[str, Any]:
    """The figures of one dtype, number of threads and context."""
    both, ours, theirs = found["plain+read"], found["nested"], found["twin"]
    plain = both["plain"][clock]
    bits = [(int(theirs["hits"][at], 16), int(ours["hits"][at], 16)) for at in theirs["hits"]]
    return {
        "plain": plain,
        "read": both["read"][clock],
        "read_to_plain": both["read"][clock] / plain,
        "plain_mib": found["plain"]["peak_mib"],
        "read_mib": found["read"]["peak_mib"],
        "twin": theirs[clock],
        "nested": ours[clock],
        "twin_to_nested": theirs[clock] / ours[clock],
        "nested_to_bound": ours["operations"] / (both["operations"] / plain) / ours[clock],
        "nested_to_bound_by_plan": ours["by_plan"] / (both["by_plan"] / plain) / ours[clock],
        "twin_mib": theirs["peak_mib"],
        "nested_mib": ours["peak_mib"],
        "hits": sum(twin.bit_count() for twin, _ in bits),
        "hits_that_differ": sum((twin ^ own).bit_count() for twin, own in bits),
    }


def missed(name: str, figures: dict[str, Any], context: int, exact: bool) -> list[str]:
    wrong = []
    if exact and figures["hits_that_differ"]:
        wrong.append(f"{name}: {figures['hits_that_differ']} hits differ")
    if context >= JUDGED and figures["read_to_plain"] > READ_BOUND:
        wrong.append(f"{name}: read to plain {figures['read_to_plain']:.2f}, bound {READ_BOUND}")
    if context >= JUDGED and figures["nested_to_bound"] < NESTED_BOUND:
        wrong.append(f"{name}: nested to its bound {figures['nested_to_bound']:.2f}, at least {NESTED_BOUND}")
    return wrong


def main() -> None:
    parser = parser_of(__doc__, "the embedded model, float32, a context of 512")
    parser.add_argument("--model", help="a folder, a hub id or a GGUF file")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--contexts", nargs="+", type=int, default=[2048, 8192], help="tokens")
    parser.add_argument("--runs", type=int, default=3, help="of which the fastest counts")
    parser.add_argument("--profile", action="store_true", help="the time of each operator of one reading, and no more")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(*json.loads(options.child))))
        return
    if options.quick:
        options.model, options.dtypes, options.contexts = options.model or "demo", ["float32"], [512]
    if options.model is None:
        parser.error("which model? Give --model MODEL, or --quick for the embedded one")

    figures, wrong = dict[str, Any](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        write_text(text)
        for dtype, threads, context in product(options.dtypes, options.threads, options.contexts):
            if options.profile:
                given = json.dumps(["profile", options.model, str(text), dtype, threads, context, 1])
                most = apart(__file__, "--child", given, freeing=False)["shares"][:SHOWN]
                print(f"{dtype}, {threads} threads, {context:,} tokens")
                print(table(["operator", "calls", "share"], [[f"`{n}`", f"{c:,}", f"{x:.1%}"] for n, c, x in most]))
                continue
            found = {}
            for way in ("plain+read", "plain", "read", "twin", "nested"):
                given = json.dumps([way, options.model, str(text), dtype, threads, context, options.runs])
                found[way] = apart(__file__, "--child", given, freeing=way in ("plain", "read"))
            name = f"{dtype}, {threads} threads, {context} tokens"
            one = compared(found, "cpu" if threads == 1 else "wall")
            print(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in one.items()), flush=True)
            figures |= {f"{name}: {key}": value for key, value in one.items()}
            wrong += missed(name, one, context, exact=dtype == "float32")
    if not options.profile:
        end(figures, wrong, options.check)


if __name__ == "__main__":
    run_script(main)
