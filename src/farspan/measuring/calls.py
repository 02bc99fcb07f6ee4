"""`curve` and `compare`: `measure` with the defaults of the commands of the same names."""

from collections.abc import Sequence
from typing import Any

from farspan.measuring.arguments import Lengths, Methods, Models, Tasks, depths_of
from farspan.measuring.grid import measure
from farspan.measuring.result import Measured
from farspan.tasks.curve import Curve
from farspan.text.documents import Text, named


def curve(
    models: Models,
    methods: Methods = "full",
    *,
    text: Text = "builtin",
    lengths: Lengths = "auto",
    target_text: Text | None = None,
    prefix_text: Text | None = None,
    protocol: str | None = None,
    depths: Sequence[float] = (0.0,),
    **options: Any,
) -> Measured:
    """Measure the forgetting curve of one or more models: how long a text they can copy from memory.

    Args:
        models, methods, text, lengths: as of `farspan.measure`; "auto" adds lengths where the curve needs them.
        target_text: the text to copy; default `text`, and `shuffled`: `text` with its tokens in shuffled order.
        prefix_text: the irrelevant text of the control; default: chosen by the protocol.
        protocol: nested, probe or paper; None or auto: nested, or probe with lengths above 4,096 tokens or with depths.
        depths: places in the text to probe, 0 its beginning to 1 its end.
        options: further arguments of `farspan.measure`, such as repeats, minutes and out.

    Raises:
        ValueError: as `farspan.measure`.
    """
    target, prefix = (None if one is None else named(one) for one in (target_text, prefix_text))
    task = Curve(protocol=protocol, depths=depths_of(depths), target_text=target, prefix_text=prefix)
    return measure(models, methods, [task], text=text, lengths=lengths, **options)


def compare(
    models: Models, methods: Methods = "full", tasks: Tasks = "perplexity", *, cost: bool = True, **options: Any
) -> Measured:
    """Compare models and methods on the same tokens: quality, paired with the first model and method, and cost.

    Args:
        models, methods, tasks: as of `farspan.measure`.
        cost: also measure seconds and memory.
        options: further arguments of `farspan.measure`, such as text, lengths, repeats and out.

    Raises:
        ValueError: as `farspan.measure`, but lengths that a model or method refuses are recorded.
    """
    return measure(models, methods, tasks, cost=cost, refusals=True, **options)
