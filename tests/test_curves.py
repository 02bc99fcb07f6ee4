"""Lengths, default folders, and the loop over models and methods."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from farspan import stats
from farspan.lm import DEFAULT_TRAINED_LENGTH, LM, wrap
from farspan.measuring import adaptive, one_model
from farspan.measuring.grid import measure
from farspan.measuring.loader import Load
from farspan.record import read_examples, read_header
from farspan.report.curves import curves_of
from farspan.tasks.curve import Curve
from farspan.tasks.recall import Recall

from tiny import tiny_model
from toys import counting_text, curve_of


@pytest.fixture
def text(tmp_path: Path) -> str:
    file = tmp_path / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog " * 300)
    return str(file)


@pytest.mark.parametrize(("architecture", "longest"), [("llama", 511), ("gpt2", 255)])
def test_default_lengths_go_to_twice_the_trained_length_or_where_positions_end(
    architecture: str, longest: int, tokenizer: PreTrainedTokenizerFast
) -> None:
    lm = wrap(tiny_model(architecture), tokenizer, "tiny")
    curve = curve_of(counting_text())
    lengths = curve.auto_lengths(lm, 10)
    assert (len(lengths), lengths[-1]) == (16, longest)
    assert curve.num_tokens(lm, curve.examples(lm, (10,), 2, 0)[0], longest) <= 1024


@pytest.mark.parametrize("wrong", [{"repeats": 0}, {"protocol": "mine"}, {"lengths": (20, 10)}])
def test_impossible_settings_are_refused(wrong: dict[str, Any], lm: LM) -> None:
    with pytest.raises(ValueError, match=r"repeats|protocol|lengths"):
        measure(lm, ["full"], ["curve:protocol=" + wrong.pop("protocol", "nested")], **wrong)


def test_several_models_share_a_run(text: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    models = [wrap(tiny_model(name), tokenizer, name) for name in ("llama", "qwen3")]
    rows = measure(models, ["full"], ["curve"], text=text, lengths=(10, 20), repeats=2, out=tmp_path / "run").rows
    assert {(row.model, row.length) for row in rows} == {(m, n) for m in ("llama", "qwen3") for n in (10, 20)}
    assert set(read_header(tmp_path / "run")["models"]) == {"llama", "qwen3"}


def test_another_model_under_the_same_name_does_not_continue_a_run(
    text: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    options = {"text": text, "lengths": (10, 20), "repeats": 2, "out": tmp_path / "run"}
    measure([wrap(tiny_model(), tokenizer, "m")], ["full"], ["curve"], **options)
    other = wrap(tiny_model(num_hidden_layers=1), tokenizer, "m")
    with pytest.raises(ValueError, match=r"parameters was \d+, now \d+"):
        measure([other], ["full"], ["curve"], **options)


LONG_LLAMA, SHORT_LLAMA = 131_072, 4096  # trained lengths


@pytest.mark.parametrize(
    ("given", "trained", "protocol", "asked"),
    [
        ({}, [SHORT_LLAMA], "nested", (None, None)),
        ({}, [4097], "probe", (128, 256)),
        ({}, [8193], "probe", (512, 1024)),
        ({}, [SHORT_LLAMA, LONG_LLAMA], "probe", (512, 1024)),  # one protocol for both
        ({}, [None], "nested", (None, None)),
        ({"lengths": (100, 4096)}, [LONG_LLAMA], "nested", (None, None)),
        ({"lengths": (100, 8192)}, [SHORT_LLAMA], "probe", (128, 256)),
        ({"lengths": (100, 8193)}, [SHORT_LLAMA], "probe", (512, 1024)),
        ({"protocol": "nested"}, [LONG_LLAMA], "nested", (None, None)),
        ({"protocol": "probe"}, [SHORT_LLAMA], "probe", (128, 256)),
        ({"protocol": "probe", "warmup": 7}, [SHORT_LLAMA], "probe", (7, 256)),
        ({"depths": (0.0, 1.0)}, [SHORT_LLAMA], "probe", (128, 256)),
        ({"depths": (0.0, 1.0)}, [512], "probe", (64, 128)),  # halved, so that lengths have room for depths
        ({"depths": (0.0, 1.0), "lengths": (400, 600)}, [512], "probe", (128, 256)),
        ({"whole_window": True}, [LONG_LLAMA], "probe", (512, 1024)),
    ],
)
def test_the_protocol_follows_the_largest_length(
    given: dict[str, Any], trained: list[int | None], protocol: str, asked: tuple[int | None, int | None]
) -> None:
    lengths = given.get("lengths")
    task: Any = Recall() if "whole_window" in given else Curve(**_without_lengths(given))
    task = task.resolved(lengths, [length or DEFAULT_TRAINED_LENGTH for length in trained])
    assert (getattr(task, "protocol", "probe"), task.warmup, task.scored) == (protocol, *asked)


def _without_lengths(given: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key != "lengths"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"warmup": 300, "scored": 300, "protocol": "probe", "lengths": (64, 500)}, "300 \\+ 300 tokens.*500 tokens"),
        ({"warmup": 30, "protocol": "nested"}, "belong to protocol=probe"),
    ],
)
def test_probes_that_cannot_be_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Curve(**_without_lengths(given)).resolved(given.get("lengths"), (512,))


def test_a_budget_begins_when_a_model_is_loaded_and_its_texts_are_tokenised(
    text: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, left = [0.0], []
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(adaptive, "time", clock)
    monkeypatch.setattr(one_model, "time", clock)
    monkeypatch.setattr(one_model, "TimeBudget", lambda seconds: adaptive.TimeBudget(seconds, started=now[0]))
    begin = one_model.begin_model

    class SlowLoad(Load):
        def __call__(self, model: Any) -> LM:
            now[0] += 100
            return super().__call__(model)

    def slow_begin(*args: Any) -> Any:
        now[0] += 100
        return begin(*args)

    def measured(*args: Any, budget: adaptive.TimeBudget, **options: Any) -> None:
        left.append(budget.left)
        now[0] += 30

    monkeypatch.setattr(one_model, "begin_model", slow_begin)
    monkeypatch.setattr(one_model, "measure_adaptively", measured)
    models = [wrap(tiny_model(), tokenizer, name) for name in ("one", "another")]
    measure(models, tasks=["curve"], text=text, lengths="auto", out=tmp_path / "run", minutes=2, loader=SlowLoad())
    assert left == [60, 90]


def test_a_budget_needs_something_to_choose(text: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    lm = wrap(tiny_model(), tokenizer, "tiny")
    with pytest.raises(ValueError, match="lengths auto"):
        measure([lm], ["full"], ["curve"], text=text, lengths=(10, 20), out=tmp_path / "run", minutes=1)


def test_every_pair_of_texts_is_a_curve_of_its_own(
    text: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    other = tmp_path / "other.txt"
    other.write_text("pack my box with five dozen liquor jugs " * 300)
    tasks = [Curve(prefix_text=prefix) for prefix in (text, str(other))]
    options = {"text": text, "lengths": (10, 20), "repeats": 4, "out": tmp_path / "run"}
    rows = measure([wrap(tiny_model(), tokenizer, "m")], ["full"], tasks, **options).rows
    found = stats.curves(rows)
    assert {what for _, _, what in found} == {"nested, text.txt after text.txt", "nested, text.txt after other.txt"}
    one, two = found.values()
    assert (one.targets == two.targets).all()  # paired: the same targets after either text


def test_the_first_example_is_kept_in_words(text: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    lm = wrap(tiny_model(), tokenizer, "m")
    for _ in range(2):  # repeating a command adds no second one
        measure([lm], ["full"], ["curve"], text=text, lengths=(10, 20), repeats=4, out=tmp_path / "run")
    (example,) = read_examples(tmp_path / "run")
    assert (example["model"], example["what"], example["length"], example["scored"]) == (
        "m",
        "curve:protocol=nested",
        10,
        5,
    )
    parts = dict(example["parts"])
    assert "".join(parts["asked"]) in (tmp_path / "text.txt").read_text()
    assert parts["asked"] == parts["read"]
    assert len(parts["asked"]) == 10


def test_models_of_different_trained_lengths_are_measured_on_the_same_texts(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    text = write_varied(tmp_path)
    models = [wrap(tiny_model(), tokenizer, f"to-{n}", trained_length=n) for n in (64, 40)]
    found = measure(models, ["full"], ["curve"], text=text, lengths="auto", repeats=4, out=tmp_path / "run")
    long, short = curves_of([one for group in found.results.groups for one in group.members])
    assert long.curve.lengths[-1] > short.curve.lengths[-1]
    assert (long.curve.targets[:, 0] == short.curve.targets[:, 0]).all()
    assert {one.pairs for one in stats.differences(long.curve, short.curve)} == {4}
    with pytest.raises(ValueError, match=r"models named now have others .* Name the same models"):
        measure(models[1:], ["full"], ["curve"], text=text, lengths="auto", repeats=4, out=tmp_path / "run")


def write_varied(folder: Path) -> str:
    rng = np.random.default_rng(0)
    words = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "sleeps", "on"]
    (folder / "varied.txt").write_text(" ".join(rng.choice(words, 3000)))
    return str(folder / "varied.txt")
