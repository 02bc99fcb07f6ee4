"""CEPE-Distilled: an instruction-tuned decoder with an encoder learns from the decoder without one.

    loss = c_CE · CE + c_KL · KL          KL = 1/N Σ_n Σ_k p_nk (log p_nk - log q_nk)

Yen et al. 2024, arXiv 2402.16617, section 3. The teacher p, by default the same frozen decoder, reads chunks and input
in one window; the student q reads the chunks through the encoder. N is the number of the decoder's positions. Of each
of the teacher's distributions only the `top` (K = 50) most likely tokens are used. Variants for the other tokens:

    drop      they are left out, as published; the sum is no longer a divergence and can be negative
    smooth    they are one more entry, and δ is added to all, as in the authors' code: (p + δ) / (1 + (K + 1) δ)
    rest      they are one more entry
    renorm    p and q are divided by their sums over the K tokens

The teacher's log-probabilities of the K tokens, and of all others together, are computed once and stored in fp16, or
computed again at each step. Losses are computed in fp32, in blocks of tokens.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, default_collate

from farspan import files, hf
from farspan.lm import LM
from farspan.record import changed_fields
from farspan.text.corpora import Corpus, tokenizer_hash
from farspan.train import engines
from farspan.train.blocks import NOT_A_TARGET, block_size, summed
from farspan.train.cepe import CepeSettings, decoded, fit, opened, prepare
from farspan.train.checkpoint import writing
from farspan.train.config import Settings
from farspan.train.documents import DocumentRows
from farspan.train.objective import last_hidden
from farspan.train.progress import TrainingWatch
from farspan.train.trainer import load_finite, training

Variant = Literal["drop", "smooth", "rest", "renorm"]
LEAST = -60_000.0  # the lowest log-probability, also of a probability of 0; fp16 reaches -65,504
SAMPLES_AT_ONCE = 8  # in one forward pass of the teacher
BATCHES_A_SAVE = 64  # forward passes between two records of how many samples are stored


class DistillationSettings(Settings):
    """[distill]: the teacher, and the loss."""

    teacher: str | None = None  # a causal model with the decoder's tokenizer; default the decoder itself
    ce: float = Field(1.0, ge=0)  # c_CE, weight of the cross-entropy
    kl: float = Field(2.0, ge=0)  # c_KL, weight of the divergence; 0: no teacher
    variant: Variant = "drop"  # how tokens outside of the `top` are treated: drop, smooth, rest or renorm
    delta: float = Field(1e-6, gt=0)  # δ of `smooth`
    top: int = Field(50, gt=0)  # K, the number of tokens used of each distribution
    stored: bool = True  # compute the teacher's distributions once, before the training; false: at each step

    @model_validator(mode="after")
    def _has_effect(self) -> "DistillationSettings":
        if not self.ce and not self.kl:
            raise ValueError("ce = 0 and kl = 0 leave no loss to train with: give one of them a weight above 0")
        if self.variant != "smooth":
            self.refuse_unused(("delta",), f"variant = {self.variant!r}", 'variant = "smooth"')
        return self


class DistillSettings(CepeSettings):
    """The whole config of `farspan train distill`: that of `farspan train cepe`, and [distill]."""

    distill: DistillationSettings  # no default: a config without it is one of `farspan train cepe`


@training
def train(settings: DistillSettings, watch: TrainingWatch) -> dict[str, Any]:
    """Train the main stage as `farspan.train.cepe.train`, with the loss above.

    Raises:
        ValueError: as `farspan.train.cepe.train`; stage = "warmup"; a teacher with another vocabulary, or with a window
            too short for chunks and input.
    """
    if settings.stage != "main":
        raise ValueError('stage = "warmup": distillation is a main stage; run the warm-up with farspan train cepe')
    chosen, lm = settings.distill, opened(settings)
    other = other_teacher(settings, lm)
    samples: Dataset[dict[str, Tensor]]
    samples = rows = prepare(settings, lm, watch)
    if not chosen.kl:
        watch.notice("distill.kl = 0: nothing is learned from a teacher; distill.teacher and its settings are not used")
    teacher = teacher_of(settings, rows, other or lm) if chosen.kl else None
    inputs = rows.inputs
    if teacher is not None:
        inputs = inputs | {"teacher": teacher.identity["fingerprint"], "teacher_config": json.dumps(teacher.config)}
    if teacher is not None and chosen.stored:
        with engines.processes().main_process_first():
            samples = store(teacher, rows, Path(settings.out) / "teacher", watch)
        teacher = None
    objective = {
        "terms": partial(terms, chosen, teacher),
        "weights": {"ce": chosen.ce, "kl": chosen.kl},
        "predicted": lambda batch: {"ce": batch["labels"][:, 1:], "kl": batch["input_ids"]},  # kl: all positions
    }
    return fit(settings, lm, samples, watch, inputs, **objective)


def terms(
    settings: DistillationSettings, teacher: "Teacher | None", model: Any, core: Any, batch: Mapping[str, Tensor]
) -> dict[str, Float[Tensor, ""]]:
    """Return `ce`, the cross-entropy per predicted token in nats, and `kl`, the divergence per position.

    Args:
        teacher: computes its distributions now; None: the batch holds them, or `kl` has no weight.
    """
    hidden, output = decoded(model, core, batch)
    labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=NOT_A_TARGET)
    taught: tuple[Tensor, ...] = ()
    if settings.kl:
        taught = teacher.of(batch) if teacher is not None else (batch["teacher_index"], batch["teacher_log_probs"])
    ce, kl = losses(core, hidden, output, labels, settings, *taught)
    return {"ce": ce, "kl": kl}


def losses(
    core: Any,
    hidden: Float[Tensor, "batch time hidden"],
    output: Any,
    labels: Int[Tensor, "batch time"],
    settings: DistillationSettings,
    *taught: Shaped[Tensor, "batch time _"],
) -> Float[Tensor, "2"]:
    """Return the mean of the cross-entropy, over labels that are tokens, and of the divergence, over all positions.

    Args:
        labels: the token that each position predicts, or NOT_A_TARGET.
        taught: the teacher's most likely tokens at each position [batch, time, top], and their log-probabilities, then
            that of all other tokens together [batch, time, top + 1]. If left out, the divergence is 0.
    """

    def of_block(block: Tensor, targets: Tensor, *taught: Tensor) -> Tensor:
        log_q = hf.logits(core, block[None], output)[0].float().log_softmax(-1)
        ce = cross_entropy(log_q, targets, ignore_index=NOT_A_TARGET, reduction="sum")
        if not taught:
            return torch.stack([ce, ce.new_zeros(())])
        log_q, log_p = log_q.gather(-1, taught[0].long()), taught[1].float()
        return torch.stack([ce, divergence(log_q, log_p, settings.variant, settings.delta)])

    rows = [part.flatten(0, 1) for part in (hidden, labels, *taught)]
    total = summed(of_block, core.get_input_embeddings().num_embeddings, *rows)
    counts = torch.stack([(labels != NOT_A_TARGET).sum().clamp_min(1), labels.new_tensor(labels.numel())])
    return total / counts


def divergence(
    log_q: Float[Tensor, "tokens top"],
    log_p: Float[Tensor, "tokens top_plus_one"],
    variant: Variant,
    delta: float = 1e-6,
) -> Float[Tensor, ""]:
    """Return the sum over positions of the Kullback-Leibler divergence of student q from teacher p.

    Args:
        log_q: the student's log-probabilities of the teacher's most likely tokens.
        log_p: the teacher's, and last that of all other tokens together.
        delta: δ of the variant `smooth`.
    """
    kept = log_p[:, :-1]
    match variant:
        case "drop":
            log_p = kept
        case "renorm":
            log_p, log_q = kept.log_softmax(-1), log_q - log_q.logsumexp(-1, keepdim=True)
        case "rest":
            log_q = torch.cat([log_q, remainder(log_q)], -1)
        case "smooth":
            total = 1 + delta * log_p.shape[1]
            q = torch.cat([log_q.exp(), remainder(log_q).exp()], -1)
            log_p, log_q = ((log_p.exp() + delta) / total).log(), ((q + delta) / total).log()
    return (log_p.exp() * (log_p - log_q)).sum()


def remainder(log_q: Float[Tensor, "*rows top"]) -> Float[Tensor, "*rows one"]:
    """Return log(1 - Σ q). It is finite also if the sum is 1, or above 1 by rounding."""
    total = log_q.logsumexp(-1, keepdim=True).clamp_max(-torch.finfo(torch.float32).eps)
    return torch.where(total > -0.69, (-torch.expm1(total)).log(), torch.log1p(-total.exp()))


@dataclass
class Teacher:
    """A causal model that reads chunks and input as one text."""

    model: Any
    identity: dict[str, Any]  # fingerprint and `top`: stored distributions of another teacher are refused
    top: int  # the number of tokens used of each distribution
    before: int = 0  # tokens of the input's separator, which the teacher reads before the chunks
    config: dict[str, Any] = field(default_factory=dict)  # its fields that change the distributions

    @torch.no_grad()
    def of(self, batch: Mapping[str, Tensor]) -> tuple[Int[Tensor, "batch time top"], Float[Tensor, "batch time last"]]:
        """Return, for each of the decoder's positions, the `top` most likely next tokens in descending order, and their
        log-probabilities, then that of all other tokens together, in fp16. Chunks are read without noise, which is only
        for the student."""
        ids, context = batch["input_ids"], batch["context_input_ids"].flatten(1)
        whole = torch.cat([ids[:, : self.before], context, ids[:, self.before :]], 1)
        hidden, output = last_hidden(self.model, self.model, input_ids=whole, use_cache=False)
        hidden = hidden[:, context.shape[1] :].flatten(0, 1)
        vocabulary = self.model.get_input_embeddings().num_embeddings
        parts = [self._best(block, output) for block in hidden.split(block_size(hidden.device, vocabulary))]
        index, log_p = (torch.cat(part).view(*ids.shape, -1) for part in zip(*parts, strict=True))
        return index, log_p

    def _best(self, hidden: Float[Tensor, "tokens hidden"], output: Any) -> tuple[Tensor, Tensor]:
        logits = hf.logits(self.model, hidden[None], output)[0]
        best, index = logits.topk(self.top, -1)  # only these and the sum are in fp32; bf16 would round the sum
        total = (logits - best[:, :1]).exp_().sum(-1, keepdim=True, dtype=torch.float32)
        log_p = best.float() - best[:, :1].float() - total.log()
        log_p = torch.cat([log_p, remainder(log_p)], -1).clamp_min(LEAST)
        return index, log_p.half()


def other_teacher(settings: DistillSettings, lm: LM) -> LM | None:
    """Load the teacher if it is another model than the decoder; None if it is the decoder, or none is needed.

    Raises:
        ValueError: a teacher that cannot be loaded, or with another vocabulary than the decoder's.
    """
    chosen = settings.distill
    if chosen.teacher is None or chosen.kl == 0:
        return None
    other = load_finite(chosen.teacher, "teacher", settings.trainer, dtype=settings.model.dtype)
    if tokenizer_hash(other.tokenizer) != tokenizer_hash(lm.tokenizer) or other.vocabulary != lm.vocabulary:
        raise ValueError(
            f"teacher {chosen.teacher!r} has another vocabulary ({other.vocabulary:,} tokens) than the decoder "
            f"{lm.name!r} ({lm.vocabulary:,}): its probabilities would belong to other tokens"
        )
    other.model.requires_grad_(False)
    return other


def teacher_of(settings: DistillSettings, rows: DocumentRows, lm: LM) -> Teacher:
    """Return `lm` as the teacher of a training on `rows`.

    Raises:
        ValueError: chunks and input are longer than the teacher's trained length, samples are not contiguous text, or
            the separator has several tokens.
    """
    needed = rows.window + len(rows.before)
    if lm.trained_length is not None and needed > lm.trained_length:
        raise ValueError(
            f"the teacher reads chunks and input in one window: {needed:,} tokens are more than the "
            f"{lm.trained_length:,} it was trained on; give fewer data.chunks or data.decoder"
        )
    if settings.data.mixture.get("retrieved"):
        raise ValueError("a teacher reads chunks and input as one text: leave out `retrieved` of data.mixture")
    if len(rows.before) > 1:
        raise ValueError(
            "a separator of several tokens cannot be put before the teacher's chunks: use data.separator = false"
        )
    top = min(settings.distill.top, lm.vocabulary - 1)
    identity = {"fingerprint": lm.identity["fingerprint"], "top": top}
    return Teacher(lm.model, identity, top, len(rows.before), lm.identity["config"])


def store(teacher: Teacher, rows: DocumentRows, folder: Path, watch: TrainingWatch) -> "TaughtRows":
    """Compute the teacher's distributions of the samples that `folder` does not hold yet, and store them there.

    Raises:
        ValueError: the folder holds distributions of another teacher or of other samples, is damaged, or cannot be
            written; or the teacher's probabilities are not finite.
    """
    kind = np.uint16 if teacher.model.get_input_embeddings().num_embeddings <= 1 << 16 else np.int32
    about = {"seed": rows.seed, "text": rows.corpus.hash, "data": rows.settings.model_dump(mode="json")}
    about |= teacher.identity
    shape = len(rows), len(rows.before) + rows.settings.decoder
    layout = {"index.npy": (kind, (*shape, teacher.top)), "log_probs.npy": (np.float16, (*shape, teacher.top + 1))}
    taught = TaughtRows(rows, folder, layout)
    done, file, config, now = 0, folder / "done.json", None, teacher.config
    if file.exists():
        try:
            record = files.parse_json(file.read_bytes(), str(file))
            done, config = int(record.pop("done")), record.pop("config", None)
            have = min(map(len, taught.arrays("r")))  # not "r+", which would lengthen a file that was cut
        except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{folder} is damaged ({error}). Delete it and repeat the command: the teacher reads all samples again"
            ) from error
        if record != about:
            raise ValueError(
                f"{folder} holds a teacher's distributions of other samples: {record}, not {about}. Delete it"
            )
        if different := changed_fields(config, now):
            raise ValueError(f"{folder} is of a teacher whose config has changed since: {different}. Delete it")
    if done < len(rows):
        watch.notice(
            f"the teacher reads {len(rows) - done:,} windows once; {taught.num_bytes / 1e9:.2f} GB in {folder}"
        )
    if watch.calibrate and done < len(rows):
        raise ValueError(
            "--calibrate: the steps need the teacher's distributions, which are not stored yet; use --plan alone, or "
            "--set distill.stored=false"
        )
    if watch.plan:
        return taught
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if done == 0 or have < len(rows):  # new, or of a shorter training
            taught.allocate(keep=done > 0)
        index, log_probs = taught.arrays("r+")
    if done < len(rows):
        watch.start("windows of the teacher", len(rows))
    device = hf.input_device(teacher.model)
    for first in range(done, len(rows), SAMPLES_AT_ONCE):
        last = min(first + SAMPLES_AT_ONCE, len(rows))
        batch = {name: t.to(device) for name, t in default_collate([rows[i] for i in range(first, last)]).items()}
        best, log_p = teacher.of(batch)
        if not bool(log_p.isfinite().all()):
            raise ValueError(
                f"the teacher's probabilities of samples {first:,} to {last - 1:,} are NaN or infinite, expected "
                'finite numbers. Use another distill.teacher, or model.dtype = "float32"'
            )
        index[first:last], log_probs[first:last] = best.cpu().numpy().astype(kind), log_p.cpu().numpy()
        if last == len(rows) or (first // SAMPLES_AT_ONCE + 1) % BATCHES_A_SAVE == 0:
            index.flush()
            log_probs.flush()
            record = about | {"done": last, "config": config or now}
            files.write(file, json.dumps(record))  # after the arrays are flushed
        watch.step(last, len(rows), "")
    return taught


@dataclass
class TaughtRows(Dataset[dict[str, Tensor]]):
    """Samples with the teacher's distributions."""

    rows: DocumentRows
    folder: Path
    layout: Mapping[str, tuple[type, tuple[int, int, int]]]  # file: dtype; samples, positions, tokens of a distribution

    @property
    def corpus(self) -> Corpus:
        return self.rows.corpus

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, sample: int) -> dict[str, Tensor]:
        index, log_probs = self._stored
        return self.rows[sample] | {
            "teacher_index": torch.from_numpy(index[sample].astype(np.int32)),
            "teacher_log_probs": torch.from_numpy(np.array(log_probs[sample])),
        }

    @property
    def num_bytes(self) -> int:
        return sum(np.dtype(kind).itemsize * math.prod(shape) for kind, shape in self.layout.values())

    @cached_property
    def _stored(self) -> list[Any]:
        return self.arrays("r")

    def arrays(self, mode: Literal["r", "r+"]) -> list[Any]:
        """Return indices [samples, positions, top] and log-probabilities [samples, positions, top + 1], as memmaps."""
        return [np.load(self.folder / name, mmap_mode=mode) for name in self.layout]

    def allocate(self, *, keep: bool) -> None:
        """Create the files of both arrays; with `keep`, copy the samples that are stored already.

        Disk space is allocated now, so that a full disk is an error here instead of a SIGBUS at a later write.
        """
        for name, (kind, shape) in self.layout.items():
            old = np.load(self.folder / name, mmap_mode="r") if keep else ()
            with files.written(self.folder / name) as path:
                new = np.lib.format.open_memmap(path, "w+", kind, shape)
                with path.open("r+b") as file:
                    if hasattr(os, "posix_fallocate"):
                        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
                if keep:
                    new[: len(old)] = old
                new.flush()
