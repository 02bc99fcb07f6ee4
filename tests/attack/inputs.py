"""Wrong inputs: tables of commands, options, spellings and configs, and what is expected of each; see also `damages`.

An input is a command on a copy of the stage (or of what an earlier command made of it), damaged first. `expect`:

refused   exit code 2, a message that names one of `names`, and no row measured
ok        exit code 0
same      exit code 0 and the rows of the undamaged run, or refused
any       either, in words: a value that may have a meaning
"""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, get_args

from attack.stage import CONFIGS

Damage = Callable[[Path], None]
MEMORY = 6 << 30  # bytes that a command may take: an input must not take the machine down
MANY = "9" * 25


@dataclass(frozen=True)
class Input:
    """One wrong input."""

    table: str
    name: str
    argv: tuple[str, ...]
    expect: str = "refused"
    names: tuple[str, ...] = ()
    damage: Damage | None = None
    made: str | None = None  # what the stage is copied from: one of MADE
    stdin: str | None = None
    timeout: float = 240  # seconds; the built-in text takes twenty of a machine that does nothing else
    env: tuple[tuple[str, str], ...] = ()

    @property
    def id(self) -> str:
        return f"{self.table}: {self.name}"


CURVE = ("curve", "models/llama", "--text", "text.txt", "--lengths", "4,8", "--repeats", "2", "--out", "run")
PERPLEXITY = ("perplexity", "models/llama", "--text", "text.txt", "--lengths", "8,16", "--repeats", "2", "--out", "run")
RECALL = (
    "recall", "models/llama", "--text", "text.txt", "--length", "64", "--points", "3", "--repeats", "2", "--warmup",
    "2", "--scored", "4", "--out", "run",
)  # fmt: skip
ATTENTION = ("attention", "models/llama", "--text", "text.txt", "--lengths", "16,32", "--repeats", "2", "--out", "run")
COMPARE = (
    "compare", "models/llama", "--text", "text.txt", "--lengths", "8,16", "--repeats", "2", "--no-cost", "--task",
    "perplexity:target_tokens=4", "--out", "run",
)  # fmt: skip
OWN = ("task", "own", "models/llama", "--text", "docs", "--lengths", "300", "--repeats", "2", "--out", "run")
QA = ("task", "qa:data=nq.jsonl,new_tokens=2", "models/llama", "--lengths", "0,2", "--repeats", "2", "--out", "run")
ICL = ("task", "icl:set=mr,data=icl", "models/llama", "--lengths", "0,2", "--repeats", "2", "--out", "run")
RALM = (
    "task", "ralm:index=index,window=32,query=8,passage_tokens=8", "models/llama", "--text", "text.txt", "--lengths",
    "0,2", "--repeats", "2", "--out", "run",
)  # fmt: skip
INDEX = ("index", "--text", "docs", "--out", "index")
IMPORT = ("import", "authors.json", "--out", "run")
ASK = ("ask", "models/llama", "what?", "--context", "text.txt", "--max-new-tokens", "2")
DOCTOR = ("doctor", "models/llama", "--text", "text.txt")
REPORT = ("report", "run")
CHECK = ("check", "run", "models/llama", "--out", "again")
EXPORT = ("export", "run", "--to", "csv")
SEARCH = (
    "search", "rope", "models/llama", "--text", "text.txt", "--factor", "2", "--evaluations", "2", "--repeats", "2",
    "--warmup", "2", "--scored", "4", "--out", "run",
)  # fmt: skip
TRAIN = {kind: ("train", kind, f"{kind}.toml") for kind in CONFIGS}
# trainings whose first steps do not depend on how many follow, so that they go on with more
LONGER = {
    kind: (*argv, "--set", "lengths.every=2" if kind == "smt" else "optimizer.decay_fraction=0")
    for kind, argv in TRAIN.items()
}

# what an earlier command made of the stage, by name
MADE: dict[str, tuple[str, ...]] = {
    "curve": CURVE,
    "recall": RECALL,
    "perplexity": PERPLEXITY,
    "compare": COMPARE,
    "own": OWN,
    "index": INDEX,
    "import": IMPORT,
    "ralm": RALM,
    **TRAIN,
    **{f"{kind}, longer": argv for kind, argv in LONGER.items()},
}
BEFORE = {"ralm": "index"}  # and before that

BASES: dict[str, tuple[tuple[str, ...], str | None]] = {
    "curve": (CURVE, None),
    "recall": (RECALL, None),
    "perplexity": (PERPLEXITY, None),
    "attention": (ATTENTION, None),
    "compare": (COMPARE, None),
    "task": (OWN, None),
    "ask": (ASK, None),
    "index": (INDEX, None),
    "doctor": (DOCTOR, None),
    "report": (REPORT, "curve"),
    "import": (IMPORT, None),
    "check": (CHECK, "curve"),
    "export": (EXPORT, "curve"),
    "search rope": (SEARCH, None),
    "methods": (("methods",), None),
    "tasks": (("tasks",), None),
    **{f"train {kind}": (argv, None) for kind, argv in TRAIN.items()},
}


def write(here: Path, place: str, content: bytes | str) -> None:
    """Puts a file in the place of what was there."""
    path = here / place
    if path.is_symlink() or path.is_file():
        path.unlink()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))


# options: every option of every command, by its type


def refused(*values: str) -> dict[str, str]:
    return dict.fromkeys(values, "refused")


INTEGERS = refused("", "x", "1.5", "nan", "1e3", "0x10", "-1", " 3 x") | {"0": "any", MANY: "any"}
NUMBERS = refused("", "x", "nan", "-1") | {"inf": "any", "1e400": "any", "0": "any"}
CHOICES = refused("", "x", "NESTED")
PLACES = refused("", "text.txt", "text.txt/x", "/proc/none/x", "x" * 300, "docs", "/dev/null", "/dev/full")
LENGTHS = refused(
    "", " ", "x", "4,8,x", "0", "-4,8", "8,4", "4,4", "8:4", "0:8", "4:8:12", "4:", ":8", "1e3", "4.5",
    "nan", "4;8", "4,,8", "auto,8", "AUTO", "-1", "4:-8", ",", ":", "\x1b[31m", "[/x]", "None"
)  # fmt: skip
LENGTHS |= {MANY: "any", f"4:{MANY}": "any", "4," + MANY: "any", "4:8000000": "any"}
TEXTS = refused(
    "", " ", "nothere", "nothere.txt", "models", "models/llama/model.safetensors", "a/b", "builtin:x",
    "builtin:", "builtin:held-out+", "shuffled:", "shuffled:nothere", "shuffled", "text.txt#column",
    "text.jsonl#nothere", "text.parquet#nothere", "~nouser/x", "\x1b[31mred", "[/x]", "[bold]x",
    "a$\\frac$z", "random:x", "/dev/null", "x" * 5000, "\udcff", "org/name@c:s#col", "nothere.parquet",
    "docs/*.txt", "https://example.com/x.txt", "nothere#column", "text.txt\n", "-", "#text", "icl#"
)  # fmt: skip
METHODS = refused(
    "", " ", "ful", "full:x=1", "FULL", "sinks", "sinks:window", "sinks:window=", "sinks:window=4,window=5",
    "sinks:windo=64", "full+", "+full", "full+full", "+", "cepe+full",
    "sinks:window=16+topk:k=3", "rope", "rope:type=x", "rope:type=yarn", "rope:factor=2", "topk",
    "lambda_mask", "cepe", "replug:weights=x", "replug:piece=0", "full,sinks:window=9", "full;", ":",
    "sinks:window=64:sinks=4", "[/x]", "\x1b[31m", "rope:type=yarn,factor=nan", "rope:type=yarn,factor=0",
    "rope:type=yarn,factor=-2", "rope:type=yarn,factor=inf", "rope:type=yarn,factor=2,original=0",
    "rope:type=dynamic+sinks:window=64"
)  # fmt: skip
# four tokens and four sinks: few, and no mistake
METHODS |= {"sinks:window=4,sinks=4": "any", "rope:type=yarn,factor=1e307": "any", "full:": "any", " full ": "any",
            f"sinks:window={MANY}": "any",
            f"rope:type=linear,factor=2,original={MANY}": "any", "rope:type=linear,factor=1e-30": "any"}  # fmt: skip
DEVICES = refused("", "x", "cuda", "cuda:99", "mps", "meta", "hpu", "CPU", "cuda:-1", "xla", "xpu", "\x1b[31m")
DEVICES |= {"cpu:7": "any"}
DEVICE_MAPS = refused("", "x", "meta", "disk", "cuda", "{}")
MODELS = refused(
    "", " ", "nothere", "models", "docs", "text.txt", "models/bert", "models/t5", "models/encoder",
    "a/b/c", "org/none", "[/x]", "\x1b[31m", "../..", "/", "/dev/null", "~nouser/x", "x" * 5000, "\udcff",
    "models/llama/config.json", "-1", "http://example.com/x"
)  # fmt: skip
DEPTHS = refused(
    "", "x", "0", "-1", "1.5", "0,2", "0,-1", "0.5", "1,0", "0,0", "nan", "0,nan", "0,inf", ",", "1", "0,0.5,"
)  # fmt: skip
DEPTHS |= {"100000": "any", MANY: "any"}
ATTENTIONS = refused(
    "", "x", "flash_attention_2", "flash_attention_3", "SDPA", "\x1b[31m", "kernels-community/none"
)  # fmt: skip
TASKS = refused(
    "", " ", "curv", "perplexity:", "perplexity:x=1", "perplexity:targets=x",
    "perplexity:target_tokens=0",
    "perplexity:target_tokens=-1", "curve:protocol=x", "icl", "icl:set=x", "icl:set=mr,head=-1", "qa",
    "qa:data=nothere.jsonl", "qa:data=", "qa:data=text.txt", "qa:data=docs", "qa:data=nq.jsonl,shots=-1",
    "qa:data=nq.jsonl,weights=x", "qa:data=nq.jsonl,index=nothere", "own:tests=x", "own:pairs=0",
    "own:pairs=-1", "own:pairs=x", "ralm", "ralm:index=nothere", "ralm:index=docs", "longbench:set=x",
    "longbench:set=qasper,view=x", "zeroscrolls:set=x", "zeroscrolls", "longbench",
    "icl:set=mr,data=docs",
    "icl:set=mr,data=nothere", "[/x]", "\x1b[31m", "own:tests=recall,tests=cloze", "own,own"
)  # fmt: skip
TASKS |= {"perplexity:": "any", f"own:pairs={MANY}": "any", "own:pairs=100000": "any"}
TASKS |= {"icl:set=mr,data=icl,head=99": "any"}
REVISIONS = refused("x", "../..") | {"": "any"}
ENCODERS = refused("", "nothere", "docs", "models/llama", "a/b")
SETS = refused(
    "", "x", "=", "x=1", "out", ".=1", "out.x=1", "trainer.steps=", "trainer..steps=1", "trainer=1", "out=",
    "trainer.steps=\x1b[31m",
)  # fmt: skip
TARGETS = refused("", "x", "FIXED", "last,all", "[/x]")
FILES = refused("", "nothere", "docs", "x" * 300, "text.txt/x", "models/llama/model.safetensors", "\udcff")
FILES |= {"/dev/null": "any"}
STRINGS: dict[str, Mapping[str, str]] = {
    "--text": TEXTS, "--target-text": TEXTS, "--prefix-text": TEXTS, "--lengths": LENGTHS, "--method": METHODS,
    "--device": DEVICES, "--device-map": DEVICE_MAPS, "--depths": DEPTHS, "--attention": ATTENTIONS, "--task": TASKS,
    "--revision": REVISIONS, "--tokenizer": MODELS, "--encoder": ENCODERS, "--set": SETS, "--targets": TARGETS,
    "--model": {"": "any", "\x1b[31m": "any", "[/x]": "any", "a$\\frac$z": "any", "x" * 5000: "any"},
    "--context": FILES,
}  # fmt: skip
# (command or None, option, value) -> what is expected where it is not what the type says
EXCEPTIONS: dict[tuple[str | None, str, str], str] = {
    (None, "--seed", "-1"): "any",
    (None, "--prefix-text", "builtin:"): "any",
    (None, "--target-text", "builtin:"): "any",
    (None, "--text", "builtin:"): "any",
    (None, "--prefix-text", "shuffled"): "any",
    (None, "--target-text", "shuffled"): "ok",
    (None, "--temperature", "nan"): "refused",
    (None, "--repeats", "0"): "refused",
    (None, "--minutes", "0"): "refused",
    (None, "--minutes", "nan"): "refused",
    ("report", "--out", "docs"): "any",
    ("report", "--out", "/dev/full"): "refused",
    ("index", "--text", "text.txt\n"): "refused",
    ("doctor", "--method", "cepe"): "refused",
    ("index", "--tokenizer", "models/bert"): "ok",  # no causal model is needed for its tokenizer
    ("index", "--tokenizer", "models/t5"): "ok",
    ("index", "--tokenizer", "models/encoder"): "ok",
}
WITH: dict[tuple[str, str], tuple[str, ...]] = {  # options that need another
    ("index", "--tokenizer"): ("--passage-tokens", "5"),
    ("index", "--passage-tokens"): ("--tokenizer", "models/llama"),
    ("index", "--encoder"): ("--kind", "dense"),
    ("curve", "--points"): ("--lengths", "4:8"),
    ("curve", "--spacing"): ("--lengths", "4:8"),
    ("curve", "--minutes"): ("--lengths", "auto"),
}


def declared(app: Any, prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """Each option of each command of a Typer: the command, the option as it is written, its Python type."""
    from typer.models import ArgumentInfo

    for one in app.registered_commands:
        name = prefix + (one.name or one.callback.__name__)
        for parameter in inspect.signature(one.callback).parameters.values():
            kind, about = get_args(parameter.annotation)[:2]
            if not isinstance(about, ArgumentInfo):
                option = next(iter(about.param_decls or ()), "--" + parameter.name.replace("_", "-"))
                kinds = [part for part in get_args(kind) or (kind,) if part is not type(None)]
                yield name, option, kinds[0]
    for group in app.registered_groups:
        yield from declared(group.typer_instance, f"{prefix}{group.name} ")


def values_of(option: str, kind: Any) -> Mapping[str, str]:
    """The wrong values for an option of this type."""
    if option in STRINGS:
        return STRINGS[option]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return CHOICES
    return {int: INTEGERS, float: NUMBERS, Path: PLACES}.get(kind, {})


def options() -> Iterator[Input]:
    """Every option and argument of every command with every wrong value of its type."""
    from farspan.cli import app

    for command, (base, made) in BASES.items():
        yield Input("options", f"{command} --nothere", (*base, "--nothere"), names=("--nothere",), made=made)
        yield Input("options", f"{command} one argument more", (*base, "--", "[/x]"), "any", made=made)
    for command, option, kind in declared(app):
        if command == "demo":
            continue
        base, made = BASES[command]
        for value, expect in values_of(option, kind).items():
            expect = EXCEPTIONS.get((command, option, value), EXCEPTIONS.get((None, option, value), expect))
            argv = (*base, *WITH.get((command, option), ()), f"{option}={value}")
            name = f"{command} {option}={shown(value)}"
            yield Input("options", name, argv, expect, (option, value.strip()), made=made)
    for command in ("curve", "recall", "perplexity", "attention", "compare", "ask", "doctor"):
        base, _ = BASES[command]
        for value, expect in MODELS.items():
            if command == "compare" and value == "models/bert":  # it loads, and what refuses to be read becomes rows
                expect = "failed"
            argv = (base[0], "--", value) if command == "doctor" else (base[0], *base[2:], "--", value)
            if command == "ask":
                argv = (base[0], *base[3:], "--", value, "what?")
            yield Input("options", f"{command} MODEL {shown(value)}", argv, expect, (value.strip(),))
    for value, expect in TASKS.items():
        argv = (OWN[0], *OWN[3:], "--", value, OWN[2])
        yield Input("options", f"task TASK {shown(value)}", argv, expect, (value.strip(),))
    for value, expect in FILES.items():
        yield Input(
            "options", f"import FILE {shown(value)}", ("import", "--out", "run", "--", value), expect, (value or ".",)
        )
        yield Input("options", f"report RUN {shown(value)}", ("report", "--", value), "refused", (value or "/work",))
        for kind in CONFIGS:
            name = f"train {kind} CONFIG {shown(value)}"
            yield Input("options", name, ("train", kind, "--", value), "refused", (value, "config"))


def shown(value: str) -> str:
    short = value if len(value) <= 40 else f"{value[:20]}...({len(value)})"
    return short.encode("unicode_escape", "backslashreplace").decode()


def combinations() -> Iterator[Input]:
    """Options that contradict each other or belong together."""
    table: list[tuple[tuple[str, ...], str]] = [
        ((*CURVE, "--test"), "refused"),
        ((*CURVE, "--target-text", "docs", "--target-text", "docs"), "refused"),
        ((*CURVE, "--points", "3"), "refused"),
        ((*CURVE, "--spacing", "log"), "refused"),
        ((*CURVE, "--minutes", "1"), "refused"),
        ((*CURVE, "--compat", "authors"), "refused"),
        ((*CURVE, "--compat", "authors", "--lengths", "8:64", "--protocol", "probe"), "refused"),
        ((*CURVE, "--depths", "3", "--protocol", "nested"), "refused"),
        ((*CURVE, "--depths", "3", "--protocol", "paper"), "refused"),
        ((*CURVE, "--device", "cpu", "--device-map", "auto"), "refused"),
        ((*CURVE, "--warmup", "2"), "any"),
        ((*CURVE, "--protocol", "probe", "--warmup", "100", "--scored", "100"), "refused"),
        ((*CURVE, "--prefix-text", "text.txt"), "any"),
        ((*CURVE, "--text", "random", "--prefix-text", "random"), "any"),
        ((*CURVE, "--target-text", "shuffled", "--prefix-text", "text.txt"), "any"),
        ((*CURVE, "--revision", "main"), "any"),
        ((*CURVE, "--method", "full", "--method", "full"), "any"),
        ((*CURVE, "models/llama"), "any"),
        ((*CURVE, "--lengths", "600"), "any"),
        ((*CURVE, "--lengths", "5000"), "refused"),
        ((*CURVE, "--repeats", "100000"), "refused"),
        (("curve", "models/gpt2", *CURVE[2:], "--lengths", "16,64"), "any"),
        ((*PERPLEXITY, "--buckets", "3"), "refused"),
        ((*PERPLEXITY, "--targets", "all", "--target-tokens", "3"), "refused"),
        ((*PERPLEXITY, "--target-tokens", "5000"), "refused"),
        ((*PERPLEXITY, "--targets", "all", "--buckets", "5000"), "any"),
        ((*INDEX, "--words", "5", "--passage-tokens", "5", "--tokenizer", "models/llama"), "refused"),
        ((*INDEX, "--passage-tokens", "5"), "refused"),
        ((*INDEX, "--tokenizer", "models/llama"), "refused"),
        ((*INDEX, "--encoder", "models/llama"), "refused"),
        ((*INDEX, "--kind", "dense"), "refused"),
        ((*INDEX, "--kind", "faiss"), "refused"),
        (("ask", "models/llama"), "refused"),
        ((*ASK, "--top-p", "2"), "refused"),
        ((*ASK, "--temperature", "1", "--top-p", "0"), "refused"),
        ((*ASK, "--temperature", "1", "--top-p", "-1"), "refused"),
        ((*ASK, "--temperature", "1", "--top-p", "nan"), "refused"),
        ((*ASK, "--temperature", "inf"), "refused"),
        ((*ASK, "--temperature", "1e-320"), "any"),
        ((*ASK, "--method", "cepe"), "refused"),
        (("ask", "models/llama", "\udcff", "--max-new-tokens", "2"), "any"),
        (("ask", "models/llama", "", "--max-new-tokens", "2"), "any"),
        (("ask", "models/gpt2", *ASK[2:]), "refused"),
        (("ask", "models/llama", "x", "--interactive", "--max-new-tokens", "2"), "any"),
        ((*QA, "--lengths", "0,99"), "any"),
        ((*ICL, "--lengths", "0,9999"), "any"),
        ((*QA, "--repeats", "9999"), "any"),
        (("compare", *COMPARE[1:], "--task", "perplexity", "--task", "perplexity"), "any"),
        (("report", "run", "run"), "refused"),
        (("demo", "--out", "text.txt"), "refused"),
    ]  # fmt: skip
    for number, (argv, expect) in enumerate(table):
        yield Input("combinations", f"{number} {' '.join(map(shown, argv))}", argv, expect)


def spellings() -> Iterator[Input]:
    """Every setting of every method and task with every wrong value."""
    from dataclasses import fields

    from farspan.methods import METHODS as METHODS_KNOWN
    from farspan.tasks import TASKS as TASKS_KNOWN

    needs = {
        "sinks": {"window": "64"}, "lambda_mask": {"window": "64"}, "rope": {"type": "yarn", "factor": "2"},
        "topk": {"k": "4"}, "icl": {"set": "mr", "data": "icl"}, "qa": {"data": "nq.jsonl"},
        "ralm": {"index": "index"}, "longbench": {"set": "qasper"}, "zeroscrolls": {"set": "squality"},
    }  # fmt: skip
    numbers = refused("", "x", "nan", "-1", "--", "1,2") | dict.fromkeys(("0", "1.5", MANY, "inf", "1e307"), "any")
    strings = refused("", "\x1b[31m", "[/x]", "x y", "=")
    for known, base, what in ((METHODS_KNOWN, CURVE, "method"), (TASKS_KNOWN, OWN, "task")):
        for name, kind in known.items():
            for field in fields(kind):  # type: ignore[arg-type]
                numeric = field.type in (int, float, int | None, float | None)
                for value, expect in (numbers if numeric else strings).items():
                    given = {**needs.get(name, {}), field.name: value}
                    if name == "icl" and field.name in ("text", "label"):  # of a data set of one's own
                        given = {"data": "icl", "text": "text", "label": "label", field.name: value}
                    spelled = f"{name}:" + ",".join(f"{key}={one}" for key, one in given.items())
                    if field.name == "encoder":
                        expect = "any"  # it is used for weights=dense alone
                    if what == "method":
                        model = "models/cepe" if name == "cepe" else "models/llama"
                        argv = ("curve", model, *base[2:], f"--method={spelled}")
                    else:
                        text = base[3:5] if kind.reads_text else ()
                        argv = ("task", spelled, base[2], *text, *base[5:])
                        if name in ("qa", "icl", "ralm"):  # whose lengths are passages or demonstrations
                            argv = (*argv, "--lengths", "0,2")
                    made = "index" if name == "ralm" else None
                    yield Input(
                        "spellings", f"{what} {shown(spelled)}", argv, expect, (value, field.name, name), made=made
                    )


def configs() -> Iterator[Input]:
    """Every field of every training's config with wrong values of its type, and damaged files."""
    from farspan.train.config import settings_of

    for command in CONFIGS:
        for key, annotation in _fields(settings_of(command)):
            for value, expect in _values(key, annotation).items():
                argv = (*TRAIN[command], "--set", f"{key}={value}")
                names = (key, key.rpartition(".")[2], *_plain(value))  # what is not found is named by its own name
                yield Input("configs", f"{command} {key}={shown(value)}", argv, expect, names)
        for name, content in BROKEN_TOML.items():
            damage = partial(write, place=f"{command}.toml", content=content)
            yield Input("configs", f"{command} file: {name}", TRAIN[command], "refused", (f"{command}.toml",), damage)


def _fields(kind: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    from pydantic import BaseModel

    for name, field in kind.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from _fields(annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", annotation


ENDLESS = ("steps", "workers")  # where a large number is no mistake, or takes the machine
WRONG_STRINGS = ("", "nothere", "\\u001b[31m")


def _plain(value: str) -> tuple[str, ...]:
    """What a TOML string holds; nothing for other values."""
    return (str(json.loads(value)),) if value.startswith('"') else ()


def _values(key: str, annotation: Any) -> dict[str, str]:
    kinds = set(get_args(annotation)) or {annotation}
    text = str(annotation)
    if kinds & {int, float} and "tuple" not in text and "dict" not in text:
        values = refused('"x"', "-1", "nan", "[1]", "true")
        if key.rpartition(".")[2] not in ENDLESS:
            values |= {"0": "any", "1.5": "any", "inf": "any", "1e30": "any"}
        if key.rpartition(".")[2] == "seed":
            values["-1"] = "any"
        return values
    if annotation is bool:
        return refused('"x"', "2", "[]", "nan")
    if "Literal" in text:
        return refused('"x"', '""', "1")
    if "tuple" in text or "dict" in text:
        any_list = dict.fromkeys(("[-1]", "[nan, nan]", "[1e30, 2]", "[2, 1]"), "any")
        return refused('"x"', "3", '["x"]', "{x=1}") | any_list
    values = refused(*(f'"{value}"' for value in WRONG_STRINGS), "3", "[]")
    if key in ("out", "smt.draw", "model.rope", "model.revision"):
        values |= {'"nothere"': "any", '"\\u001b[31m"': "any"}
    if key in ("watch.text",):
        values |= dict.fromkeys(values, "any")  # `watch.every` is 0
    if key in ("model.warmed_up", "model.encoder", "data.held_out", "data.index", "model.revision"):
        values['""'] = "any"
    if key == "out":
        values |= {'"docs"': "any", '"text.txt"': "refused", '"text.txt/x"': "refused", '"/proc/none"': "refused"}
    return values


BROKEN_TOML: dict[str, bytes | str] = {
    "empty": b"",
    "zeros": b"\0" * 100,
    "latin-1": 'out = "\xe9"\n'.encode("latin-1"),
    "utf-16": 'out = "o"\n'.encode("utf-16"),
    "yaml": "out: x\ntrainer:\n  steps: 3\n",
    "json": '{"out": "x"}',
    "unclosed": 'out = "x\n[data\n',
    "duplicate": 'out = "x"\nout = "y"\n',
    "a list at the top": "[[trainer]]\nsteps = 3\n",
    "deep": "x = " + "[" * 5000 + "]" * 5000 + "\n",
    "byte-order mark": '\ufeffout = "x"\n',
    "date": "out = 2020-01-01\n[trainer]\nsteps = 2020-01-01\n",
    "only a comment": "# nothing\n",
    "control characters": 'out = "\x1b[31m"\n',
    "huge number": "out = 3\n[trainer]\nsteps = " + "9" * 5000 + "\n",
}
