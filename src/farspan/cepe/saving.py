"""Write a CEPE model to disk: whole, in the authors' layout, or only the weights that were added to a decoder."""

import hashlib
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from farspan.files import added

PER_ROW = 16  # values of each row of a weight that a base's hash is made of, at least, if it has as many
ADAPTER = "cepe_adapter.safetensors"
WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json",
           ADAPTER)  # fmt: skip


def is_added(name: str) -> bool:
    """Return whether a parameter or module of this name was added to the decoder."""
    return name.split(".", 1)[0] in ("encoder", "context_order") or ".cross_attn." in f"{name}."


def save(model: Any, folder: str | Path, write: Callable[..., Any], *, adapter_only: bool, **kwargs: Any) -> None:
    """Write a model, or only the added weights. Files in the folder are replaced after all new ones are written.

    Args:
        write: saves the whole model in a folder, as transformers' `save_pretrained`.
        kwargs: for `write`; of an adapter only `state_dict` is used.

    Raises:
        ValueError: a file where the folder should be.
        OSError: the disk is full.
    """
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file: give a folder to save the model in")
    target.mkdir(parents=True, exist_ok=True)
    with added(target, last="config.json") as place:
        if adapter_only:
            _write_adapter(model, place, kwargs.get("state_dict"))
        else:
            write(str(place), **kwargs)
        names = {file.name for file in place.iterdir()}
    if any(name.endswith(".safetensors") for name in names):
        for old in {old for pattern in WEIGHTS for old in target.glob(pattern) if old.name not in names}:
            old.unlink()


def weights_hash(model: Any, *, by_row: bool = True) -> str | None:
    """Return a hash that identifies a base, whatever its dtype: of the name, the shape, and some values (in bfloat16)
    of each weight. None if weights are quantised or offloaded.

    Args:
        by_row: take PER_ROW values of each row; false: only the first and last 16 of a weight, as older versions did.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        if is_added(name):
            continue
        if weight.device.type == "meta" or not weight.is_floating_point():
            return None
        flat = weight.detach().reshape(-1)
        values = _of_each_row(weight.detach()) if by_row else torch.cat([flat[:16], flat[-16:]])
        values = values.to(torch.bfloat16).float().cpu()
        digest.update(f"{name} {tuple(weight.shape)}".encode() + values.numpy().tobytes())
    return digest.hexdigest()[:16]


def _of_each_row(weight: Tensor) -> Tensor:
    """Return PER_ROW values of each row of a weight, from columns that move on by one from row to row; of a vector all
    values."""
    width = max(1, weight.shape[-1]) if weight.dim() > 1 else 1
    rows = weight.reshape(-1, width)
    columns = torch.arange(0, width, max(1, width // PER_ROW), device=rows.device)
    return rows.gather(1, (torch.arange(len(rows), device=rows.device)[:, None] + columns) % width)


def _write_adapter(model: Any, place: Path, state: dict[str, Any] | None) -> None:
    config = deepcopy(model.config)
    config.cepe_base = getattr(config, "cepe_base", None) or {"name": None, "revision": None}
    config.cepe_weights = weights_hash(model, by_row=False) or ""
    config.cepe_weights_by_row = weights_hash(model) or ""
    config.architectures = [type(model).__name__]
    tensors = {name: t.detach().contiguous() for name, t in (state or model.state_dict()).items() if is_added(name)}
    save_file(tensors, place / ADAPTER, metadata={"format": "pt"})
    config.save_pretrained(place)
