"""benchmarks/methods_table.py: a page made of the recorded rows."""

import importlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
methods_table: Any = importlib.import_module("methods_table")


def test_the_tables_of_the_page_are_those_of_the_recorded_rows() -> None:
    """After new rows: python benchmarks/methods_table.py --record, then --write."""
    assert methods_table.page() == methods_table.PAGE.read_text()


def test_the_recorded_rows_support_every_claim_of_the_page() -> None:
    assert all(methods_table.claims().values()), methods_table.claims()
