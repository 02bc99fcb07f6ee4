"""`farspan doctor`."""

import json

import typer

from farspan.cli.messages import err, one_line_errors
from farspan.cli.options import AsJson, Documents, Loading, Model, OneMethod
from farspan.terminal import Terminal


def doctor(
    model: Model = None,
    method: OneMethod = "full",
    text: Documents = "builtin",
    *,
    loading: Loading,
    as_json: AsJson = False,
) -> None:
    """Check that a method keeps its promises on this model, in under a minute. Exit with 1 if a check fails.

    For a served model, check that the server scores exactly the tokens sent and returns the same numbers each time.
    """
    with one_line_errors():
        from dataclasses import asdict

        from farspan.doctor import beginning, diagnose, print_checks
        from farspan.doctor.served import diagnose_server
        from farspan.methods import method as parsed
        from farspan.reader.served import ServedLM

        model, wanted = loading.only_model(model), parsed(method)
        loader = loading.loader()
        excerpt, console = beginning(text), err if as_json else Terminal()
        with console.status(f"loading {model}") as status:
            lm = loader(model)
            wanted = wanted.fitted(lm.trained_length)

            def watch(name: str, done: int, total: int) -> None:
                status.update(f"{done + 1}/{total}: {name}")

            if isinstance(lm, ServedLM):
                with wanted.on(lm):  # refuses methods that need the model itself
                    checks = diagnose_server(lm, excerpt, watch=watch)
            else:
                checks = diagnose(lm, wanted, excerpt, watch=watch)
        failed = print_checks(checks, f"{wanted} on {model}", console)
        if as_json:
            about = {"model": model, "method": str(wanted), "failed": failed}
            print(json.dumps(about | {"checks": list(map(asdict, checks))}))
        if failed:
            raise typer.Exit(1)
