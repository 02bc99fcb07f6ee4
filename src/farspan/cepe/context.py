"""What is kept of an encoded context: the encoder's states, and how the cross-attention is to use them."""

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Mode = Literal["auto", "cache", "recompute", "absorb"]
MODES: tuple[str, ...] = get_args(Mode)
BUDGET = 1 << 30  # bytes of keys and values over all layers that mode `auto` may keep


@dataclass(eq=False)
class Context:
    """The states Φ of one or several contexts, masked tokens left out.

    The cross-attention uses them in one of four ways, which give the same numbers:

    `recompute`  keys and values anew in each layer and forward
    `cache`      keys and values of each layer are kept with the first forward (not while gradients are wanted)
    `absorb`     W_k goes into the query, W_v behind the sum: nothing but Φ is needed
    `auto`       for each forward the one that should be fastest; `cache` only if it fits into `budget`

    A forward of g·rows prompts reads it: prompts i·g to (i + 1)·g - 1 have row i.
    """

    states: tuple[Float[Tensor, "rows tokens width"], ...]  # the last, or one for each layer with cross-attention
    mask: Bool[Tensor, "rows tokens"] | None = None  # False: padding behind a shorter row; None: there is none
    visible: Float[Tensor, "rows"] | None = None  # 0 for a row without any token, else 1; None: all have some
    mode: Mode = "auto"
    budget: int = BUDGET  # bytes, for `auto`
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)  # layer -> keys, values
    scales: dict[int, Tensor] = field(default_factory=dict, repr=False)  # layer -> what k-norm divides by
    elsewhere: dict[torch.device, "Context"] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode {self.mode!r} of a context is unknown; known are {', '.join(MODES)}")

    @property
    def rows(self) -> int:
        return self.states[0].shape[0]

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest row."""
        return self.states[0].shape[1]

    @property
    def device(self) -> torch.device:
        return self.states[0].device

    @property
    def num_bytes(self) -> int:
        """Held for this context: its states, and keys and values where they are kept."""
        tensors = [*self.states, *(t for pair in self.kept.values() for t in pair), *self.scales.values()]
        tensors += [t for t in (self.mask, self.visible) if t is not None]
        return sum(t.nbytes for t in tensors) + sum(other.num_bytes for other in self.elsewhere.values())

    def of_layer(self, from_end: int) -> Float[Tensor, "rows tokens width"]:
        """The states for the layer that is `from_end` layers before the end: 1 for the last."""
        return self.states[-1 if len(self.states) == 1 else -from_end]

    def to(self, device: torch.device | str, **kwargs: object) -> "Context":
        """The same on a device; itself where it is there already. Copies are made once for each device.

        accelerate calls this for each layer of a model that is spread over devices.
        """
        device = torch.device(device)
        if device == self.device or (device.type == self.device.type and device.index is None):
            return self
        if device not in self.elsewhere:
            self.elsewhere[device] = Context(
                tuple(states.to(device) for states in self.states),
                None if self.mask is None else self.mask.to(device),
                None if self.visible is None else self.visible.to(device),
                self.mode,
                self.budget,
            )
        return self.elsewhere[device]
