"""Load the models of a run: folders, hub ids, URLs of servers, or models that are loaded already."""

from dataclasses import dataclass, field
from typing import Any

from farspan.lm import LM, load, position_limit_of, trained_length_of
from farspan.reader.served import served


@dataclass(frozen=True)
class Load:
    """The options for loading models; see `farspan.load`. A model loaded already is used as it is."""

    dtype: Any = "auto"
    device: str | None = None
    attention: str | None = None
    trained_length: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    served: dict[str, Any] = field(default_factory=dict)  # of `farspan.served`, for models given as URLs
    _served: dict[str, LM] = field(default_factory=dict, repr=False, compare=False)  # each is queried only once

    def __call__(self, model: str | LM, *, weights: bool = True) -> LM:
        if isinstance(model, LM):
            return model
        if is_url(model):
            if model not in self._served:
                self._served[model] = served(model, trained_length=self.trained_length, **self.served)
            return self._served[model]
        return load(
            model,
            dtype=self.dtype,
            device=self.device,
            attention=self.attention,
            trained_length=self.trained_length,
            weights=weights,
            **self.options,
        )

    def to_measure(self, model: str | LM) -> LM:
        """Return a model with its weights; the identity of one loaded already is that of its weights now."""
        lm = self(model)
        if lm is model:
            lm.renew()
        return lm

    def trained(self, model: str | LM) -> int | None:
        """Return the trained length of a model without loading it; None if its config has none.

        Commands call this for all of their models before they measure the first.

        Raises:
            ValueError: no such model.
        """
        if isinstance(model, LM) or is_url(model):
            return self(model).trained_length
        found = trained_length_of(model, **self.options)
        return self.trained_length or found

    def limit(self, model: str | LM) -> int | None:
        """Return the longest text (tokens) that a model's table of positions allows, without loading its weights; None
        if it has no such table, or cannot be built without weights."""
        if isinstance(model, LM) or is_url(model):
            return self(model).position_limit
        try:
            return position_limit_of(model, **self.options)
        except ValueError:  # its own code needs weights; other errors are raised again when the model is loaded
            return None


def is_url(model: str) -> bool:
    """Return whether a model is named by the address of the server that runs it."""
    return model.startswith(("http://", "https://"))
