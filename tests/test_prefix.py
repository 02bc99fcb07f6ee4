"""SDPA in two parts against SDPA with the whole mask, and where it is used."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from farspan import hf
from farspan.hf import prefix
from farspan.hf.prefix import in_two_parts, sdpa

from tiny import VOCABULARY, tiny_model

BEFORE, TIME = 37, 12
LAYER = SimpleNamespace(num_key_value_groups=3, is_causal=True)


def causal() -> Tensor:
    return (torch.arange(TIME)[:, None] + BEFORE >= torch.arange(BEFORE + TIME))[None, None]


def additive(visible: Tensor, hidden: float = torch.finfo(torch.float32).min) -> Tensor:
    return torch.zeros(visible.shape).masked_fill_(~visible, hidden)


def with_gap(row: int, column: int) -> Tensor:
    mask = causal()
    mask[..., row, column] = False
    return mask


def branches() -> Tensor:
    mask = causal()
    mask[..., 4:, BEFORE : BEFORE + 4] = False
    return mask


def lonely() -> Tensor:
    mask = causal()
    mask[..., 5, BEFORE:] = False  # sees nothing of the chunk, not even itself
    return mask


SPLIT = {
    "causal": causal,
    "causal, additive": lambda: additive(causal()),
    "branches": branches,
    "branches, additive": lambda: additive(branches()),
    "a query that sees no key of the chunk": lonely,
    "rows that differ": lambda: torch.cat([causal(), branches()]),
}
WHOLE = {
    "a gap in what was read": lambda: with_gap(7, 20),
    "the first key hidden": lambda: with_gap(0, 0),
    "an additive bias": lambda: torch.randn(1, 1, TIME, BEFORE + TIME),
    "one row for all queries": lambda: torch.ones(1, 1, 1, BEFORE + TIME, dtype=torch.bool),
    "no mask": lambda: None,
}


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    query = torch.randn(2, TIME, 6, 16, dtype=dtype).transpose(1, 2)
    key, value = (torch.randn(2, 2, 3 * BEFORE, 16, dtype=dtype)[:, :, : BEFORE + TIME] for _ in range(2))
    return query, key, value


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of keys of each part that is computed."""
    seen: list[int] = []
    own = prefix.flash

    def counting(query: Tensor, key: Tensor, *given: Any, **more: Any) -> Any:
        seen.append(key.shape[2])
        return own(query, key, *given, **more)

    monkeypatch.setattr(prefix, "flash", counting)
    return seen


@pytest.mark.parametrize("scaling", [None, 0.7])
@pytest.mark.parametrize("mask", [pytest.param(mask, id=name) for name, mask in (SPLIT | WHOLE).items()])
def test_two_parts_equal_the_whole_mask(
    mask: Callable[[], Tensor | None], scaling: float | None, parts: list[int]
) -> None:
    query, key, value = inputs()
    given = mask()
    with torch.no_grad(), in_two_parts():
        ours, _ = sdpa(LAYER, query, key, value, given, scaling=scaling)
        expected, _ = sdpa_attention_forward(LAYER, query, key, value, given, scaling=scaling)
    assert parts == ([BEFORE, TIME] if mask in SPLIT.values() else [])
    assert ours.shape == expected.shape
    assert ours.is_contiguous()
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_two_parts_in_bf16_are_as_exact_as_the_whole(parts: list[int]) -> None:
    exact, _ = sdpa_attention_forward(LAYER, *(x.double() for x in inputs(torch.bfloat16)), causal())
    with torch.no_grad(), in_two_parts():
        ours, _ = sdpa(LAYER, *inputs(torch.bfloat16), causal())
        whole, _ = sdpa_attention_forward(LAYER, *inputs(torch.bfloat16), causal())
    assert parts == [BEFORE, TIME]
    assert (ours - exact).norm() < 1.5 * (whole - exact).norm()


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_a_new_token_attends_as_in_transformers(dtype: torch.dtype, error: float, parts: list[int]) -> None:
    query, key, value = inputs(dtype)
    query = query[:, :, -1:]
    with torch.no_grad(), in_two_parts():
        ours, _ = sdpa(LAYER, query, key, value, None, scaling=0.7)
        expected, _ = sdpa_attention_forward(LAYER, query, key, value, None, scaling=0.7)
    assert parts == [BEFORE + TIME]
    assert (ours.shape, ours.dtype, ours.is_contiguous()) == (expected.shape, dtype, True)
    torch.testing.assert_close(ours, expected, rtol=0, atol=error)


def test_one_query_has_the_output_and_the_log_sum_of_several() -> None:
    query, key, value = inputs()
    with torch.no_grad():
        many, totals = prefix.flash(query, key, value, scale=0.7)
        one, total = prefix.flash(query[:, :, 4:5], key, value, scale=0.7)
    torch.testing.assert_close(one, many[:, :, 4:5])
    torch.testing.assert_close(total, totals[:, :, 4:5])


def test_a_gradient_takes_the_whole_mask(parts: list[int]) -> None:
    with in_two_parts():
        query, key, value = (x.requires_grad_() for x in inputs())
        sdpa(LAYER, query, key, value, causal())[0].square().sum().backward()
    assert parts == []
    assert query.grad is not None


@pytest.mark.parametrize("option", [{"dropout": 0.5}, {"position_bias": torch.zeros(1, 6, TIME, BEFORE + TIME)}])
def test_options_that_the_parts_do_not_know_take_the_whole_mask(option: dict[str, Any], parts: list[int]) -> None:
    with torch.no_grad(), in_two_parts():
        sdpa(LAYER, *inputs(), causal(), **option)
    assert parts == []


def test_a_stream_reads_in_two_parts_and_leaves_transformers_as_it_was(parts: list[int]) -> None:
    model, ids = tiny_model(), torch.randint(1, VOCABULARY, (1, 30))
    stream = hf.Stream(model)
    with torch.no_grad():
        stream.step(ids[:, :20])
        assert parts == []
        stream.step(ids[:, 20:])
        assert parts == [20, 10] * 2
        model(ids, attention_mask=torch.ones(1, 1, 30, 30, dtype=torch.bool).tril())  # no stream
    assert parts == [20, 10] * 2
    assert AttentionInterface()["sdpa"] is sdpa_attention_forward


def test_another_thread_is_affected_only_where_it_reads_itself(parts: list[int]) -> None:
    def elsewhere(read: bool) -> None:
        with in_two_parts() if read else nullcontext():
            attend()

    def attend() -> None:
        with torch.no_grad():
            AttentionInterface()["sdpa"](LAYER, *inputs(), causal())

    with in_two_parts(), ThreadPoolExecutor(1) as pool:
        pool.submit(elsewhere, False).result()
        assert parts == []
        pool.submit(elsewhere, True).result()
        assert parts == [BEFORE, TIME]
        attend()
        assert parts == [BEFORE, TIME] * 2
    assert AttentionInterface()["sdpa"] is sdpa_attention_forward


def test_an_error_leaves_transformers_as_it_was() -> None:
    stream = hf.Stream(tiny_model())
    with pytest.raises(IndexError):
        stream.step(torch.tensor([[VOCABULARY]]))
    assert AttentionInterface()["sdpa"] is sdpa_attention_forward
