"""All commands, in one app."""

import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import OptionInfo

from farspan import __version__
from farspan.cli import (
    ask,
    attention,
    check,
    curve,
    demo,
    doctor,
    export,
    index,
    listing,
    perplexity,
    report,
    search,
    task,
    train,
)
from farspan.cli.messages import err

UsageError: Any = typer.BadParameter.__base__  # of click, or of typer's own copy of it

WORDS = {  # of pydantic, by which typer checks values
    "Value error, ": "",
    "Input should be a valid integer, unable to parse string as an integer": "expected a whole number",
    "Input should be a valid number, unable to parse string as a number": "expected a number",
    "Input should be greater than or equal to": "expected at least",
    "Input should be less than or equal to": "expected at most",
    "Input should be": "expected",
}


class OneLine(TyperGroup):
    """Refuses wrong options and arguments in one line, like all wrong input. `--ray` needs no value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments; `--ray` without an address is `--ray auto`: typer has no optional values. An empty `--out`,
        as of an unset variable of the shell, is refused: as a path it is the current folder."""
        filled: list[str] = []
        for one, after in pairwise([*args, "-"]):
            if one == "--out=" or (one, after) == ("--out", ""):
                raise typer.BadParameter("got '', expected a folder, such as runs/mine", ctx, param_hint="'--out'")
            filled += [one, "auto"] if one == "--ray" and after.startswith("-") else [one]
        return super().parse_args(ctx, filled)

    def main(self, *args: Any, **options: Any) -> Any:
        try:
            ended = super().main(*args, **options | {"standalone_mode": False})
        except UsageError as error:
            if type(error).__name__ != "NoArgsIsHelpError":  # its help is already printed
                problem = error.format_message().rstrip(".")
                for theirs, plain in WORDS.items():
                    problem = problem.replace(theirs, plain)
                problem += _given(error)
                end = "" if problem.endswith("?") else "."
                line = f"error: {problem}{end} See {getattr(error.ctx, 'command_path', 'farspan')} --help"
                err.print_line(" ".join(line.split()), style="red")
            sys.exit(error.exit_code)
        sys.exit(ended or 0)


def _given(error: Any) -> str:
    """Return the refused value if the message leaves it out."""
    refused: list[Any] = getattr(error.__cause__, "errors", list)()
    values = [repr(one["input"]) for one in refused if repr(one["input"]) not in error.format_message()]
    return f" (got {values[0]})" if values else ""


app = typer.Typer(
    cls=OneLine,
    no_args_is_help=True,
    help="farspan measures how far back a language model remembers, and extends that range.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Commands = dict[str, tuple[Callable[..., None], str]]  # name, function and example, as `farspan --help` lists them
COMMANDS: Commands = {
    "demo": (demo.demo, "--out runs/demo"),
    "curve": (curve.curve, "demo --text shuffled:builtin --lengths 64,256,1024"),
    "recall": (curve.recall, "demo --length 1024 --points 8"),
    "perplexity": (perplexity.perplexity, "demo --lengths 256,512,1024 --method full --method sinks:window=508"),
    "attention": (attention.attention, "demo --lengths 256,512 --layers 0,-1"),
    "task": (task.task, "passkey demo --lengths 256,512 --repeats 5"),
    "compare": (task.compare, "demo --method full --method sinks:window=508 --task perplexity --task curve"),
    "methods": (listing.methods, "--json"),
    "tasks": (listing.tasks, "--json"),
    "check": (check.check, "runs/baseline demo --tolerance perplexity=0.01"),
    "ask": (ask.ask, "demo 'Who is Watson?' --context book.txt"),
    "index": (index.index, "--text books/ --out books.index"),
    "doctor": (doctor.doctor, "demo --method sinks:window=508"),
    "report": (report.report, "runs/* --out report"),
    "export": (export.export, "runs/demo/natural --to csv"),
    "import": (report.import_file, "results.json --out runs/published"),
}
TRAININGS: Commands = {
    "lm": (train.train_lm, "demo"),
    "smt": (train.train_smt, "smt-demo --set trainer.steps=100"),
    "mlm": (train.train_mlm, "mlm-demo"),
    "cepe": (train.train_cepe, "cepe-warmup-demo"),
    "distill": (train.train_distill, "distill-demo"),
}
SEARCHES: Commands = {
    "rope": (search.search_rope, "demo --factor 4 --evaluations 20"),
}


def _spread(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for typer, in which a parameter that is a dataclass becomes an option for each of its fields."""
    groups: dict[str, Any] = {}
    flat: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if isinstance(parameter.annotation, type) and is_dataclass(parameter.annotation):
            groups[name] = parameter.annotation
            flat += inspect.signature(parameter.annotation).parameters.values()
        else:
            flat.append(parameter)

    @wraps(command)
    def called(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    for parameter in flat:
        _name_value(parameter)
    by_name = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in flat]
    called.__signature__ = inspect.Signature(by_name)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return called


def _name_value(parameter: inspect.Parameter) -> None:
    """Let `--help` show no type after a switch, and a name instead of a type after an option that takes any text or
    number."""
    kind, *about = get_args(parameter.annotation) if get_origin(parameter.annotation) is Annotated else [None]
    for one in about:
        if isinstance(one, OptionInfo) and one.metavar is None:
            if kind is bool:
                one.metavar = ""
            elif {kind, *get_args(kind)} & {str, int, float, Path, list[Path]}:
                one.metavar = parameter.name.rpartition("_")[2].upper()


def _add(to: typer.Typer, group: str, commands: Commands, kind: type[TyperCommand] = TyperCommand) -> None:
    for name, (command, example) in commands.items():
        # typer would keep the line breaks of a docstring
        paragraphs = [" ".join(one.split()) for one in (command.__doc__ or "").split("\n\n")]
        add = to.command(
            name,
            cls=kind,
            help="\n\n".join(paragraphs),
            short_help=paragraphs[0],
            epilog=f"Example: {group} {name} {example}",
        )
        add(_spread(command))


_add(app, "farspan", COMMANDS)
train_app = typer.Typer(no_args_is_help=True, help="Train or extend a model. A config is one TOML file.")
_add(train_app, "farspan train", TRAININGS, train.Training)
app.add_typer(train_app, name="train")
search_app = typer.Typer(
    no_args_is_help=True, help="Search for the settings of a method with which a model remembers most."
)
_add(search_app, "farspan search", SEARCHES)
app.add_typer(search_app, name="search")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"farspan {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", metavar="", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    # transformers' own progress bars and advice would hide ours
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1" if not sys.stderr.isatty() else "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
