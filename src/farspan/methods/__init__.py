"""The ways a model reads a long text, one file each. No other module lists their names."""

from farspan.methods.ape import Ape
from farspan.methods.base import Composed, Method
from farspan.methods.cepe import Cepe
from farspan.methods.dca import Dca
from farspan.methods.full import Full
from farspan.methods.knorm import Knorm
from farspan.methods.lambda_mask import LambdaMask
from farspan.methods.replug import Replug
from farspan.methods.rope import Rope
from farspan.methods.selfextend import SelfExtend
from farspan.methods.sinks import Sinks
from farspan.methods.snapkv import SnapKV
from farspan.methods.temperature import Temperature
from farspan.methods.topk import TopK
from farspan.methods.tova import Tova
from farspan.specs import one_of

__all__ = ["METHODS", "Composed", "Method", "method"]

KINDS: tuple[type[Method], ...] = (
    Full,
    Sinks,
    LambdaMask,
    SelfExtend,
    Dca,
    Rope,
    TopK,
    SnapKV,
    Tova,
    Knorm,
    Temperature,
    Replug,
    Ape,
    Cepe,
)
METHODS: dict[str, type[Method]] = {kind.name: kind for kind in KINDS}


def method(text: str) -> Method:
    """Return the method that `text` names, as `sinks:window=2045,sinks=4`, or several joined by `+`, in any order.

    Raises:
        ValueError: an unknown name or setting, a value out of range, or methods that do not go together.
    """
    written = text.split("+")
    if len(written) > 1 and not all(part.strip() for part in written):
        raise ValueError(f"method {text!r} has a + without a method on both sides: write METHOD+METHOD, or one METHOD")
    parts = tuple(one_of(METHODS, part, "method") for part in written)
    return parts[0] if len(parts) == 1 else Composed(parts)
