"""The page of benchmarks/memory_recipes.py is that of its recorded rows, and its judgement can fail."""

import importlib
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from farspan import LM, load, method
from farspan.stats import MeasuredCurve
from farspan.train.config import read_config
from farspan.train.smt import SmtSettings

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
memory_recipes: Any = importlib.import_module("memory_recipes")
llama_xl: Any = importlib.import_module("llama_xl")


def test_the_tables_of_the_page_are_those_of_the_recorded_rows() -> None:
    assert memory_recipes.PAGE.read_text() == memory_recipes.page()


def test_the_config_of_smollm2_is_the_recipe_that_was_measured() -> None:
    size, configs = memory_recipes.SIZES["smollm2"], memory_recipes.CONFIGS
    overrides = [*size.common, *size.all_recipes["yarn-decoys-65536"][0], "out='?'", f"trainer.steps={size.steps}"]
    expected = read_config(configs / size.config, SmtSettings, overrides)
    assert read_config(configs / "smt-smollm2-decoys.toml", SmtSettings, ["out='?'"]) == expected


def test_without_slow_pairs_the_layers_of_copying_heads_are_those_of_a_model_with_truncated_rope() -> None:
    demo, ids = load("demo", dtype="float32"), torch.arange(5, 45)[None]
    size = replace(memory_recipes.DEMO_SIZE, heads=tuple(f"{layer}.0" for layer in range(4)), window=512)
    with torch.no_grad():
        plain = demo.model(ids).logits
        with memory_recipes.unrotated(memory_recipes.DEMO_SIZE):
            some = demo.model(ids).logits
        with memory_recipes.unrotated(size):
            all_layers = demo.model(ids).logits
        assert torch.equal(demo.model(ids).logits, plain)
        with method("rope:type=truncated").on(demo):
            torch.testing.assert_close(demo.model(ids).logits, all_layers)
    assert not torch.allclose(some, plain, atol=1e-2)
    assert not torch.allclose(some, all_layers, atol=1e-2)


def test_a_recipe_passes_by_whole_intervals_alone() -> None:
    longer, than_yarn, lost = memory_recipes.LONGER, memory_recipes.THAN_YARN, memory_recipes.LOST
    good = {longer: (6.0, 4.0, 8.0), than_yarn: (2.0, 1.5, 2.5), "span": (1.0, 0.9, 1.1), lost: (0.01, 0.0, 0.02)}
    assert memory_recipes.passes(good)
    for name, worse in {longer: (6.0, 3.9, 8.0), than_yarn: (2.0, 1.4, 2.6), lost: (0.01, 0.0, 0.021)}.items():
        assert not memory_recipes.passes(good | {name: worse})
        assert memory_recipes.verdict(good | {name: worse}) == "not shown"
    assert memory_recipes.verdict(good) == "met"
    for name, missed in {longer: (3.0, 2.0, 3.9), than_yarn: (1.2, 1.0, 1.4), lost: (0.04, 0.021, 0.06)}.items():
        assert memory_recipes.verdict(good | {name: missed}) == "missed"
    losses = ((0.01, 0.0, 0.02), (0.01, 0.0, 0.021), (0.04, 0.021, 0.06))
    assert [memory_recipes.within(one) for one in losses] == ["yes", "undecided", "no"]


@pytest.mark.parametrize(("size", "kept"), [("demo", False), ("smollm2", True)])
def test_the_check_judges_the_recorded_rows(size: str, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["memory_recipes.py", "--size", size, "--check"])
    with nullcontext() if kept else pytest.raises(SystemExit, match="no recipe keeps all bounds"):
        memory_recipes.main()


def test_no_multiple_of_a_memory_of_0_meets_a_bound() -> None:
    lengths, hits = np.array([64, 128, 256]), np.full((4, 3), 0.5)
    none = MeasuredCurve(lengths, lengths // 2, hits, hits, {}, lengths, np.full((4, 3), "text"))
    some = replace(none, copy=hits + 0.4)
    for name in ("half_life", "span"):
        assert not any(value >= 0 for value in memory_recipes.times(some, none, name))
        assert memory_recipes.times(some, some, name)[0] == 1


def test_the_interval_of_a_ratio_of_half_lives_holds_the_error_of_interpolating() -> None:
    """However much the texts agree: each of the two lengths around a half-life is left out in turn."""
    rng, lengths = np.random.default_rng(0), np.array([64, 128, 256, 512])
    texts = np.array([["text"] * 4] * 8)

    def of(*copy: float) -> MeasuredCurve:
        hits = np.clip(np.array(copy) + 0.001 * rng.standard_normal((8, 4)), 0, 1)
        return MeasuredCurve(lengths, lengths // 2, hits, np.zeros((8, 4)), {}, lengths, texts)

    base, curve = of(0.9, 0.3, 0.1, 0.0), of(0.9, 0.9, 0.9, 0.1)  # half-lives of 64 to 128 and of 320 to 512 tokens
    for ratio in (memory_recipes.times(curve, base, "half_life"), llama_xl.ratio([base], [curve], "half_life")):
        assert ratio == pytest.approx((384 / 106.7, 320 / 128, 512 / 64), rel=0.02)
    assert memory_recipes.times(base, base, "half_life") == (1, 1, 1)


def test_a_ratio_needs_the_same_texts_only_at_the_lengths_that_both_curves_have() -> None:
    lengths = np.array([64, 128, 256])
    hits, texts = np.full((4, 3), 0.5), np.array([["a", "b", "c"]] * 4)
    one = MeasuredCurve(lengths, lengths // 2, hits + np.array([0.4, 0.3, -0.5]), np.zeros((4, 3)), {}, lengths, texts)
    assert memory_recipes.times(one.kept(lengths != 128), one, "span")[0] > 0
    with pytest.raises(AssertionError, match="other documents"):
        memory_recipes.times(replace(one, targets=texts[:, ::-1]), one, "span")


def test_an_interrupted_run_counts_the_texts_that_have_copy_and_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its curves have a row for each text of which a half was measured; intervals are those of the whole texts alone,
    up to the random numbers of the bootstrap."""
    size, recorded = memory_recipes.SIZES["demo"], memory_recipes.rows_of
    monkeypatch.setattr(memory_recipes, "rows_of", lambda *of: [row for row in recorded(*of) if row.repeat < 5])
    monkeypatch.setattr(memory_recipes, "curve_of", memory_recipes.curve_of.__wrapped__)
    curves = [memory_recipes.curve_of(size, how, "nested") for how in ("full", size.untrained[1])]
    alone = []
    for one in curves:
        whole = one.whole.any(1)
        assert (len(one.copy), whole.sum()) == (6, 4)
        assert one.whole[whole].all()
        alone.append(replace(one, copy=one.copy[whole], control=one.control[whole], targets=one.targets[whole]))
    texts = {line.split(" | ")[2] for line in memory_recipes.nested(size).splitlines()[2:]}
    assert texts == {"4"}
    for tests in (1, 5):
        found, expected = (memory_recipes.times(b, a, "span", tests) for a, b in (curves, alone))
        assert found[0] == pytest.approx(expected[0], rel=1e-12)
        assert found[2] - found[1] == pytest.approx(expected[2] - expected[1], rel=0.05)
    gaps = (curves[0].copy - curves[0].control)[:, 0]
    some = alone[0].copy[:, 0] - alone[0].control[:, 0]
    assert memory_recipes.interval(gaps) == pytest.approx(memory_recipes.interval(some), rel=1e-12)
    over_texts = memory_recipes.real_tables.over_texts
    assert over_texts(gaps.tolist()) == pytest.approx(over_texts(some.tolist()), rel=1e-12)


def test_the_heads_that_copy_are_those_that_the_recipe_trains(lm: LM) -> None:
    demo = load("demo", dtype="float32", attention="eager")
    assert tuple(memory_recipes.copying_heads(demo)) == memory_recipes.SIZES["demo"].heads
    lm.model.set_attn_implementation("eager")
    with pytest.raises(
        SystemExit, match=r"^no head of tiny-llama copies: .* is 0\.\d\d, of head \d\.\d, expected"
    ) as no:
        memory_recipes.copying_heads(lm)
    assert "\n" not in str(no.value)


def test_more_recipes_widen_an_interval() -> None:
    mean, low, high = memory_recipes.widened((1.0, 0.9, 1.1), texts=8, tests=1)
    assert (mean, round(low, 9), round(high, 9)) == (1.0, 0.9, 1.1)
    _, low, high = memory_recipes.widened((1.0, 0.9, 1.1), texts=8, tests=5)
    assert 0.8 < low < 0.9 < 1.1 < high < 1.2


def test_paths_of_this_machine_are_not_recorded() -> None:
    line = '{"name": "/tmp/models/one", "method": "temperature:scales=/tmp/models/one", "text": "a/b"}'
    recorded = memory_recipes.kept.ABSOLUTE.sub(r'\1\2"', line)
    assert recorded == '{"name": "one", "method": "temperature:scales=one", "text": "a/b"}'
