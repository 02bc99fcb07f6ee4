"""Perplexity by length: against one plain forward, against numbers made by hand, and what the command says."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_cli import done, farspan, last_line, refused
from transformers import PreTrainedTokenizerFast

from farspan import stats
from farspan.lm import LM, load, wrap
from farspan.measuring.grid import measure
from farspan.measuring.plan import plan
from farspan.measuring.setups import grid
from farspan.methods import method
from farspan.reader import Scores
from farspan.record import Row, read_rows
from farspan.report import perplexity as report
from farspan.report.runs import groups_of_rows
from farspan.tasks.longppl import BoundLongPPL, LongPPL
from farspan.tasks.perplexity import BoundPerplexity, Perplexity, bucket_ends
from farspan.text import corpora

import tiny
from naive import log_p_after
from tiny import PlannedAndFed, hit_prone, saved, tiny_model
from toys import counting_text, few_tokens, perplexity_of, text_that_breaks, toy_lm

ARCHITECTURES = ["llama", "mistral", "qwen3", "gpt_neox", "gpt2", "gemma2", "mamba2", "rwkv", "falcon_h1", "mamba"]
LENGTHS = (20, 33, 100)
KINDS = [("fixed", None), ("last", None), ("all", None), ("all", 7)]


measured = partial(tiny.measured, lengths=LENGTHS, repeats=3, batch=2)


def naive_nats(lm: LM, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Nats, hits and the two largest logits' distance of every token of ids behind a separator, from one plain
    forward and all logits."""
    log_p, target = log_p_after(lm.model, lm.separator.ids, ids), torch.tensor(ids)
    best = log_p.topk(2).values
    return -log_p[torch.arange(len(ids)), target], log_p.argmax(-1) == target, best[:, 0] - best[:, 1]


def assert_equals_the_naive_pass(rows: list[Row], lm: LM, task: BoundPerplexity, lengths: tuple[int, ...]) -> float:
    """Every mean, hit and bucket; returns the share of hits."""
    repeats = 1 + max(row.repeat for row in rows)
    texts = {example.id: example.payload.tolist() for example in task.examples(lm, lengths, repeats, 0)}
    hits = []
    for row in rows:
        text = texts[row.example]
        read = text[-row.length :] if task.targets == "fixed" else text[: row.length]
        scored = row.length if task.targets == "all" else task.target_tokens
        nats, hit, margin = (values[-scored:] for values in naive_nats(lm, read))
        assert row.status == "ok"
        assert row.scores["scored"] == scored
        assert row.scores["context"] == len(lm.separator.ids) + row.length
        assert abs(row.scores["nats"] - float(nats.mean())) <= 1e-5
        ours = torch.from_numpy(stats.unpacked(row.scores["hits"], scored).astype(bool))
        assert torch.equal(ours[margin > 1e-5], hit[margin > 1e-5])
        assert row.scores["accuracy"] == pytest.approx(float(ours.float().mean()))
        if task.targets == "all":
            begin = 0
            for end, sum_, count in zip(*(row.scores["buckets"][k] for k in ("ends", "nats", "hits")), strict=True):
                assert abs(sum_ - float(nats[begin:end].sum())) <= 1e-5 * (end - begin)
                assert count == int(ours[begin:end].sum())
                begin = end
            assert begin == row.length
        hits.append(float(hit.float().mean()))
    return float(np.mean(hits))


@pytest.mark.parametrize(
    ("architecture", "targets", "buckets"),
    [
        *((name, *kind) for name in ("llama", "gpt2", "mamba2") for kind in KINDS),
        *((name, *KINDS[number % 3]) for number, name in enumerate(ARCHITECTURES)),
    ],
)
def test_numbers_equal_the_naive_pass(
    architecture: str, targets: str, buckets: int | None, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    lm = wrap(hit_prone(tiny_model(architecture)), tokenizer, "tiny")
    task = perplexity_of(few_tokens(), targets, target_tokens=15, buckets=buckets)
    rows = measured(tmp_path, lm, task, chunk=23)
    assert len(rows) == 9
    share = assert_equals_the_naive_pass(rows, lm, task, LENGTHS)
    assert 0.02 < share < 0.98  # otherwise equality would say nothing


@pytest.mark.parametrize("targets", ["fixed", "last", "all"])
def test_numbers_equal_the_naive_pass_on_a_real_model_and_a_real_book(
    targets: str, shared_data: Path, tmp_path: Path
) -> None:
    lm = load(shared_data / "models" / "stories260K", dtype="float32", device="cpu")
    task = perplexity_of(corpora.load(str(shared_data / "books" / "great_gatsby.txt"), lm.tokenizer), targets, 64)
    rows = measured(tmp_path, lm, task, lengths=(128, 500), repeats=2, chunk=100)
    assert assert_equals_the_naive_pass(rows, lm, task, (128, 500)) > 0.1


@pytest.mark.parametrize("targets", ["fixed", "last", "all"])
def test_numbers_do_not_depend_on_the_chunk_or_the_batch(targets: str, lm: LM, tmp_path: Path) -> None:
    task = perplexity_of(few_tokens(), targets, target_tokens=15)
    ways = [{"chunk": 1024, "batch": 1}, {"chunk": 7, "batch": 3}, {"chunk": 1, "batch": 2}]
    first, *others = (measured(tmp_path / str(i), lm, task, lengths=LENGTHS[:2], **way) for i, way in enumerate(ways))
    for rows in others:
        other = {row.key: row.scores for row in rows}
        for row in first:
            assert other[row.key]["nats"] == pytest.approx(row.scores["nats"], abs=1e-5)
            assert other[row.key]["hits"] == row.scores["hits"]


@pytest.mark.parametrize("how", ["sinks:window=25,sinks=2", "lambda_mask:window=25", "topk:k=10", "replug:piece=30"])
def test_other_methods_say_the_same_whatever_lengths_were_read_before(how: str, lm: LM, tmp_path: Path) -> None:
    for targets in ("fixed", "last"):
        task = perplexity_of(few_tokens(), targets, target_tokens=15)
        together = measured(tmp_path / targets, lm, task, how=how, repeats=2)
        path = tmp_path / targets / "rows.jsonl"
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if json.loads(line)["length"] != 100))
        again = measured(tmp_path / targets, lm, task, how=how, repeats=2)  # the longest alone
        for before, after in zip(sorted(together, key=by_cell), sorted(again, key=by_cell), strict=True):
            assert before.key == after.key
            assert after.scores["nats"] == pytest.approx(before.scores["nats"], abs=1e-5)
        full = measured(tmp_path / f"{targets}-full", lm, task, lengths=(100,), repeats=2)
        longest = [
            max(abs(a.scores["nats"] - b.scores["nats"]) for a, b in zip(*map(at_100, (again, full)), strict=True))
        ]
        assert max(longest) > 1e-3  # the method was at work


def by_cell(row: Row) -> tuple[int, int]:
    return row.length, row.repeat


def at_100(rows: list[Row]) -> list[Row]:
    return sorted((row for row in rows if row.length == 100), key=by_cell)


# what is scored


def test_fixed_targets_are_the_same_tokens_at_all_lengths(lm: LM, tmp_path: Path) -> None:
    for targets, different in (("fixed", 1), ("last", 3)):
        rows = measured(tmp_path / targets, lm, perplexity_of(few_tokens(), targets, target_tokens=15))
        for repeat in range(3):
            assert len({row.scores["target"] for row in rows if row.repeat == repeat}) == different


def test_more_context_never_changes_where_fixed_targets_end() -> None:
    task = perplexity_of(few_tokens(), target_tokens=15)
    assert [task.span(100, length) for length in LENGTHS] == [(80, 85, 100), (67, 85, 100), (0, 85, 100)]


def test_the_last_tokens_of_lengths_that_begin_together() -> None:
    task = perplexity_of(few_tokens(), "last", target_tokens=15)
    assert [task.span(100, length) for length in LENGTHS] == [(0, 5, 20), (0, 18, 33), (0, 85, 100)]


def test_at_the_largest_length_fixed_and_last_are_the_same(lm: LM, tmp_path: Path) -> None:
    fixed, last = (
        at_100(measured(tmp_path / targets, lm, perplexity_of(few_tokens(), targets, target_tokens=15)))
        for targets in ("fixed", "last")
    )
    assert [row.scores["target"] for row in fixed] == [row.scores["target"] for row in last]
    for one, other in zip(fixed, last, strict=True):
        assert one.scores["nats"] == pytest.approx(other.scores["nats"], abs=1e-5)


def test_positions_sum_to_the_whole_and_do_not_see_what_comes(lm: LM, tmp_path: Path) -> None:
    lengths = (64, 100, 130)
    rows = measured(tmp_path, lm, perplexity_of(few_tokens(), "all"), lengths=lengths, repeats=2)
    first: dict[int, set[float]] = {}
    for row in rows:
        buckets = row.scores["buckets"]
        assert sum(buckets["nats"]) == pytest.approx(row.scores["nats"] * row.length)
        assert sum(buckets["hits"]) == round(row.scores["accuracy"] * row.length)
        first.setdefault(row.repeat, set()).add(round(buckets["nats"][0], 3))
    assert {len(values) for values in first.values()} == {1}  # the first 64 of 130 tokens are as those of 64 alone


def test_buckets_end_at_powers_of_two_or_are_equal() -> None:
    assert bucket_ends(10, None) == [10]
    assert bucket_ends(64, None) == [64]
    assert bucket_ends(300, None) == [64, 128, 256, 300]
    assert bucket_ends(100, 4) == [25, 50, 75, 100]
    assert bucket_ends(3, 8) == [1, 2, 3]


def test_a_model_that_halves_its_doubt_gains_log_two(tmp_path: Path) -> None:
    class Guess:
        """Twice as sure behind twice as many tokens; hits every other one."""

        num_seen = num_kept = 0

        def __init__(self, seen: int) -> None:
            self.num_seen = seen

        def score(self, ids: torch.Tensor, keep: slice | None = None) -> Scores:
            nats = torch.full(ids.shape, math.log(400 / (self.num_seen + 3)))  # separator and 16 read of 20: log 20
            return Scores(nats, torch.arange(ids.shape[1]).expand(ids.shape) % 2)

    class Reader:
        lm, chunk, capacity = toy_lm(), 1024, 0

        def read(self, *passages: Any, head: Any) -> Guess:
            return Guess(head.shape[1] + sum(part.shape[1] for part in passages))

    task = perplexity_of(counting_text(), target_tokens=4)
    examples = task.examples(toy_lm(), (20, 40), 3, 0)
    results = list(task.run(Reader(), examples))  # type: ignore[arg-type]
    assert [(r.length, r.num_seen) for r in results] == [(20, 17)] * 3 + [(40, 37)] * 3
    rows = [
        Row("m", "full", task.name, 1, task.settings, r.length, r.example.repeat, 0, r.example.id, scores=r.scores)
        for r in results
    ]
    (one,) = report.series(rows)
    (short, long) = report.as_data([one])[0]["lengths"]
    assert (short["perplexity"], long["perplexity"]) == (pytest.approx(20), pytest.approx(10))
    assert (short["accuracy"], short["gain"]) == (0.5, 0.0)
    assert long["gain"] == pytest.approx(math.log(2), abs=1e-6)
    assert (long["gain_low"], long["gain_high"]) == (None, None)  # no repeat differs, so the spread is unknown


def test_gains_from_another_length_than_the_shortest_are_not_compared() -> None:
    """The second method has failed at the shortest length, and the third has no row there."""
    settings = {"targets": "fixed", "target_tokens": 64, "text": "books", "text_hash": "x"}
    scores = {"nats": 2.0, "accuracy": 0.5, "scored": 64, "context": 64}
    rows = [
        Row("m", how, "perplexity", 2, settings, length, repeat, 0, f"{repeat}", scores=scores)
        for how in ("full", "sinks", "topk")
        for length in (128, 256)[how == "topk" :]
        for repeat in range(2)
    ]
    rows = [replace(row, status="oom") if (row.method, row.length) == ("sinks", 128) else row for row in rows]
    members = report.series(rows)
    assert [one.by_length[-1]["gain"] for one in members] == [0.0, None, 0.0]
    (group,) = groups_of_rows(rows, "perplexity", report.PerplexityMember)
    figures = report.PerplexityReport([group], Path()).section(group, 1)["figures"]
    traces = [len({trace["meta"]["curve"] for trace in figure["data"]}) for figure in figures]
    assert traces == [3, 1]  # accuracy and gain


def test_intervals_are_over_repeats() -> None:
    low, high = stats.interval(np.array([[1.0], [2.0], [3.0]]))
    assert (low[0], high[0]) == (pytest.approx(2 - 4.302653 / math.sqrt(3)), pytest.approx(2 + 4.302653 / math.sqrt(3)))
    assert np.isnan(stats.interval(np.array([[1.0], [np.nan]]))).all()


# as part of the one loop


@pytest.mark.parametrize(("kept", "targets"), [(1, "all"), (4, "fixed"), (4, "all"), (8, "last")])
def test_a_stopped_run_goes_on_to_the_same_numbers(kept: int, targets: str, lm: LM, tmp_path: Path) -> None:
    task = perplexity_of(few_tokens(), targets, target_tokens=15)
    whole = {row.key: row.scores for row in measured(tmp_path, lm, task)}
    path = tmp_path / "rows.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:kept]) + lines[kept][:40])
    resumed = {row.key: row.scores for row in measured(tmp_path, lm, task)}
    assert resumed.keys() == whole.keys()
    assert all(resumed[key]["nats"] == pytest.approx(whole[key]["nats"], abs=1e-5) for key in whole)
    assert path.read_bytes().startswith(b"".join(lines[:kept]))
    assert len(read_rows(tmp_path)) == 9


@pytest.mark.parametrize("targets", ["fixed", "last", "all"])
def test_the_tokens_of_a_plan_are_those_that_are_fed(targets: str, lm: LM, planned_and_fed: PlannedAndFed) -> None:
    task = perplexity_of(few_tokens(), targets, target_tokens=15)
    planned, fed = planned_and_fed(task, lm, lengths=LENGTHS, repeats=3, batch=2)
    assert planned == fed


def test_numbers_that_are_not_finite_are_rows_that_name_the_layer_and_the_length(lm: LM, tmp_path: Path) -> None:
    rows = measured(tmp_path, lm, perplexity_of(text_that_breaks(lm), target_tokens=15), lengths=(20, 140))
    assert {row.status for row in rows} == {"ok", "nan"}
    broken = [row for row in rows if row.status == "nan"]
    assert broken[0].reason.startswith("15 scored tokens have no finite log-probability; at 140 tokens the first")
    assert broken[0].reason.endswith("came out of model.embed_tokens")
    assert {(row.length, row.repeat) for row in broken} == {(140, broken[0].repeat)}  # the others went on
    assert broken[0].scores["nats"] is None
    assert "accuracy" not in broken[0].scores  # or a mean would count the row in one number and not in the other
    assert "hits" not in broken[0].scores
    assert not any(module._forward_hooks for module in lm.model.modules())
    (one,) = report.series(rows)
    assert np.isfinite(one.values("nats")).sum() == len(rows) - len(broken)


def test_the_first_layer_that_breaks_is_named(lm: LM, tmp_path: Path) -> None:
    lm.model.model.layers[1].mlp.up_proj.weight.data[3] = torch.inf
    rows = measured(tmp_path, lm, perplexity_of(few_tokens(), "last", target_tokens=15))
    assert {row.status for row in rows} == {"nan"}
    assert {row.reason.partition("; ")[2] for row in rows} == {
        "at 20 tokens the first numbers that are not finite came out of model.layers.1.mlp.up_proj"
    }


def test_lengths_beyond_the_positions_are_rows_and_the_last_position_is_used(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    lm = wrap(tiny_model("gpt2", n_positions=64), tokenizer, "tiny-gpt2")
    rows = measured(tmp_path, lm, perplexity_of(few_tokens(), target_tokens=15), lengths=(32, 64, 65))
    assert {(row.length, row.status) for row in rows} == {(32, "ok"), (64, "ok"), (65, "too_long")}


# what is chosen, and what is refused


@pytest.mark.parametrize(
    ("trained", "limit", "tokens", "expected"),
    [
        (4096, None, None, (512, 1024, 2048, 4096, 8192)),
        (512, None, None, (128, 256, 512, 1024)),
        (512, 512, None, (128, 256, 512)),
        (512, None, 256, (512, 1024)),
        (1000, None, None, (128, 256, 512, 1024)),
        (2, None, None, (1, 2, 4)),
    ],
)
def test_lengths_are_powers_of_two_to_twice_the_trained_length(
    trained: int, limit: int | None, tokens: int | None, expected: tuple[int, ...]
) -> None:
    task = Perplexity("all" if trained == 2 else "fixed", tokens).resolved(None, (trained,))
    lm: Any = SimpleNamespace(**vars(toy_lm(limit)) | {"trained_length": trained})
    bound = BoundPerplexity(**vars(task), text=counting_text(100, 9000))
    assert bound.auto_lengths(lm, 10) == expected
    assert task.targets == "all" or task.target_tokens == (tokens or min(256, expected[0] // 2))


def test_a_text_too_short_for_the_default_lengths_ends_them_with_a_notice(
    lm: LM, capsys: pytest.CaptureFixture[str]
) -> None:
    assert perplexity_of(few_tokens(4, 300), target_tokens=64).auto_lengths(lm, 4) == (128, 256)
    assert capsys.readouterr().err == "the text is too short for 1,024 tokens: the longest length is 256\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"targets": "lats"}, r"targets = 'lats' is unknown; known are fixed, last, all \(did you mean 'last'\?\)"),
        ({"lengths": (0, 4)}, "expected numbers of tokens from 1 on"),
        ({"repeats": 0}, "repeats: got 0, expected a whole number, at least 1"),
        ({"lengths": (64, 128), "target_tokens": 64}, "64 target tokens leave no context in lengths up to 64"),
        ({"targets": "all", "target_tokens": 64}, "all scores every token"),
        ({"buckets": 4}, "buckets belong to targets=all"),
    ],
)
def test_settings_that_cannot_be_are_refused(options: dict[str, Any], said: str) -> None:
    what = {key: options.pop(key) for key in ("lengths", "repeats") if key in options}
    with pytest.raises(ValueError, match=said):
        grid([], [Perplexity(**options)], **what)


def test_the_task_refuses_what_the_settings_cannot_know() -> None:
    with pytest.raises(
        ValueError, match=r"has 600 tokens, 6 windows of 100; 7 are needed: give a text of at least 700 tokens"
    ):
        perplexity_of(few_tokens(), target_tokens=15).examples(toy_lm(), (50, 100), 7, 0)
    with pytest.raises(ValueError, match=r"20 target tokens leave no context in lengths up to 20"):
        perplexity_of(few_tokens(), target_tokens=20).examples(toy_lm(), (20, 30), 2, 0)
    with pytest.raises(ValueError, match=r"target_tokens: got 0"):
        perplexity_of(few_tokens(), target_tokens=0)


# several models and methods, the picture, the command


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    return saved(tmp_path_factory.mktemp("models") / "llama", tokenizer)


def perplexity(model: Path | str, *options: object) -> Any:
    """A small measurement into run/, whose options later ones override."""
    small = ("--text", "text.txt", "--lengths", "16,32,64", "--repeats", 3, "--target-tokens", 8)
    return farspan("perplexity", model, *small, "--device", "cpu", "--out", "run", *options)


@pytest.mark.usefixtures("text_file", "drawn")
def test_methods_are_measured_on_the_same_tokens_and_drawn(model: Path) -> None:
    result = done(perplexity(model, "--method", "full", "--method", "sinks:window=20,sinks=2", "--json"))
    assert len(result.stdout.splitlines()) == 1
    full, sinks = last_line(result)["perplexity"]
    assert (full["method"], sinks["method"]) == ("full", "sinks:window=20,sinks=2")
    assert [at["length"] for at in full["lengths"]] == [16, 32, 64]
    assert full["lengths"][0]["nats"] == pytest.approx(sinks["lengths"][0]["nats"], abs=1e-5)  # inside the window
    assert full["lengths"][2]["nats"] != pytest.approx(sinks["lengths"][2]["nats"], abs=1e-3)
    assert full["lengths"][2]["perplexity"] == pytest.approx(math.exp(full["lengths"][2]["nats"]), rel=1e-4)
    assert {path.name for path in Path("run").glob("perplexity.*")} == {"perplexity.png", "perplexity.svg"}
    assert "nats/token" in result.stderr
    by_target: dict[tuple[int, int], set[str]] = {}
    for row in read_rows("run"):
        by_target.setdefault((row.repeat, row.length), set()).add(row.scores["target"])
    assert {len(found) for found in by_target.values()} == {1}


@pytest.mark.usefixtures("text_file")
def test_all_tokens_come_with_a_table_by_position(model: Path) -> None:
    options = ("--text", "text.txt", "--lengths", "100,200", "--repeats", 2, "--device", "cpu", "--out", "run")
    result = done(farspan("perplexity", model, *options, "--targets", "all"))
    assert "by position in 200 tokens" in result.stdout
    assert "; n = 2 examples, 95 % intervals" in " ".join(result.stdout.split())
    assert "64 to 127" in result.stdout


@pytest.mark.usefixtures("text_file")
def test_repeating_the_command_measures_nothing_again(model: Path) -> None:
    perplexity(model)
    before = Path("run/rows.jsonl").read_bytes()
    assert perplexity(model).exit_code == 0
    assert Path("run/rows.jsonl").read_bytes() == before
    assert "seed was 0, now 1" in refused(perplexity(model, "--seed", 1))


@pytest.mark.usefixtures("text_file")
def test_a_plan_measures_nothing(model: Path) -> None:
    (cost,) = last_line(perplexity(model, "--plan", "--json"))["plans"]
    assert cost["tokens"] == 3 * (16 + 32 + 64)  # the separator in, the last token only asked for
    assert not Path("run").exists()


@pytest.mark.usefixtures("text_file")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--lengths", "0,16"), "lengths: got [0, 16], expected numbers of tokens from 1 on"),
        (("--target-tokens", 16), "16 target tokens leave no context in lengths up to 16"),
        (("--targets", "lats"), "known are fixed, last, all"),
        (("--lengths", "64,100000"), "windows of 100,000; 3 are needed: give a text of at least 300,000"),
        (("--method", "nope"), "method 'nope' is unknown"),
        (("--points", 3), "belong to a range"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_one_line(model: Path, options: tuple[object, ...], said: str) -> None:
    result = perplexity(model, *options)
    assert said in refused(result)
    assert len(result.stderr.strip().splitlines()) == 1 or "Loading" in result.stderr


@pytest.mark.usefixtures("text_file")
def test_lengths_that_fail_are_said_and_drawn_and_end_the_command_in_failure(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    saved("gpt2", tokenizer, tiny_model("gpt2", n_positions=64))
    result = perplexity("gpt2", "--lengths", "32,64,65", "--json")
    assert result.exit_code == 1, result.output
    (found,) = last_line(result)["perplexity"]
    assert found["failed"] == {"65": "too_long"}
    assert [at["length"] for at in found["lengths"]] == [32, 64]
    assert "3 of 9 rows failed" in result.stderr


def test_two_models_stand_under_their_names(lm: LM, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    other = wrap(tiny_model("qwen3"), tokenizer, "tiny-qwen3")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 200)
    tasks = [Perplexity(target_tokens=None)]
    options = {"text": str(tmp_path / "text.txt"), "lengths": (32, 64), "repeats": 2, "out": tmp_path / "run"}
    rows = measure([lm, other], ["full"], tasks, **options).rows
    assert [one.name for one in report.series(rows)] == ["tiny-llama", "tiny-qwen3"]
    assert {row.settings["target_tokens"] for row in rows} == {16}


@pytest.mark.parametrize(
    "how", ["replug:piece=8", "ape:piece=8", "snapkv:capacity=9,window=4", "tova:capacity=9", "knorm:share=0.5"]
)
def test_methods_that_would_be_full_attention_are_refused_where_every_token_is_scored(
    how: str, lm: LM, tmp_path: Path
) -> None:
    text = few_tokens(4, 300)
    for task in (perplexity_of(text, targets="all"), LongPPL(targets="all", short=8, block=8).resolved((64,), (64,))):
        bound = task if isinstance(task, BoundPerplexity) else BoundLongPPL(how=task, text=text)
        with pytest.raises(ValueError, match="targets=all scores a text from its first token on"):
            measured(tmp_path, lm, bound, lengths=(64,), how=how)
        with pytest.raises(ValueError, match="use targets=fixed or targets=last"):
            plan(bound, method(how), lm, lengths=(64,), repeats=2)
