"""`farspan attention`."""

from typing import Annotated

from farspan.cli.measured import run_measurement
from farspan.cli.messages import one_line_errors
from farspan.cli.options import TASK, LocalLoading, LocalModels, Methods, Repeats, Running, TextOptions, count, option


def attention(
    models: LocalModels,
    *,
    sampling: TextOptions,
    repeats: Repeats = 10,
    layers: Annotated[str, option(TASK, "all, or layers such as 0,5,-1: the first, the sixth, the last.")] = "all",
    sinks: Annotated[int, count(TASK, "Number of first tokens that the shares named `rest` leave out.", 0)] = 8,
    bin: Annotated[
        int | None, count(TASK, "Tokens in a bin of distance; default 1,024, fewer for short texts.")
    ] = None,
    map_bins: Annotated[int, count(TASK, "Bins of the map by query and key; 0: no map.", 0, 512)] = 128,
    method: Methods = None,
    loading: LocalLoading,
    running: Running,
) -> None:
    """Measure where attention goes: by distance, rank, layer and head, with and without sinks, and a map.

    A length is the position of a query. With --lengths auto: parts of the trained length, up to 8,192 tokens.
    """
    with one_line_errors(running.kept):
        from farspan.tasks.attention import Attention

        tasks = [Attention(chosen_layers(layers), sinks, bin, map_bins)]
        run_measurement(models, method, tasks, running, loading, repeats=repeats, **sampling.settings())


def chosen_layers(text: str) -> tuple[int, ...] | None:
    """Return the layers that --layers names; None for `all`.

    Raises:
        ValueError: neither `all` nor numbers.
    """
    if text == "all":
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"layers: got {text!r}, expected all, or numbers as 0,5,-1 (--layers)") from error
