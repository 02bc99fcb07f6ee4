"""`farspan train`: one command for each recipe."""

import json
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from farspan.cli.messages import one_line_errors
from farspan.cli.options import RUN, AsJson, option
from farspan.extras import optional_import
from farspan.terminal import Terminal

NO_CHECKPOINT = "no checkpoint was saved yet: the same command begins again"
LESS_MEMORY = "--set trainer.micro_batch=1 or --set trainer.activation_checkpointing=true"
SIZE = "{parameters:,} parameters, {tokens:,} tokens"


@dataclass(frozen=True)
class Given:
    """The options of every recipe."""

    config: Annotated[
        Path,
        typer.Argument(help="TOML file, or the name of a config that comes with farspan, as in the example below."),
    ]
    overrides: Annotated[
        list[str] | None,
        option("Config", "Replace a value of the config. Repeatable.", "--set", metavar="TABLE.KEY=VALUE"),
    ] = None
    plan: Annotated[
        bool, option(RUN, "Check model and text, print what a training would do; train nothing.", "--plan")
    ] = False
    calibrate: Annotated[
        bool, option(RUN, "With --plan: also time three steps, which are discarded.", "--calibrate")
    ] = False
    as_json: AsJson = False


class Training(TyperCommand):
    """A command whose help also lists the recipe's configs and keys, after the rest, as these import torch."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        from farspan.train.config import keys_of, parsed, recipe_of, settings_of, shipped_configs

        page = "training" if self.name in ("lm", "smt") else "cepe_training"
        configs = ", ".join(name for name in shipped_configs() if recipe_of(parsed(name)) == self.name)
        lines = [f"Configs that come with farspan: {configs}", f"Keys of --set, explained in docs/{page}.md:"]
        for line in (*lines, *keys_of(settings_of(str(self.name)))):
            Terminal().print_line(line)


def train_lm(given: Given) -> None:
    """Pre-train a small Llama and its tokenizer. Repeating the command continues a training that was stopped."""
    _train("lm", given, SIZE)


def train_smt(given: Given) -> None:
    """Extend a model's context by Sparse Memory Training. Repeating the command continues one that was stopped."""
    _train("smt", given, "rows of {window:,} tokens, to {settings[lengths][target]:,}")


def train_mlm(given: Given) -> None:
    """Pre-train an encoder for CEPE by masked-language modelling. Repeating the command continues a stopped one."""
    _train("mlm", given, SIZE)


def train_cepe(given: Given) -> None:
    """Train an encoder and cross-attention for a frozen decoder (CEPE), warm-up or main stage. Repeating the command
    continues one that was stopped."""
    _train("cepe", given, "{stage}, {tokens:,} tokens")


def train_distill(given: Given) -> None:
    """Train as the main stage of `cepe`, but from a teacher: the decoder itself, which reads all tokens in one window
    (CEPE-Distilled). Repeating the command continues one that was stopped. The example needs the encoder that
    `farspan train cepe cepe-warmup-demo` makes."""
    _train("distill", given, "distilled, {tokens:,} tokens")


def _train(recipe: str, given: Given, result: str) -> None:
    """Run a training, and print its result in one line; or only its plan.

    Args:
        recipe: a module of `farspan.train`, with `train` and the class of its config, such as `LmSettings`.
        result: a format string for the summary.
    """
    settings: Any = None
    how = {"out": "--set out=FOLDER", "less_memory": LESS_MEMORY}
    with one_line_errors(lambda: "" if given.plan else _kept(settings), **how):
        if given.calibrate and not given.plan:
            raise ValueError("--calibrate belongs to --plan, which trains nothing: give both, or omit --calibrate")
        optional_import("accelerate", "train")  # first: without it, torch would be imported in vain
        from farspan.report.progress import Display
        from farspan.train.config import read_config, settings_of
        from farspan.train.engines import is_first_process
        from farspan.train.progress import TrainingWatch, loss_in_words

        settings = read_config(given.config, settings_of(recipe), given.overrides or [])
        console, lines = Terminal(stderr=given.as_json, quiet=not is_first_process()), list[str]()

        def notice(line: str) -> None:
            lines.append(line)
            console.print_line(line)

        with Display(console) as display:
            watch = TrainingWatch(display.start, display.step, notice, given.plan, given.calibrate)
            summary = import_module(f"farspan.train.{recipe}").train(settings, watch)
        if given.plan:
            summary = {"plan": lines} | summary
        else:
            loss = loss_in_words(summary["loss"], summary["losses"], " nats per token")
            if summary.get("held_out_loss") is not None:
                loss += f", held-out loss {summary['held_out_loss']:.3f} nats per token"
            console.print_line(f"{result.format(**summary)}, {loss}, {summary['seconds']:,} s: {settings.out}")
        if given.as_json and is_first_process():
            print(json.dumps(summary))


def _kept(settings: Any) -> str:
    """Return what remains of a training that is stopped; "" before its settings are read."""
    if settings is None:
        return ""
    from farspan.train.checkpoint import steps
    from farspan.train.config import CHECKPOINTS

    found = steps(Path(settings.out) / CHECKPOINTS)
    return f"the same command continues from checkpoint-{found[-1]}" if found else NO_CHECKPOINT
