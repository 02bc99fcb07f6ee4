"""Windows that are left out follow from the trained length, and rows name them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from farspan import measure
from farspan.doctor import diagnose
from farspan.lm import LM
from farspan.measuring.grid import grid, plans
from farspan.methods import method
from farspan.record import read_header

from tiny import CODE, some_ids


@pytest.mark.parametrize(
    ("written", "fitted"),
    [
        ("sinks", "sinks:window=508"),
        ("sinks:sinks=0", "sinks:window=512,sinks=0"),
        ("sinks:sinks=2,stride=16", "sinks:window=495,sinks=2,stride=16"),
        ("lambda_mask", "lambda_mask:window=512"),
        ("sinks:window=9", "sinks:window=9"),
        ("rope:type=yarn,factor=4+sinks", "rope:type=yarn,factor=4+sinks:window=2044"),
        ("rope:type=yarn,factor=4,original=100+sinks", "rope:type=yarn,factor=4,original=100+sinks:window=396"),
        ("rope:type=truncated+lambda_mask", "rope:type=truncated+lambda_mask:window=512"),
    ],
)
def test_a_window_that_is_left_out_is_the_largest_that_a_model_takes(written: str, fitted: str, lm: LM) -> None:
    found = method(written).fitted(lm.trained_length)
    assert found == method(fitted)
    with found.on(lm):
        pass


def test_a_method_without_its_window_reads_as_with_it(lm: LM) -> None:
    lm, ids = replace(lm, trained_length=20), some_ids(1, 60)
    scores = []
    for text in ("sinks", "sinks:window=16", "lambda_mask:sinks=1", "lambda_mask:window=20,sinks=1"):
        with method(text).on(lm) as reader:
            scores.append(reader.read(ids[:, :30]).score(ids[:, 30:]).nats)
    assert torch.equal(scores[0], scores[1])
    assert torch.equal(scores[2], scores[3])
    assert not torch.equal(scores[0], scores[2])


def test_rows_plans_and_the_header_of_a_run_name_the_window_that_suits_all_models(lm: LM, tmp_path: Path) -> None:
    models = [lm, replace(lm, name="other", trained_length=300)]
    rows = measure(models, ["sinks"], ["perplexity:target_tokens=8"], text=CODE, lengths=[40], repeats=1,
                   out=tmp_path / "run").rows  # fmt: skip
    assert {row.method for row in rows} == {"sinks:window=296,sinks=4"}
    assert read_header(tmp_path / "run")["settings"]["methods"] == ["sinks:window=296,sinks=4"]
    what = grid(models, ["perplexity:target_tokens=8"], text=CODE, lengths=[40], repeats=1)
    assert {one.method for one in plans(models, ["sinks"], what)} == {"sinks:window=296,sinks=4"}


def test_the_doctor_checks_a_method_without_its_window(lm: LM) -> None:
    text = Path(CODE).read_text("utf-8")
    found, expected = (diagnose(lm, method(name), text) for name in ("sinks", "sinks:window=508"))
    assert {check.name for check in found if check.passed} >= {"runs", "at work", "forgetting"}
    assert [(one.name, one.passed, one.allowed, one.note) for one in found] == [
        (one.name, one.passed, one.allowed, one.note) for one in expected
    ]


def test_sinks_that_fill_the_trained_length_are_refused() -> None:
    with pytest.raises(ValueError, match="sinks:sinks=64 leaves no window in the trained length of 64 tokens; use"):
        method("sinks:sinks=64").fitted(64)
