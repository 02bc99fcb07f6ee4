"""benchmarks/copying_distance.py: its scores are the model's own, and its page is that of the kept weights."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from farspan import LM, load

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
copying_distance: Any = importlib.import_module("copying_distance")


@pytest.fixture(scope="module")
def demo() -> LM:
    return load("demo", dtype="float32", attention="eager")


def test_scores_at_a_distance_are_those_of_the_model(demo: LM) -> None:
    row, inv_freq = torch.arange(5, 45), demo.model.model.rotary_emb.inv_freq
    with torch.no_grad():
        weights = demo.model(row[None], output_attentions=True).attentions[2][0]  # [heads, queries, keys]
    ((queries, keys),) = copying_distance.queries_and_keys(demo, row, [2])
    here = torch.arange(len(row))
    apart = copying_distance.angles((here[-1] - here), inv_freq)
    groups, scaling = queries.shape[1] // keys.shape[1], demo.model.model.layers[2].self_attn.scaling
    for head in range(queries.shape[1]):
        each = copying_distance.scores(queries[-1:, head], keys[:, head // groups], apart, scaling).diagonal()
        assert torch.allclose(each.softmax(0), weights[head, -1], atol=1e-6)


def test_a_weight_is_that_of_a_text_whose_other_keys_are_drawn_from_the_row(
    demo: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying_distance, "HALF", 20)
    monkeypatch.setattr(copying_distance, "QUERIES", 3)
    monkeypatch.setattr(copying_distance, "OTHERS", 4)
    half, inv_freq = torch.arange(5, 25), demo.model.model.rotary_emb.inv_freq
    row = torch.cat([torch.tensor([0]), half, torch.tensor([0]), half])
    (found,) = copying_distance.weights(demo, row, [2], inv_freq, 1.0, [30])[1].unsqueeze(0)
    ((queries, keys),) = copying_distance.queries_and_keys(demo, row, [2])
    rng = torch.Generator().manual_seed(0)
    at, others = 22 + torch.randperm(19, generator=rng)[:3], 1 + torch.randperm(20, generator=rng)[:4]
    factor, key_head = demo.model.model.layers[2].self_attn.scaling, keys.shape[1] // queries.shape[1]

    def e_to_the_score(query: int, key: int, distance: int) -> float:
        apart = copying_distance.angles(torch.tensor([distance]), inv_freq)
        one = copying_distance.scores(queries[query, 1], keys[key, key_head], apart, factor)
        return float(one.exp())

    expected = []
    for query in at.tolist():
        copied, first = e_to_the_score(query, query - 20, 30), e_to_the_score(query, 0, 30)
        before = sum(e_to_the_score(query, key, d) for key in others.tolist() for d in range(1, 31)) / 4
        expected.append(copied / (copied + first + before))
    assert float(found[0]) == pytest.approx(sum(expected) / 3, rel=1e-5)


def test_the_tables_of_the_page_are_those_of_the_kept_weights() -> None:
    assert copying_distance.PAGE.read_text() == copying_distance.page()
