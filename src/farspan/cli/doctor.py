"""`farspan doctor`."""

import json
from typing import Annotated

import typer

from farspan.cli.options import AsJson, Attention, Loading, Text, err, said
from farspan.terminal import Terminal


def doctor(
    model: Annotated[str, typer.Argument(help="Folder or hub id of a causal model.")],
    method: Annotated[str, typer.Option(help="How the model reads.")] = "full",
    text: Text = "builtin",
    attention: Attention = None,
    *,
    loading: Loading,
    as_json: AsJson = False,
) -> None:
    """Is a method really doing on this model what it says? Checks in under a minute; exit 1 when one fails."""
    with said():
        from dataclasses import asdict

        from farspan.doctor import beginning, diagnose, print_checks
        from farspan.methods import method as parsed

        wanted = parsed(method)
        loader = loading.loader(attention)
        excerpt, console = beginning(text), err if as_json else Terminal()
        with console.status(f"loading {model}") as status:
            lm = loader(model)
            checks = diagnose(
                lm, wanted, excerpt, watch=lambda name, done, total: status.update(f"{done + 1}/{total}: {name}")
            )
        failed = print_checks(checks, f"{wanted} on {model}", console)
        if as_json:
            print(
                json.dumps(
                    {"model": model, "method": str(wanted), "failed": failed, "checks": list(map(asdict, checks))}
                )
            )
        if failed:
            raise typer.Exit(1)
