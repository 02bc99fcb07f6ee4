"""Lengths, default folders, and the loop over models and methods."""

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from farspan.compare import (
    CurveSettings,
    authors_lengths,
    default_folder,
    default_lengths,
    measure_curves,
    parse_lengths,
    spaced_lengths,
)
from farspan.lm import wrap
from farspan.record import read_header
from farspan.tasks.curve import Curve

from tiny import tiny_model
from toys import counting_text


@pytest.fixture
def text(tmp_path: Path) -> str:
    file = tmp_path / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog " * 300)
    return str(file)


@pytest.mark.parametrize(
    ("written", "expected"),
    [("512,1024", (512, 1024)), ("7", (7,)), ("10:40", (10, 20, 30, 40)), ("16:128", (16, 53, 90, 128))],
)
def test_lengths_are_read_as_written(written: str, expected: tuple[int, ...]) -> None:
    assert parse_lengths(written, 4, "linear") == expected


def test_logarithmic_lengths_keep_both_ends() -> None:
    assert spaced_lengths(512, 16384, 6, "log") == (512, 1024, 2048, 4096, 8192, 16384)


@pytest.mark.parametrize("written", ["", "a", "10,", "20,10", "10,10", "0,5", "-4,5", "40:10", "0:10", "1:2:3"])
def test_lengths_that_are_none_are_refused(written: str) -> None:
    with pytest.raises(ValueError, match="lengths"):
        parse_lengths(written, 4, "linear")


def test_the_authors_grid_is_that_of_their_table() -> None:
    lengths = authors_lengths(8000)  # RWKV's fine length in Table 3 is the second of these
    assert (len(lengths), lengths[0], lengths[1], lengths[-1]) == (32, 8, 265, 8000)
    assert 4134 in authors_lengths(16000)  # Llama-3-8B's


@pytest.mark.parametrize(("architecture", "longest"), [("llama", 511), ("gpt2", 255)])
def test_default_lengths_go_to_twice_the_trained_length_or_where_positions_end(
    architecture: str, longest: int, tokenizer: PreTrainedTokenizerFast
) -> None:
    lm = wrap(tiny_model(architecture), tokenizer, "tiny")
    lengths = default_lengths(lm, Curve(counting_text()))
    assert (len(lengths), lengths[-1]) == (16, longest)
    assert Curve(counting_text()).num_tokens(lm, longest) <= 1024


def test_the_default_folder_is_the_same_for_the_same_command_only() -> None:
    settings = CurveSettings(lengths=(10, 20))
    assert default_folder(["a/b"], ["full"], settings) == default_folder(["a/b"], ["full"], settings)
    assert default_folder(["a/b"], ["full"], settings) != default_folder(["a/b"], ["full"], CurveSettings(seed=1))
    assert default_folder(["a/b"], ["full"], settings).name.startswith("curve-b-")


@pytest.mark.parametrize("wrong", [{"repeats": 0}, {"protocol": "mine"}, {"lengths": (20, 10)}])
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"repeats|protocol|lengths"):
        CurveSettings(**wrong)


def test_several_models_share_a_run(text: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    models = [wrap(tiny_model(name), tokenizer, name) for name in ("llama", "qwen3")]
    settings = CurveSettings(text=text, lengths=(10, 20), repeats=2)
    rows = measure_curves(models, ["full"], settings, tmp_path / "run")
    assert {(row.model, row.length) for row in rows} == {(m, n) for m in ("llama", "qwen3") for n in (10, 20)}
    assert set(read_header(tmp_path / "run")["models"]) == {"llama", "qwen3"}


def test_another_model_under_the_same_name_does_not_continue_a_run(
    text: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    settings = CurveSettings(text=text, lengths=(10, 20), repeats=2)
    measure_curves([wrap(tiny_model(), tokenizer, "m")], ["full"], settings, tmp_path / "run")
    other = wrap(tiny_model(num_hidden_layers=1), tokenizer, "m")
    with pytest.raises(ValueError, match="fingerprint was"):
        measure_curves([other], ["full"], settings, tmp_path / "run")
