"""benchmarks/farther_keys.py: hits and weights are those of one forward, and its page is that of the kept lines."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from farspan import LM, load

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
farther_keys: Any = importlib.import_module("farther_keys")
LENGTH, SCORED, HEADS, LAYERS = 240, 16, ("2.0", "3.2"), (2, 3)


@pytest.fixture(scope="module")
def lm() -> LM:
    return load("demo", dtype="float32", attention="eager")


@pytest.fixture(scope="module")
def row(lm: LM) -> torch.Tensor:
    half = torch.randint(5, 60, (LENGTH,), generator=torch.Generator().manual_seed(0))  # few tokens: many look-alikes
    begin = torch.tensor(lm.separator.ids)[:1]
    return torch.cat([begin, half, begin, half])


@pytest.fixture(scope="module")
def found(row: torch.Tensor) -> dict[str, dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(farther_keys, "SCORED", SCORED)
        patch.setattr(farther_keys, "PIECE", 50)
        return dict(farther_keys.read(load("demo", dtype="float32"), row[1 : LENGTH + 1], HEADS, LAYERS))


def kinds(row: torch.Tensor, place: int) -> dict[str, list[int]]:
    """The keys of each kind for the query at a place."""
    alike = [key for key in range(1, place + 1) if row[key - 1] == row[place] and key != place - LENGTH]
    return {
        "right token": [place - LENGTH],
        "farther look-alikes": [key for key in alike if key < place - LENGTH],
        "nearer look-alikes": [key for key in alike if key > place - LENGTH],
        "first token": [0],
    }


def test_hits_and_weights_are_those_of_one_forward(lm: LM, row: torch.Tensor, found: dict[str, dict[str, Any]]) -> None:
    with torch.no_grad():
        whole = lm.model(row[None], output_attentions=True)
    hits = (whole.logits[0, :-1].argmax(-1) == row[1:]).int().tolist()
    assert list(found) == list(farther_keys.PLACES)
    for one in found.values():
        asked = range(one["before"], one["before"] + SCORED)
        assert one["hits"][farther_keys.SEEN[0]] == [hits[place] for place in asked]
        assert one["farther"] == [len(kinds(row, place)["farther look-alikes"]) for place in asked]
        for head in HEADS:
            layer, number = map(int, head.split("."))
            sums = [
                sum(float(whole.attentions[layer][0, number, place, kinds(row, place)[part]].sum()) for place in asked)
                for part in farther_keys.PARTS[:4]
            ]
            expected = [part / SCORED for part in sums]
            assert one["weights"][head] == pytest.approx([*expected, 1 - sum(expected)], abs=1e-5)


def test_hidden_keys_change_the_prediction_as_a_mask_does(
    lm: LM, row: torch.Tensor, found: dict[str, dict[str, Any]]
) -> None:
    """All queries of a place are masked, and no other: as in one forward with the mask in these layers alone."""
    one, count = found["end"], len(row)
    asked = range(one["before"], one["before"] + SCORED)
    causal = torch.ones(count, count).tril().bool()
    for what in farther_keys.SEEN[1:]:
        allowed = causal.clone()
        for place in asked:
            farther = kinds(row, place)["farther look-alikes"] if "look" in what else range(1, place - LENGTH)
            allowed[place, list(farther)] = False
        handles = [
            lm.model.model.layers[layer].self_attn.register_forward_pre_hook(
                lambda module, args, given, mask=allowed: (
                    args,
                    given | {"attention_mask": torch.zeros(mask.shape).masked_fill(~mask, -1e30)[None, None]},
                ),
                with_kwargs=True,
            )
            for layer in LAYERS
        ]
        with torch.no_grad():
            hits = (lm.model(row[None]).logits[0, :-1].argmax(-1) == row[1:]).int().tolist()
        for handle in handles:
            handle.remove()
        assert one["hits"][what] == [hits[place] for place in asked]
        assert one["hits"][what] != one["hits"][farther_keys.SEEN[0]], "the text must tell them apart"


def test_the_page_is_that_of_the_kept_lines() -> None:
    lines = farther_keys.kept.read_lines(farther_keys.KEPT)
    page = farther_keys.PAGE.read_text()
    for made in farther_keys.TABLES.values():
        assert made(lines) in page
