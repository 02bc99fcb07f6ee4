"""`farspan doctor`."""

import json

import typer

from farspan.cli.options import AsJson, Loading, Model, OneMethod, Text, err, one_line_errors
from farspan.terminal import Terminal


def doctor(
    model: Model, method: OneMethod = "full", text: Text = "builtin", *, loading: Loading, as_json: AsJson = False
) -> None:
    """Check that a method does on this model what it promises, in under a minute; exit with 1 if a check fails."""
    with one_line_errors():
        from dataclasses import asdict

        from farspan.doctor import beginning, diagnose, print_checks
        from farspan.methods import method as parsed

        wanted = parsed(method)
        loader = loading.loader()
        excerpt, console = beginning(text), err if as_json else Terminal()
        with console.status(f"loading {model}") as status:
            lm = loader(model)
            checks = diagnose(
                lm, wanted, excerpt, watch=lambda name, done, total: status.update(f"{done + 1}/{total}: {name}")
            )
        failed = print_checks(checks, f"{wanted} on {model}", console)
        if as_json:
            about = {"model": model, "method": str(wanted), "failed": failed}
            print(json.dumps(about | {"checks": list(map(asdict, checks))}))
        if failed:
            raise typer.Exit(1)
