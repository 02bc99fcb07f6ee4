"""The command line: thin and typed. Nothing heavy is imported before a command needs it, typer included, so that a
signal ends a command with one line from the start."""

import gc
from typing import Any

from farspan.cli import stopping


def main() -> None:
    """Exit with 1 when rows are missing, 2 for errors a user can correct, 130 when interrupted, 143 when terminated."""
    gc.set_threshold(10_000, 20, 20)  # garbage collection would take a tenth of the time of importing modules
    stopping.run(_commands)


def _commands() -> None:
    from farspan.cli.commands import app

    app()


def __getattr__(name: str) -> Any:
    """Create `app` when it is first used."""
    if name != "app":
        raise AttributeError(f"module 'farspan.cli' has no attribute {name!r}")
    from farspan.cli.commands import app

    return app
