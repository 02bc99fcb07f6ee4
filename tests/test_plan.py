"""What a measurement will cost, against what it did."""

from pathlib import Path
from typing import Any

import pytest
import torch

from farspan.lm import LM
from farspan.measuring.loop import measure_cell
from farspan.measuring.plan import plan
from farspan.methods import method
from farspan.record import Run
from farspan.tasks.curve import BoundCurve

from tiny import tiny_model
from toys import counting_text, curve_of

LENGTHS = (20, 50, 110)


def few_words() -> BoundCurve:
    text = counting_text(4, 150)
    return curve_of(type(text)("few", "few", text.tokens % 250 + 1, text.starts))


@pytest.mark.parametrize("protocol", ["nested", "paper"])
def test_the_tokens_of_a_plan_are_those_that_are_fed(
    protocol: Any, lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = curve_of(few_words().target, protocol=protocol)
    cost = plan(task, method("full"), lm, lengths=LENGTHS, repeats=3, batch=2, calibrate=False)
    fed = 0
    decoder = lm.model.get_decoder()

    def count(module: Any, args: Any, kwargs: Any) -> None:
        nonlocal fed
        if "forward" not in vars(module):  # it stands still while the head runs
            fed += kwargs["input_ids"].numel()

    with method("full").on(lm), Run.open(tmp_path, {}) as run:  # the self-check is not part of the plan
        handle = decoder.register_forward_pre_hook(count, with_kwargs=True)
        measure_cell(task, method("full"), lm, run, lengths=LENGTHS, repeats=3, batch=2)
        handle.remove()
    separators = 3 if protocol == "nested" else 2 * 3 * len(LENGTHS)  # each memory begins with one
    assert fed - separators == cost.tokens
    assert cost.seconds is None


def test_flops_equal_a_count_by_hand(lm: LM) -> None:
    hidden, feed_forward, layers, vocabulary = 32, 64, 2, 300
    matrices = layers * (2 * hidden * hidden + 2 * hidden * hidden // 2 + 3 * hidden * feed_forward)
    norms = (2 * layers + 1) * hidden
    attention = 4 * layers * hidden * 10 * (90 + 10)
    assert lm.flops(90, 10, 7) == 2 * (matrices + norms) * 10 + attention + 2 * hidden * vocabulary * 7


def test_a_calibrated_plan_says_a_time_that_grows_with_the_work(lm: LM) -> None:
    short, long = (
        plan(few_words(), method("full"), lm, lengths=lengths, repeats=4, batch=2).seconds
        for lengths in ((20,), (20, 50, 80, 110, 140))
    )
    assert short is not None
    assert long is not None
    assert 0 < short < long


def test_the_memory_of_a_plan_covers_the_keys(tokenizer: Any) -> None:
    from farspan.lm import wrap

    lm = wrap(tiny_model().to(torch.bfloat16), tokenizer, "tiny")
    cost = plan(few_words(), method("full"), lm, lengths=(140,), repeats=4, batch=4, calibrate=False)
    keys = 4 * 280 * 2 * 2 * 2 * 8 * 2  # rows, tokens, keys and values, layers, heads, dimension, bytes
    assert cost.extra_bytes > keys
