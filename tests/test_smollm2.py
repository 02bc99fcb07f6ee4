"""Methods against their naive twins on SmolLM2-135M-Instruct, where `make real` has fetched it.

Rounding in float32 adds up over 30 layers: a token's nats differ by at most 0.00006, those of `full` from its twin by
0.00002. So the bound is ATOL, not the 0.00001 of tiny models. Each method changes some token's nats by more than 0.8.
"""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from test_ape import Naive, given
from test_remap import chunked, grouped
from test_temperature import log_n
from torch import Tensor

import farspan
from farspan import reader
from farspan.lm import LM
from farspan.methods import method

import naive
from naive import by_pairs
from tiny import nats_of

HEAD, PASSAGES, READ, TIME = 2, (9, 14, 11), 50, 60  # tokens
ATOL = 1e-4  # nats
FACTORS = [1 + pair / 8 for pair in range(32)]


@pytest.fixture(scope="module")
def smol(smollm2: Path) -> Iterator[LM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FARSPAN_CACHE", str(smollm2.parents[2]))
        patch.setattr(reader, "self_check", lambda lm: None)  # test_gguf.py compares it with transformers
        yield farspan.load(smollm2, dtype="float32", attention="eager")


@pytest.fixture(scope="module")
def ids(smol: LM) -> Tensor:
    text = Path(farspan.__file__).with_name("lm.py").read_text()
    return torch.tensor([[*smol.separator.ids, *smol.tokenizer(text)["input_ids"]][:TIME]])


def own(lm: LM) -> Tensor:
    return lm.model.model.rotary_emb.inv_freq


def turning(lm: LM) -> Tensor:
    """The frequencies of pairs that rotate at least once in 64 tokens, and 0 for the others."""
    return torch.where(64 * own(lm) / (2 * math.pi) < 1, 0.0, own(lm))


def by_factors(lm: LM, ids: Tensor) -> Tensor:
    scale = math.sqrt(1 + math.log(4) / math.log(8192))
    return by_pairs(lm.model, ids, inv_freq=own(lm) / torch.tensor(FACTORS), rotary_scale=scale)


TWINS: dict[str, Callable[[LM, Tensor], Tensor]] = {
    "full": lambda lm, ids: by_pairs(lm.model, ids),
    "selfextend:group=3,window=14": lambda lm, ids: by_pairs(lm.model, ids, parts=grouped(3, 14)),
    "dca:chunk=13,local=3": lambda lm, ids: by_pairs(lm.model, ids, parts=chunked(13, 3)),
    "temperature:original=7": lambda lm, ids: by_pairs(lm.model, ids, factor=lambda i: log_n(i, 7)),
    "rope:type=truncated,original=64": lambda lm, ids: by_pairs(lm.model, ids, inv_freq=turning(lm)),
    "rope:type=factors,factor=4,file={file}": by_factors,
    "tova:capacity=17": lambda lm, ids: naive.tova(lm.model, ids, READ, 17)[0],
    "knorm:capacity=17": lambda lm, ids: naive.knorm(lm.model, ids, READ, 17)[0],
}


@pytest.mark.parametrize("text", TWINS)
def test_it_equals_its_twin(text: str, smol: LM, ids: Tensor, tmp_path: Path) -> None:
    (tmp_path / "factors.json").write_text(json.dumps(FACTORS))
    logits = TWINS[text](smol, ids)
    expected = nats_of(logits, ids[0, -len(logits) :])
    with method(text.format(file=tmp_path / "factors.json")).on(smol) as reader:
        reader.chunk = 9
        read = TIME - len(expected)
        nats = reader.read(ids[:, :read]).score(ids[:, read:]).nats[0]
    torch.testing.assert_close(nats, expected, rtol=0, atol=ATOL)


def test_ape_equals_its_twin(smol: LM, ids: Tensor) -> None:
    expected = Naive(HEAD, PASSAGES, 0.9, 0.9).nats(smol, ids)
    nats = given("ape", smol, ids, HEAD, PASSAGES, 9)[0]
    torch.testing.assert_close(nats, expected, rtol=0, atol=ATOL)
