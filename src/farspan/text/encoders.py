"""Sentence encoders: loading them, and the record by which an index recognises its own."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from farspan.extras import optional_import
from farspan.files import expanded
from farspan.record import changed_fields
from farspan.text.corpora import tokenizer_hash

HASH, CONFIG = "encoder_fingerprint", "encoder_config"  # keys of the record


def encoder_named(name: str) -> Any:
    """Return an encoder of sentence-transformers; the last one is kept until its files change.

    Raises:
        ValueError: the extra `retrieval` is not installed, or there is no such encoder.
    """
    statuses = ((file, file.stat()) for file in files_of(name))
    return _loaded(name, tuple((file, status.st_size, status.st_mtime_ns) for file, status in statuses))


def vectors_of(encoder: Any, texts: Sequence[str], *, query: bool = False) -> Float[np.ndarray, "texts dim"]:
    """Return the vectors of passages, or of queries, with the prompt and the modules that an encoder has for them."""
    encode = encoder.encode_query if query else encoder.encode_document
    return np.asarray(encode(list(texts), show_progress_bar=False), np.float32)


def num_cut(encoder: Any, texts: Sequence[str]) -> int:
    """Return how many of some texts have more tokens than an encoder reads, without its prompt."""
    if (most := getattr(encoder, "max_seq_length", None)) is None or not callable(encoder.tokenizer):
        return 0
    return sum(len(ids) > most for ids in encoder.tokenizer(list(texts), verbose=False)["input_ids"])


def files_of(name: str) -> tuple[Path, ...]:
    """Return the files of an encoder in a folder; () for one of the hub."""
    return tuple(sorted(path for path in expanded(name).rglob("*") if path.is_file()))


def record_of(encoder: Any) -> dict[str, Any]:
    """Return a hash of an encoder's weights, tokenizer, pooling and limits, and the fields of its config that change
    vectors; {} for an object that is no module of torch."""
    import torch

    from farspan import hf
    from farspan.lm import fingerprint

    if not isinstance(encoder, torch.nn.Module):
        return {}
    parts = [[type(part).__name__, _pooling(part)] for part in encoder.children()]
    limits = [getattr(encoder, name, None) for name in ("max_seq_length", "prompts", "default_prompt_name")]
    if any((getattr(encoder, "prompts", None) or {}).values()):
        limits.append("prompts by role")  # older versions gave none, and so made other vectors
    content = json.dumps([fingerprint(encoder), tokenizer_hash(encoder.tokenizer), parts, limits], default=str)
    record: dict[str, Any] = {HASH: hashlib.sha256(content.encode()).hexdigest()[:16]}
    body = next((part for part in encoder.modules() if hasattr(part, "config")), None)
    return record if body is None else record | {CONFIG: hf.scoring_fields(body.config)}


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return in what two records differ; "" if in nothing, or if one is not known."""
    old, new = before.get(HASH), now.get(HASH)
    if old and new and old != new:
        return f"its hash was {old}, now {new}"
    return changed_fields(before.get(CONFIG), now.get(CONFIG))


def _pooling(part: Any) -> str:
    """Return how a module makes one vector of those of all tokens; "" if it does not."""
    if (mode := getattr(part, "pooling_mode", None)) is not None:
        return str(mode)
    written = getattr(part, "get_pooling_mode_str", None)  # of sentence-transformers 5
    return str(written()) if written is not None else ""


@lru_cache(maxsize=1)
def _loaded(name: str, files: tuple[tuple[Path, int, int], ...]) -> Any:
    from farspan.loading.errors import explained
    from farspan.loading.places import cached_parts

    library = optional_import("sentence_transformers", "retrieval")
    with explained(name, "encoder", "weights", None), cached_parts(name, {}):
        return library.SentenceTransformer(name)
