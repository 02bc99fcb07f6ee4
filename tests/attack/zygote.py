"""A process that has imported everything once, and forks a child for each command.

Reads a JSON line a request from standard input and answers with a JSON line on standard output. Importing torch and
transformers takes seconds, a fork milliseconds. With the argument `undrawn`, pictures are files of zeros: to draw one
takes as long as a tiny training. A child runs `farspan.cli.main()` as the command would: its own working
folder, environment, standard streams and limits, and its exit code is that of the interpreter.
"""

import contextlib
import gc
import importlib
import json
import os
import random
import resource
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

# what commands import when they need it
MODULES = """
torch torch.distributed.checkpoint.state_dict transformers transformers.trainer transformers.integrations
transformers.models.llama.modeling_llama transformers.models.gpt2.modeling_gpt2 transformers.models.auto.modeling_auto
matplotlib.pyplot matplotlib.backends.backend_agg scipy.stats scipy.optimize plotly.graph_objects plotly.io jinja2
datasets pyarrow.parquet bm25s accelerate peft safetensors.torch tokenizers pydantic rich.progress rich.table
pydoc_data.topics rouge_score.rouge_scorer rouge jieba hypothesis
farspan farspan.cli farspan.ask farspan.callback farspan.measuring.grid farspan.demo farspan.report.progress
farspan.doctor farspan.stats farspan.text.retrieval farspan.tasks
farspan.report.page farspan.report.terminal farspan.report.perplexity farspan.report.attention farspan.report.cells
farspan.report.contrasts farspan.report.picture farspan.train.lm farspan.train.smt farspan.train.mlm farspan.train.cepe
farspan.train.distill
"""
PICTURE = 50_000  # bytes of a file that stands for a picture
WRITES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink", "shutil.rmtree")


def serve(drawn: bool) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is no answer
    _prepare(drawn)
    print(json.dumps({"ready": os.getpid()}), file=answers, flush=True)
    for line in sys.stdin:
        requests = json.loads(line)
        started = time.perf_counter()
        children = [(request, _start(request)) for request in requests]
        ends = [_end(child, request, started) for request, child in children]
        print(json.dumps(ends), file=answers, flush=True)


def _prepare(drawn: bool) -> None:
    import torch
    from matplotlib.figure import Figure

    torch.set_num_threads(1)
    gc.disable()
    for module in MODULES.split():
        with contextlib.suppress(ModuleNotFoundError):  # an extra that is not installed
            importlib.import_module(module)
    if not drawn:
        picture = importlib.import_module("farspan.report.picture")
        for step in ("draw_on", "add_legend"):
            setattr(picture, step, lambda *_, **options: None)
        Figure.savefig = lambda self, path, **options: Path(path).write_bytes(bytes(PICTURE))
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page of what was imported
    gc.enable()


def _start(request: dict[str, Any]) -> int:
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        code = _run(request)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _run(request: dict[str, Any]) -> int:
    os.setpgid(0, 0)
    for name in ("SIGINT", "SIGTERM", "SIGALRM"):
        signal.signal(getattr(signal, name), signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL)
    for number, place in enumerate((request.get("stdin") or os.devnull, request["stdout"], request["stderr"])):
        opened = os.open(place, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.environ.update(request.get("env", {}))
    os.chdir(request["cwd"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit(request.get("limits", {}))
    _kill_at(request.get("kill", {}), request["cwd"])
    sys.argv = ["farspan", *request["argv"]]
    code = _call(request.get("call", "farspan.cli:main"), request.get("arguments", ()))
    import atexit

    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def _call(what: str, arguments: Any) -> int:
    """Calls MODULE:FUNCTION; the exit code that an interpreter would end with."""
    module, _, name = what.partition(":")
    try:
        getattr(importlib.import_module(module), name)(*arguments)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _limit(limits: dict[str, int]) -> None:
    if "memory" in limits:  # bytes of address space beyond what is taken already
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + limits["memory"],) * 2)
    if "file" in limits:  # bytes of any file: the signal ends the command in the middle of a write
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits["file"], limits["file"]))
    if "cgroup" in limits:
        Path(str(limits["cgroup"]), "cgroup.procs").write_text(str(os.getpid()))


def _kill_at(kill: dict[str, Any], place: str) -> None:
    """SIGKILLs this process at the Nth time it opens a file below `place` for writing, or renames or removes one, or a
    little later. Counts these times in a file, where it is asked to."""
    if not kill.keys() & {"operation", "count"}:
        return
    pid, seen = os.getpid(), 0
    tally = os.open(kill["count"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if "count" in kill else None

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event == "open":
            path, _, flags = arguments
            if not isinstance(flags, int) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
                return
        elif event in WRITES:
            path = arguments[0]
        else:
            return
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if not isinstance(path, str) or os.getpid() != pid:
            return
        if os.path.isabs(path) and not path.startswith(place):
            return
        seen += 1
        if tally is not None:
            os.pwrite(tally, str(seen).encode(), 0)
        if seen == kill.get("operation"):
            if not kill.get("delay"):
                os.kill(pid, signal.SIGKILL)
            signal.setitimer(signal.ITIMER_REAL, kill["delay"])  # whose signal ends a process that does not handle it

    sys.addaudithook(hook)


def _end(child: int, request: dict[str, Any], started: float) -> dict[str, Any]:
    """Waits for a child, and sends it the signal that it is to have, when it is to have it."""
    kill = request.get("kill", {})
    watched = os.pidfd_open(child)
    waiting = select.poll()
    waiting.register(watched, select.POLLIN)
    hung = False
    if "after" in kill and not waiting.poll(1000 * kill["after"]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, kill.get("signal", signal.SIGKILL))
    if not waiting.poll(1000 * max(0.1, request.get("timeout", 120) - (time.perf_counter() - started))):
        hung = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    _, status, used = os.wait4(child, 0)
    os.close(watched)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)  # what it has started and left
    return {
        "code": os.waitstatus_to_exitcode(status),
        "hung": hung,
        "seconds": round(time.perf_counter() - started, 3),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 3),
        "peak_bytes": used.ru_maxrss * 1024,
    }


if __name__ == "__main__":
    random.seed(0)
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    serve(sys.argv[1:] != ["undrawn"])
