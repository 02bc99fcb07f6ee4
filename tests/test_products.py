"""Products of float32 by oneDNN: as exact as float32, only inside the `with`, and attention in 16 bits uses them."""

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from farspan.hf import flash, products

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not products.is_exact(), reason="oneDNN rounds to bfloat16 here, or is not built in")


@pytest.fixture
def setting() -> Any:
    return torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("shape", [(1, 64, 64), (3, 512, 576), (40, 576, 1536), (1024, 1536, 576), (2048, 128, 49)])
def test_products_are_those_of_float32(shape: tuple[int, int, int]) -> None:
    time, inner, outer = shape
    x, weight = torch.randn(time, inner), torch.randn(outer, inner)
    with products.by_onednn(CPU):
        found = torch.nn.functional.linear(x, weight)
    assert error(found, x.double() @ weight.double().mT) < 3e-6


def test_the_setting_returns_when_the_last_thread_leaves(setting: Any) -> None:
    before, inside, leave = setting.fp32_precision, threading.Event(), threading.Event()

    def other() -> None:
        with products.by_onednn(CPU):
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with products.by_onednn(CPU):
        thread.start()
        inside.wait()
    assert setting.fp32_precision == "bf16"
    leave.set()
    thread.join()
    assert setting.fp32_precision == before
    with pytest.raises(RuntimeError, match="stop"), products.by_onednn(CPU):
        raise RuntimeError("stop")
    with products.by_onednn(torch.device("meta")):
        assert setting.fp32_precision == before
    assert setting.fp32_precision == before


def lacking_memory() -> None:
    torch.backends.mkldnn.enabled = False  # what torch does where oneDNN cannot allocate, as it warns


def test_a_product_that_lacked_memory_is_an_error_and_not_computed_by_mkl(setting: Any) -> None:
    before = setting.fp32_precision
    with pytest.raises(MemoryError, match="too little memory"), products.by_onednn(CPU):
        lacking_memory()
    assert torch.backends.mkldnn.enabled
    with pytest.raises(ZeroDivisionError), products.by_onednn(CPU):
        lacking_memory() or 1 / 0
    assert torch.backends.mkldnn.enabled
    assert setting.fp32_precision == before


def test_a_check_of_onednn_that_lacks_memory_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    multiplied = torch.bmm

    def short(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        lacking_memory()
        return multiplied(one, other)

    products.is_exact.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "bmm", short)
        with pytest.raises(MemoryError, match="too little memory"):
            products.is_exact()
    assert torch.backends.mkldnn.enabled
    assert products.is_exact()


def test_onednn_that_was_turned_off_remains_off(setting: Any) -> None:
    before = setting.fp32_precision
    lacking_memory()
    try:
        with products.by_onednn(CPU):
            assert setting.fp32_precision == before
            products.refuse_fallback()
        assert not torch.backends.mkldnn.enabled
    finally:
        torch.backends.mkldnn.enabled = True


def test_onednn_is_not_used_where_memory_is_small(setting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = setting.fp32_precision
    monkeypatch.setattr(products, "total_bytes", lambda: products.LEAST_BYTES - 1)
    products.is_used.cache_clear()
    try:
        with products.by_onednn(CPU):
            assert setting.fp32_precision == before
    finally:
        products.is_used.cache_clear()


SHAPES = """
import ctypes, psutil, torch
from farspan.hf import products
weight, process, kept = torch.randn(1536, 576), psutil.Process(), []
give_back = ctypes.CDLL(None).malloc_trim  # what was freed
with products.by_onednn(torch.device("cpu")):
    for rows in range(1, 801):
        torch.nn.functional.linear(torch.randn(rows, 576), weight)
        if rows in (100, 800):
            give_back(0)
            kept.append(process.memory_info().rss >> 20)
print(kept[1] - kept[0])
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not products.is_used(), reason="needs glibc, and memory that is not small"
)
def test_products_of_many_shapes_do_not_fill_the_memory() -> None:
    """One for each length of a text's last piece: 700 of them kept 430 MiB with the caches' own size."""
    found = subprocess.run([sys.executable, "-c", SHAPES], check=True, capture_output=True, text=True)
    assert int(found.stdout) < 100


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("time", [1, flash.FEW, 200])
def test_attention_in_16_bits_is_computed_in_32(dtype: torch.dtype, time: int) -> None:
    """The kernel in 16 bits rounds the weights too, so that its error is larger than that of the rounded output."""
    query, key, value = (torch.randn(1, heads, n, 64).to(dtype) for heads, n in ((6, time), (2, 900), (2, 900)))
    with torch.no_grad():
        found, total = flash.flash(query, key, value)
    doubles = (one.double() for one in (query, key, value))
    expected = scaled_dot_product_attention(*doubles, enable_gqa=True)
    assert found.dtype == dtype
    assert total.dtype == torch.float32
    rounding = error(expected.to(dtype).double(), expected)
    assert error(found.double(), expected) < (1.01 if time >= flash.FEW else 3) * rounding
