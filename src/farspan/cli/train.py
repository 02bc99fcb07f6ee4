"""`farspan train`: one command a recipe."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from farspan.cli.options import err, said


def train_lm(
    config: Annotated[Path, typer.Argument(help="TOML file; see configs/.")],
    overrides: Annotated[list[str] | None, typer.Option("--set", help="TABLE.KEY=VALUE; repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON last.")] = False,
) -> None:
    """Pre-trains a small Llama, tokenizer included. Repeating the command continues a training that was stopped."""
    with said():
        from farspan.train.config import read_config
        from farspan.train.lm import LmSettings, train

        settings = read_config(config, LmSettings, overrides or [])
        summary = train(settings)
        console = err if as_json else Console()
        console.print(
            f"{summary['parameters']:,} parameters, {summary['tokens']:,} tokens, loss {summary['loss']:.3f}, "
            f"held-out loss {summary['held_out_loss']} nats per token: {settings.out}"
        )
        if as_json:
            print(json.dumps(summary))
