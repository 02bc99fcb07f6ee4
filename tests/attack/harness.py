"""Starts commands in the children of a zygote, each in a folder of its own, and judges how they end."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from farspan.terminal import shown

TESTS = Path(__file__).resolve().parents[1]
SOURCE = TESTS.parent / "src"
TIMEOUT = 300.0  # seconds of one command; it takes two, but a busy machine gives it few


@dataclass(frozen=True)
class End:
    """How a command ended."""

    argv: tuple[str, ...]
    code: int  # negative: the signal that ended it
    stdout: str
    stderr: str
    hung: bool = False
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_bytes: int = 0


@dataclass(frozen=True)
class Command:
    """One command, where it runs and how it is disturbed; see `zygote`."""

    argv: Sequence[str]
    cwd: Path
    kill: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)
    stdin: Path | None = None
    timeout: float = TIMEOUT
    env: dict[str, str] = field(default_factory=dict)


class Zygote:
    """A process that forks for each command; a context manager."""

    def __init__(self, drawn: bool = True) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(SOURCE), str(TESTS)]),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TRANSFORMERS_VERBOSITY": "error",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "MPLBACKEND": "agg",
            "PYTHONDONTWRITEBYTECODE": "1",
            "COLUMNS": "200",
        }
        for name in ("FARSPAN_DEBUG", "PYTEST_CURRENT_TEST"):
            environment.pop(name, None)
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("zygote.py")), *([] if drawn else ["undrawn"])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the zygote has ended")
        return json.loads(line)

    def run(self, *commands: Command) -> list[End]:
        """Starts the commands at once and waits for all of them."""
        assert self._process.stdin is not None
        requests = [
            _request(
                command.cwd.resolve(),
                command.timeout,
                {"HOME": str(command.cwd.resolve())} | command.env,
                argv=list(command.argv),
                stdin=str(command.stdin) if command.stdin else None,
                kill=command.kill,
                limits=command.limits,
            )
            for command in commands
        ]
        return self._ends(requests, [tuple(command.argv) for command in commands])

    def call(self, what: str, *arguments: Any, cwd: Path, timeout: float = 300) -> End:
        """Calls MODULE:FUNCTION in a child, with arguments that are JSON."""
        return self._ends([_request(cwd, timeout, {}, argv=[], call=what, arguments=arguments)], [(what,)])[0]

    def _ends(self, requests: list[Any], names: list[tuple[str, ...]]) -> list[End]:
        assert self._process.stdin is not None
        print(json.dumps(requests), file=self._process.stdin, flush=True)
        ends = []
        for name, request, answer in zip(names, requests, self._answer(), strict=True):
            paths = [Path(request[stream]) for stream in ("stdout", "stderr")]
            texts = [path.read_text("utf-8", "backslashreplace") if path.exists() else "" for path in paths]
            ends.append(End(name, stdout=texts[0], stderr=texts[1], **answer))
            shutil.rmtree(paths[0].parent)
        return ends

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def _request(cwd: Path, timeout: float, env: dict[str, str], **more: Any) -> dict[str, Any]:
    """A request to the zygote, whose streams are files in a folder of their own beside the working folder."""
    beside = Path(tempfile.mkdtemp(prefix=".streams-", dir=cwd.parent))
    streams = {stream: str(beside / stream) for stream in ("stdout", "stderr")}
    env = {"FARSPAN_CACHE": str(cwd / "cache"), "TMPDIR": str(cwd)} | env
    return {"cwd": str(cwd), "env": env, "timeout": timeout} | streams | more


class Stage:
    """The folder of what is attacked, and copies of it to attack."""

    def __init__(self, zygote: Zygote, folder: Path) -> None:
        self.zygote, self.folder = zygote, folder
        self.origin = folder / "origin"
        self._made: dict[str, Path] = {}
        self.origin.mkdir(parents=True)
        end = zygote.call("attack.stage:build", str(self.origin), cwd=self.origin)
        if end.code:
            raise RuntimeError(f"the stage cannot be built: {end.stderr}")
        shutil.rmtree(self.origin / "cache", ignore_errors=True)

    @contextmanager
    def copy(self, origin: Path | None = None) -> Iterator[Path]:
        """A copy of the stage, or of another folder, which may be damaged; its files are links until they are
        written anew."""
        place = Path(tempfile.mkdtemp(dir=self.folder))
        here = place / "work"
        try:
            shutil.copytree(origin or self.origin, here, symlinks=True)
            yield here
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def made(self, name: str) -> Path:
        """The stage after a command that ends well, one of `inputs.MADE`; made once."""
        from attack.inputs import BEFORE, MADE

        if name not in self._made:
            with self.copy(self.made(BEFORE[name]) if name in BEFORE else None) as here:
                (end,) = self.zygote.run(Command(MADE[name], here))
                if end.code:
                    raise RuntimeError(f"{' '.join(MADE[name])} ended with {end.code}: {end.stderr[-2000:]}")
                place = self.folder / f"made-{name}"
                here.rename(place)
            self._made[name] = place
        return self._made[name]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of all files of rows below a folder, which may be damaged: also folders and links to nothing."""
    found = []
    for file in sorted(one for one in folder.rglob("rows*.jsonl") if one.is_file()):
        for line in file.read_bytes().split(b"\n"):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                found.append(row)
    return found


# how an end is judged

FIX = re.compile(
    r"\b(use|give|choose|write|try|set|delete|repeat|install|make|name|needs?|must|expected?|known|at most|at least|"
    r"allowed|did you mean|build|download|convert|wait|free|remove|unset|only|instead|add|shorten|see|has|go together|"
    r"contradict|required|is not in the range|is not one of|not a valid|no such option|belongs?|missing argument|"
    r"got unexpected|should be|cannot be|does not exist|does not take|requires|at (character|line|column)|is not TOML|"
    r"exceeded maximum size|omit|correct|rename|replace|restore|leave)\b",
    re.IGNORECASE,
)
WHERE = re.compile(r"[\w.-]+\.\w{2,}|/|'")  # a file, a folder or a quoted name
UNCLEAR = {
    "errno": re.compile(r"\[Errno \d+\]"),
    "json without place": re.compile(r"^(error: )?(Expecting|Extra data|Unterminated|Invalid control|Invalid \\)"),
    "codec": re.compile(r"codec can't (en|de)code"),
    "class name": re.compile(r"<class '|<built-in|<function| object at 0x|<enum |<bound method"),
    "exception name": re.compile(r"^(error: )?\w*(Error|Exception)\b"),
    "bare conversion": re.compile(r"(invalid literal for int|could not convert string|cannot convert float)"),
    "library warning": re.compile(r"\b\w*Warning: |^\[\w+\|", re.MULTILINE),
    "python message": re.compile(
        r"(object has no attribute|not subscriptable|object is not iterable|unhashable|unexpected keyword argument|"
        r"must be str, not|positional argument|list index out of range|argument of type|weights_only|sys\.set_int|"
        r"argument after \*\*)"
    ),
}
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x80-\x9f]")
MAX_MESSAGE = 1200  # characters


def message(stderr: str) -> str:
    """What was said in the end, without typer's frame and usage."""
    lines = [line.strip("│╭╮╰╯─ \t") for line in stderr.splitlines()]
    lines = [line for line in lines if line and not line.startswith(("Usage:", "Try '", "Error ─"))]
    return "\n".join(line for line in lines if line != "Error")


@dataclass(frozen=True)
class Finding:
    """A rule that an end breaks."""

    kind: str  # traceback, crash, hang, silent, measured, exit code, unclear, escape, refused
    detail: str


def judge(
    end: End,
    *,
    expect: str,
    names: Sequence[str] = (),
    rows_before: int = 0,
    rows_after: int = 0,
    at_once: bool = False,
) -> list[Finding]:
    """The rules that an end breaks.

    Args:
        expect: "refused": exit code 2 and nothing measured; "ok": exit code 0; "failed": exit code 1 and a reason;
            "any": either of them, in words.
        names: what a message must name, one of them: the wrong value, the option or the file.
        at_once: whether it can be refused before anything is measured.
    """
    found: list[Finding] = []
    text = end.stderr
    said = message(text)
    if "Traceback (most recent call last)" in text + end.stdout:
        return [Finding("traceback", _raised(text))]
    if end.hung:
        return [Finding("hang", f"more than {end.seconds:.0f} s")]
    if end.code < 0 or end.code > 2:
        return [Finding("crash", f"exit code {end.code}: {said[-300:]}")]
    allowed = {"refused": (2,), "ok": (0,), "failed": (1, 2), "any": (0, 1, 2)}[expect]
    if end.code not in allowed:
        if expect == "refused":
            kind = "measured" if rows_after > rows_before else "silent" if end.code == 0 else "exit code"
        else:
            kind = "refused" if end.code == 2 else "exit code"
        found.append(Finding(kind, f"exit code {end.code}, expected {allowed[0]}: {said[-300:]}"))
    if CONTROL.search(end.stdout.replace("\r\n", "\n") + end.stderr):
        found.append(Finding("escape", repr(CONTROL.findall(end.stdout + end.stderr)[:8])))
    if end.code == 2:
        if rows_after > rows_before and expect == "refused" and at_once:
            found.append(Finding("measured", f"{rows_after - rows_before} rows, then refused: {said[-200:]}"))
        found += unclear(said, names)
    elif end.code == 1 and not (said or end.stdout.strip()):
        found.append(Finding("unclear", "exit code 1 without a word"))
    return found


def _raised(text: str) -> str:
    """The exception of a traceback, and where in farspan it came from."""
    raised = re.findall(r"^[\w.]+(?:Error|Exception|Interrupt|Exit|Warning)\b.*", text, re.MULTILINE)
    places = re.findall(r'File "[^"]*/farspan/([\w/]+\.py)", line (\d+), in (\w+)', text)
    where = f" at {places[-1][0]}:{places[-1][1]} in {places[-1][2]}" if places else ""
    return (raised[-1][:300] if raised else text[-300:]) + where


def unclear(said: str, names: Sequence[str] = ()) -> list[Finding]:
    """What is wrong with a message of refusal."""
    found = []
    if not said.strip():
        return [Finding("unclear", "exit code 2 without a word")]
    for kind, pattern in UNCLEAR.items():
        match = pattern.search(said)
        if match is None:
            continue
        if kind == "errno" and WHERE.search(said[match.end() :]):
            continue
        if kind == "codec" and re.search(r"is not UTF-8|, line \d+", said):
            continue
        found.append(Finding("unclear", f"{kind}: {said[:300]}"))
    if len(said) > MAX_MESSAGE:
        found.append(Finding("unclear", f"{len(said):,} characters: {said[:200]}"))
    if len([line for line in said.splitlines() if line.strip()]) > 4:
        found.append(Finding("unclear", f"{len(said.splitlines())} lines: {said[:300]}"))
    if names and not _names(said, names):
        found.append(Finding("no name", f"names none of {list(names)[:4]!r:.160}: {said[:300]}"))
    if not FIX.search(said):
        found.append(Finding("no fix", f"says not what to do: {said[:300]}"))
    return found


def _names(said: str, names: Sequence[str]) -> bool:
    """Whether a message has one of the names, as it is, escaped, broken into lines, or a part of its spelling."""
    squeezed = re.sub(r"\s+", "", said)
    parts = [part for name in names for part in re.split(r"[:=,+#/\s]+", name) if len(part) > 2 or part.isdigit()]
    wanted = [form for name in [*names, *parts] for form in (name, repr(name)[1:-1], shown(name)) if form]
    # messages cut names of hundreds of characters
    return any(re.sub(r"\s+", "", form)[:100] in squeezed for form in wanted) or ("" in names and "''" in squeezed)
