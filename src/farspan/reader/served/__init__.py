"""Models on an inference server (vLLM, SGLang, llama-server, ...) as an LM."""

import hashlib
import math
import reprlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from farspan.files import LONGEST, check_number, expanded
from farspan.lm import LM, choose_separator
from farspan.loading import load_tokenizer
from farspan.reader.logits import Sampling
from farspan.reader.served.client import Client, NotServedError, ServerError
from farspan.reader.served.memory import Placeholder, ServedReader
from farspan.reader.served.transports import PROBED, UNREADABLE, Completions, InputLogprobs, Transport, probe
from farspan.text.corpora import tokenizer_hash
from farspan.text.prompts import decoded

__all__ = ["ServedLM", "ServerError", "served"]

MOST_PARAMETERS = 10**15
HOW_QUERIED = {
    "prompt_logprobs": "one request scores all tokens of a text",
    "input_logprobs": "one request scores all tokens after a position",
    "one_token": "one request for each scored token",
}
# with line ends, runs of spaces, digits and an accent, which tokenizers split in different ways
SENTENCE = "The quick brown fox jumps over the lazy dog.\n\n  In 2024,   12 naïve foxes did not."


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ServedLM(LM):
    """A causal model on a server. The tokenizer runs here."""

    transport: Transport
    client: Client
    num_entries: int  # of the vocabulary, as the server reports, else the tokenizer's

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def vocabulary(self) -> int:
        return self.num_entries

    @property
    def stop_tokens(self) -> list[int]:
        return [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]

    @property
    def num_parts(self) -> int:
        return 1

    @property
    def _key_bytes(self) -> dict[int | None, int]:
        """Empty: the keys are the server's."""
        return {}

    @property
    def num_bytes(self) -> int:
        return 0

    @property
    def limit(self) -> str:
        assert self.position_limit is not None
        return f"and one more is written; the server takes {self.position_limit + 1:,}"

    @property
    def how_queried(self) -> str:
        return f"{self.name} is queried through {self.transport.name}: {HOW_QUERIED[self.transport.name]}"

    @property
    def rows_at_once(self) -> int | None:
        """One repeat after the other: interleaved prefixes evict each other from the server's cache."""
        return 1

    def flops(self, num_before: int, num_tokens: int, num_scored: int, most: float = math.inf) -> float:
        """Return the number of tokens, for dividing work into shards: the server does not report the model's size."""
        return float(num_tokens)

    def first_not_finite(self) -> AbstractContextManager[Callable[[], str]]:
        return nullcontext(lambda: "on the server")

    def renew(self) -> None:
        """Do nothing: the server reports no weights."""

    def own_reader(self) -> ServedReader:
        return ServedReader(self)


def served(
    base_url: str,
    *,
    model: str | None = None,
    tokenizer: str | None = None,
    trained_length: int | None = None,
    concurrency: int | None = None,
    wait: float = 60.0,
    insecure: bool = False,
    trust_remote_code: bool | None = False,
) -> LM:
    """Return a model on a server, to measure curves, recall, perplexity and tasks.

    A probe of a few tokens finds how the server can score: vLLM's `prompt_logprobs`, SGLang's `input_logprobs`, or
    one new token for each scored one. Keys come from the environment variable FARSPAN_API_KEY (or OPENAI_API_KEY).

    Args:
        base_url: such as http://127.0.0.1:8000.
        model: the name on the server; default: the only one it serves.
        tokenizer: folder, GGUF file or hub id; default: the one that the server names.
        trained_length: tokens; default: the server's context.
        concurrency: parallel requests if each scores one token; default 1 for llama-server, which has a cache for
            each, else 8.
        wait: seconds to wait for a server that has answered before and cannot be reached.
        insecure: allow http to machines other than this one.

    Raises:
        ValueError: no server, no such model, no way to score tokens, or a tokenizer that does not match.
    """
    client = Client(base_url, wait=wait, insecure=insecure)
    about = _about(client, model)
    name, meta = about["id"], _object(f"{client.base_url}/v1/models", about, "meta")
    source = tokenizer or str(about.get("root") or name)
    if tokenizer is None and "/" not in source and not expanded(source).is_dir():
        raise ValueError(
            f"{client.base_url} names its model {source!r}, which is neither a folder nor a hub id: give the folder, "
            "GGUF file or hub id of its tokenizer (--tokenizer)"
        )
    words = load_tokenizer(source, what="tokenizer", trust_remote_code=trust_remote_code)
    separator = choose_separator(words)
    ids = [*separator.ids, *words(SENTENCE, add_special_tokens=False)["input_ids"]]
    if (entries := _count(client.base_url, meta, "n_vocab")) is not None and len(words) > entries:
        raise ValueError(
            f"tokenizer {source!r} has {len(words):,} entries, the model on {client.base_url} only {entries:,}: they "
            "do not belong together (--tokenizer)"
        )
    _check_tokens(client, name, words, source)
    transport = probe(client, name, words, ids, concurrency)
    _check_answer(transport, words, ids, source)
    context, most = _context(client, about, transport.engine)
    shown = f"{_short(name)} ({transport.engine})"
    identity = {
        "name": shown,
        "revision": None,
        "architecture": None,
        "parameters": _count(client.base_url, meta, "n_params", MOST_PARAMETERS),
        "dtype": None,
        "attention": transport.name,
        "device": client.base_url,
        "trained_length": trained_length or context,
        "config_trained_length": context,
        "separator": {"kind": separator.kind, "ids": list(separator.ids)},
        "tokenizer": tokenizer_hash(words),
        "fingerprint": hashlib.sha256(f"{name} {entries} {context}".encode()).hexdigest()[:16],
        "sentence_nats": _sentence_nats(transport, ids, len(separator.ids)),
    }
    client.take()
    return ServedLM(
        Placeholder(shown),
        words,
        shown,
        separator,
        trained_length or context,
        None if most is None else most - 1,  # one new token is requested after the text
        identity,
        transport=transport,
        client=client,
        num_entries=entries or len(words),
    )


def _sentence_nats(transport: Transport, ids: list[int], begin: int) -> list[float | None]:
    """Return the nats of the first tokens of SENTENCE, by which a run notices that a server has other weights; None: a
    token is not among those that the server lists. Later tokens are easy to predict, and alike for many models."""
    scored = transport.expect(ids[:begin], ids[begin:], range(min(PROBED, len(ids) - begin)))
    return [round(nats, 3) if math.isfinite(nats) else None for nats, _ in scored]


def _short(name: str) -> str:
    """Return a model's name on a server, without folders if it is a file path."""
    return Path(name).name if name.endswith(".gguf") or name.startswith("/") else name


def _about(client: Client, model: str | None) -> dict[str, Any]:
    """Return the server's entry for a model."""
    try:
        listed = client.get("/v1/models")
    except NotServedError as error:
        raise ServerError(f"{client.base_url} lists no models: is it the server's base URL? ({error})") from error
    models = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(models, list) or not models:
        raise ServerError(f"{client.base_url} serves no model: got {str(listed)[:200]}")
    for one in models:
        if not isinstance(one, dict) or not isinstance(one.get("id"), str) or not one["id"]:
            raise ServerError(
                f"{client.base_url}/v1/models lists a model without a name: got {reprlib.repr(one)}, expected "
                'an object such as {"id": "NAME"}'
            )
    names = [one["id"] for one in models]
    if model is None and len(models) > 1:
        raise ValueError(f"{client.base_url} serves {', '.join(names)}: name one (--served-model)")
    if model is not None and model not in names:
        raise ValueError(f"{client.base_url} serves no model {model!r}: it has {', '.join(names)} (--served-model)")
    return dict(models[0 if model is None else names.index(model)])


def _object(where: str, answer: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an object in a server's answer; empty if it is null or missing. `where`: the address, for the error."""
    if not isinstance(found := answer.get(name) or {}, dict):
        raise ServerError(f"{where}: {name}: got {reprlib.repr(found)}, expected an object")
    return found


def _count(where: str, answer: dict[str, Any], name: str, most: int = LONGEST) -> int | None:
    """Return a whole number in a server's answer; None if it is 0, null or missing."""
    if (found := answer.get(name)) is not None:
        check_number(f"{where}: {name}", found, 0, most)
    return found or None


def _context(client: Client, about: dict[str, Any], engine: str) -> tuple[int | None, int | None]:
    """Return the tokens of the server's context, and the most that it accepts with one new token, which are fewer on
    SGLang; None if it does not report them."""
    more: dict[str, Any] = {}
    context = _count(f"{client.base_url}/v1/models", about, "max_model_len")
    path = "/get_server_info" if (is_sglang := engine == InputLogprobs.engine) else "/props"
    if is_sglang or context is None:
        with suppress(ServerError):
            found = client.get(path)
            more = found if isinstance(found, dict) else {}
    where = client.base_url + path
    of_slot = _count(where, _object(where, more, "default_generation_settings"), "n_ctx")
    context = context or _count(where, more, "context_length") or of_slot
    # SGLang refuses prompts of `max_req_input_len` tokens: its memory can hold fewer keys than a context has
    most = _count(where, more, "max_req_input_len") or context
    return context or most, most


def _check_tokens(client: Client, model: str, tokenizer: Any, source: str) -> None:
    """Raise ValueError if the server can tokenise and its tokens differ."""
    ours = list(tokenizer(SENTENCE, add_special_tokens=False)["input_ids"])
    bodies = {"prompt": SENTENCE, "add_special_tokens": False}, {"content": SENTENCE, "add_special": False}
    for body in bodies:
        try:
            answer = client.post("/tokenize", {"model": model, **body})
        except ServerError:
            continue
        theirs = answer.get("tokens") if isinstance(answer, dict) else None
        if isinstance(theirs, list) and theirs and theirs != ours:
            raise ValueError(
                f"tokenizer {source!r} does not match the server's: a sentence is {ours[:6]} ... here and "
                f"{theirs[:6]} ... there. Give the model's own (--tokenizer)"
            )
        if theirs:
            return


def _check_answer(transport: Transport, tokenizer: Any, prompt: list[int], source: str) -> None:
    """Raise ValueError if the tokenizer decodes new tokens to another text; not every server can tokenise."""
    if isinstance(transport, Completions):  # it returns only text
        return
    try:
        new, text = transport.generate(prompt, Sampling(PROBED))
    except ServerError:  # no ids of new tokens: curves do not need them
        return
    several = prompt[-1:], [*prompt[-1:], *new]
    before, both = (decoded(tokenizer, ids, skip_special_tokens=True) for ids in several)
    ours, theirs = "".join(both[len(before) :].split()), "".join(text.split())
    if theirs and UNREADABLE not in ours + theirs and ours != theirs:
        raise ValueError(
            f"tokenizer {source!r} does not match the server's: new tokens are {ours[:40]!r} here and {theirs[:40]!r} "
            "there. Give the model's own (--tokenizer)"
        )
