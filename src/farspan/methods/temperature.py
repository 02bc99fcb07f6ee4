"""Log-n scaling of attention: queries grow with the number of tokens they choose among.

    q_i · max(1, ln i / ln n)        i: tokens up to the query, itself included; n: `original`

A softmax over more keys is flatter: the largest weight shrinks while its score stays. A factor of ln i / ln n keeps the
weights' concentration, without training. Su 2021, kexue.fm/archives/8823; Chiang and Cholak 2022, arXiv 2202.12172; in
the form above Bai et al. 2023, arXiv 2309.16609 (`use_logn_attn`) and the `scale_base` of Self-Extend's code. Up to n
tokens nothing changes. n stays the model's trained length even if RoPE scaling extends it: the model was
trained to choose among n keys.

With `scales` the factor of head h has an exponent s_h, which `farspan train smt` learns (`model.temperature =
"learned"`). Not in a paper. At s_h = 1 it is the factor above, at 0 the head is not scaled. Up to n tokens it is 1 for
any s_h, so no query weights can do the same. The file holds n too, which is then the default of `original`, as the
config of a trained model has a longer length.

The factor multiplies whatever scores another method computes, and the votes of methods that evict. Keeps every key.
Without `scales` not trained.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from farspan.files import LONGEST, check_number, expanded, read_json
from farspan.hf.remap import in_place
from farspan.lm import LM
from farspan.methods.base import TEMPERATURE, Method
from farspan.reader import DenseReader, Reader, attending
from farspan.specs import limited

SCALES = "log_n_scales.json"  # in the folder of a trained model
LARGEST_SCALE = 100.0  # trained ones are near 1


@dataclass(frozen=True)
class Temperature(Method):
    """Queries beyond `original` tokens are multiplied by ln(tokens) / ln(original)."""

    # tokens, at least 2, whose logarithm is not 0; default: the model's trained length, or that of `scales`
    original: int | None = limited(None, 2, LONGEST)
    scales: str | None = None  # exponents of the factor, one for each head: a file, or the folder of a trained model

    name: ClassVar[str] = "temperature"
    changes: ClassVar[tuple[str, ...]] = (TEMPERATURE,)

    @property
    def files(self) -> tuple[Path, ...]:
        return (_scales_file(self.scales),) if self.scales is not None else ()

    def small(self, num_tokens: int) -> "Temperature":
        return replace(self, original=min(self.original or num_tokens, max(2, num_tokens // 16)))

    def neutral(self, num_tokens: int) -> "Temperature":
        return replace(self, original=max(self.original or num_tokens, num_tokens, 2))

    @contextmanager
    def on(self, lm: LM) -> Iterator[Reader]:
        factor = self._factor(lm)
        with attending(lm, in_place, name=str(self), rotary=False) as reader:
            assert reader.attention is not None
            with reader.attention.scaled_queries(factor):
                yield reader

    @contextmanager
    def around(self, reader: DenseReader) -> Iterator[Reader]:
        if reader.attention is None:
            with self.on(reader.lm) as own:
                yield own
            return
        with reader.attention.scaled_queries(self._factor(reader.lm)):
            yield reader

    def _factor(self, lm: LM) -> Callable[[Tensor, int], Tensor]:
        """Return the factor of queries, from their positions and the layer: [time], or with scales [heads, time]."""
        original, scales = self.original, None
        if self.scales is not None:
            trained, scales = self._scales(lm, self.scales)
            scales = scales.to(lm.device)  # a copy from the CPU in every layer would wait for the device
            original = original or trained
        # of the model as it was loaded: a RoPE method reports a longer trained length
        if (original := original or lm.identity.get("trained_length")) is None or original < 2:
            raise ValueError(f"{self}: the config of {lm.name} has no trained length. Write original=TOKENS")

        def factor(positions: Tensor, layer: int) -> Tensor:
            same = log_n(positions, original)
            return same if scales is None else same ** scales[layer].to(same)[:, None]

        return factor

    def _scales(self, lm: LM, place: str) -> tuple[int, Float[Tensor, "layers heads"]]:
        """Return `original` and the scales of a file.

        Raises:
            ValueError: as `read_scales`, scales of another model, or a model whose heads are divided among processes.
        """
        if lm.num_parts > 1:
            raise ValueError(f"{self}: the heads of {lm.name} are divided among {lm.num_parts} processes: use one")
        original, scales = read_scales(place)
        expected = lm.num_layers, int(lm.model.config.get_text_config(decoder=True).num_attention_heads)
        if tuple(scales.shape) != expected:
            raise ValueError(
                f"{place} has scales of another model: got {len(scales)} layers of {scales.shape[1]} heads, expected "
                f"{expected[0]} of {expected[1]} for {lm.name}"
            )
        return original, scales


def log_n(positions: Int[Tensor, "*shape"], original: int) -> Float[Tensor, "*shape"]:
    """Return the factor of the query at each position, from 0 on."""
    return ((positions + 1).log() / math.log(original)).clamp_min(1.0)


def read_scales(place: str) -> tuple[int, Float[Tensor, "layers heads"]]:
    """Return `original` and the scales of a file, or of the folder of a model that was trained with them.

    Raises:
        ValueError: no such file, not JSON, no number for each head of each layer in it, or one out of range.
    """
    file = _scales_file(place)
    try:
        found = read_json(file)
    except FileNotFoundError as error:
        raise ValueError(
            f'scales {str(file)!r} do not exist: give the folder of a model trained with model.temperature = "learned"'
        ) from error
    rows: Any = found.get("scales") if isinstance(found, dict) else None
    heads = {len(row) if isinstance(row, list) else 0 for row in rows} if isinstance(rows, list) else set()
    if len(heads) != 1 or 0 in heads:
        raise ValueError(
            f"{file} has no scales: expected an object with `original`, tokens from 2 on, and `scales`, for each layer "
            "a list of one number for each head"
        )
    check_number(f"{file}: original", found.get("original"), 2, LONGEST)
    for layer, row in enumerate(rows):
        for head, one in enumerate(row):
            check_number(f"{file}: scale of head {head} of layer {layer}", one, -LARGEST_SCALE, LARGEST_SCALE)
    return found["original"], torch.tensor(rows, dtype=torch.float32)


def _scales_file(place: str) -> Path:
    """Return the file of scales itself, or that in the folder of a trained model."""
    file = expanded(place)
    return file / SCALES if file.is_dir() else file
