"""What is asked of a memory, and how the answer is judged. One file each; this table is the only place that knows their
names."""

from farspan.spelling import one_of
from farspan.tasks.base import Example, Quality, Question, Result, Task, Work
from farspan.tasks.curve import CurveQuestion
from farspan.tasks.icl import InContextLearningQuestion
from farspan.tasks.longbench import LongBenchQuestion
from farspan.tasks.own import OwnQuestion
from farspan.tasks.perplexity import PerplexityQuestion
from farspan.tasks.qa import QaQuestion
from farspan.tasks.ralm import RalmQuestion
from farspan.tasks.zeroscrolls import ZeroScrollsQuestion

TASKS: dict[str, type[Question]] = {
    "perplexity": PerplexityQuestion,
    "curve": CurveQuestion,
    "icl": InContextLearningQuestion,
    "zeroscrolls": ZeroScrollsQuestion,
    "longbench": LongBenchQuestion,
    "ralm": RalmQuestion,
    "qa": QaQuestion,
    "own": OwnQuestion,
}


def task(text: str) -> Question:
    """The question that `text` names, as `perplexity:targets=last`.

    Raises:
        ValueError: an unknown name or setting, or a value out of range.
    """
    return one_of(TASKS, text, "task")


__all__ = ["TASKS", "Example", "Quality", "Question", "Result", "Task", "Work", "task"]
