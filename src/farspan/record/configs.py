"""Compare the configs and weights of models as they were recorded at different times."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAMED = 3  # differing fields in an error
OPTIONAL = dict.fromkeys(("config", "chat", "stop_tokens"))  # parts of an identity, compared if both sides have them


def refuse_other_weights(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ValueError if the weights or the adapters of a run's model have changed, such as by a training.

    Args:
        before, now: the identity of the model. Those of servers have no `fingerprint`.
    """
    old, new = before.get("fingerprint"), now.get("fingerprint")
    if old != new:
        raise ValueError(
            f"{folder}: the weights of {now['name']} have changed since this run started: their fingerprint was "
            f"{old!r}, now {new!r}. Restore them to continue the run, or choose another folder (out)"
        )


def refuse_other_config(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ValueError if the config, the chat template or the stop tokens of a run's model have changed.

    Args:
        before, now: the identity of the model. Older runs lack those of OPTIONAL, servers have no `config`.
    """
    if different := changed_fields(before.get("config"), now.get("config")):
        raise ValueError(
            f"{folder}: the config of {now['name']} has changed since this run started: {different}. Restore it "
            "(config.json) to continue the run, or choose another folder (out)"
        )
    old, new = before.get("chat"), now.get("chat")
    if old and new and old != new:
        raise ValueError(
            f"{folder}: the chat template of {now['name']} has changed since this run started: the hash of what it "
            f"writes was {old}, now {new}. Restore it (chat_template.jinja, or chat_template in tokenizer_config.json) "
            "to continue the run, or choose another folder (out)"
        )
    old, new = before.get("stop_tokens"), now.get("stop_tokens")
    if old is not None and new is not None and old != new:
        raise ValueError(
            f"{folder}: the tokens that end an answer of {now['name']} have changed since this run started: they were "
            f"{old}, now {new}. Restore them (eos_token_id in generation_config.json) to continue the run, or choose "
            "another folder (out)"
        )


def changed_fields(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> str:
    """Return the fields of a config that have changed, with both values; "" for none. A field that only one has is not
    compared: it is of another version of transformers."""
    old, new = before or {}, now or {}
    names = sorted(name for name in old.keys() & new.keys() if old[name] != new[name])
    found = [_change(name, old[name], new[name]) for name in names]
    more = f"; and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return "; ".join(found[:NAMED]) + more


def _change(name: str, old: Any, new: Any) -> str:
    """Return one change in words; of nested values, only the keys that differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
        return "; ".join(_change(f"{name}.{key}", old.get(key), new.get(key)) for key in keys)
    return f"{name} was {old!r}, now {new!r}"
