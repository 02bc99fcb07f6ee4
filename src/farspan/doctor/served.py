"""Check that a server gives the numbers that a measurement needs: the same each time, and for the tokens sent."""

import math
from collections.abc import Callable, Sequence

import torch

from farspan.doctor.subject import Check, beginning
from farspan.reader.logits import Sampling
from farspan.reader.served import ServedLM
from farspan.reader.served.client import NotServedError, ServerError
from farspan.reader.served.transports import UNCHANGED, Completions, Expected, Transport

READ, SCORED = 160, 16  # tokens of the text, and tokens scored after it
NOISE = 0.05  # nats; engines that batch differently round differently
LIMIT = 0.9  # share of a text that the prefix cache returns when it is sent again


def diagnose_server(
    lm: ServedLM, text: str | None = None, *, watch: Callable[[str, int, int], None] | None = None
) -> list[Check]:
    """Query a server with a text of 160 tokens in several ways, and compare its answers.

    Raises:
        ValueError: a text that is too short.
    """
    ids = lm.tokenizer(text or beginning("builtin"), add_special_tokens=False)["input_ids"]
    if len(ids) < READ + SCORED:
        raise ValueError(f"the text has {len(ids)} tokens, the checks need {READ + SCORED}: give a longer one (--text)")
    subject = Server(lm, [*lm.separator.ids, *ids[:READ]], ids[READ : READ + SCORED])
    checks = []
    for number, (name, question) in enumerate(QUESTIONS.items()):
        if watch is not None:
            watch(name, number, len(QUESTIONS))
        try:
            passed, measured, allowed, note = question(subject)
        except ServerError as error:
            passed, measured, allowed, note = False, "refused", "", str(error)
        shown = "other hits, or nats of other tokens" if measured == math.inf else measured
        checks.append(Check(name, passed, shown, allowed, note))
    return checks


Answer = tuple[bool | None, float | str, str, str]  # the fields of a check after its name


class Server:
    """A server, a text and the tokens to score after it."""

    def __init__(self, lm: ServedLM, prefix: Sequence[int], target: Sequence[int]) -> None:
        self.lm, self.prefix, self.target = lm, prefix, target

    def ask(self, transport: Transport | None = None, prefix: Sequence[int] | None = None) -> list[Expected]:
        how = transport or self.lm.transport
        return how.expect(prefix or self.prefix, self.target, range(len(self.target)))

    def token_ids(self) -> Answer:
        """Other tokens before the same target must change the answer: a server that takes text cannot see them all."""
        first = self.ask()
        if not any(rank == 0 or not math.isnan(nats) for nats, rank in first):
            return None, "", "", "it guesses none of the tokens, and gives no log-probabilities"
        turned = [*self.lm.separator.ids, *reversed(self.prefix[len(self.lm.separator.ids) :])]
        changed = _apart(first, self.ask(prefix=turned))
        return changed > NOISE, changed, f"> {NOISE} nats or hits", "between the text and the same tokens reversed"

    def log_probabilities(self) -> Answer:
        known = sum(not math.isnan(nats) for nats, _ in self.ask())
        every = known == len(self.target)
        note = "" if every else "curves and recall can be measured; perplexity and likelihoods cannot"
        return every or None, f"{known} of {len(self.target)}", "every token", note

    def repeats(self) -> Answer:
        first = self.ask()
        apart = max(_apart(first, self.ask()) for _ in range(3))
        return apart <= NOISE, apart, f"≤ {NOISE} nats, no other hit", "the same request four times"

    def order(self) -> Answer:
        """Answers must not depend on earlier requests; stale entries of a cache change them (vLLM issue 42019)."""
        first = self.ask()
        self.ask(prefix=self.prefix[: len(self.prefix) // 2])
        self.ask(prefix=[*self.lm.separator.ids, *self.prefix[READ // 3 :]])
        apart = _apart(first, self.ask())
        return apart <= NOISE, apart, f"≤ {NOISE} nats, no other hit", "before and after requests about other texts"

    def prefix_cache(self) -> Answer:
        self.ask()
        self.lm.client.take()
        self.ask()
        used = self.lm.client.take()
        if used.cached_tokens is None:
            return None, "", "", "the server does not report how many tokens it takes from its cache"
        share = used.cached_tokens / max(1, used.prompt_tokens)
        note = "" if share >= LIMIT else "each request reads its text again"
        return (share >= LIMIT) or None, f"{share:.0%}", f"≥ {LIMIT:.0%} of a known text", note

    def echo(self) -> Answer:
        """Completions that return the prompt with log-probabilities; no way of querying a server needs them."""
        body = {"model": self.lm.transport.model, "prompt": list(self.prefix), "max_tokens": 1}
        try:
            answer = self.lm.client.post("/v1/completions", body | {"echo": True, "logprobs": 1})
            known = sum(one is not None for one in answer["choices"][0]["logprobs"]["token_logprobs"])
        except (ServerError, LookupError, TypeError):
            return None, "", "", "not offered, and not needed"
        every = known >= len(self.prefix) - 1
        note = "" if every else "the prompt is not scored, which is not needed"
        return every or None, f"{known} of {len(self.prefix)}", "every token but the first", note

    def two_ways(self) -> Answer:
        """Compare new tokens with log-probabilities of the prompt, which an engine computes in different shapes."""
        if self.lm.transport.name == "one_token":
            return None, "", "", "only new tokens are requested from the server"
        written, _ = self.lm.transport.generate(self.prefix, Sampling(SCORED))  # so that there are hits
        subject = Server(self.lm, self.prefix, [*written, *self.target])
        ours = subject.ask()
        try:
            other = subject.ask(
                Completions(self.lm.client, self.lm.transport.model, self.lm.tokenizer, sampling=UNCHANGED)
            )
        except NotServedError as error:
            return None, "", "", str(error)
        both = [(a[1] == 0, b[1] == 0) for a, b in zip(ours, other, strict=True) if b[1] >= 0]
        note = f"{sum(a and b for a, b in both)} hits both ways, by new tokens and by the prompt's own"
        differ = sum(a != b for a, b in both)
        return differ == 0, f"{differ} of {len(both)}", "no other hit", note


def _apart(one: Sequence[Expected], other: Sequence[Expected]) -> float:
    """Return the largest difference in nats; infinite if a token is hit in one only, or has nats in one only."""
    if any((a[1] == 0, math.isnan(a[0])) != (b[1] == 0, math.isnan(b[0])) for a, b in zip(one, other, strict=True)):
        return math.inf
    nats = torch.tensor([[a[0] - b[0] for a, b in zip(one, other, strict=True)]], dtype=torch.float64)
    return float(nats.abs().nan_to_num(0.0).max())


QUESTIONS: dict[str, Callable[[Server], Answer]] = {
    "token ids": Server.token_ids,
    "log-probabilities": Server.log_probabilities,
    "repeats": Server.repeats,
    "order of requests": Server.order,
    "prefix cache": Server.prefix_cache,
    "echo": Server.echo,
    "two ways": Server.two_ways,
}
