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
    """Return whether oneDNN multiplies in float32 even where it may round to bfloat16, from two products."""
    if not torch.backends.mkldnn.is_available():
        return False
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    drawn = torch.Generator().manual_seed(0)
    a, b = (torch.randn(4, *shape, generator=drawn) for shape in ((64, 256), (256, 128)))
    before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    try:
        found = (torch.bmm(a, b), a[0] @ b[0])
    finally:
        matmul.fp32_precision = before
    expected = a.double() @ b.double()
    errors = ((one - of).norm() / of.norm() for one, of in zip(found, (expected, expected[0]), strict=True))
    return all(float(error) < ROUNDING for error in errors)
