"""Matrix products in float32 on CPUs by oneDNN instead of MKL, which on AMD's processors takes twice as long.

torch calls oneDNN where products of float32 may be rounded to bfloat16. Only some processors have instructions that
do so (AMX); on the others oneDNN computes in float32, and is called here.
"""

import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from farspan.hf.device import total_bytes

# oneDNN and torch's bridge to it each keep what they prepared for 1,024 shapes of a product: products of 4,500 shapes
# took 2.7 GiB, and with these sizes .1 to .3. A forward of a model has about four shapes. Both are read at the first
# product.
for _capacity in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_capacity, "64")
LEAST_BYTES = 2 << 30  # where a process may take less memory, MKL computes
ROUNDING = 1e-5  # largest relative error of a product in float32; with factors rounded to bfloat16 it is 2e-3
SHORT = "oneDNN has too little memory for a matrix product"

_mkldnn: Any = torch.backends.mkldnn
_lock = threading.Lock()
_users = 0
_before = ""
warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # `refuse_fallback` raises an error instead


@contextmanager
def by_onednn(device: torch.device) -> Iterator[None]:
    """Let oneDNN compute a CPU's products of float32 inside the `with`, in all threads, if `is_used`.

    Inside, `torch.get_float32_matmul_precision` raises an error, since torch has settings of two kinds for it.

    Raises:
        MemoryError: at the end, as `refuse_fallback`.
    """
    global _users, _before
    if device.type != "cpu" or not _mkldnn.enabled or not is_used():
        yield
        return
    matmul = _mkldnn.matmul
    with _lock:
        if not _users:
            _before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
        _users += 1
    try:
        yield
        refuse_fallback()
    finally:
        with _lock:
            _users -= 1
            if not _users:
                matmul.fp32_precision = _before
                _mkldnn.enabled = True  # also after another error


def refuse_fallback() -> None:
    """Raise MemoryError if oneDNN lacked memory for a product within `by_onednn`. torch then computes it and all later
    ones by MKL, which rounds differently: a continued training would get other weights. oneDNN is used again."""
    if _users and not _mkldnn.enabled:
        _mkldnn.enabled = True
        raise MemoryError(SHORT)


@cache
def is_used() -> bool:
    """Return whether oneDNN computes products of float32: where it is exact, and memory is not small."""
    return total_bytes() >= LEAST_BYTES and is_exact()


@cache
def is_exact() -> bool:
    """Return whether oneDNN multiplies in float32 even where it may round to bfloat16, from products of three sizes.

    Raises:
        MemoryError: oneDNN lacks the memory for these.
    """
    if not _mkldnn.is_available() or not _mkldnn.enabled or torch.cpu._is_amx_tile_supported():
        return False
    matmul = _mkldnn.matmul
    generator = torch.Generator().manual_seed(0)
    before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    try:
        for rows, inner, columns in ((64, 256, 128), (256, 64, 1024), (512, 576, 576)):
            a, b = (torch.randn(*shape, generator=generator) for shape in ((2, rows, inner), (2, inner, columns)))
            expected = a.double() @ b.double()
            for found, right in ((torch.bmm(a, b), expected), (a[0] @ b[0], expected[0])):
                if float((found - right).norm() / right.norm()) > ROUNDING:
                    return False
        if not _mkldnn.enabled:  # as in `refuse_fallback`
            raise MemoryError(SHORT)
    finally:
        matmul.fp32_precision = before
        _mkldnn.enabled = True
    return True
