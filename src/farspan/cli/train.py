"""`farspan train`: one command a recipe."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from farspan.cli.options import CHECKPOINT_KEPT, AsJson, one_line_errors
from farspan.terminal import Terminal

Config = Annotated[Path, typer.Argument(help="TOML file; see configs/.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="TABLE.KEY=VALUE; repeatable.")]


def train_lm(config: Config, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Pre-trains a small Llama, tokenizer included. Repeating the command continues a training that was stopped."""
    with one_line_errors(CHECKPOINT_KEPT):
        from farspan.train.config import read_config
        from farspan.train.lm import LmSettings, train

        settings = read_config(config, LmSettings, overrides or [])
        summary = train(settings, _notice(as_json))
        _say(summary, f"{summary['parameters']:,} parameters, {summary['tokens']:,} tokens", settings.out, as_json)


def train_smt(
    config: Config,
    overrides: Overrides = None,
    plan_only: Annotated[bool, typer.Option("--plan", help="Check model and text, say what; train nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Extends a model's context by Sparse Memory Training. Repeating the command continues one that was stopped."""
    with one_line_errors("" if plan_only else CHECKPOINT_KEPT):
        from farspan.train.config import read_config
        from farspan.train.smt import SmtSettings, plan, train

        settings = read_config(config, SmtSettings, overrides or [])
        tell = _notice(as_json)
        if plan_only:
            lines = list(plan(settings))
            for line in lines:
                tell(line)
            if as_json:
                print(json.dumps({"plan": lines}))
            return
        summary = train(settings, tell)
        _say(summary, f"{summary['window']:,} to {settings.lengths.target:,} tokens", settings.out, as_json)


def train_mlm(config: Config, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Pre-trains an encoder for CEPE by masked-language modelling. Repeating the command continues a stopped one."""
    with one_line_errors(CHECKPOINT_KEPT):
        from farspan.train.config import read_config
        from farspan.train.mlm import MlmSettings, train

        settings = read_config(config, MlmSettings, overrides or [])
        summary = train(settings, _notice(as_json))
        _say(summary, f"{summary['parameters']:,} parameters, {summary['tokens']:,} tokens", settings.out, as_json)


def train_cepe(config: Config, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Trains an encoder and cross-attention beside a frozen decoder (CEPE), warm-up or main stage. Repeating the
    command continues one that was stopped."""
    with one_line_errors(CHECKPOINT_KEPT):
        from farspan.train.cepe import CepeSettings, train
        from farspan.train.config import read_config

        settings = read_config(config, CepeSettings, overrides or [])
        summary = train(settings, _notice(as_json))
        _say(summary, f"{summary['stage']}, {summary['tokens']:,} tokens", settings.out, as_json)


def train_distill(config: Config, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Trains as `cepe`, main stage, with the decoder as teacher, which reads all in one window (CEPE-Distilled).
    Repeating the command continues one that was stopped."""
    with one_line_errors(CHECKPOINT_KEPT):
        from farspan.train.config import read_config
        from farspan.train.distill import DistillSettings, train

        settings = read_config(config, DistillSettings, overrides or [])
        summary = train(settings, _notice(as_json))
        _say(summary, f"distilled, {summary['tokens']:,} tokens", settings.out, as_json)


def _notice(as_json: bool) -> Callable[[str], None]:
    console = Terminal(stderr=as_json, quiet=not _speaks())
    return lambda text: console.print_line(text)


def _say(summary: dict[str, Any], what: str, out: str, as_json: bool) -> None:
    held_out = "" if summary.get("held_out_loss") is None else f", held-out loss {summary['held_out_loss']:.3f}"
    parts = summary["losses"] if len(summary["losses"]) > 1 else {}
    each = f" ({', '.join(f'{name} {value:.3f}' for name, value in parts.items())})" if parts else ""
    _notice(as_json)(
        f"{what}, loss {summary['loss']:.3f}{each}{held_out} nats per token, {summary['seconds']:,} s: {out}"
    )
    if as_json and _speaks():
        print(json.dumps(summary))


def _speaks() -> bool:
    """Of several processes only the first one speaks."""
    return os.environ.get("RANK", "0") == "0"
