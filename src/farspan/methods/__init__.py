"""Methods of reading a long text, one file each. No other module lists their names."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from farspan.specs import Kinds, check_known, one_of

if TYPE_CHECKING:
    from farspan.methods.base import Composed, Method

__all__ = ["METHODS", "Composed", "Method", "check_names", "method"]

METHODS: "Kinds[Method]" = Kinds(
    __name__,
    {
        "full": "Full",
        "sinks": "Sinks",
        "lambda_mask": "LambdaMask",
        "selfextend": "SelfExtend",
        "dca": "Dca",
        "rope": "Rope",
        "topk": "TopK",
        "snapkv": "SnapKV",
        "tova": "Tova",
        "knorm": "Knorm",
        "temperature": "Temperature",
        "replug": "Replug",
        "ape": "Ape",
        "cepe": "Cepe",
    },
)
# names from the literature, without - and _
SPELLINGS = {
    "yarn": "rope:type=yarn,factor=4",
    "linear": "rope:type=linear,factor=4",
    "pi": "rope:type=linear,factor=4",
    "ntk": "rope:type=ntk,factor=4",
    "dynamic": "rope:type=dynamic",
    "dynamicntk": "rope:type=dynamic",
    "longrope": "rope:type=factors,file=FACTORS.json",
    "prope": "rope:type=truncated",
    "streamingllm": "sinks",
    "window": "sinks:sinks=0",
    "slidingwindow": "sinks:sinks=0",
    "lminfinite": "lambda_mask",
    "logn": "temperature",
}


def method(text: str) -> "Method":
    """Return the method that `text` names, like `sinks:window=2045,sinks=4`, or several joined by `+`, in any order.

    Raises:
        ValueError: an unknown name or setting, a value out of range, or methods that cannot be composed.
    """
    check_names(text)
    parts = tuple(one_of(METHODS, part, "method") for part in text.split("+"))
    if len(parts) == 1:
        return parts[0]
    from farspan.methods.base import Composed

    return Composed(parts)


def check_names(text: str) -> None:
    """Raise ValueError for an unknown name of a method in `text`; settings are not checked. Imports no method, and so
    not torch."""
    written = text.split("+")
    if len(written) > 1 and not all(part.strip() for part in written):
        raise ValueError(f"method {text!r} has a + without a method on both sides: write METHOD+METHOD, or one METHOD")
    for part in written:
        name = part.partition(":")[0].strip()
        if spelling := SPELLINGS.get(name.lower().replace("-", "").replace("_", "")):
            raise ValueError(f"method {name!r} is unknown; for example write {spelling}")
        check_known("method", name, METHODS)


def __getattr__(name: str) -> Any:
    """`Composed` and `Method`, which need torch, are imported when they are first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("farspan.methods.base"), name)
