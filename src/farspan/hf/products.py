"""Matrix products in float32 on CPUs by oneDNN instead of MKL, which on AMD's processors takes twice as long.

torch calls oneDNN where products of float32 may be rounded to bfloat16. Only some processors have instructions that
do so (AMX); on the others oneDNN computes in float32, and is called here.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

ROUNDING = 1e-5  # largest relative error of a product in float32; with factors rounded to bfloat16 it is 2e-3

_lock = threading.Lock()
_users = 0
_before = ""


@contextmanager
def by_onednn(device: torch.device) -> Iterator[None]:
    """Let oneDNN compute a CPU's products of float32 inside the `with`, in all threads, where it does so in float32.

    Inside, `torch.get_float32_matmul_precision` raises an error, since torch has settings of two kinds for it.
    """
    global _users, _before
    if device.type != "cpu" or not is_exact():
        yield
        return
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    with _lock:
        if not _users:
            _before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                matmul.fp32_precision = _before


@cache
def is_exact() -> bool:
    """Return whether oneDNN multiplies in float32 even where it may round to bfloat16, from products of three sizes."""
    if not torch.backends.mkldnn.is_available() or torch.cpu._is_amx_tile_supported():
        return False
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    drawn = torch.Generator().manual_seed(0)
    before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    try:
        for rows, inner, columns in ((64, 256, 128), (256, 64, 1024), (512, 576, 576)):
            a, b = (torch.randn(*shape, generator=drawn) for shape in ((2, rows, inner), (2, inner, columns)))
            expected = a.double() @ b.double()
            for found, of in ((torch.bmm(a, b), expected), (a[0] @ b[0], expected[0])):
                if float((found - of).norm() / of.norm()) > ROUNDING:
                    return False
    finally:
        matmul.fp32_precision = before
    return True
