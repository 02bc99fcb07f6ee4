"""The order of a context: vectors added to the encoder's states that the last layers' cross-attention reads.

    `position`    φ_j + W s(d_j)     s(d) = (sin(d · R^(-i/F)), cos(d · R^(-i/F))), i = 0 .. F - 1
    `age`         φ_j + u(log2 a_j)  u: a learned vector for each power of two, linear between them

    d_j  tokens from token j to the decoder's first token: offset + 1 for the last token of the context; at most R
    a_j  age of token j in chunks of L tokens, floor((d_j - 1) / L) + 1: 1 for the last chunk if the offset is 0

Our addition to CEPE. Without it the context is a set (Yen et al. 2024, arXiv 2402.16617, section 2.1): only inside a
chunk, through the encoder, does the model see which token follows another. The sinusoids are those of Vaswani et al.
2017 (arXiv 1706.03762, section 3.5), with the range R in place of 10,000: s(d + 1) is a rotation of s(d), so that the
value read at one token can become the query for the next.

Distances are counted back from the decoder, in tokens without padding, so they mean the same in a context of any
length. If they were counted from the beginning of the context, the newest chunk would have a different vector in each
context. W and u are zero at first, so the outputs do not change until they are trained. The vectors are added to the
states, so all modes of the cross-attention stay exact.
"""

from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

Order = Literal["none", "position", "age"]
ORDERS: tuple[str, ...] = get_args(Order)
RANGE = 1 << 17  # tokens

States = tuple[Float[Tensor, "rows tokens width"], ...]


class ContextOrder(nn.Module):
    """Vectors for the encoder's states by their distance from the decoder, zero at first.

    Args:
        kind: position or age.
        width: of the states.
        layers: the number of decoder layers, the last ones, that read states with order.
        num_cross: the number of layers with cross-attention.
        longest: R, the largest distance in tokens.
    """

    def __init__(self, kind: str, width: int, *, layers: int, num_cross: int, longest: int) -> None:
        super().__init__()
        self.kind, self.layers, self.num_cross, self.longest = kind, layers, num_cross, longest
        if kind == "position":
            self.position = nn.Linear(2 * max(1, width // 2), width, bias=False)
        else:
            self.age = nn.Embedding(longest.bit_length() + 1, width)
        for weight in self.parameters():
            nn.init.zeros_(weight)

    def forward(self, states: States, distances: Int[Tensor, "rows tokens"], chunk: int) -> States:
        """Return the states with order: as many tensors as given if all layers with cross-attention read it, else one
        tensor for each of these layers.

        Args:
            chunk: tokens of a chunk; without an offset the last chunk has the distances 1 to `chunk`.
        """
        added = (self._positions(distances) if self.kind == "position" else self._ages(distances, chunk)).to(
            states[0].dtype
        )
        if self.layers == self.num_cross:
            return tuple(one + added for one in states)
        if len(states) == 1:
            return states * (self.num_cross - self.layers) + (states[0] + added,) * self.layers
        return (*states[: -self.layers], *(one + added for one in states[-self.layers :]))

    def check(self, farthest: int) -> None:
        """Raise ValueError if `farthest`, the distance of a context's first token, is larger than `longest`."""
        if farthest > self.longest:
            raise ValueError(
                f"a context of {farthest:,} tokens, its offset included, exceeds the range of this model's order, "
                f"{self.longest:,} tokens: give a shorter one, or read with cepe:order=none"
            )

    def _positions(self, distances: Tensor) -> Tensor:
        half = self.position.in_features // 2
        steps = torch.arange(half, device=distances.device, dtype=torch.float32) / half
        angles = distances[..., None].float() * float(self.longest) ** -steps
        return self.position(torch.cat([angles.sin(), angles.cos()], -1).to(self.position.weight.dtype))

    def _ages(self, distances: Tensor, chunk: int) -> Tensor:
        age = ((distances.clamp_min(1) - 1) // chunk + 1).float().log2()
        below = age.floor().long()
        share = (age - below)[..., None].to(self.age.weight.dtype)
        return torch.lerp(self.age(below), self.age(below + 1), share)
