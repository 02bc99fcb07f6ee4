"""benchmarks/methods_table.py: a page made of the recorded rows."""

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
methods_table: Any = importlib.import_module("methods_table")
real_tables: Any = importlib.import_module("real_tables")
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1"


def test_the_tables_of_the_page_are_those_of_the_recorded_rows() -> None:
    """After new rows: python benchmarks/methods_table.py --record, then --write."""
    assert methods_table.page() == methods_table.PAGE.read_text()


def test_the_recorded_rows_support_every_claim_of_the_page() -> None:
    assert all(methods_table.claims().values()), methods_table.claims()


def test_the_methods_that_still_predict_take_less_than_a_nat_more_than_the_model_at_its_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_window = {100: {"full": {"text": 3.0, "other": 3.2}, "good": {"text": 3.1}}}
    known = {"perplexity": {"full": -6.0, "good": -4.0, "worse": -4.2}, "facts": {"good": 0.5, "worse": 0.7}}
    monkeypatch.setattr(methods_table, "token_nats", lambda model: at_window)
    monkeypatch.setattr(methods_table, "measures", lambda model, length: known)
    assert methods_table.predicting("any", 200) == {"perplexity": {"good": -4.0}, "facts": {"good": 0.5}}


def test_a_method_with_texts_of_its_own_is_paired_with_the_model_on_the_same_texts() -> None:
    """The means and their difference, recomputed row by row."""
    (line,) = (
        line for line in methods_table.beside_full(SMOLLM2).splitlines() if line.startswith("| nats per token | 16,")
    )
    rows = real_tables.recorded(SMOLLM2, "longppl-beside")[1]
    nats = {(row.method, row.example): row.scores["nats_all"] for row in rows if row.length == 16_384}
    pairs = [
        (nats["full", one], nats["topk:k=1024", one])
        for how, one in nats
        if how == "full" and ("topk:k=1024", one) in nats
    ]
    full, topk = np.array(pairs).T
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[2:5] == [str(len(pairs)), f"{full.mean():.2f}", f"{topk.mean():.2f}"]
    assert cells[5].startswith(f"{(topk - full).mean():+.3f} [")
