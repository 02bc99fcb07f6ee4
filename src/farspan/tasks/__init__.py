"""The tasks, one file each; only this table lists their names."""

from farspan.specs import one_of
from farspan.tasks.attention import Attention
from farspan.tasks.base import Bound, Example, Quality, Result, Task, Work
from farspan.tasks.curve import Curve
from farspan.tasks.icl import Icl
from farspan.tasks.longbench import LongBench
from farspan.tasks.longbench2 import LongBench2
from farspan.tasks.longppl import LongPPL
from farspan.tasks.mentions import Mentions
from farspan.tasks.needle import Needle
from farspan.tasks.own import Own
from farspan.tasks.passkey import Passkey
from farspan.tasks.perplexity import Perplexity
from farspan.tasks.qa import Qa
from farspan.tasks.ralm import Ralm
from farspan.tasks.recall import Recall
from farspan.tasks.zeroscrolls import ZeroScrolls

KINDS: tuple[type[Task], ...] = (
    Perplexity, LongPPL, Mentions, Curve, Recall, Attention, Icl, ZeroScrolls, LongBench, LongBench2, Ralm, Qa, Own,
    Passkey, Needle,
)  # fmt: skip
TASKS: dict[str, type[Task]] = {kind.name: kind for kind in KINDS}


def task(text: str) -> Task:
    """Return the task that `text` names, as `perplexity:targets=last`.

    Raises:
        ValueError: an unknown name or setting, or a value out of range.
    """
    return one_of(TASKS, text, "task")


__all__ = ["TASKS", "Bound", "Example", "Quality", "Result", "Task", "Work", "task"]
