"""`farspan perplexity`."""

from typing import Annotated

from farspan.cli.measured import run_measurement
from farspan.cli.messages import one_line_errors
from farspan.cli.options import TASK, Loading, Methods, Models, Repeats, Running, TextOptions, count, option


def perplexity(
    models: Models = None,
    *,
    sampling: TextOptions,
    repeats: Repeats = 10,
    targets: Annotated[
        str, option(TASK, "fixed: the same tokens at all lengths; last: the last of each length; all: every token.")
    ] = "fixed",
    target_tokens: Annotated[
        int | None, count(TASK, "Tokens scored at each length; default 256, or half of the smallest length.")
    ] = None,
    buckets: Annotated[
        int | None, count(TASK, "With --targets all: number of equal parts of a text; default: powers of two.")
    ] = None,
    method: Methods = None,
    loading: Loading,
    running: Running,
) -> None:
    """Measure perplexity by length: how well a model predicts the same tokens after more and more of their text.

    With --lengths auto: powers of two up to twice the trained length.
    """
    with one_line_errors(running.kept):
        from farspan.tasks.perplexity import Perplexity

        settings = sampling.settings()
        if target_tokens is not None and targets == "all":
            raise ValueError("--target-tokens belongs to --targets fixed or last; all scores every token: omit one")
        tasks = [Perplexity(targets, target_tokens, buckets)]
        run_measurement(models, method, tasks, running, loading, repeats=repeats, **settings)
