"""An encoded context: the encoder's states, and how the cross-attention uses them."""

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from farspan.specs import check_known

Mode = Literal["auto", "cache", "recompute", "absorb"]
MODES: tuple[str, ...] = get_args(Mode)
BUDGET = 1 << 30  # bytes of keys and values, of all layers together, that mode `auto` may keep


@dataclass(eq=False)
class Context:
    """The states Φ of one or several contexts, masked tokens left out.

    The cross-attention uses them in one of four ways, which give the same numbers:

    `recompute`  keys and values are computed again in each layer and forward pass
    `cache`      keys and values of each layer are kept after the first forward pass (not while gradients are needed)
    `absorb`     W_k is applied to the query and W_v after the sum, so that only Φ is needed
    `auto`       for each layer and forward pass, the estimated fastest of these; `cache` only if it fits into `budget`

    A batch of g·rows prompts can read it: prompts i·g to (i + 1)·g - 1 read row i.
    """

    states: tuple[Float[Tensor, "rows tokens width"], ...]  # the last, or one for each layer with cross-attention
    mask: Bool[Tensor, "rows tokens"] | None = None  # False: padding after a shorter row; None: no padding
    visible: Float[Tensor, "rows"] | None = None  # 0 for a row without any token, else 1; None: all have some
    mode: Mode = "auto"
    budget: int = BUDGET  # bytes, for `auto`
    score_factor: float = 1.0  # multiplies q·k, before the softmax
    # by layer, counted from the last (1): keys and values; factors of the k-norm
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)
    scales: dict[int, Tensor] = field(default_factory=dict, repr=False)
    elsewhere: dict[torch.device, "Context"] = field(default_factory=dict, repr=False)  # copies on other devices

    def __post_init__(self) -> None:
        check_known("mode of a context", self.mode, MODES)

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
        """Bytes of this context: states, masks, keys and values that are kept, and copies on other devices."""
        tensors = [*self.states, *(t for pair in self.kept.values() for t in pair), *self.scales.values()]
        tensors += [t for t in (self.mask, self.visible) if t is not None]
        return sum(t.nbytes for t in {id(t): t for t in tensors}.values()) + sum(
            other.num_bytes for other in self.elsewhere.values()
        )

    def of_layer(self, from_end: int) -> Float[Tensor, "rows tokens width"]:
        """Return the states for the layer that is `from_end` layers before the end: 1 for the last."""
        return self.states[-1 if len(self.states) == 1 else -from_end]

    def to(self, device: torch.device | str, **kwargs: object) -> "Context":
        """Return a copy on `device`, or the context itself if it is there already. Each device gets one copy.

        accelerate calls this for each layer of a model that is spread over devices.
        """
        device = torch.device(device)
        if device == self.device or (device.type == self.device.type and device.index is None):
            return self
        if device not in self.elsewhere:
            mask, visible = (None if part is None else part.to(device) for part in (self.mask, self.visible))
            moved = {id(states): states.to(device) for states in self.states}  # layers can share them
            states = tuple(moved[id(states)] for states in self.states)
            self.elsewhere[device] = Context(states, mask, visible, self.mode, self.budget, self.score_factor)
        return self.elsewhere[device]
