"""The device and the dtype that a model is loaded on and in."""

import logging
import re
from typing import Any, Literal

import torch

from farspan import hf
from farspan.loading import stored_dtype

logger = logging.getLogger(__name__)


def own_dtype(name: str, config: Any, device: torch.device | None) -> torch.dtype | Literal["auto"]:
    """Return the dtype for a model that should keep its own: "auto", or float32 instead of a 16-bit dtype that the
    device has no instructions for.

    Args:
        name: of the model, for a warning.
        device: None: other options choose devices.
    """
    own = stored_dtype(config)
    if own is None or device is None or hf.has_instructions(device, own):
        return "auto"
    stored = str(own).removeprefix("torch.")
    logger.warning(
        "model %r is stored in %s, for which this CPU has no instructions: it is computed in float32, which is faster "
        "and takes twice the memory; dtype %s computes as stored",
        *(name, stored, stored),
    )
    return torch.float32


def device_of(wanted: str | torch.device | None) -> torch.device:
    """Return the device that is wanted, by default the first accelerator, else the CPU.

    Raises:
        ValueError: no such device.
    """
    if wanted is None:
        has_mps = torch.backends.mps.is_available()
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if has_mps else "cpu")
    allowed = "expected cpu, cuda, cuda:NUMBER, mps or another accelerator of this torch; or leave it out"
    try:
        device = torch.empty(0, device=wanted).device
    except (RuntimeError, AssertionError, ImportError) as error:  # torch asserts that its build supports the device
        problem = re.split(r"[.:;]\s|\n", str(error))[0][:150]
        raise ValueError(f"device {str(wanted)!r} cannot be used ({problem}): {allowed}") from error
    if device.type == "meta":
        raise ValueError(f"device 'meta' holds no weights: {allowed}")
    return device


def check_device_map(wanted: Any) -> None:
    """Raise ValueError for a `device_map` of transformers with a device that does not exist."""
    named = ("auto", "balanced", "balanced_low_0", "sequential")
    for device in wanted.values() if isinstance(wanted, dict) else [wanted]:
        if str(device) == "meta":
            raise ValueError(
                f"device_map 'meta' holds no weights: expected {', '.join(named)} or a device such as cuda"
            )
        if isinstance(wanted, str) and wanted not in named:
            device_of(wanted)
