"""All commands, in one app."""

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from farspan import __version__
from farspan.cli import ask, attention, curve, demo, doctor, index, perplexity, report, task, train
from farspan.cli.options import err, spread

UsageError: Any = typer.BadParameter.__base__  # of click, or of the copy of it that typer brings


class OneLine(TyperGroup):
    """Wrong options and arguments are refused in one line, as every other wrong input is."""

    def main(self, *args: Any, **options: Any) -> Any:
        try:
            ended = super().main(*args, **options | {"standalone_mode": False})
        except UsageError as error:
            if type(error).__name__ != "NoArgsIsHelpError":  # whose help is printed already
                said = error.format_message().replace("Value error, ", "").rstrip(".") + _given(error)
                line = f"error: {said}. See {getattr(error.ctx, 'command_path', 'farspan')} --help"
                err.print_line(" ".join(line.split()), style="red")
            sys.exit(error.exit_code)
        sys.exit(ended or 0)


def _given(error: Any) -> str:
    """The value that was refused, where the message leaves it out."""
    refused: list[Any] = getattr(error.__cause__, "errors", list)()
    values = [repr(one["input"]) for one in refused if repr(one["input"]) not in error.format_message()]
    return f" (got {values[0]})" if values else ""


app = typer.Typer(
    cls=OneLine,
    no_args_is_help=True,
    add_completion=False,
    help="farspan measures how far back a language model remembers, and extends it.",
    pretty_exceptions_enable=False,
)
# in the order in which `farspan --help` lists them
measures = (curve.curve, curve.recall, perplexity.perplexity, attention.attention, task.task, task.compare)
for command in (demo.demo, *measures, ask.ask, index.index, doctor.doctor, report.report):
    app.command()(spread(command))
app.command("import")(report.import_file)
train_app = typer.Typer(no_args_is_help=True, help="Train or extend a model. A config is one TOML file.")
train_app.command("lm")(train.train_lm)
train_app.command("smt")(train.train_smt)
train_app.command("mlm")(train.train_mlm)
train_app.command("cepe")(train.train_cepe)
train_app.command("distill")(train.train_distill)
app.add_typer(train_app, name="train")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"farspan {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    # transformers' own progress and advice would bury ours
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1" if not sys.stderr.isatty() else "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
