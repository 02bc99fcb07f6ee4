"""Distillation: losses equal to the authors' and to naive twins, gradients too, and a teacher that is asked once."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train import numbered
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from farspan import hf, reader
from farspan.train import distill
from farspan.train.cepe import decoded
from farspan.train.distill import DistillationSettings, Teacher, divergence, losses, remainder
from farspan.train.documents import DocumentRows, DocumentSettings
from farspan.train.progress import TrainingWatch

from cepe_models import authors_model
from tiny import close

VARIANTS = ("drop", "smooth", "rest", "renorm")


@pytest.fixture
def authors(reference: dict[str, Tensor]) -> Any:
    return authors_model(reference).train()


def both(authors: Any, r: dict[str, Tensor], settings: DistillationSettings) -> Tensor:
    """Cross-entropy and divergence of the authors' example."""
    batch = {"input_ids": r["in.x"], "context_input_ids": r["in.e"], "context_attention_mask": r["in.m_right"]}
    hidden, output = decoded(authors, authors, batch)
    labels = torch.nn.functional.pad(r["in.labels"][:, 1:], (0, 1), value=-100)
    return losses(authors, hidden, output, labels, settings, r["in.distill_index"], r["in.distill_prob"].log())


@pytest.mark.parametrize("variant", ["drop", "smooth"])
@pytest.mark.parametrize("tokens_at_once", [1000, 5])
def test_losses_are_those_of_the_authors(
    authors: Any, reference: Any, variant: Any, tokens_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(reader.LOGITS_AT_ONCE, "cpu", tokens_at_once * 97)
    ce, kl = both(authors, reference, DistillationSettings(variant=variant, delta=1e-6))
    name = {"drop": "drop", "smooth": "smooth_1e-6"}[variant]
    given = (ce + 2 * kl).detach()
    assert float(abs(given - reference[f"mha.loss.{name}"])) < 5e-6
    assert float(abs(ce.detach() - reference["mha.loss.ce"])) < 5e-6


@pytest.mark.parametrize("tokens_at_once", [1000, 5])
def test_gradients_are_those_of_the_authors(
    authors: Any, reference: Any, tokens_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(reader.LOGITS_AT_ONCE, "cpu", tokens_at_once * 97)
    ce, kl = both(authors, reference, DistillationSettings())
    (ce + 2 * kl).backward()
    expected = {key[14:]: value for key, value in reference.items() if key.startswith("mha.grad.drop.")}
    given = {name: p.grad for name, p in authors.named_parameters() if p.grad is not None}
    assert given.keys() == expected.keys()
    largest = max(float(value.abs().max()) for value in expected.values())
    assert max(float((given[name] - expected[name]).abs().max()) for name in expected) < 2e-5 * largest


def naive(logits: Tensor, index: Tensor, p: Tensor, variant: str, delta: float) -> Tensor:
    """Token by token, entry by entry, in probabilities and fp64."""
    total = torch.zeros((), dtype=torch.float64)
    for row, kept, theirs in zip(logits.double(), index, p.double(), strict=True):
        q = row.softmax(-1)
        ours = [q[i] for i in kept]
        if variant in ("rest", "smooth"):
            ours.append(1 - sum(ours))
        theirs = list(theirs if variant in ("rest", "smooth") else theirs[:-1])
        if variant == "smooth":
            ours = [(one + delta) / (1 + delta * len(ours)) for one in ours]
            theirs = [(one + delta) / (1 + delta * len(theirs)) for one in theirs]
        if variant == "renorm":
            ours, theirs = [one / sum(ours) for one in ours], [one / sum(theirs) for one in theirs]
        total = total + sum(one * (one.log() - other.log()) for one, other in zip(theirs, ours, strict=True))
    return total


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_divergence_is_that_of_the_naive_twin(variant: Any) -> None:
    torch.manual_seed(0)
    logits = (3 * torch.randn(7, 40)).requires_grad_()
    teacher = (3 * torch.randn(7, 40)).softmax(-1)
    kept, index = teacher.topk(5, -1)
    p = torch.cat([kept, 1 - kept.sum(-1, keepdim=True)], -1)
    given = divergence(logits.log_softmax(-1).gather(-1, index), p.log(), variant, 1e-3)
    expected = naive(logits, index, p, variant, 1e-3)
    close(given.double(), expected)
    ours, theirs = (torch.autograd.grad(value, logits)[0] for value in (given, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_dropping_the_remainder_can_be_negative_and_keeping_it_cannot() -> None:
    log_p, log_q = torch.tensor([[0.5, 0.2, 0.3]]).log(), torch.tensor([[0.6, 0.3]]).log()
    assert float(divergence(log_q, log_p, "drop")) == pytest.approx(-0.172, abs=1e-3)
    assert float(divergence(log_q, log_p, "rest")) > 0
    assert float(divergence(log_q, log_p, "renorm")) > 0


def test_a_student_that_is_its_teacher_diverges_by_nothing() -> None:
    p = torch.tensor([[0.5, 0.2, 0.3]])
    for variant in VARIANTS:
        assert float(divergence(p[:, :2].log(), p.log(), variant)) == pytest.approx(0, abs=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize("total", [1e-6, 0.3, 0.5, 0.9, 1 - 1e-6])
def test_a_remainder_is_exact_at_both_ends(total: float) -> None:
    log_q = torch.tensor([[0.25, 0.75]], dtype=torch.float64).log() + torch.tensor(total, dtype=torch.float64).log()
    expected = torch.log1p(torch.tensor(-total, dtype=torch.float64))
    assert float(remainder(log_q)) == pytest.approx(float(expected), rel=1e-6)


def test_a_remainder_beside_a_token_that_is_nearly_certain_is_exact_in_fp32() -> None:
    log_q = torch.tensor([[-1e-6, -30.0]])
    assert float(remainder(log_q).exp()) == pytest.approx(1e-6, rel=1e-4)


def test_what_is_nearly_impossible_to_a_teacher_stays_finite_in_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distill.hf, "logits", lambda model, hidden, output: hidden)
    index, log_p = Teacher(None, {}, top=2)._best(torch.tensor([[0.0, 1e5, 0.0, -1e5]]), None)
    assert int(index[0, 0]) == 1
    assert log_p[0].tolist() == [0.0, -60_000.0, pytest.approx(math.log(2**-23), rel=1e-3)]


def test_a_teacher_in_bf16_rounds_no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distill.hf, "logits", lambda model, hidden, output: hidden)
    logits = (30 + 2 * torch.randn(20, 30_000, generator=torch.Generator().manual_seed(0))).bfloat16()
    _, log_p = Teacher(None, {}, top=50)._best(logits, None)
    best = logits.float().log_softmax(-1).topk(50, -1).values
    torch.testing.assert_close(log_p[:, :50].float(), best, rtol=0, atol=3e-3)


class Last:
    """A teacher who expects the last tokens of a large vocabulary."""

    def __init__(self, vocabulary: int) -> None:
        self.model, self.top, self.identity = torch.nn.Sequential(), 2, {"top": 2}
        self.config: dict[str, float] = {}
        self.model.get_input_embeddings = lambda: torch.nn.Embedding(vocabulary, 1)  # type: ignore[assignment]

    def of(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        shape = *batch["input_ids"].shape, 1
        last = self.model.get_input_embeddings().num_embeddings - torch.tensor([1, 2])  # type: ignore[operator]
        return last.expand(*shape[:2], 2), torch.zeros(*shape[:2], 3)


@pytest.mark.parametrize("vocabulary", [1 << 16, (1 << 16) + 1])
def test_tokens_of_a_large_vocabulary_are_kept(vocabulary: int, tmp_path: Path) -> None:
    settings = DocumentSettings(text="", mixture={"cat": 1.0}, decoder=6, chunks=1, chunk=4)
    rows = DocumentRows(numbered(40), settings, samples=3, separator=(0,), seed=0)
    taught = distill.store(Last(vocabulary), rows, tmp_path, TrainingWatch())  # type: ignore[arg-type]
    assert taught[2]["teacher_index"].unique().tolist() == [vocabulary - 2, vocabulary - 1]
    assert taught._stored[0].itemsize == (2 if vocabulary == 1 << 16 else 4)


def test_stored_distributions_of_a_teacher_with_another_config_are_refused(tmp_path: Path) -> None:
    settings = DocumentSettings(text="", mixture={"cat": 1.0}, decoder=6, chunks=1, chunk=4)
    rows, teacher = DocumentRows(numbered(40), settings, samples=3, separator=(0,), seed=0), Last(300)
    for config in ({"rms_norm_eps": 1e-6}, {"rms_norm_eps": 1e-6, "of_a_new_version": 1}):
        teacher.config = config
        distill.store(teacher, rows, tmp_path, TrainingWatch())  # type: ignore[arg-type]
    teacher.config = {"rms_norm_eps": 0.5}
    with pytest.raises(ValueError, match=r"whose config has changed since: rms_norm_eps was 1e-06, now 0\.5"):
        distill.store(teacher, rows, tmp_path, TrainingWatch())  # type: ignore[arg-type]


def test_a_remainder_of_nothing_is_finite_with_finite_gradients() -> None:
    logits = torch.tensor([[60.0, 0.0, -60.0]], requires_grad=True)
    value = divergence(logits.log_softmax(-1)[:, :2], torch.tensor([[0.0, -60_000.0, -60_000.0]]), "rest")
    value.backward()
    assert value.isfinite()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_a_teacher_says_what_it_expects_behind_chunks_and_input() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=90, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).eval()
    chunks, tokens = torch.randint(1, 90, (2, 3, 4)), torch.randint(1, 90, (2, 6))
    before = torch.zeros(2, 1, dtype=torch.long)
    batch = {"input_ids": torch.cat([before, tokens], 1), "context_input_ids": chunks}
    batch["context_attention_mask"] = torch.zeros_like(chunks)  # noise is the student's
    index, log_p = Teacher(model, {}, top=5, before=1).of(batch)
    with torch.no_grad():
        whole = model(input_ids=torch.cat([before, chunks.flatten(1), tokens], 1)).logits.log_softmax(-1)[:, -7:]
    best, expected = whole.topk(5, -1)
    assert index.tolist() == expected.tolist()
    assert log_p.dtype == torch.float16
    torch.testing.assert_close(log_p[..., :5].float(), best, rtol=2e-3, atol=2e-3)
    rest = (1 - best.exp().sum(-1)).log()
    torch.testing.assert_close(log_p[..., 5].float(), rest, rtol=2e-3, atol=2e-3)


def test_a_teacher_in_blocks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=90, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    teacher = Teacher(LlamaForCausalLM(config).eval(), {}, top=5)
    batch = {"input_ids": torch.randint(1, 90, (2, 6)), "context_input_ids": torch.randint(1, 90, (2, 3, 4))}
    whole = teacher.of(batch)
    seen: list[int] = []
    original = hf.logits
    monkeypatch.setattr(
        distill.hf,
        "logits",
        lambda model, hidden, output: seen.append(hidden.shape[1]) or original(model, hidden, output),
    )
    monkeypatch.setitem(reader.LOGITS_AT_ONCE, "cpu", 5 * 90)
    for one, other in zip(whole, teacher.of(batch), strict=True):
        assert torch.equal(one, other)
    assert seen == [5, 5, 2]
