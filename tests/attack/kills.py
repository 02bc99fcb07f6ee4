"""Commands that are killed, and repeated until they end: nothing is lost, twice or another number, none is blocked.

A kill is SIGKILL at the Nth time that the command opens a file for writing, renames or removes one (exactly there, or
some microseconds later), a signal at the byte where a file reaches a size, so that a write is torn, or SIGKILL after a
while. Where they come is drawn from a seed. What a command leaves in the end is compared with what one leaves that was
never stopped.
"""

import hashlib
import json
import random
import re
import signal
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attack.harness import Command, End, Finding, Stage
from attack.inputs import ATTENTION, COMPARE, ICL, IMPORT, INDEX, OWN, PERPLEXITY, REPORT, TRAIN

CURVE = ("curve", "models/llama", "--text", "text.txt", "--lengths", "8,16,24,32", "--repeats", "5", "--out", "run")
AUTO = ("curve", "models/llama", "--text", "text.txt", "--repeats", "3", "--out", "run")
PROBE = (*CURVE, "--protocol", "probe", "--warmup", "2", "--scored", "4", "--depths", "3")
RECALL = (
    "recall", "models/llama", "--text", "text.txt", "--length", "64", "--points", "3", "--repeats", "4", "--warmup",
    "2", "--scored", "4", "--out", "run",
)  # fmt: skip
HALF = ("--batch", "2")
MOST = 6  # kills of one sequence


@dataclass(frozen=True)
class Killed:
    """A command, and what of it must be the same in the end."""

    name: str
    argv: tuple[str, ...]
    digest: Callable[[Path], Any]
    made: str | None = None  # an earlier command, of MADE
    sequences: int = 6


def rows(here: Path) -> Any:
    """What was measured: each row once, with hits and accuracies as they are and nats to six digits."""
    lines = [line for file in (here / "run").glob("rows*.jsonl") for line in file.read_text().splitlines()]
    found: dict[str, Any] = {}
    for line in lines:
        row = json.loads(line)
        if row["status"] == "oom":
            continue  # one that had too little memory is measured again
        key = _key(row)
        if key in found:
            return {"twice": key}
        scores = {name: _rounded(name, value) for name, value in row["scores"].items()}
        found[key] = [row["status"], scores]
    return found


def _key(row: dict[str, Any]) -> str:
    return json.dumps([row[name] for name in ("model", "method", "task", "example", "length", "depth")])


def ran_out(here: Path) -> set[str]:
    """The rows that had too little memory when they were first measured."""
    file = here / "run" / "rows.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {_key(row) for row in lines if row["status"] == "oom"}


def _rounded(name: str, value: Any) -> Any:
    if isinstance(value, float) and ("nats" in name or "per_second" in name):
        return None if "per_second" in name else float(f"{value:.3g}")
    if isinstance(value, list):
        return [_rounded(name, one) for one in value]
    if isinstance(value, dict):
        return {key: _rounded(f"{name} {key}", one) for key, one in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


def weights(here: Path) -> Any:
    """What was trained: weights bit by bit, and losses."""
    out = here / "out"
    found = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(out.glob("*.safetensors"))}
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    found["losses"] = str([(entry["step"], entry["loss"]) for entry in log if "loss" in entry])
    return found


def index(here: Path) -> Any:
    return {
        str(file.relative_to(here)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted((here / "index").rglob("*"))
        if file.is_file()
    }


def report(here: Path) -> Any:
    found = {}
    for file in sorted((here / "report").iterdir()):
        text = re.sub(r'"(started|seconds)": ?"[^"]*"', "", file.read_text("utf-8", "replace"))
        found[file.name] = len(text) if file.suffix == ".html" else hashlib.sha256(text.encode()).hexdigest()
    return found


COMMANDS = (
    Killed("curve nested", CURVE, rows, sequences=10),
    Killed("curve nested bf16", ("curve", "models/half", *CURVE[2:]), rows, sequences=10),
    Killed("curve nested in batches", (*CURVE, *HALF), rows),
    Killed("curve probe", PROBE, rows),
    Killed("curve probe bf16", ("curve", "models/half", *PROBE[2:]), rows),
    Killed("curve auto", AUTO, rows, sequences=10),
    Killed("curve auto bf16", ("curve", "models/half", *AUTO[2:]), rows, sequences=10),
    Killed("curve sinks", (*CURVE, "--method", "sinks:window=24"), rows),
    Killed("curve cepe", ("curve", "models/cepe", *CURVE[2:], "--method", "cepe"), rows),
    Killed("recall", RECALL, rows),
    Killed("perplexity", PERPLEXITY, rows),
    Killed("perplexity bf16", ("perplexity", "models/half", *PERPLEXITY[2:]), rows),
    Killed("attention", ATTENTION, rows),
    Killed("compare", (*COMPARE, "--method", "full", "--method", "sinks:window=24", "--task", "curve"), rows),
    Killed("task own", OWN, rows),
    Killed("task icl", ICL, rows),
    Killed("train lm", TRAIN["lm"], weights, sequences=8),
    Killed("train smt", TRAIN["smt"], weights, sequences=8),
    Killed("train mlm", TRAIN["mlm"], weights, sequences=8),
    Killed("train cepe", TRAIN["cepe"], weights, sequences=8),
    Killed("train distill", TRAIN["distill"], weights, sequences=8),
    Killed("index", INDEX, index, sequences=8),
    Killed("import", IMPORT, rows),
    Killed("report", REPORT, report, made="curve"),
)


@dataclass(frozen=True)
class Series:
    """One command killed some times in a row."""

    killed: Killed
    seed: int

    @property
    def name(self) -> str:
        return f"{self.killed.name}, {self.seed}"


def sequences(of_each: int = 0) -> Iterator[Series]:
    for killed in COMMANDS:
        for seed in range(of_each or killed.sequences):
            yield Series(killed, seed)


@dataclass(frozen=True)
class Whole:
    """What a command leaves that was never stopped, and what its kills are drawn from."""

    digest: Any
    operations: int
    seconds: float
    sizes: tuple[int, ...]  # bytes of the files that it writes
    leftover: tuple[str, ...]  # names in the working folder


def whole(stage: Stage, killed: Killed) -> Whole:
    known: dict[str, Whole] = stage.__dict__.setdefault("_whole", {})
    if killed.name not in known:
        with stage.copy(origin_of(stage, killed)) as here:
            before = {str(file.relative_to(here)) for file in here.rglob("*")}
            tally = here.parent / "tally"
            (end,) = stage.zygote.run(Command(killed.argv, here, kill={"count": str(tally)}))
            if end.code:
                raise RuntimeError(f"{killed.name} ends with {end.code} without a kill: {end.stderr[-500:]}")
            written = [file for file in here.rglob("*") if file.is_file() and str(file.relative_to(here)) not in before]
            known[killed.name] = Whole(
                killed.digest(here),
                int(tally.read_text()),
                end.seconds,
                tuple(sorted({file.stat().st_size for file in written})),
                _names(here),
            )
    return known[killed.name]


def origin_of(stage: Stage, killed: Killed) -> Path:
    return stage.made(killed.made) if killed.made else stage.origin


def _names(here: Path) -> tuple[str, ...]:
    """What lies in the working folder, and beside caches and indexes: temporary folders have names of their own."""
    places = (here, here / "cache", here / "cache" / "corpora", here / "run", here / "report")
    return tuple(sorted(f"{place.name}/{file.name}" for place in places if place.is_dir() for file in place.iterdir()))


def kill_of(rng: random.Random, known: Whole, timed: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
    """One kill: how, and under which limits. Those that are not timed come at the same place each time."""
    kind = rng.choice(("operation", "size", *(("operation", "a little later", "while") if timed else ())))
    if kind == "size":
        return {}, {"file": rng.randrange(1, max(known.sizes, default=100) + 2)}
    if kind == "while":
        return {"after": rng.uniform(0.02, max(0.05, known.seconds))}, {}
    kill: dict[str, Any] = {"operation": rng.randrange(1, known.operations + 1)}
    if kind == "a little later":
        kill["delay"] = 10 ** rng.uniform(-5, -2)
    return kill, {}


KILLS = (-signal.SIGKILL, -signal.SIGALRM, -signal.SIGXFSZ)


def _after(story: list[str], kind: str, detail: str) -> Finding:
    return Finding(kind, f"after {'; '.join(story)}: {detail}")


def _wrong_end(end: End, story: list[str], allowed: Collection[int]) -> list[Finding]:
    """What is wrong with how a command ended after these kills; codes other than 0 that are none are allowed."""
    if end.hung:
        return [_after(story, "hang", f"more than {end.seconds:.0f} s")]
    if end.code not in (0, *allowed):
        return [_after(story, "blocked", f"{end.code}: {end.stderr[-400:]}")]
    return []


def attack(stage: Stage, sequence: Series, *, timed: bool = True) -> tuple[int, list[Finding]]:
    """Kills a command some times, lets it end, and compares; returns the kills that hit."""
    killed = sequence.killed
    known = whole(stage, killed)
    rng = random.Random(f"{killed.name} {sequence.seed}")
    hits, story = 0, list[str]()
    with stage.copy(origin_of(stage, killed)) as here:
        for _ in range(rng.randrange(1, MOST + 1)):
            kill, limits = kill_of(rng, known, timed)
            (end,) = stage.zygote.run(Command(killed.argv, here, kill=kill, limits=limits))
            story.append(json.dumps(kill | limits))
            if found := _wrong_end(end, story, KILLS):
                return hits, found
            hits += end.code in KILLS
        (end,) = stage.zygote.run(Command(killed.argv, here))
        if found := _wrong_end(end, story, ()):
            return hits, found
        digest = killed.digest(here)
        if digest != known.digest:
            found.append(_after(story, "changed", difference(known.digest, digest)))
        more = set(_names(here)) - set(known.leftover)
        if more:
            found.append(_after(story, "left", f"{sorted(more)[:5]}"))
    return hits, found


def difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    missing, more = one.keys() - other.keys(), other.keys() - one.keys()
    moved = [key for key in one.keys() & other.keys() if one[key] != other[key]]
    first = f"; {moved[0]}: {one[moved[0]]} is {other[moved[0]]}" if moved else ""
    return f"{len(missing)} missing, {len(more)} more, {len(moved)} of {len(one)} differ{first[:600]}"


# shards beside each other


@dataclass(frozen=True)
class Beside:
    """A command that two shards measure at the same time, each killed whenever it was started again."""

    killed: Killed
    kills: int = 20
    shards: int = 2

    @property
    def name(self) -> str:
        return f"{self.killed.name}, {self.shards} shards"


LONGER = (*CURVE[:5], "8,12,16,20,24,28,32,40", "--repeats", "9", *CURVE[8:], "--batch", "1")
BESIDE = (
    Beside(Killed("curve longer", LONGER, rows)),
    Beside(Killed("curve longer bf16", (LONGER[0], "models/half", *LONGER[2:]), rows)),  # a batch of one, as alone
    Beside(Killed("compare", (*COMPARE, "--method", "full", "--method", "sinks:window=24", "--task", "curve"), rows)),
)


def attack_shards(stage: Stage, one: Beside) -> tuple[int, list[Finding]]:
    """Kills shards of a command until enough kills have hit, lets all end, and compares with one process; returns the
    kills that hit."""
    known = whole(stage, one.killed)
    rng = random.Random(one.name)
    hits, story = 0, list[str]()
    with stage.copy() as here:

        def ends(disturbed: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[Finding]:
            nonlocal hits
            commands = [
                Command((*one.killed.argv, "--shard", f"{number}/{one.shards}"), here, kill=kill, limits=limits)
                for number, (kill, limits) in enumerate(disturbed, 1)
            ]
            story.append(json.dumps(disturbed))
            for end in stage.zygote.run(*commands):
                if found := _wrong_end(end, story, KILLS):
                    return found
                hits += end.code in KILLS
            return []

        while hits < one.kills:
            if found := ends([kill_of(rng, known) for _ in range(one.shards)]):
                return hits, found
        if found := ends([({}, {})] * one.shards):
            return hits, found
        digest = one.killed.digest(here)
        if digest != known.digest:
            found.append(_after(story, "changed", difference(known.digest, digest)))
        if left := [name for name in _names(here) if ".farspan-part-" in name]:
            found.append(_after(story, "left", f"{left[:5]}"))
    return hits, found


# signals that end a command, and what is said then


@dataclass(frozen=True)
class Signalled:
    name: str
    argv: tuple[str, ...]
    signal: int
    share: float  # of the command's time


def signals(shares: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)) -> Iterator[Signalled]:
    for killed in COMMANDS:
        for number in (signal.SIGINT, signal.SIGTERM):
            for share in shares:
                name = f"{signal.Signals(number).name} to {killed.name} after {share:.0%}"
                yield Signalled(name, killed.argv, number, share)


def attack_signal(stage: Stage, one: Signalled) -> tuple[bool, list[Finding]]:
    """Sends the signal: the command ends with 130 or 143 and a line, or it was over, which is returned first."""
    killed = next(known for known in COMMANDS if known.argv == one.argv)
    known = whole(stage, killed)
    with stage.copy(origin_of(stage, killed)) as here:
        kill = {"after": one.share * known.seconds, "signal": one.signal}
        (end,) = stage.zygote.run(Command(one.argv, here, kill=kill))
        expected = 128 + one.signal
        if "Traceback" in end.stderr:
            return False, [Finding("traceback", end.stderr[-1000:])]
        if end.code not in (expected, 0):
            return False, [Finding("signal", f"exit code {end.code}, expected {expected}: {end.stderr[-200:]!r}")]
        if end.code and not end.stderr.strip():
            return False, [Finding("unclear", "ended without a word")]
        return not end.code, []
