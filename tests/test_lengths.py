"""Lengths and depths as they are written, and the grids."""

from dataclasses import replace
from typing import Any

import pytest

from farspan.lengths import authors_lengths, doubled_lengths, parse_depths, parse_lengths, spaced_lengths
from farspan.measuring.loop import Watch
from farspan.measuring.setups import grid

from tiny import open_lm


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


@pytest.mark.parametrize(
    ("written", "expected"), [("5", (0, 0.25, 0.5, 0.75, 1)), ("2", (0, 1)), ("0,0.3", (0, 0.3)), ("0,1", (0, 1))]
)
def test_depths_are_read_as_written(written: str, expected: tuple[float, ...]) -> None:
    assert parse_depths(written) == expected


@pytest.mark.parametrize("written", ["", "a", "0,1.2", "-0.1", "0.5,0.2", "0.5,1", "1", "1.5", "0,0"])
def test_depths_outside_a_length_are_refused(written: str) -> None:
    with pytest.raises(ValueError, match="depths"):
        parse_depths(written)


@pytest.mark.parametrize(
    ("first", "trained", "lengths"),
    [(128, (512,), (128, 256, 512, 1024)), (300, (512, 700), (300, 600, 1200)), (4096, (512,), (4096,))],
)
def test_doubled_lengths_end_at_twice_the_largest_trained_length(
    first: int, trained: tuple[int, ...], lengths: tuple[int, ...]
) -> None:
    assert doubled_lengths(first, trained) == lengths


def test_default_lengths_end_where_the_positions_of_a_model_end(tokenizer: Any) -> None:
    lines: list[str] = []
    for positions, expected in (
        (1500, (256, 512, 1024)),
        (3000, (256, 512, 1024, 2048)),
        (100, (256, 512, 1024, 2048)),
    ):
        lm = replace(open_lm("llama", tokenizer), trained_length=1024, position_limit=positions)
        (setup,) = grid([lm], ["perplexity"], text="builtin:held-out").setups(lm, Watch(notice=lines.append))
        assert setup.lengths == expected
    what = "perplexity:targets=fixed,target_tokens=128"
    assert lines == [f"tiny-llama takes at most 1,500 tokens: the default lengths of {what} end at 1,024"]
    (setup,) = grid([lm], ["curve"], text="builtin:held-out").setups(lm, Watch())  # no length fits 100 positions
    lm = replace(lm, position_limit=1500)
    (curve,) = grid([lm], ["curve"], text="builtin:held-out").setups(lm, Watch())
    assert (setup.lengths[-1], curve.lengths[-1]) == (1024, 640)  # a text and its copy
    (setup,) = grid([lm], ["perplexity"], text="builtin:held-out", lengths=[600, 4000]).setups(lm, Watch())
    assert setup.lengths == (600, 4000)


@pytest.mark.parametrize("task", ["needle", "own", "passkey", "cost", "perplexity"])
def test_default_lengths_leave_positions_for_what_follows_the_text(task: str, tokenizer: Any) -> None:
    lm = replace(open_lm("llama", tokenizer), trained_length=4096, position_limit=4096)
    text = "builtin" if task in ("cost", "passkey") else "builtin:held-out"
    for one in grid([lm], [task], text=text, repeats=2, cost=task == "perplexity").setups(lm, Watch()):
        assert one.lengths[-2] == 2048 < one.lengths[-1]
        longest = [one.bound.num_tokens(lm, example, example.lengths[-1]) for example in one.examples(lm, 0)]
        assert max(longest) in range(4096 - 16, 4096 + 1)
    different = {"positions": (4096, 4096), "other": (4096, 8192)}
    models = [replace(lm, name=name, trained_length=a, position_limit=b) for name, (a, b) in different.items()]
    (setup, *_) = grid(models, [task], text=text, repeats=2).setups(models[0], Watch())
    assert setup.lengths[-1] == 4096  # compared with the other at the same lengths
