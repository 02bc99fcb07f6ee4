"""`make test-attack`: all attacks; a table of counts and a line of JSON in the end; exit 1 where one found something.

cd tests && python -m attack [--parts inputs,kills,...] [--only TEXT] [--sample N] [--jobs N] [--findings FILE]
                              [--messages FILE]
"""

import argparse
import json
import os
import platform
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attack.harness import Finding, Stage, Zygote


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m attack", description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", default="inputs,kills,limits,hostile,fuzz", help="which of these, comma-separated")
    parser.add_argument("--only", default="", help="inputs, kills, ... whose name has this text")
    parser.add_argument("--sample", type=int, default=0, help="some of each table; default all")
    parser.add_argument("--skip", type=int, default=0, help="inputs of each table to leave out before a sample")
    seconds = float(os.environ.get("FARSPAN_FUZZ_SECONDS", 600))
    parser.add_argument("--seconds", type=float, default=seconds, help="of fuzzing, in all")
    parser.add_argument("--seed", type=int, default=0, help="of fuzzing: another draws other examples")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="commands at once")
    parser.add_argument("--findings", type=Path, default=Path("attack-findings.jsonl"), help="a line each")
    parser.add_argument("--messages", type=Path, help="file for how each wrong input ended, a line each, to read")
    given = parser.parse_args()
    parts: dict[str, Callable[[Any, list[Stage]], Sequence[tuple[str, str, list[Finding]]]]] = {}
    from attack import parts as known

    for name in given.parts.split(","):
        parts[name] = getattr(known, name)
    counts: dict[str, Any] = {}
    found: Counter[str] = Counter()
    commit, started = _commit(), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="farspan-attack-") as folder, given.findings.open("w") as file:
        zygotes = [Zygote() for _ in range(given.jobs)]
        stages = [Stage(zygote, Path(folder) / str(number)) for number, zygote in enumerate(zygotes)]
        for part, attack in parts.items():
            part_started = time.perf_counter()
            results = attack(given, stages)
            bad = 0
            for name, kind, findings in results:
                found.update(f"{part} {one.kind}" for one in findings)
                bad += bool(findings)
                for one in findings:
                    line = {"part": part, "table": kind, "name": name, "kind": one.kind, "detail": one.detail}
                    file.write(json.dumps(line) + "\n")
            counts[part] = {"attacks": len(results), "with_findings": bad}
            counts[part]["minutes"] = round((time.perf_counter() - part_started) / 60, 1)
            counts[part]["of_each"] = dict(Counter(kind for _, kind, _ in results))
        for zygote in zygotes:
            zygote.__exit__()
    print(f"{'part':<10} {'attacks':>8} {'with findings':>14} {'minutes':>8}")
    for part, row in counts.items():
        print(f"{part:<10} {row['attacks']:>8,} {row['with_findings']:>14,} {row['minutes']:>8.1f}")
    summary = {
        "commit": commit,
        "python": platform.python_version(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "minutes": round((time.perf_counter() - started) / 60, 1),
        "parts": counts,
        "findings": dict(found),
    }
    print(json.dumps(summary))
    sys.exit(bool(found))


def _commit() -> str | None:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None


def shared_out(
    stages: list[Stage], work: Sequence[Any], attack: Callable[[Stage, Any], list[Finding]], name: Callable[[Any], str]
) -> list[tuple[Any, list[Finding]]]:
    """Does each piece of work once, on as many stages at once as there are; says what it finds as it goes."""
    waiting: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    for number, one in enumerate(work):
        waiting.put((number, one))
    results: list[Any] = [None] * len(work)

    def worker(stage: Stage) -> None:
        while True:
            try:
                number, one = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                findings = attack(stage, one)
            except (OSError, RuntimeError, ValueError, KeyError, IndexError) as error:
                findings = [Finding("harness", f"{type(error).__name__}: {error}")]
            results[number] = one, findings
            done = sum(result is not None for result in results)
            if done % 25 == 0 or done == len(work):
                print(f"{done} of {len(work)}", file=sys.stderr, flush=True)
            for finding in findings:
                print(f"{name(one)}\n    {finding.kind}: {finding.detail}", flush=True)

    threads = [threading.Thread(target=worker, args=(stage,)) for stage in stages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


if __name__ == "__main__":
    main()
