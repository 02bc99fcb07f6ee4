"""LongPPL: against two plain forwards for each target, against numbers made by hand, its cost, and its refusals."""

import json
import math
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_cli import done, farspan, last_line, refused
from transformers import PreTrainedTokenizerFast

from farspan import stats
from farspan.lm import LM, wrap
from farspan.measuring.plan import plan
from farspan.measuring.setups import grid
from farspan.methods import method
from farspan.reader import Scores
from farspan.record import Row, Run, read_examples, read_rows
from farspan.report.cells import cells
from farspan.report.tables import further_scores
from farspan.tasks import task
from farspan.tasks.longppl import BoundLongPPL, LongPPL
from farspan.text.corpora import Corpus

import tiny
from naive import nats_after
from tiny import PlannedAndFed, saved, tiny_model
from toys import few_tokens, perplexity_of, text_that_breaks, toy_lm

ARCHITECTURES = ["llama", "mistral", "qwen3", "gpt_neox", "gpt2", "gemma3", "falcon_h1", "jamba"]
LENGTHS = (40, 63, 120)
SMALL = {"short": 10, "block": 4, "alpha": 0.1, "beta": 7.0}  # of a random model, whose tokens take about 6 nats


def bound(text: Corpus, targets: str = "fixed", **settings: Any) -> BoundLongPPL:
    settings = ({} if targets == "all" else {"target_tokens": 15}) | SMALL | settings
    return BoundLongPPL(how=LongPPL(targets, **settings).resolved(LENGTHS, ()), text=text)


measured = partial(tiny.measured, lengths=LENGTHS, repeats=3, batch=2)


def naive(lm: LM, window: list[int], length: int, how: LongPPL) -> tuple[np.ndarray, np.ndarray]:
    """Nats of every target after its long and its short context, a plain forward for all and one for each block."""
    text = window[-length:] if how.targets == "fixed" else window[:length]
    first = length - how.target_tokens if how.target_tokens else how.short + how.block
    short = list[float]()
    for place in range(first, length, how.block):
        before = [*lm.separator.ids, *text[place - how.short : place]]
        short += nats_after(lm.model, before, text[place : min(place + how.block, length)])[0].tolist()
    long, _ = nats_after(lm.model, [*lm.separator.ids, *text[:first]], text[first:length])
    return long.numpy(), np.array(short)


@pytest.mark.parametrize(
    ("architecture", "targets"),
    [*((name, "fixed") for name in ARCHITECTURES), *(("llama", "last"), ("jamba", "last")),
     *((name, "all") for name in ("llama", "gpt2", "gemma3", "jamba"))],
)  # fmt: skip
def test_numbers_equal_plain_forwards_after_both_contexts(
    architecture: str, targets: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    lm = wrap(tiny_model(architecture), tokenizer, "tiny")
    what = bound(few_tokens(), targets)
    lengths, repeats = ((40, 63), 1) if targets == "all" else (LENGTHS, 2)
    rows = measured(tmp_path, lm, what, lengths=lengths, repeats=repeats, chunk=23)
    texts = {example.id: example.payload.tolist() for example in what.examples(lm, lengths, repeats, 0)}
    assert len(rows) == len(lengths) * repeats
    shares = []
    for row in rows:
        long, short = naive(lm, texts[row.example], row.length, what.how)
        keys = (short - long > 0.1) & (long < 7)
        assert row.status == "ok"
        assert row.scores["nats"] == pytest.approx(long[keys].mean(), abs=1e-5)
        assert row.scores["nats_all"] == pytest.approx(long.mean(), abs=1e-5)
        assert row.scores["nats_short"] == pytest.approx(short.mean(), abs=1e-5)
        assert (row.scores["keys"], row.scores["scored"]) == (keys.sum(), len(long))
        assert row.scores["share"] == keys.mean()
        assert (stats.unpacked(row.scores["key_bits"], len(long)) == keys).all()
        shares.append(keys.mean())
    assert 0.05 < np.mean(shares) < 0.95  # otherwise equality would say nothing


class Guess:
    """Takes 1 nat for each token after more than 20 others, 5 nats for each after fewer; never sure of token 9."""

    num_kept = 0

    def __init__(self, seen: int) -> None:
        self.num_seen = seen

    def score(self, ids: torch.Tensor, keep: slice | None = None) -> Scores:
        nats = torch.full(ids.shape, 1.0 if self.num_seen > 20 else 5.0)
        return Scores(torch.where(ids == 9, nats + 1.5, nats), torch.zeros_like(ids))


class Guesser:
    lm, chunk, capacity, incremental = toy_lm(), 1024, 0, False

    def read(self, *passages: Any, head: Any) -> Guess:
        return Guess(head.shape[1] + sum(part.shape[1] for part in passages))


def test_key_tokens_gain_more_than_alpha_and_take_less_than_beta() -> None:
    text = few_tokens()
    what = bound(text, target_tokens=30, short=8, block=30, alpha=2.0, beta=2.0)
    results = list(what.run(Guesser(), what.examples(toy_lm(), (45, 60), 1, 0)))  # type: ignore[arg-type]
    assert [result.status for result in results] == ["no_keys", "ok"]  # 15 before the targets, 30 before them
    _, long = results
    nines = int((what.examples(toy_lm(), (45, 60), 1, 0)[0].payload[-30:] == 9).sum())
    assert nines > 0
    assert long.scores["nats"] == 1.0  # those of token 9 take 2.5
    assert (long.scores["keys"], long.scores["share"]) == (30 - nines, 1 - nines / 30)
    assert long.scores["nats_short"] - long.scores["nats_all"] == pytest.approx(4)


def test_an_example_without_key_tokens_has_a_reason_and_no_number() -> None:
    what = bound(few_tokens(), alpha=50.0, short=8)
    (result,) = what.run(Guesser(), what.examples(toy_lm(), (60,), 1, 0))  # type: ignore[arg-type]
    assert result.status == "no_keys"
    assert result.reason.startswith("none of the 15 targets gains more than 50 nats from the long context")
    assert (result.scores["nats"], result.scores["keys"], result.scores["share"]) == (None, 0, 0.0)


@pytest.mark.parametrize("targets", ["fixed", "last"])
def test_numbers_do_not_depend_on_the_chunk_the_batch_or_a_stop(targets: str, lm: LM, tmp_path: Path) -> None:
    what = bound(few_tokens(), targets)
    first = measured(tmp_path / "a", lm, what, chunk=1024, batch=1)
    others = {row.key: row.scores for row in measured(tmp_path / "b", lm, what, chunk=7, batch=3)}
    lines = (tmp_path / "a" / "rows.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "a" / "rows.jsonl").write_bytes(b"".join(lines[:4]))
    resumed = {row.key: row.scores for row in measured(tmp_path / "a", lm, what, chunk=1024, batch=1)}
    for row in first:
        for other in (others, resumed):
            assert other[row.key]["nats"] == pytest.approx(row.scores["nats"], abs=1e-5)
            assert other[row.key]["key_bits"] == row.scores["key_bits"]


def test_a_length_with_some_key_tokens_has_not_failed_and_the_others_count_in_the_share() -> None:
    settings = vars(LongPPL().resolved(None, (512,))) | {"text": "t"}
    entry = {"task": "longppl", "unit": "tokens", "quality": asdict(LongPPL.quality), "details": ["share"]}
    header = {"settings": {"tasks": {"longppl": entry}}, "models": {"m": {"tasks": {"longppl": settings}}}}
    scores = [{"nats": 1.0, "share": 0.2}, {"nats": 2.0, "share": 0.1}, {"nats": None, "share": 0.0}]
    rows = [
        Row("m", "full", "longppl", 1, settings, 512, i, 0, f"{i}", status="ok" if i < 2 else "no_keys", scores=each)
        for i, each in enumerate(scores)
    ]
    (cell,) = cells(rows, header)
    assert (cell.n, cell.failed, cell.statuses) == (2, "", {"no_keys": 1})
    assert cell.value == pytest.approx(math.exp(1.5))
    assert cell.details["share"] == pytest.approx(0.1)
    head, lines = further_scores([cell])
    assert head == ["model", "method", "", "512"]
    assert lines == [["m", "full", "examples", "2"], ["m", "full", "share", "0.100"]]


# the cost


@pytest.mark.parametrize("targets", ["fixed", "last", "all"])
def test_the_tokens_of_a_plan_are_those_that_are_fed(targets: str, lm: LM, planned_and_fed: PlannedAndFed) -> None:
    planned, fed = planned_and_fed(bound(few_tokens(), targets), lm, lengths=LENGTHS, repeats=3, batch=2)
    assert planned == fed


@pytest.mark.parametrize("length", [512, 2048])
@pytest.mark.parametrize("targets", ["fixed", "last"])
def test_both_readings_take_at_most_1_3_times_the_long_one(length: int, targets: str, lm: LM) -> None:
    text = few_tokens(3, 3000)
    what = BoundLongPPL(how=LongPPL(targets).resolved((length,), ()), text=text)
    long = perplexity_of(text, targets, what.how.target_tokens or 0)
    both, one = (plan(each, method("full"), lm, lengths=(length,), repeats=2) for each in (what, long))
    assert both.tokens <= 1.3 * one.tokens
    assert both.flops <= 1.3 * one.flops
    assert both.tokens > 1.1 * one.tokens  # or the short reading is not counted


def test_the_short_reading_of_fixed_targets_serves_all_lengths(lm: LM) -> None:
    what = bound(few_tokens())
    tokens = [plan(what, method("full"), lm, lengths=lengths, repeats=1).tokens for lengths in (LENGTHS[:1], LENGTHS)]
    blocks = [4, 4, 4, 3]
    short = sum(1 + 10 + block - 1 for block in blocks)
    assert tokens == [40 + short, 40 + 63 + 120 + short]


# key tokens of another run


def test_methods_are_scored_on_the_key_tokens_of_another_run(lm: LM, tmp_path: Path, tokenizer: Any) -> None:
    text = few_tokens()
    rows = measured(tmp_path / "keys", lm, bound(text))
    settings = {"targets": "fixed", "target_tokens": 15, **SMALL, "keys": "own"}
    assert settings.items() <= rows[0].settings.items()
    how = task(f"longppl:keys={tmp_path / 'keys'}")
    assert how.lengths((512,)) == LENGTHS
    given = how_bound(how, lm, text)
    same = measured(tmp_path / "same", lm, given)
    assert [row.scores["nats"] for row in same] == pytest.approx([row.scores["nats"] for row in rows], abs=1e-5)
    assert all("nats_short" not in row.scores for row in same)
    other = measured(tmp_path / "other", wrap(tiny_model("qwen3"), tokenizer, "other"), given)
    assert [row.scores["key_bits"] for row in other] == [row.scores["key_bits"] for row in rows]
    assert other[0].scores["nats"] != pytest.approx(rows[0].scores["nats"], abs=1e-2)
    assert other[0].settings["keys"] == "tiny-llama full"
    assert {row.example for row in other} & {row.example for row in rows} == set()
    with pytest.raises(ValueError, match=r"by tiny-llama full, has no key tokens for repeat 0 at 50 tokens"):
        given.examples(lm, (50, 120), 3, 0)
    with pytest.raises(ValueError, match=r"has no key tokens for repeat 0 at 40 tokens"):
        given.examples(lm, LENGTHS, 3, 1)
    assert plan(given, method("full"), lm, lengths=LENGTHS, repeats=3).tokens == 3 * sum(LENGTHS)


def how_bound(how: Any, lm: LM, text: Corpus) -> BoundLongPPL:
    """A task whose text is there."""
    made = how.on(lm, "random")
    return BoundLongPPL(how=made.how, chosen=made.chosen, text=text)


def test_a_folder_with_the_key_tokens_of_two_methods_or_of_none_is_refused(lm: LM, tmp_path: Path) -> None:
    for how in ("full", "sinks:window=12,sinks=2"):
        measured(tmp_path / "two", lm, bound(few_tokens()), how=how, repeats=1)
    with pytest.raises(ValueError, match=r"holds the key tokens of 2 models, methods and settings, expected those of"):
        task(f"longppl:keys={tmp_path / 'two'}").on(lm, "random")
    with Run.open(tmp_path / "none", {}):
        pass
    with pytest.raises(ValueError, match=r"holds the key tokens of 0 models, methods and settings"):
        task(f"longppl:keys={tmp_path / 'none'}").on(lm, "random")
    with pytest.raises(ValueError, match=r"nowhere"):
        task("longppl:keys=nowhere").on(lm, "random")


# settings


@pytest.mark.parametrize(
    ("given", "trained", "expected"),
    [
        (None, (512,), (64, 64, 64)),
        (None, (512, 4096), (64, 64, 64)),
        (None, (131_072,), (1024, 1024, 1024)),
        ((4096, 8192), (512,), (512, 512, 512)),
        ((3,), (512,), (1, 1, 1)),
    ],
)
def test_the_short_context_is_an_eighth_of_the_shortest_length_at_most_1_024(
    given: tuple[int, ...] | None, trained: tuple[int, ...], expected: tuple[int, int, int]
) -> None:
    how = LongPPL().resolved(given, trained)
    assert (how.short, how.block, how.target_tokens) == expected
    assert LongPPL(short=7).resolved(given, trained).short == 7
    assert LongPPL("all").resolved(given, trained).target_tokens is None


@pytest.mark.parametrize(
    ("text", "lengths", "said"),
    [
        ("longppl:targets=lats", None, r"targets = 'lats' is unknown; known are fixed, last, all"),
        ("longppl:short=0", None, r"short: got 0, expected at least 1"),
        ("longppl:block=-1", None, r"block: got -1"),
        ("longppl:target_tokens=0", None, r"target_tokens: got 0, expected at least 1"),
        ("longppl:alpha=-1", None, r"alpha = -1 and beta = 2: expected nats, alpha at least 0 and beta above 0"),
        ("longppl:beta=nan", None, r"alpha = 2 and beta = nan: expected nats"),
        ("longppl:targets=all,target_tokens=3", None, r"target_tokens=3 belongs to targets=fixed or last"),
        ("longppl:keys=run,short=3", None, r"keys=run has chosen its key tokens with targets, target_tokens, short"),
        ("longppl:keys=run,targets=last", None, r"leave these out, or choose the key tokens here \(keys=own\)"),
        (
            "longppl:short=100",
            (128, 256),
            r"short=100 leaves no longer context in 128 tokens: give lengths from 201 on \(--lengths\), or a shorter",
        ),
        ("longppl:targets=all,short=60,block=70", (128,), r"give lengths from 131 on"),
    ],
)
def test_settings_that_cannot_be_are_refused(text: str, lengths: tuple[int, ...] | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        grid([], [text], lengths=lengths)


def test_numbers_that_are_not_finite_are_rows_that_say_so(lm: LM, tmp_path: Path) -> None:
    rows = measured(tmp_path, lm, bound(text_that_breaks(lm)), lengths=(40, 140))
    broken = [row for row in rows if row.status == "nan"]
    assert {(row.length, row.repeat) for row in broken} == {(140, broken[0].repeat)}
    assert broken[0].reason.startswith("15 scored tokens have no finite log-probability; at 140 tokens the first")
    assert broken[0].scores["nats"] is None
    assert "share" not in broken[0].scores


# the command


@pytest.fixture
def model(text_file: None, tokenizer: PreTrainedTokenizerFast) -> None:
    """A model beside the text."""
    saved("model", tokenizer)


def longppl(settings: str, *options: object) -> Any:
    common = ("--text", "text.txt", "--lengths", "64,128", "--repeats", 3, "--device", "cpu", "--out", "run")
    return farspan("task", f"longppl:{settings}", "model", *common, *options)


@pytest.mark.usefixtures("model", "drawn")
def test_the_command_shows_longppl_with_its_interval_the_keys_and_their_share() -> None:
    result = done(longppl("alpha=0,beta=9", "--json", "--method", "full", "--method", "sinks:window=12,sinks=2"))
    data = last_line(result)
    assert data["quality"] == "LongPPL"
    rows = [row for row in read_rows("run") if (row.method, row.length) == ("full", 128)]
    full = next(one for one in data["results"] if (one["method"], one["length"]) == ("full", 128))
    assert full["value"] == pytest.approx(math.exp(np.mean([row.scores["nats"] for row in rows])), rel=1e-5)
    assert full["low"] < full["value"] < full["high"]
    assert full["details"]["share"] == pytest.approx(np.mean([row.scores["share"] for row in rows]), abs=1e-6)
    assert 0 < full["details"]["keys"] < 8
    assert Path("run/quality.png").stat().st_size > 0


@pytest.mark.usefixtures("model")
def test_without_key_tokens_the_command_has_no_number_says_why_and_succeeds() -> None:
    result = done(longppl("alpha=50", "--json"))
    assert "6 of 6 rows have no number, first at length 64, repeat 0: none of the 8 targets gains more" in result.stderr
    data = json.loads(result.stdout.splitlines()[-1], parse_constant=lambda name: pytest.fail(f"{name} is no number"))
    assert [one["value"] for one in data["results"]] == [None, None]
    assert [one["details"] for one in data["results"]] == [{"share": 0.0, "keys": 0.0}] * 2
    assert [one["failed"] for one in data["results"]] == [{"no_keys": 3}] * 2
    assert data["failed_rows"] == 0
    compared = farspan(
        *("compare", "model", "--task", "longppl:alpha=50", "--text", "text.txt", "--lengths", "64", "--repeats", 2),
        *("--no-cost", "--method", "full", "--method", "sinks:window=12,sinks=2", "--out", "compared", "--json"),
    )
    assert compared.exit_code == 0, compared.output
    assert {cell["failed"] for cell in last_line(compared)["cells"]} == {"no_keys"}
    assert "4 of 4 rows have no number, first at length 64" in compared.stderr
    assert not any(line.startswith("- ") for line in Path("compared/compare.md").read_text().splitlines())
    assert [example["length"] for example in read_examples("compared")] == [64]


@pytest.mark.usefixtures("model")
def test_a_plan_counts_both_readings_and_bad_settings_end_in_one_line() -> None:
    (cost,) = last_line(longppl("alpha=0", "--plan", "--json"))["plans"]
    assert cost["tokens"] == 3 * (64 + 128 + 1 + 8 + 8 - 1)
    assert not Path("run").exists()
    assert "short=40 leaves no longer context in 64 tokens" in refused(longppl("short=40"))
    assert "text.txt is a file, expected a folder" in refused(longppl("keys=text.txt"))
