"""The one loop: what it writes, that it resumes, what it does when memory or positions run out."""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

import farspan
from farspan import stats
from farspan.hf.device import is_out_of_memory
from farspan.lm import LM, wrap
from farspan.measuring.loop import Watch, _batches, measure_cell
from farspan.measuring.plan import plan
from farspan.methods import method
from farspan.methods.full import Full
from farspan.reader.served.client import TooLongError
from farspan.record import Row, Run, read_rows
from farspan.tasks import Example, Result
from farspan.tasks.curve import BoundCurve

from tiny import tiny_model
from toys import ToyMethod, ToyReader, attention_of, copier, counting_text, curve_of, perplexity_of, toy_lm

LENGTHS = (10, 40, 80)


class Failing(BoundCurve):
    """A curve that runs out of memory where `fails` says so."""

    fails: Any = None
    calls: list[tuple[int, int, tuple[int, ...]]]

    def run(self, reader: Any, batch: Sequence[Example]) -> Iterator[Result]:
        type(self).calls.append((reader.chunk, len(batch), batch[0].lengths))
        for result in super().run(reader, batch):
            if type(self).fails(reader.chunk, len(batch), result.length):
                raise torch.OutOfMemoryError("not enough memory: you tried to allocate 9 GiB")
            yield result


def failing(fails: Any) -> BoundCurve:
    kind = type("Failing", (Failing,), {"fails": staticmethod(fails), "calls": []})
    return kind(target=counting_text(), protocol="nested")


def measured(folder: Path, task: Any, repeats: int = 4, **more: Any) -> list[Row]:
    with Run.open(folder, {}) as run:
        return measure_cell(
            task, ToyMethod(copier(50)), toy_lm(more.pop("limit", None)), run, lengths=LENGTHS, repeats=repeats, **more
        )


class Refusing(BoundCurve):
    """A curve on a server that takes no more than 40 tokens of the second repeat."""

    def run(self, reader: Any, batch: Sequence[Example]) -> Iterator[Result]:
        for result in super().run(reader, batch):
            if result.length > 40 and any(example.repeat == 1 for example in batch):
                raise TooLongError("too many tokens")
            yield result


def scores(rows: list[Row]) -> list[tuple[int, int, Any]]:
    return sorted((row.repeat, row.length, json.dumps(row.scores)) for row in rows)


def test_a_row_says_everything_about_itself(lm: LM, tmp_path: Path) -> None:
    with Run.open(tmp_path, {}) as run:
        measure_cell(curve_of(counting_text(2, 140)), method("full"), lm, run, lengths=(10, 20), repeats=2, seed=7)
    row = read_rows(tmp_path)[0]
    assert (row.model, row.method, row.task, row.version) == ("tiny-llama", "full", "curve", BoundCurve.version)
    assert (row.length, row.seed) == (10, 7)
    assert row.settings["protocol"] == "nested"
    assert (row.num_seen, row.num_kept, row.status) == (11, 11, "ok")
    assert row.scores["context"] == 22
    assert row.seconds > 0
    assert row.peak_bytes > 2**20


def test_results_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    task = curve_of(counting_text())
    together, alone = (measured(tmp_path / str(b), task, batch=b) for b in (4, 1))
    assert scores(together) == scores(alone)


def test_a_server_that_refuses_one_text_is_asked_for_the_others_of_its_batch(tmp_path: Path) -> None:
    rows = measured(tmp_path, Refusing(target=counting_text(), protocol="nested"), batch=3)
    refused = {(row.repeat, row.length) for row in rows if row.status == "too_long"}
    assert (len(rows), refused) == (12, {(1, 80)})


def test_a_finished_run_measures_nothing_again(tmp_path: Path) -> None:
    first = measured(tmp_path, curve_of(counting_text()), batch=2)
    task = failing(lambda *_: False)
    again = measured(tmp_path, task, batch=2)
    assert type(task).calls == []
    assert scores(again) == scores(first)


@pytest.mark.parametrize("kept", [1, 5, 8, 11])
def test_a_stopped_run_goes_on_to_the_same_rows(kept: int, tmp_path: Path) -> None:
    whole = measured(tmp_path / "whole", curve_of(counting_text()), batch=2)
    measured(tmp_path / "cut", curve_of(counting_text()), batch=2)
    file = tmp_path / "cut" / "rows.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:kept]) + lines[kept][:40])
    assert scores(measured(tmp_path / "cut", curve_of(counting_text()), batch=2)) == scores(whole)
    assert len(read_rows(tmp_path / "cut")) == len(whole)


def test_out_of_memory_halves_the_chunk_first_then_the_batch(tmp_path: Path) -> None:
    task = failing(lambda chunk, size, length: length == 80 and (chunk > 256 or size > 1))
    rows = measured(tmp_path, task, batch=4)
    assert all(row.status == "ok" for row in rows)
    assert len(rows) == 12
    chunks_and_sizes = [(chunk, size) for chunk, size, _ in type(task).calls]
    assert chunks_and_sizes[:7] == [(1024, 4), (512, 4), (256, 4), (128, 4), (64, 4), (64, 2), (64, 1)]
    # lengths that were done are not done again
    assert type(task).calls[1][2] == (80,)


def test_examples_read_one_by_one_are_tried_alone_at_once(tmp_path: Path) -> None:
    task = failing(lambda chunk, size, length: length == 80)
    type(task).reads_together = False
    rows = measured(tmp_path, task, batch=4, chunk=64)
    assert [size for _, size, _ in type(task).calls] == [4, 1]
    assert sorted((row.repeat, row.length) for row in rows if row.status == "ok") == [
        (repeat, length) for repeat in range(4) for length in (10, 40)
    ]


def test_what_never_fits_is_a_row_with_a_reason_and_nothing_else_is_lost(tmp_path: Path) -> None:
    task = failing(lambda chunk, size, length: length >= 40)
    rows = measured(tmp_path, task, batch=2)
    by_status = {status: sorted({r.length for r in rows if r.status == status}) for status in ("ok", "oom")}
    assert by_status == {"ok": [10], "oom": [40, 80]}
    assert len(rows) == 12
    assert any("9 GiB" in row.reason for row in rows)
    assert any("not tried" in row.reason for row in rows)


def test_memory_that_runs_out_at_once_loses_no_shorter_length(tmp_path: Path) -> None:
    task = failing(lambda chunk, size, length: length >= 40)
    rows = measured(tmp_path, task, batch=1, chunk=64)  # nothing smaller to try before the failure is final
    assert sorted((row.repeat, row.length) for row in rows if row.status == "ok") == [(n, 10) for n in range(4)]
    assert {row.reason for row in rows if "not tried" in row.reason} == {"not tried: repeat 0 failed at 40 tokens"}


def test_other_errors_are_not_taken_for_missing_memory(tmp_path: Path) -> None:
    def broken(*_: Any) -> bool:
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        measured(tmp_path, failing(broken), batch=2)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("can't start new thread"), True),
        (RuntimeError("could not create a primitive"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_out_of_memory_is_told_from_other_errors(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_lengths_beyond_the_positions_are_rows_and_the_others_are_measured(tmp_path: Path) -> None:
    rows = measured(tmp_path, curve_of(counting_text()), limit=100, batch=2)
    by_length = {length: {r.status for r in rows if r.length == length} for length in LENGTHS}
    assert by_length == {10: {"ok"}, 40: {"ok"}, 80: {"too_long"}}
    assert "needs 162 tokens, the model has 100 positions" in [row.reason for row in rows]


def test_nan_logits_are_rows_and_the_run_goes_on(lm: LM, tmp_path: Path) -> None:
    lm.model.model.norm.weight.data.fill_(torch.nan)
    text = curve_of(counting_text(2, 100))
    with Run.open(tmp_path, {}) as run:
        rows = measure_cell(text, method("full"), lm, run, lengths=(10, 20), repeats=2)
    assert [row.status for row in rows] == ["nan"] * 4
    assert rows[0].reason == "10 scored tokens have no finite log-probability"
    assert rows[0].scores["copy"] == 0.0
    json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])


def test_a_model_is_measured_without_dropout_after_it_was_trained(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    lm, nats = wrap(tiny_model("gpt2"), tokenizer, "tiny"), []
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog " * 40)
    what: dict[str, Any] = {"tasks": "perplexity", "text": str(tmp_path / "text"), "lengths": [20, 40], "repeats": 2}
    for number, training in enumerate((False, True)):  # as a Trainer leaves its model
        lm.model.train(training)
        rows = farspan.measure(lm, **what, out=tmp_path / str(number)).rows
        nats.append([row.scores["nats"] for row in rows])
        assert all(module.training == training for module in lm.model.modules())
    assert nats[0] == nats[1]


class Gradients(Full):
    """A method that could train at test time."""

    name = "gradients"

    def on(self, lm: LM) -> Any:
        assert torch.is_grad_enabled()
        return super().on(lm)


def test_a_method_of_the_users_own_may_need_gradients(lm: LM, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog " * 40)
    what: dict[str, Any] = {"text": str(tmp_path / "text"), "lengths": [20], "repeats": 2, "out": tmp_path / "run"}
    assert len(farspan.measure(lm, Gradients(), "perplexity", **what).rows) == 2


def test_a_fallback_is_said(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    lm = wrap(tiny_model("mamba"), tokenizer, "tiny-mamba")
    said: list[str] = []
    with Run.open(tmp_path, {}) as run:
        measure_cell(
            curve_of(counting_text(2, 100)),
            method("full"),
            lm,
            run,
            lengths=(10,),
            repeats=2,
            watch=Watch(notice=said.append),
        )
    assert len(said) == 1
    assert "tiny-mamba is read with plain forwards" in said[0]


def test_progress_counts_what_was_already_there(tmp_path: Path) -> None:
    measured(tmp_path, curve_of(counting_text()), batch=2)
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:9]))
    told: list[tuple[int, int]] = []
    measured(
        tmp_path,
        curve_of(counting_text()),
        batch=2,
        watch=Watch(row=lambda row, done, total: told.append((done, total))),
    )
    assert told == [(10, 12), (11, 12), (12, 12)]


def test_progress_is_the_share_of_the_operations(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """The first rows of a curve are its shortest: by their number most would be done when little is."""
    lm, task = wrap(tiny_model("llama"), tokenizer, "tiny-llama"), curve_of(counting_text(3, 95))
    shares: list[float] = []

    def run(lengths: tuple[int, ...]) -> None:
        with Run.open(tmp_path, {}) as run:
            measure_cell(
                task, method("full"), lm, run, lengths=lengths, repeats=2, batch=2, watch=Watch(share=shares.append)
            )

    def flops(lengths: tuple[int, ...]) -> float:
        return plan(task, method("full"), lm, lengths=lengths, repeats=2).flops

    run(LENGTHS)
    up_to = [flops(LENGTHS[: end + 1]) / flops(LENGTHS) for end in range(len(LENGTHS))]
    assert shares[1::2] == pytest.approx(up_to)  # after both rows of a length
    assert shares[::2] == pytest.approx([(a + b) / 2 for a, b in zip([0, *up_to], up_to, strict=False)])
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:4]))
    shares.clear()
    run(LENGTHS)  # only the rows of this session count
    assert shares == pytest.approx([0.5, 1.0])


def test_a_toy_reader_keeps_the_protocol() -> None:
    from farspan.reader import Memory, Reader

    assert isinstance(ToyReader(toy_lm(), copier(1)), Reader)
    assert not isinstance(object(), Memory)


def test_what_ran_out_of_memory_is_tried_again_when_the_command_is_repeated(tmp_path: Path) -> None:
    measured(tmp_path, failing(lambda chunk, size, length: length >= 40), batch=2)
    rows = measured(tmp_path, curve_of(counting_text()), batch=2)
    assert [row.status for row in rows] == ["ok"] * 12
    assert stats.summarise(stats.curve(read_rows(tmp_path))).failed == {}


class StoppedError(Exception):
    """Raised between two rows, as Ctrl-C is."""


TEXT_TASKS = {
    "nested": lambda text: curve_of(text),
    "probe": lambda text: curve_of(text, protocol="probe", warmup=4, scored=8, depths=(0.0, 0.5)),
    "perplexity": lambda text: perplexity_of(text, "last", 8),
    "attention": lambda text: attention_of(text, bin=8, map_bins=0),
}


@pytest.mark.parametrize("kind", TEXT_TASKS)
def test_in_bfloat16_a_run_stopped_anywhere_ends_with_the_same_rows(
    kind: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    lm = wrap(tiny_model("llama").to(torch.bfloat16), tokenizer, "tiny")
    task = TEXT_TASKS[kind](replace(counting_text(), tokens=np.arange(4800) * 7919 % 300))
    lengths = (13, 29, 61)

    def once(folder: Path, rows: int | None = None) -> list[Row]:
        def row(row: Row, done: int, total: int) -> None:
            if len(run.rows) == rows:
                raise StoppedError

        with Run.open(folder, {}) as run:
            return measure_cell(
                task, method("full"), lm, run, lengths=lengths, repeats=5, batch=3, watch=Watch(row=row)
            )

    def compared(rows: list[Row]) -> list[tuple[Any, ...]]:
        return sorted((row.repeat, row.length, row.depth, json.dumps((row.scores, row.reading))) for row in rows)

    whole = compared(once(tmp_path / "whole"))
    for stop in range(1, len(whole), len(whole) // 4):
        folder = tmp_path / f"stopped-{stop}"
        with suppress(StoppedError):
            once(folder, stop)
        assert compared(once(folder)) == whole


def test_a_row_says_how_it_was_read(tmp_path: Path) -> None:
    rows = measured(tmp_path / "run", failing(lambda chunk, batch, length: chunk > 512), repeats=3, batch=2)
    assert {json.dumps(row.reading) for row in rows if row.length == 40} == {
        '{"repeats": [0, 1], "chunk": 512, "cuts": [10, 40]}',
        '{"repeats": [2], "chunk": 512, "cuts": [10, 40]}',
    }


def test_repeats_that_lack_other_lengths_are_read_in_other_batches(tmp_path: Path) -> None:
    task = failing(lambda *_: False)
    rows = measured(tmp_path, task, batch=4, mine=lambda repeat, length: repeat > 0 or length == 10)
    assert sorted(type(task).calls) == [(1024, 1, (10,)), (1024, 3, (10, 40, 80))]
    assert len(rows) == 10


def test_a_batch_that_was_begun_is_read_as_a_whole_for_the_rows_of_some_of_its_repeats(tmp_path: Path) -> None:
    measured(tmp_path, curve_of(counting_text()), batch=4)
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:4]))
    task = failing(lambda *_: False)
    measured(tmp_path, task, batch=4, mine=lambda repeat, length: repeat == 2)
    assert type(task).calls == [(1024, 4, (40, 80))]
    assert [(row.repeat, row.length) for row in read_rows(tmp_path)[4:]] == [(2, 40), (2, 80)]


def test_batches_are_planned_once_however_many_repeats_there_are() -> None:
    asked = []

    def missing(example: Example) -> tuple[int, ...]:
        asked.append(example)
        return example.lengths

    examples = [Example(str(repeat), repeat, LENGTHS, {}) for repeat in range(1000)]
    assert [len(batch.examples) for batch in _batches(examples, missing, [], 7)] == [7] * 142 + [6]
    assert len(asked) == len(examples)


def test_free_memory_is_looked_up_once_for_a_measurement_and_not_for_each_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[torch.device] = []
    monkeypatch.setattr("farspan.hf.free_bytes", lambda device: looked.append(device) or 2**40)
    assert len(measured(tmp_path, curve_of(counting_text()), repeats=8)) == 24
    assert len(looked) <= 2  # for what cannot fit, and for the batch
    before = len(looked)
    measured(tmp_path, curve_of(counting_text()), repeats=8)
    assert len(looked) == before
