"""Sinks and window by the fused kernel in parts, against the blocks that hold all scores."""

import pytest
import torch
from torch import Tensor

from farspan.hf import attend
from farspan.hf.attend import Call, Layer, frequencies, sink_window
from farspan.methods.lambda_mask import LambdaMask
from farspan.methods.sinks import Sinks

SHAPES = [Sinks(30), Sinks(30, 0), Sinks(500, 4), Sinks(9, 40), Sinks(30, 4, 8), LambdaMask(30, 5), LambdaMask(1, 0)]


def called(
    shape: Sinks | LambdaMask, start: int, time: int, dtype: torch.dtype = torch.float32, rope: bool = True
) -> Call:
    """Return a call as a reader makes it, with a cache that dropped what no later query sees."""
    torch.manual_seed(0)
    kept = min(start, shape.sinks + start - max(shape.first_near(start), 0))
    query = torch.randn(2, 2, 3, time, 16, dtype=dtype)
    key, value = (torch.randn(2, 2, kept + time, 16, dtype=dtype) for _ in range(2))
    layer = Layer(0, frequencies(1e4, 16) if rope else None, None)
    return Call(query, key, value, scale=0.3, softcap=None, layer=layer, start=start, real=None)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Blocks of 7 queries; counts calls of the kernel."""
    seen: list[int] = []
    own = attend.flash

    def counting(query: Tensor, *given: object, **more: object) -> object:
        seen.append(query.shape[2])
        return own(query, *given, **more)

    monkeypatch.setattr(attend, "flash", counting)
    monkeypatch.setattr(attend, "FUSED_QUERIES", 7)
    return seen


@pytest.mark.parametrize("rope", [True, False])
@pytest.mark.parametrize(("start", "time"), [(0, 60), (0, 5), (33, 1), (100, 40), (25, 20)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_parts_equal_the_blocks(
    shape: Sinks | LambdaMask, start: int, time: int, rope: bool, used: list[int]
) -> None:
    call = called(shape, start, time, rope=rope)
    expected = sink_window(call, shape)
    assert not used  # with gradients the scores are held
    with torch.no_grad():
        torch.testing.assert_close(sink_window(call, shape), expected, rtol=1e-5, atol=2e-6)
    assert used
    assert max(used) <= 7


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_parts_in_bf16_are_as_exact_as_the_blocks(shape: Sinks | LambdaMask, used: list[int]) -> None:
    call = called(shape, 40, 30, torch.bfloat16)
    whole = {name: getattr(call, name).double() for name in ("query", "key", "value")}
    exact = sink_window(Call(**{**vars(call), **whole}), shape)
    blocks = sink_window(call, shape)
    with torch.no_grad():
        parts = sink_window(call, shape)
    assert used
    assert (parts - exact).norm() <= 1.5 * (blocks - exact).norm()


def test_a_capped_score_takes_the_blocks(used: list[int]) -> None:
    call = called(SHAPES[0], 40, 30)
    with torch.no_grad():
        sink_window(Call(**{**vars(call), "softcap": 5.0}), SHAPES[0])
    assert not used
