"""Check on a few hundred tokens that a method keeps its promises on a model.

Windows and similar settings are made small where a text would otherwise have to be long; the check's note then names
the setting tested. In float32, two computations of the same scores are compared by their largest difference. In lower
precision, forwards of different shapes differ by rounding and are compared by the mean difference; forwards of the same
shapes are still compared by the largest one.
"""

from collections.abc import Callable

import torch

from farspan.doctor.checks import ORDER, stages
from farspan.doctor.subject import Check, Subject, beginning, reason
from farspan.doctor.table import print_checks
from farspan.doctor.trace import no_trace, state
from farspan.hf.chunks import TROUBLE
from farspan.hf.device import is_out_of_memory
from farspan.lm import LM
from farspan.methods import Method
from farspan.reader import Reader

__all__ = ["ORDER", "Check", "Watch", "beginning", "diagnose", "print_checks"]

Watch = Callable[[str, int, int], None]  # the check that begins, checks done, checks in all


class _Stop(Exception):  # noqa: N818
    """Raised to leave a method as an error would."""


def diagnose(lm: LM, method: Method, text: str | None = None, *, watch: Watch | None = None) -> list[Check]:
    """Check the promises of `method` on `lm`, in the model's own dtype.

    Args:
        text: of at least 256 tokens; default Python's own library.
        watch: called before each check.

    Returns:
        The checks in order; one failed check, "runs", for a method that the model refuses.

    Raises:
        ValueError: a text that is too short.
    """
    method = method.fitted(lm.trained_length)
    subject = Subject(lm, method, text)
    to_do = stages(subject)
    total = sum(len(questions) for questions in to_do.values()) + 1
    checks: list[Check] = []
    before, logits = state(lm), subject.plain_nats(subject.rows[:, :16], 1)

    def begins(name: str) -> None:
        if watch is not None:
            watch(name, len(checks), total)

    for number, (variant, questions) in enumerate(to_do.items()):
        opened = False
        try:
            with variant.on(lm) as reader:
                opened = True
                for name, question in questions.items():
                    begins(name)
                    checks.append(_answer(subject, name, question, reader))
                if number == len(to_do) - 1:
                    raise _Stop  # changes that remain after an error are part of the comparison below
        except _Stop:
            pass
        except TROUBLE as error:
            if opened or is_out_of_memory(error):
                raise
            checks += [Check(name, False, "refused", "", reason(error)) for name in questions]
            if variant == method:
                return checks[:1]
    begins("no trace")
    same = torch.allclose(logits, subject.plain_nats(subject.rows[:, :16], 1), 0, 0, equal_nan=True)
    checks.append(no_trace(before, state(lm), same, ORDER["no trace"]))
    order = list(ORDER)
    return sorted(checks, key=lambda check: order.index(check.name))


def _answer(subject: Subject, name: str, question: Callable[[Subject, Reader], Check], reader: Reader) -> Check:
    try:
        return question(subject, reader)
    except TROUBLE as error:
        if is_out_of_memory(error):
            raise
        return Check(name, False, "refused", "", reason(error))
