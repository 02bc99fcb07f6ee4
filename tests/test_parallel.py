"""Models whose heads several processes divide. tests/distributed has real processes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.distributed import DistributedConfig

from farspan import method
from farspan.hf.parallel import check_divides, least, num_parts
from farspan.lm import LM, load
from farspan.measuring.followers import Unwritten
from farspan.measuring.grid import measure
from farspan.measuring.loop import measure_cell
from farspan.record import read_rows
from farspan.tasks import task

from tiny import tiny_config


@pytest.mark.parametrize(
    ("architecture", "changes", "count", "error"),
    [
        ("llama", {"num_key_value_heads": 1}, 2, "4 heads and 1 key-value heads, which 2 devices cannot divide evenly"),
        ("llama", {}, 4, "4 heads and 2 key-value heads, which 4 devices"),
        ("falcon", {}, 2, "transformers has no plan for the tensor parallelism of falcon"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(
    architecture: str, changes: dict[str, Any], count: int, error: str
) -> None:
    with pytest.raises(ValueError, match=error) as raised:
        check_divides(tiny_config(architecture, **changes), DistributedConfig(tp_size=count), "mine")
    assert "--device-map auto" in str(raised.value)
    check_divides(tiny_config("llama"), DistributedConfig(tp_size=2), "mine")


def test_it_is_refused_before_its_weights_are_loaded() -> None:
    with pytest.raises(ValueError, match="model 'demo' has 3 heads and 3 key-value heads"):
        load("demo", distributed_config=DistributedConfig(tp_size=2), weights=False)


def test_processes_take_the_least_of_their_numbers(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_reduce(numbers: torch.Tensor, operation: Any) -> None:
        assert operation == torch.distributed.ReduceOp.MIN
        numbers.clamp_(max=5)  # the other process has 5

    assert lm.free_bytes > 5
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(lm.model, "_tp_size", 2)
    assert num_parts(lm.model) == lm.num_parts == 2
    assert least(7, lm.model) == lm.free_bytes == 5


def test_memory_that_runs_out_in_one_process_ends_the_measurement(
    lm: LM, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = task("perplexity:target_tokens=4").on(lm, text)

    def run(*_: Any) -> Any:
        raise MemoryError("of this device")

    monkeypatch.setattr(type(bound), "run", run)
    run_of_two = Unwritten()
    asked: dict[str, Any] = {"lengths": (8, 16), "repeats": 1}
    monkeypatch.setattr(lm.model, "_tp_size", 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_: None)
    with pytest.raises(MemoryError, match="of this device"):
        measure_cell(bound, method("full"), lm, run_of_two, **asked)
    monkeypatch.setattr(lm.model, "_tp_size", None)
    rows = measure_cell(bound, method("full"), lm, run_of_two, **asked)
    assert {row.status for row in rows} == {"oom"}


def test_a_process_that_writes_nothing_has_the_same_rows(lm: LM, text: str, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"lengths": (8, 16), "repeats": 2}
    written = measure([lm], tasks="perplexity:target_tokens=4", text=text, out=tmp_path / "run", **asked).rows
    other, bound = Unwritten(), task("perplexity:target_tokens=4").on(lm, text)
    other.know(read_rows(tmp_path / "run")[:1])
    rows = measure_cell(bound, method("full"), lm, other, **asked)
    assert sorted(row.key for row in rows) == sorted(row.key for row in written)
    assert {row.key: row.scores for row in rows} == {row.key: row.scores for row in written}


def test_a_server_divides_its_own_model() -> None:
    with pytest.raises(ValueError, match=r"the server at http://127\.0\.0\.1:9 divides its model by itself"):
        measure("http://127.0.0.1:9", ray="auto", gpus_per_model=2)


def test_votes_of_all_heads_need_them_together(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm.model, "_tp_size", 2)
    with (
        pytest.raises(ValueError, match="tova:capacity=4 needs all heads of a layer together"),
        method("tova:capacity=4").on(lm),
    ):
        pass


def test_nothing_of_a_whole_model_is_asked_of_others() -> None:
    assert num_parts(SimpleNamespace()) == num_parts(SimpleNamespace(tp_size=None)) == 1
