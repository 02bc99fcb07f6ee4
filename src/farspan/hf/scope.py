"""Exclusive use of a model: one thread at a time, under the methods that have changed it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from threading import RLock
from weakref import WeakKeyDictionary

from torch import nn

from farspan.hf.training import evaluating


class Scope:
    """The time while a method is on. A memory that was read in it cannot be used outside."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.on = True

    def check(self) -> None:
        if not self.on:
            raise ValueError(f"{self.name} is no longer on: use its memories inside its `with`")


@dataclass
class _Use:
    """The thread that may run a model, and the methods that have changed it."""

    lock: RLock = field(default_factory=RLock)
    scopes: list[Scope] = field(default_factory=list)  # the last one entered is the one to read under


_USES: WeakKeyDictionary[nn.Module, _Use] = WeakKeyDictionary()


def _use(model: nn.Module) -> _Use:
    return _USES.get(model) or _USES.setdefault(model, _Use())


@contextmanager
def alone(model: nn.Module) -> Iterator[None]:
    """Keep other threads from running `model` meanwhile: a forward and the output head depend on its state. A model in
    training mode, as a Trainer leaves it, is in eval mode meanwhile, without dropout."""
    with _use(model).lock, evaluating(model) if model.training else nullcontext():
        yield


@contextmanager
def changed(
    model: nn.Module, scope: Scope, change: Callable[[], None], undo: Callable[[], None], *, reserved: bool
) -> Iterator[None]:
    """Call `change`, and `undo` afterwards, each while no other thread runs `model`. `reserved`: inside the `with` only
    readers of this scope can read the model, so that no other reader silently sees the change."""
    use = _use(model)
    try:
        with use.lock:  # for both steps: another thread could read between them
            change()
            if reserved:
                use.scopes.append(scope)
        yield
    finally:
        scope.on = False
        with use.lock:
            undo()
            if scope in use.scopes:
                use.scopes.remove(scope)


def check_scope(model: nn.Module, scope: Scope | None) -> None:
    """Raise ValueError if the model is reserved for another scope now."""
    scopes = _use(model).scopes
    if scopes and scopes[-1] is not scope:
        raise ValueError(f"{scopes[-1].name} is on for this model: read with its reader, or leave its `with` first")
