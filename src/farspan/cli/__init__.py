"""The command line: thin and typed. Nothing heavy is imported before a command needs it, typer included, so that a
signal ends a command in one line from the beginning on."""

from typing import Any

from farspan.cli import stopping


def main() -> None:
    """Exit 1 when rows are missing, 2 for what a user can correct, 130 when interrupted, 143 when terminated."""
    stopping.run(_commands)


def _commands() -> None:
    from farspan.cli.commands import app

    app()


def __getattr__(name: str) -> Any:
    """`app`, which is made when it is first used."""
    if name != "app":
        raise AttributeError(f"module 'farspan.cli' has no attribute {name!r}")
    from farspan.cli.commands import app

    return app
