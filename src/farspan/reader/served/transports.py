"""Three ways to request scores of given tokens from a server, and the probe that chooses one.

    prompt_logprobs   vLLM: one request returns log-probability and rank of every token of its prompt
    input_logprobs    SGLang: the same from a position on; earlier tokens are taken from its cache
    one_token         llama-server, and completions in general: one request for each scored token

`one_token` sends the text again each time, which costs one token if the server keeps a prefix cache. Its hits are the
server's own choices. Log-probabilities are known only for the likeliest tokens, which it returns, and never guessed.
If tokens tie for the largest log-probability, the one with the smallest id is the hit, as in this process.
"""

import math
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, ClassVar, Protocol, runtime_checkable

from farspan.reader.logits import Sampling
from farspan.reader.served.client import (
    Client,
    NoTextError,
    NotServedError,
    OtherTokensError,
    ServerError,
    TooLongError,
)
from farspan.text.prompts import continued, decoded

# nats of a token (NaN: not known; infinite: the model gave none), and its rank (0: the server's choice; -1: not known)
Expected = tuple[float, int]
TOP = 10  # likeliest tokens requested with each new one
TIES = 2  # the same for given tokens, to detect ties
PROBED = 8  # new tokens requested to check that their text identifies them
TOKEN_ID = "token_id:"  # prefix of a token that vLLM names by its id
UNREADABLE = "\ufffd"  # the text of an incomplete character
LEAST = -9999.0  # for a log-probability of minus infinity, which JSON lacks; llama-server: the smallest float32
CUT = ("length", "limit", "abort", "error")  # reasons to end an answer that are not the model's
CHAT = "/v1/chat/completions"
# a server's own defaults, often from generation_config.json, would change greedy choices and the sampled distribution
UNCHANGED = {"repetition_penalty": 1.0, "top_k": -1, "min_p": 0.0}
# llama-server's are options of its command: all samplers but these, and penalties, which older versions always apply
UNCHANGED_BY_LLAMA = {"samplers": ["temperature", "top_p"], "dynatemp_range": 0.0, "mirostat": 0}
UNCHANGED_BY_LLAMA |= {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


@runtime_checkable
class Transport(Protocol):
    """One way to request scores and new tokens from one server."""

    client: Client
    model: str  # its name on the server
    name: ClassVar[str]
    engine: ClassVar[str]
    gives_nats: ClassVar[bool]  # of every token; otherwise only of the likeliest

    def expect(self, prefix: Sequence[int], target: Sequence[int], keep: range) -> list[Expected]:
        """Return nats and rank of the tokens at the positions `keep` of `target`, which follows `prefix`.

        Raises:
            ServerError: an answer that is not about the tokens sent.
        """

    def generate(self, prompt: Sequence[int], how: Sampling) -> tuple[list[int], str]:
        """Return the tokens that the server generates after `prompt`, without the stop token, and its text.

        Raises:
            ValueError: the engine does not take one of the settings.
        """


@dataclass
class PromptLogprobs:
    """vLLM's completions with `prompt_logprobs`."""

    client: Client
    model: str
    name: ClassVar[str] = "prompt_logprobs"
    engine: ClassVar[str] = "vLLM"
    gives_nats: ClassVar[bool] = True

    def expect(self, prefix: Sequence[int], target: Sequence[int], keep: range) -> list[Expected]:
        prompt = [*prefix, *target[: keep.stop]]
        first = len(prefix) + keep.start
        body = {"model": self.model, "prompt": prompt, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": TIES}
        # a new salt avoids the cache: entries of cached tokens are not computed, and in some versions undefined
        answer = self.client.post("/v1/completions", body | UNCHANGED | {"cache_salt": uuid.uuid4().hex})
        found = _choice(answer).get("prompt_logprobs")
        if not isinstance(found, list) or len(found) != len(prompt):
            raise ServerError(
                f"{self.client.base_url} gave log-probabilities of {len(found or ())} tokens, {len(prompt)} were sent"
            )
        if (cached := _counted(self.client, answer, len(prompt)) or 0) > first:
            raise ServerError(
                f"{self.client.base_url} takes {cached:,} tokens from its cache, without log-probabilities of them: "
                "start it with --no-enable-prefix-caching"
            )
        return [_entry(found[i], prompt[i], i) for i in range(first, len(prompt))]

    def generate(self, prompt: Sequence[int], how: Sampling) -> tuple[list[int], str]:
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": how.max_new_tokens,
            "min_tokens": how.min_new_tokens,
            "stop_token_ids": list(how.stop),
            "return_token_ids": True,
            **UNCHANGED,
            **how.named,
        }
        answer = self.client.post("/v1/completions", body)
        _counted(self.client, answer, len(prompt))
        choice = _choice(answer)
        ended = choice.get("finish_reason"), choice.get("stop_reason")
        new = _before_stop(self.client, choice.get("token_ids"), how, *ended)
        return new, str(choice.get("text") or "")


def _nats(logprob: float | None) -> float:
    """Return the nats of a log-probability; infinite for what servers return in place of one that is not finite."""
    return math.inf if logprob is None or logprob <= LEAST else -float(logprob)


def _entry(entry: Any, token: int, position: int) -> Expected:
    found = entry.get(str(token)) if isinstance(entry, dict) else None
    if not isinstance(found, dict) or not isinstance(found.get("logprob", ""), int | float | None):
        raise OtherTokensError(
            f"the server answered about another token than {token} at position {position:,}: its tokenizer or cache "
            "does not match what it reports. Give the model's own tokenizer (--tokenizer), or restart the server"
        )
    nats = {int(id): _nats(one.get("logprob")) for id, one in entry.items()}
    least, likeliest = min((value, id) for id, value in nats.items())
    if nats[token] <= least:  # the server's rank counts tied tokens as better than each other
        return least, int(likeliest != token)
    return nats[token], int(found.get("rank") or 2) - 1


@dataclass
class InputLogprobs:
    """SGLang's /generate with `logprob_start_len`."""

    client: Client
    model: str
    name: ClassVar[str] = "input_logprobs"
    engine: ClassVar[str] = "SGLang"
    gives_nats: ClassVar[bool] = True

    def expect(self, prefix: Sequence[int], target: Sequence[int], keep: range) -> list[Expected]:
        prompt = [*prefix, *target[: keep.stop]]
        first = len(prefix) + keep.start
        body = {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, **UNCHANGED},
            "return_logprob": True,
            "logprob_start_len": first - 1,  # the first entry has no log-probability
            "top_logprobs_num": TIES,
        }
        about = self._about(self.client.post("/generate", body), len(prompt))
        found, top = about.get("input_token_logprobs"), about.get("input_top_logprobs")
        wanted = len(prompt) - first
        if not isinstance(found, list) or not isinstance(top, list) or min(len(found), len(top)) < wanted:
            raise ServerError(f"{self.client.base_url} gave fewer log-probabilities than the {wanted} requested")
        expected = []
        pairs = zip(prompt[first:], found[len(found) - wanted :], top[len(top) - wanted :], strict=True)
        for position, (token, one, best) in enumerate(pairs, first):
            if one[1] != token or not best:
                raise OtherTokensError(
                    f"the server answered about token {one[1]}, not {token}, at position {position:,}"
                )
            likeliest = min((_nats(value), id) for value, id, *_ in [*best, one])[1]
            expected.append((_nats(one[0]), int(likeliest != token)))
        return expected

    def generate(self, prompt: Sequence[int], how: Sampling) -> tuple[list[int], str]:
        settings = {
            "max_new_tokens": how.max_new_tokens,
            "min_new_tokens": how.min_new_tokens,
            "stop_token_ids": list(how.stop),
            "temperature": how.temperature,
            "top_p": how.top_p,
            **UNCHANGED,
        }
        if how.temperature > 0.0 and how.seed is not None:
            if not self._takes_seeds():
                raise ValueError(
                    f"SGLang ignores seeds unless it is started with --enable-deterministic-inference: got seed = "
                    f"{how.seed} and temperature = {how.temperature:g}. Restart the server with this option, or use "
                    "temperature 0"
                )
            settings["sampling_seed"] = how.seed % 2**31  # held as int32
        answer = self.client.post("/generate", {"input_ids": list(prompt), "sampling_params": settings})
        ended = self._about(answer, len(prompt)).get("finish_reason") or {}
        new = _before_stop(self.client, answer.get("output_ids"), how, ended.get("type"), ended.get("matched"))
        return new, str(answer.get("text") or "")

    def _takes_seeds(self) -> bool:
        try:
            about = self.client.get("/get_server_info")
        except NotServedError:
            return False
        return isinstance(about, dict) and bool(about.get("enable_deterministic_inference"))

    def _about(self, answer: Any, sent: int) -> dict[str, Any]:
        about = answer.get("meta_info") if isinstance(answer, dict) else None
        if not isinstance(about, dict):
            raise ServerError(f"{self.client.base_url}/generate answers without meta_info")
        self.client.count(sent, about.get("cached_tokens"))
        return about


@dataclass
class LlamaServer:
    """llama-server's /completion, one new token at a time."""

    client: Client
    model: str
    concurrency: int = 1
    name: ClassVar[str] = "one_token"
    engine: ClassVar[str] = "llama-server"
    gives_nats: ClassVar[bool] = False

    def expect(self, prefix: Sequence[int], target: Sequence[int], keep: range) -> list[Expected]:
        def one(i: int) -> Expected:
            return self._next([*prefix, *target[:i]], target[i])

        return _in_order(one, keep, self.concurrency)

    def _next(self, prompt: Sequence[int], token: int) -> Expected:
        answer = self._post(prompt, {"n_predict": 1, "temperature": 0.0, "n_probs": TOP})
        tokens, listed = answer.get("tokens"), _likeliest(answer)
        if not isinstance(tokens, list) or len(tokens) != 1:
            raise ServerError(f"{self.client.base_url} returned {len(tokens or ())} new tokens, 1 was requested")
        ranked = {one["id"]: (_nats(one["logprob"]), i) for i, one in enumerate(listed)}
        nats, place = ranked.get(token, (math.inf, len(ranked)))
        # the server gives LEAST for probabilities too small for float32, which are not known, as those not listed
        return nats if math.isfinite(nats) else math.nan, 0 if tokens[0] == token else max(1, place)

    def generate(self, prompt: Sequence[int], how: Sampling) -> tuple[list[int], str]:
        if how.min_new_tokens:
            raise ValueError("llama-server takes no smallest number of new tokens: measure this task on another engine")
        answer = self._post(prompt, {"n_predict": how.max_new_tokens, **how.named})
        own = answer["tokens"][-1] if answer.get("stop_type") == "eos" else None
        new = _before_stop(self.client, answer["tokens"], how, answer.get("stop_type"), own)
        return new, str(answer.get("content") or "")

    def _post(self, prompt: Sequence[int], more: dict[str, Any]) -> dict[str, Any]:
        body = {"prompt": list(prompt), "cache_prompt": True, "return_tokens": True, **UNCHANGED_BY_LLAMA, **more}
        answer = self.client.post("/completion", body)
        if not isinstance(answer, dict) or "tokens" not in answer:
            raise NotServedError(f"{self.client.base_url}/completion returns no tokens")
        # not `truncated`, which is also set where new tokens reach the end of the context
        if (read := answer.get("tokens_evaluated", len(prompt))) < len(prompt):
            raise TooLongError(
                f"{self.client.base_url} read {read:,} tokens, {len(prompt):,} were sent: it has cut the text. Choose "
                "shorter lengths, or start it with a larger context (--ctx-size)"
            )
        computed = (answer.get("timings") or {}).get("prompt_n")
        self.client.count(len(prompt), None if computed is None else max(0, len(prompt) - int(computed)))
        return answer


def _likeliest(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the likeliest tokens of llama-server's answer, best first."""
    listed = answer.get("completion_probabilities") or [{}]
    return list(listed[0].get("top_logprobs") or [])


@dataclass
class Completions:
    """Any /v1/completions, one new token at a time. Prompts are token ids, or text with these tokens."""

    client: Client
    model: str
    tokenizer: Any
    concurrency: int = 8
    as_text: bool = False  # send prompts as text
    sampling: dict[str, Any] = field(default_factory=dict)  # settings beyond the interface's own, of a known engine
    name: ClassVar[str] = "one_token"
    engine: ClassVar[str] = "completions"
    gives_nats: ClassVar[bool] = False
    _texts: dict[tuple[int, int], str] = field(default_factory=dict, repr=False)

    def expect(self, prefix: Sequence[int], target: Sequence[int], keep: range) -> list[Expected]:
        def one(i: int) -> Expected:
            prompt = [*prefix, *target[:i]]
            try:
                choice = self._post(prompt, Sampling(1), {"logprobs": TOP, "return_tokens_as_token_ids": True})
            except NoTextError:
                return math.nan, -1
            logprobs = choice.get("logprobs") or {}
            listed, new = ((logprobs.get(name) or [{}])[0] for name in ("top_logprobs", "tokens"))
            if str(new).startswith(TOKEN_ID):  # the server names ids
                written = f"{TOKEN_ID}{target[i]}"
            else:
                written, new = self._text(prompt[-1], target[i]), choice["text"]
                if self._is_special(target[i]):  # servers leave them out of the text
                    return math.nan, -1
            nats = _nats(listed[written]) if written in (listed or ()) else math.nan
            if not written or UNREADABLE in written:  # other tokens have the same text
                return math.nan, -1
            return nats, int(new != written)

        return _in_order(one, keep, self.concurrency)

    def check(self, prompt: Sequence[int]) -> None:
        """Raise OtherTokensError if the server drops the space before a word: each would count as another token."""
        ids = continued(self.tokenizer, self._post(prompt, Sampling(PROBED))["text"])[0].tolist()
        for i in range(1, len(ids)):
            try:
                new = self._post([*prompt, *ids[:i]], Sampling(1))["text"]
            except NoTextError:
                continue
            whole = self._text(ids[i - 1], ids[i])
            if new != whole and new == whole.strip():
                raise OtherTokensError(
                    f"{self.client.base_url} answers {new!r} where {whole!r} is the token: its tokens cannot be told "
                    "from their text"
                )

    def _text(self, before: int, token: int) -> str:
        """Return the text that a token adds after another one."""
        if (before, token) not in self._texts:
            alone, both = (decoded(self.tokenizer, ids) for ids in ([before], [before, token]))
            self._texts[before, token] = both[len(alone) :]
        return self._texts[before, token]

    def _is_special(self, token: int) -> bool:
        return decoded(self.tokenizer, [token]) != decoded(self.tokenizer, [token], skip_special_tokens=True)

    def _prompt(self, ids: Sequence[int]) -> str | None:
        """Return the text that a server tokenises to these tokens; None: there is none."""
        alone = len(self.tokenizer("")["input_ids"])
        for text in (decoded(self.tokenizer, ids[alone:]), decoded(self.tokenizer, ids)):
            if self.tokenizer(text)["input_ids"] == list(ids):
                return text
        return None

    def generate(self, prompt: Sequence[int], how: Sampling) -> tuple[list[int], str]:
        if how.min_new_tokens:
            raise ValueError("/v1/completions takes no smallest number of new tokens: measure this task elsewhere")
        stop = [decoded(self.tokenizer, [token]) for token in how.stop][:4]  # as many as the interface takes
        text = self._post(prompt, how, {"stop": stop} if stop else {})["text"]
        return continued(self.tokenizer, text)[0].tolist(), text

    def _post(self, prompt: Sequence[int], how: Sampling, more: dict[str, Any] | None = None) -> dict[str, Any]:
        sent = self._prompt(prompt) if self.as_text else list(prompt)
        if sent is None:
            raise NoTextError(f"{self.client.base_url} takes text only, and no text has these {len(prompt):,} tokens")
        body = {"model": self.model, "prompt": sent, "max_tokens": how.max_new_tokens}
        body |= self.sampling | how.named | (more or {})
        answer = self.client.post("/v1/completions", body)
        _counted(self.client, answer, len(prompt))
        used, choice = answer.get("usage") or {}, _choice(answer)
        if (read := used.get("prompt_tokens", len(prompt))) != len(prompt):
            raise ServerError(f"{self.client.base_url} read {read:,} tokens, {len(prompt):,} were sent")
        _refuse_cut(self.client, used.get("completion_tokens") or how.max_new_tokens, how, choice.get("finish_reason"))
        if not isinstance(choice.get("text"), str):
            raise ServerError(f"{self.client.base_url}/v1/completions returns no text")
        return choice


def _in_order(one: Callable[[int], Expected], keep: range, concurrency: int) -> list[Expected]:
    """Return `one(i)` for every position, at most `concurrency` at a time. The first runs alone to fill the cache."""
    if concurrency == 1 or len(keep) < 2:
        return [one(i) for i in keep]
    with ThreadPoolExecutor(concurrency) as pool:
        return [one(keep[0]), *pool.map(one, keep[1:])]


def _choice(answer: Any) -> dict[str, Any]:
    found = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(found, list) or not found or not isinstance(found[0], dict):
        raise ServerError(f"the server's answer has no choices: {str(answer)[:200]}")
    return found[0]


def _counted(client: Client, answer: Any, sent: int) -> int | None:
    """Count the tokens of an answered prompt; return how many came from the server's cache, if it reports it."""
    cached = ((answer.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens")
    client.count(sent, cached)
    return cached


def _before_stop(client: Client, tokens: Any, how: Sampling, reason: str | None, own: Any) -> list[int]:
    """Return new tokens without the stop token.

    Args:
        reason: why the answer ended, as the server names it.
        own: the stop token that the server found, if it names it; a model can have others than the tokenizer's.
    """
    if not isinstance(tokens, list):
        raise ServerError(f"{client.base_url} returns no ids of new tokens: use a later version of the server")
    _refuse_cut(client, len(tokens), how, reason)
    return [int(token) for token in takewhile(lambda token: token != own and token not in how.stop, tokens)]


def _refuse_cut(client: Client, count: int, how: Sampling, reason: str | None) -> None:
    if count < how.max_new_tokens and reason in CUT:
        raise ServerError(
            f"{client.base_url} ended an answer after {count} of {how.max_new_tokens} new tokens ({reason}). If it has "
            "a limit of its own, start it without (llama-server: --predict; vLLM: max_new_tokens of a generation "
            "config)"
        )


def probe(client: Client, model: str, tokenizer: Any, prompt: Sequence[int], concurrency: int | None) -> Transport:
    """Return the best transport for this server, found with a prompt of a few tokens.

    Raises:
        ServerError: no transport works; the message lists the reasons.
    """
    tried: list[Transport] = [
        PromptLogprobs(client, model),
        InputLogprobs(client, model),
        LlamaServer(client, model, concurrency or 1),
        Completions(client, model, tokenizer, concurrency or 8),
        Completions(client, model, tokenizer, concurrency or 8, as_text=True),
    ]
    reasons = []
    for one in tried:
        try:
            one.expect(prompt[:-4], prompt[-4:], range(4))
            if isinstance(one, Completions):
                one.check(prompt)
        except OtherTokensError:
            raise
        except ServerError as error:
            if not client.answered:
                raise
            reasons.append(f"{one.engine}: {error}")
        else:
            return one
    if _has_chat(client):
        raise ServerError(
            f"{client.base_url} serves chats only: it puts its own tokens around a text and takes no token ids, so "
            "that nothing can be scored. Serve the model with /v1/completions"
        )
    raise ServerError(f"{client.base_url} cannot score tokens. {'; '.join(dict.fromkeys(reasons))}")


def _has_chat(client: Client) -> bool:
    try:
        client.post(CHAT, {})
    except NotServedError as error:
        return error.status != 404
    except ServerError:
        return False
    return True
