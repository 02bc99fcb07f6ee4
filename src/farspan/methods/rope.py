"""RoPE with other frequencies: linear (position interpolation), NTK-aware, dynamic NTK, YaRN, truncated, any factors.

    f_m = theta^(-2m / d)                        angle per position of pair m of d / 2
    linear:  f_m / s                             Chen et al. 2023, arXiv 2306.15595, equation 4
    ntk:     theta · s^(d / (d - 2)) for theta   bloc97 2023; as in Peng et al. 2023, arXiv 2309.00071, definition 1
    dynamic: ntk with s(i) = max(1, factor · (i + 1) / original - (factor - 1)) for the query at i
    yarn:    ramp(m) · f_m / s + (1 - ramp(m)) · f_m, queries and keys times 0.1 ln s + 1        ibid., section 3
    truncated:  f_m where the pair rotates at least `turns` times in `original` tokens, else 0
                                                 Barbero et al. 2024, arXiv 2410.06205, section 6 (p-RoPE)
    factors: f_m / λ_m, λ from `file`, queries and keys times sqrt(1 + ln s / ln original)
                                                 LongRoPE, Ding et al. 2024, arXiv 2402.13753

s is `factor`, d the rotary dimension. The ramp rises from 0 to 1 between the pairs that rotate 32 times and once in
`original` tokens, linear in m and with rounded ends as in YaRN's own code. All types but dynamic rotate by fixed
frequencies, in the model's own attention. Keeps every key. Not trained. Layers with a sliding window that have a RoPE
of their own, as in Gemma 3, keep it: they see no farther than their window. Refused where only these have RoPE, as in
Cohere 2.

The p-RoPE paper trains with a fixed share of pairs without position; ours chooses these pairs by their rotations in
the trained length, without training. LongRoPE also leaves the first tokens of a text unscaled; ours, like transformers,
does not. `file` is JSON: a list of one factor per pair, or `rope_parameters` of transformers' longrope, alone or in a
config.json. Of these we read `long_factor`, `factor` (by default the ratio of the two lengths in the config.json), and
`attention_factor`, which replaces the root. `original_max_position_embeddings` and `rope_theta` must be the model's.

Dynamic: for each query, all keys are rotated by the frequencies of the length up to it, as in token-by-token generation
with keys cached before RoPE. A forward in transformers rotates a whole text by the frequencies of its full length, so
that a token's prediction depends on later tokens. Ours is causal and independent of how the text is cut, but slower:
every key is rotated again for each query beyond `original`.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from farspan import hf
from farspan.files import LONGEST, check_number, expanded, read_json
from farspan.hf.attend import Call, angles, dense, frequencies, turned
from farspan.lm import LM
from farspan.methods.base import ATTENTION, ROPE, Method
from farspan.reader import Reader, attending, dense_reader, read_alike
from farspan.specs import choice, limited

TYPES = ("linear", "ntk", "dynamic", "yarn", "truncated", "factors")
BETA_FAST, BETA_SLOW = 32.0, 1.0  # rotations within the original length, the ends of YaRN's ramp
LARGEST_FACTOR = 1_000_000
LIMITS = 1.2e-38, 3.4e38  # of the factors in a file: normal numbers of float32
# in a config.json, or in its parameters of RoPE
LONGER, ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"
RANGES = {LONGER: (1, LONGEST), ORIGINAL: (1, LONGEST), "rope_theta": LIMITS, "attention_factor": LIMITS}


@dataclass(frozen=True)
class Rope(Method):
    """RoPE for texts `factor` times as long as the model was trained on."""

    type: str = choice(TYPES)
    # of dynamic: how fast its scale grows; default the paper's 1
    factor: float | None = limited(None, 1, LARGEST_FACTOR)
    original: int | None = limited(None, 1, LONGEST)  # tokens; default: the model's trained length
    turns: float = limited(1.0, quiet=True)  # truncated: least rotations in `original`
    file: str | None = None  # JSON, for factors

    name: ClassVar[str] = "rope"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.type != "factors" and self.file is not None:
            raise ValueError(f"{self}: file belongs to rope:type=factors: leave it out")
        if self.type == "factors" and self.file is None:
            raise ValueError("rope:type=factors needs a file: write file=FACTORS.json")
        if self.turns != 1.0 and self.type != "truncated":
            raise ValueError(f"{self}: turns belongs to rope:type=truncated: leave it out")
        if self.factor is None and self.type == "dynamic":
            object.__setattr__(self, "factor", 1.0)
        if self.type == "truncated" and self.factor is not None:
            raise ValueError(f"{self}: truncated RoPE has no factor: leave it out")
        if self.type not in ("truncated", "factors") and self.factor is None:
            raise ValueError(
                f"rope:type={self.type} needs a factor, without which it changes nothing: write for example "
                f"rope:type={self.type},factor=4 for texts 4 times as long as the model was trained on"
            )

    @property
    def changes(self) -> tuple[str, ...]:
        return (ROPE, ATTENTION) if self.type == "dynamic" else (ROPE,)

    @property
    def files(self) -> tuple[Path, ...]:
        return (expanded(self.file),) if self.file is not None else ()

    def small(self, num_tokens: int) -> "Rope":
        if self.type != "dynamic":
            return self
        return replace(self, original=min(self.original or num_tokens, num_tokens // 5))

    def neutral(self, num_tokens: int) -> "Rope":
        if self.type == "factors":  # the file's factors cannot be changed
            return replace(self, type="linear", factor=1.0, file=None)
        if self.type == "truncated":
            return replace(self, turns=0.0)
        if self.type != "dynamic":
            return replace(self, factor=1.0)
        return replace(self, original=max(self.original or num_tokens, num_tokens))

    def extended(self, trained_length: int | None) -> int | None:
        original = self.original or trained_length
        if self.type in ("dynamic", "truncated") or original is None:
            return trained_length
        return int(original * self._factor)

    def neutral_limit(self, trained_length: int | None) -> int | None:
        limits = trained_length, self.original if self.type != "dynamic" else None
        return min((limit for limit in limits if limit is not None), default=None)

    def frequencies(self, lm: LM) -> tuple[Tensor, float] | None:
        if self.type == "dynamic":
            return None
        theta, own = hf.plain_rope(lm.model, name=str(self))
        dim, original = 2 * len(own), self._original(lm)
        if self.type == "truncated":
            return truncated(theta, dim, self.turns, original), 1.0
        if self.type == "factors":
            factors, scale = self._factors(lm, theta, len(own))
            return frequencies(theta, dim) / factors, scale
        return scaled(self.type, theta, dim, self._factor, original)

    @contextmanager
    def on(self, lm: LM) -> Iterator[Reader]:
        theta, own = hf.plain_rope(lm.model, name=str(self))
        original = self._original(lm)
        if not own.is_meta and not torch.allclose(own.float().cpu(), frequencies(theta, 2 * len(own)), rtol=0.01):
            raise ValueError(
                f"{self}: the RoPE of {lm.name} does not have the frequencies that its theta = {theta:g} gives"
            )
        if hf.rotates_only_near(lm.model):
            raise ValueError(
                f"{self} changes RoPE frequencies, and {lm.name} has RoPE only in layers with a sliding window, which "
                "see no farther than it: use full"
            )
        if (other := self.frequencies(lm)) is None:
            scores = partial(scores_by_length, own=own, theta=theta, factor=self._factor, original=original)
            with attending(lm, partial(dense, scores=scores), name=str(self)) as reader:
                yield reader
            return
        longer = replace(lm, trained_length=self.extended(lm.trained_length))
        read_alike(longer, lm)  # both frequencies are fixed, so reading in chunks works as before
        with hf.rope(lm.model, *other, name=str(self)) as scope:
            yield replace(dense_reader(longer), scope=scope)

    @property
    def _factor(self) -> float:
        """The factor, of `rope:type=factors` by default that of the file."""
        if self.factor is None and self.file is not None:
            if (found := read_factors(self.file).get("factor")) is None:
                raise ValueError(
                    f"rope:type=factors needs a factor, and {self.file} has none: write for example "
                    f"rope:type=factors,factor=4,file={self.file} for texts 4 times as long as the model was trained on"
                )
            return float(found)
        return 1.0 if self.factor is None else self.factor

    def _original(self, lm: LM) -> int:
        if (original := self.original or lm.trained_length) is None:
            raise ValueError(f"{self}: the config of {lm.name} has no trained length. Write original=TOKENS")
        return original

    def _factors(self, lm: LM, theta: float, pairs: int) -> tuple[Tensor, float]:
        """Return the factors [pairs] of the file, in float32, and the factor of cos and sin."""
        assert self.file is not None
        found, factor, original = read_factors(self.file), self._factor, self._original(lm)
        factors = torch.tensor(found["long_factor"], dtype=torch.float32)
        of_another = (
            (len(factors), pairs, "factors"),
            (found.get("rope_theta", theta), theta, "rope_theta"),
            (found.get(ORIGINAL, original), original, "original length"),
            (found.get("factor", factor), factor, "factor"),
        )
        for given, own, what in of_another:
            if given != own:
                raise ValueError(
                    f"{self.file} has factors of another model: got {what} = {given:g}, expected {own:g} for {lm.name}"
                )
        root = math.sqrt(1 + math.log(factor) / math.log(max(original, 2)))
        return factors, float(found.get("attention_factor", root))


def read_factors(file: str) -> dict[str, Any]:
    """Return the parameters of transformers' longrope in a JSON file, `long_factor` among them.

    Raises:
        ValueError: no such file, not JSON, no `long_factor` in it, or a number out of range.
    """
    try:
        content = read_json(expanded(file))
    except FileNotFoundError as error:
        raise ValueError(f"file of factors {file!r} does not exist: write file=FACTORS.json") from error
    config, found = {}, {"long_factor": content} if isinstance(content, list) else content
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(found, dict) and isinstance(found.get(name), dict):
            config, found = found, found[name]
    if not isinstance(found, dict) or not isinstance(found.get("long_factor"), list) or not found["long_factor"]:
        raise ValueError(
            f"{file} has no factors: expected a JSON list of positive numbers, one for each pair, or an object with "
            "such a list as long_factor"
        )
    for pair, one in enumerate(found["long_factor"]):
        check_number(f"{file}: factor of pair {pair}", one, *LIMITS)
    found = _given({name: config.get(name) for name in (LONGER, ORIGINAL)}) | _given(found)
    for name, limits in RANGES.items():
        if name in found:
            check_number(f"{file}: {name}", found[name], *limits)
    if ORIGINAL in found and found[ORIGINAL] < found.get(LONGER, 0):  # all that published configs give
        found.setdefault("factor", found[LONGER] / found[ORIGINAL])
    if "factor" in found:
        check_number(f"{file}: factor", found["factor"], 1.0, float(LARGEST_FACTOR))
    return found


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields without those that are null in JSON, which count as left out."""
    return {name: value for name, value in fields.items() if value is not None}


def truncated(theta: float, dim: int, turns: float, original: int) -> Tensor:
    """Return the frequencies [dim / 2]: 0 for pairs that rotate less than `turns` times in `original` tokens."""
    inv_freq = frequencies(theta, dim)
    return torch.where(original * inv_freq / (2 * math.pi) < turns, 0.0, inv_freq)


def scaled(type: str, theta: float, dim: int, factor: float, original: int) -> tuple[Tensor, float]:
    """Return the frequencies [dim / 2] in float32, and the factor of cos and sin."""
    if type == "ntk":
        return frequencies(ntk(theta, dim, factor), dim), 1.0
    if type == "linear":
        return frequencies(theta, dim) / factor, 1.0
    return yarn(theta, dim, factor, original), yarn_scale(factor)


def yarn(
    theta: float, dim: int, factor: float, original: int, fast: float = BETA_FAST, slow: float = BETA_SLOW
) -> Tensor:
    """Return YaRN's frequencies [dim / 2] in float32. `fast` and `slow`: rotations at the ends of the ramp."""
    low, high = (dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (fast, slow))
    low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
    ramp = ((torch.arange(dim // 2) - low) / max(high - low, 1e-3)).clamp(0, 1)
    inv_freq = frequencies(theta, dim)
    return inv_freq / factor * ramp + inv_freq * (1 - ramp)


def yarn_scale(factor: float) -> float:
    """Return YaRN's factor of cos and sin."""
    return 0.1 * math.log(factor) + 1.0


def ntk(theta: float, dim: int, factor: float) -> float:
    """Return theta for texts `factor` times as long. A single pair rotates 1 radian a token for any theta."""
    return theta if dim == 2 else theta * factor ** (dim / (dim - 2))


def scores_by_length(
    call: Call, queries: slice, keys: slice, *, own: Tensor, theta: float, factor: float, original: int
) -> Tensor:
    """Return scores with the frequencies of each query, which depend on the length of the text up to it. Layers that do
    not rotate by `own` are left as they are."""
    inv_freq, start, device = call.layer.inv_freq, call.start, call.query.device
    if inv_freq is None or not torch.equal(inv_freq, own):
        return call.scores(call.query[..., queries, :], call.key[:, :, keys])
    inside = min(max(original - start, queries.start), queries.stop)  # queries before it: within the original length
    parts = [call.scores(call.query[..., queries.start : inside, :], call.key[:, :, keys])]
    end = start + call.query.shape[3]
    there = torch.arange(end - call.key.shape[2], end, device=device)[keys]
    before = angles(there, inv_freq)
    for query in range(inside, queries.stop):
        length = start + query + 1
        scale = factor * length / original - (factor - 1)
        dim = 2 * inv_freq.numel()
        longer = frequencies(ntk(theta, dim, scale), dim)
        here = torch.tensor([start + query], device=device)
        one = turned(call.query[..., query : query + 1, :], angles(here, inv_freq), angles(here, longer))
        parts.append(call.scores(one, turned(call.key[:, :, keys], before, angles(there, longer))))
    return torch.cat(parts, -2)
