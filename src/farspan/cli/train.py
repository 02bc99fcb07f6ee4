"""`farspan train`: one command a recipe."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from farspan.cli.options import AsJson, said

Config = Annotated[Path, typer.Argument(help="TOML file; see configs/.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="TABLE.KEY=VALUE; repeatable.")]


def train_lm(config: Config, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Pre-trains a small Llama, tokenizer included. Repeating the command continues a training that was stopped."""
    with said():
        from farspan.train.config import read_config
        from farspan.train.lm import LmSettings, train

        settings = read_config(config, LmSettings, overrides or [])
        summary = train(settings)
        console = _console(as_json)
        console.print(
            f"{summary['parameters']:,} parameters, {summary['tokens']:,} tokens, loss {summary['loss']:.3f}, "
            f"held-out loss {summary['held_out_loss']} nats per token: {settings.out}"
        )
        if as_json and not console.quiet:
            print(json.dumps(summary))


def train_smt(
    config: Config,
    overrides: Overrides = None,
    plan_only: Annotated[bool, typer.Option("--plan", help="Check model and text, say what; train nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Extends a model's context by Sparse Memory Training. Repeating the command continues one that was stopped."""
    with said():
        from farspan.train.config import read_config
        from farspan.train.smt import SmtSettings, plan, train

        settings = read_config(config, SmtSettings, overrides or [])
        console = _console(as_json)

        def tell(text: str) -> None:
            console.print(text, markup=False, highlight=False, soft_wrap=True)

        if plan_only:
            lines = list(plan(settings))
            for line in lines:
                tell(line)
            if as_json:
                print(json.dumps({"plan": lines}))
            return
        summary = train(settings, tell)
        console.print(
            f"{summary['window']:,} to {settings.lengths.target:,} tokens, loss {summary['loss']:.3f}, "
            f"{summary['seconds']:,} s: {settings.out}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        if as_json and not console.quiet:
            print(json.dumps(summary))


def _console(as_json: bool) -> Console:
    """Where to say something; of several processes only the first one speaks."""
    return Console(stderr=as_json, quiet=os.environ.get("RANK", "0") != "0")
