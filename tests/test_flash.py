"""torch's fused kernels over parts of the keys against one softmax, on CPUs and, if there is one, a GPU."""

import pytest
import torch

from farspan.hf.flash import flash, hidden_mask, joined, takes

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def tensors(device, dtype, time=50, keys=50, heads=4, key_heads=2, dim=32):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, heads, time, dim), (2, key_heads, keys, dim), (2, key_heads, keys, dim))
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def naive(query, key, value, hidden, scale):
    """The output and log-sum-exp of attention, written out in float64."""
    groups = query.shape[1] // key.shape[1]
    query, key, value = query.double(), *(x.double().repeat_interleave(groups, 1) for x in (key, value))
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def hidden_pairs(kind, time, keys, device):
    here, there = torch.arange(time, device=device)[:, None], torch.arange(keys, device=device)
    pairs = {"causal": there > here, "mirrored": there < here, "mask": (there + here) % 3 == 0}
    return pairs.get(kind, torch.zeros(time, keys, dtype=torch.bool, device=device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kind", ["causal", "mirrored", "mask", "all", "one query"])
def test_a_part_equals_one_softmax_and_gives_its_sum(device, dtype, kind):
    time, keys = {"mask": (37, 51), "all": (37, 51), "one query": (1, 51)}.get(kind, (50, 50))
    query, key, value = tensors(device, dtype, time, keys)
    hidden = hidden_pairs(kind, time, keys, device)
    with torch.no_grad():
        assert takes(query, key, value)
        mask = hidden_mask(hidden, dtype)[None, None] if kind == "mask" else None
        out, total = flash(
            query, key, value, causal=kind == "causal", mirrored=kind == "mirrored", mask=mask, scale=0.3
        )
    expected, sums = naive(query, key, value, hidden, 0.3)
    assert out.dtype == dtype
    assert (out - expected).abs().max() < TOLERANCES[dtype]
    assert (total - sums).abs().max() < TOLERANCES[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_parts_join_to_the_softmax_over_all_keys_also_where_a_query_sees_none_of_a_part(device, dtype):
    query, key, value = tensors(device, dtype, 40, 70)
    here, there = torch.arange(40, device=device)[:, None] + 30, torch.arange(70, device=device)
    hidden = (there > here) | (there < here - 20)  # the last queries see no key of the first part
    with torch.no_grad():
        parts = [
            flash(query, key[:, :, some], value[:, :, some], mask=hidden_mask(hidden[:, some], dtype)[None, None])
            for some in (slice(0, 30), slice(30, 70))
        ]
    expected, _ = naive(query, key, value, hidden, 32**-0.5)
    assert (joined(parts) - expected).abs().max() < TOLERANCES[dtype]


def test_a_kernel_takes_neither_gradients_nor_mixed_dtypes():
    query, key, value = tensors("cpu", torch.float32)
    assert not takes(query, key, value)  # gradients are on
    with torch.no_grad():
        assert not takes(query, key.bfloat16(), value.bfloat16())
        assert not takes(query, key, value[..., :16])


def test_a_single_part_is_not_copied():
    with torch.no_grad():
        part = flash(*tensors("cpu", torch.bfloat16))
    assert joined([part]) is part[0]
