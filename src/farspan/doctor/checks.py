"""The checks, one function each, called with the subject and a reader of the setting tested."""

import inspect
import math
from collections.abc import Callable

import torch
from torch import Tensor

from farspan import hf
from farspan.doctor.subject import Check, Subject, largest, nats_of, reason
from farspan.hf.attend import frequencies
from farspan.methods import Method
from farspan.reader import Reader
from farspan.report.export import memory_size

STRING = 24  # random tokens to copy
COPIES = 5  # texts with such a string
GAP = 4  # tokens between a string and its copy; also the first tokens of a copy, which are not counted
GONE = 12  # tokens changed where no query should reach them
AT_WORK = 1e-3  # nats; smaller differences are ignored
SPARE = 5 / 4  # factor on the bytes of the keys held, for spare capacity

Question = Callable[[Subject, Reader], Check]

ORDER = {
    "runs": "the model accepts the method, and its scores are finite",
    "no-op": "inside its window or at its neutral setting it is the model's own plain forward",
    "at work": "beyond that it differs from it",
    "cuts": "the result does not depend on how the text is cut",
    "causality": "a later token changes no earlier score",
    "rows": "the rows of a batch do not see each other",
    "right padding": "padding after the scored tokens changes nothing",
    "left padding": "the model called directly with a left-padded batch gives the scores of its rows, or refuses",
    "inv_freq": "RoPE frequencies are in float32, and those of the model's theta",
    "rope": "far positions are rotated by the scaled frequencies",
    "context": "a random string has more probability where it repeats one that the memory holds",
    "forgetting": "tokens out of reach change nothing",
    "memory": "it holds no more than it promises",
    "no trace": "the model is left bit-identical, also after an error",
}


def stages(subject: Subject) -> dict[Method, dict[str, Question]]:
    """Return the checks of the method as it is, and of its neutral, small and forgetful settings."""
    method, small = subject.method, subject.small
    planned: list[tuple[Method, str, Question]] = [
        (method, "runs", runs),
        (method, "inv_freq", inv_freq),
        (method, "rope", rope),
        (method, "context", context),
        (subject.neutral or method, "no-op", no_op),
        (small, "at work", at_work),
        (small, "cuts", cuts),
        (small, "causality", causality),
        (small, "rows", row_by_row),
        (small, "right padding", right_padding),
        (small, "left padding", left_padding),
        (small, "memory", memory),
        (subject.forgetful or method, "forgetting", forgetting),
    ]
    stages: dict[Method, dict[str, Question]] = {}
    for variant, name, question in sorted(planned, key=lambda one: one[1] == "at work"):  # last: it needs the noise
        stages.setdefault(variant, {})[name] = question
    return stages


def runs(subject: Subject, reader: Reader) -> Check:
    nats = subject.nats(reader, subject.rows[:1])
    numbers = int(nats.isfinite().sum())
    note = f"reads with plain forwards, since {reader.fallback}" if reader.fallback else ORDER["runs"]
    return Check("runs", numbers == nats.numel(), f"{numbers} numbers", f"{nats.numel()} numbers", note)


def no_op(subject: Subject, reader: Reader) -> Check:
    if subject.neutral is None:
        return Check("no-op", None, "", "", f"no neutral setting of {subject.method} is known")
    length = subject.neutral_length
    whole = length == subject.rows.shape[1]
    expected = subject.expected if whole else subject.plain_nats(subject.rows[:, :length])
    subject.noise = subject.apart(subject.nats(reader, subject.rows[:, :length]), expected)
    note = f"on {length} tokens it is the model's own plain forward"
    return subject.equal("no-op", subject.neutral, subject.noise, note)


def at_work(subject: Subject, reader: Reader) -> Check:
    if subject.small == subject.method == (subject.neutral or subject.method):
        why = "is the model as it is" if subject.neutral else "declares no setting (`small`) that changes a short text"
        return Check("at work", None, "", "", f"{subject.method} {why}")
    apart = subject.apart(subject.nats(reader, subject.rows), subject.expected)
    needed = max(AT_WORK, 2 * subject.noise)
    if apart <= needed and float(subject.expected.mean()) >= math.log(subject.lm.vocabulary):
        why = (
            "the model predicts text no better than chance, as random weights do, and a small difference proves nothing"
        )
        return Check("at work", None, apart, f"> {needed:.2g} nats, {subject.kind}", why)
    note = f"beyond its window, or with other frequencies, it differs from full{subject.tested(subject.small)}"
    return Check("at work", apart > needed, apart, f"> {needed:.2g} nats, {subject.kind}", note)


def cuts(subject: Subject, reader: Reader) -> Check:
    ids = subject.rows[:1]
    whole = subject.nats(reader, ids)
    cut = (subject.nats(reader, ids, *chunks) for chunks in ((7, None), (64, 1)))  # the last is scored token by token
    apart = max(subject.apart(one, whole) for one in cut)
    note = "chunks of 7, of 64 and one token at a time give the scores of one pass"
    return subject.equal("cuts", subject.small, apart, note)


def causality(subject: Subject, reader: Reader) -> Check:
    ids, half = subject.rows[:1], subject.num_scored // 2
    later = ids.clone()
    later[:, -half:] = (later[:, -half:] + 1) % subject.lm.vocabulary
    memory = subject.read(reader, ids)
    given, changed = (subject.score(reader, memory, one)[:, : subject.num_scored - half] for one in (ids, later))
    note = f"changing the last {half} tokens changes no score before them"
    return subject.equal("causality", subject.small, largest(changed, given), note, same_shapes=True)


def row_by_row(subject: Subject, reader: Reader) -> Check:
    together = subject.nats(reader, subject.rows)
    alone = torch.cat([subject.nats(reader, subject.rows[i : i + 1]) for i in range(2)])
    note = "two rows together have the scores that each has alone"
    return subject.equal("rows", subject.small, subject.apart(together, alone), note)


def right_padding(subject: Subject, reader: Reader) -> Check:
    memory = subject.read(reader, subject.rows)
    padded, real = subject.rows.clone(), subject.num_scored - subject.num_scored // 3
    padded[0, subject.before + real :] = -1
    given, expected = (subject.score(reader, memory, rows) for rows in (padded, subject.rows))
    apart = max(largest(given[0, :real], expected[0, :real]), largest(given[1], expected[1]))
    if bool(given[0, real:].isfinite().any()):
        return Check("right padding", False, "numbers", "NaN", "padding is given a score")
    note = "rows of other lengths are scored as they are without padding"
    return subject.equal("right padding", subject.small, apart, note, same_shapes=True)


def left_padding(subject: Subject, reader: Reader) -> Check:
    if not subject.small.in_model:
        note = f"{subject.method} works around the model, which reads differently when called directly"
        return Check("left padding", None, "", "", note)
    lm, model, ids, padding = subject.lm, reader.lm.model, subject.rows, subject.num_scored // 2
    parameters = inspect.signature(model.forward).parameters
    if "attention_mask" not in parameters:
        return Check("left padding", None, "", "", f"{type(model).__name__} takes no attention mask")
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[0, padding:] = ids[0, : ids.shape[1] - padding]
    padded[0, :padding], mask[0, :padding] = lm.tokenizer.pad_token_id or 0, 0
    arguments = {"attention_mask": mask, "use_cache": False}
    if "position_ids" in parameters and lm.position_limit is not None:  # else only distances matter
        arguments["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
    alone = torch.cat([subject.plain_nats(one, subject.num_scored) for one in (padded[:1, padding:], ids[1:])])
    try:
        with torch.no_grad():
            logits = model(input_ids=padded, **arguments).logits
    except ValueError as error:
        return Check("left padding", True, "refused", "equal or refused", reason(error))
    together = nats_of(logits[:, -subject.num_scored - 1 : -1], padded[:, -subject.num_scored :])
    note = "the model called directly with a left-padded batch gives the scores of its rows"
    return subject.equal("left padding", subject.small, subject.apart(together, alone), note)


def inv_freq(subject: Subject, reader: Reader) -> Check:
    found = list(hf.rope_frequencies(reader.lm.model))
    if not found:
        return Check("inv_freq", None, "", "", f"{type(reader.lm.model).__name__} has no RoPE frequencies")
    others = {str(values.dtype).removeprefix("torch.") for _, values in found} - {"float32"}
    if others:
        note = "cast with the model: far positions are rotated wrongly; load with dtype= instead of .to(dtype)"
        return Check("inv_freq", False, ", ".join(others), "float32", note)
    if subject.method.frequencies(subject.lm) is not None:
        return Check("inv_freq", True, "float32", "float32", "the scaled frequencies are in float32")
    try:
        theta, own = hf.plain_rope(subject.lm.model, name=str(subject.method))
    except ValueError:
        own = found[0][1].to("meta")
    if own.device.type == "meta":
        note = "the frequencies are in float32; they have no plain theta to compare them with"
        return Check("inv_freq", True, "float32", "float32", note)
    error = float((own.cpu() / frequencies(theta, 2 * len(own)) - 1).abs().max())
    note = f"in float32, and those of theta = {theta:g} (rounded to bfloat16 they are off by 0.004)"
    return Check("inv_freq", error <= 1e-4, error, "<= 0.0001, relative", note)


def rope(subject: Subject, reader: Reader) -> Check:
    lm, method = subject.lm, subject.method
    if (scaled := method.frequencies(lm)) is None:
        return Check("rope", None, "", "", f"{method} leaves the model's cosines and sines as they are")
    wanted, scale = scaled
    theta, own = hf.plain_rope(lm.model, name=str(method))
    unchanged = frequencies(theta, 2 * len(own))
    trained, longer = lm.trained_length or 1, reader.lm.trained_length or 1
    far = [1, trained - 1, trained, 2 * trained + 1, longer]
    worst, change = 0.0, 0.0
    _, kind = hf.full_attention_rope(lm.model)
    for module in hf.rotary_modules(lm.model):
        worst = max(worst, hf.rotation_error(module, far, wanted, scale, kind))
        change = max(change, hf.rotation_error(module, far, unchanged, 1.0, kind))
    note = f"cosines at positions up to {max(far):,} are the formula's; unscaled ones differ by {change:.2g}"
    changed = change > 0.01 or torch.allclose(wanted, unchanged)
    if not changed:
        note = f"the cosines are still the model's own: the scaling of {method} is ignored"
    return Check("rope", worst <= 1e-3 and changed, worst, "<= 0.001", note)


def context(subject: Subject, reader: Reader) -> Check:
    sees = subject.longest if subject.method.sees is None else subject.method.sees
    string = min(STRING, (subject.longest - 2 * GAP - len(subject.head)) // 2, sees - GAP - 2)
    if string <= GAP:
        return Check("context", None, "", "", f"{subject.method} holds too few tokens for a string and its copy")
    sizes = (GAP, string, string, GAP)
    lead, copied, other, gap = (subject.sampled(COPIES, n, seed) for seed, n in enumerate(sizes))
    head = subject.head.expand(COPIES, -1)
    with_it, without = (torch.cat([head, lead, first, gap, copied], 1) for first in (copied, other))
    by_full = _gain(*(subject.plain_nats(ids, string) for ids in (with_it, without)))
    given = [_string_nats(reader, ids, string) for ids in (with_it, without)]
    gain, error = _gain(*given)
    allowed = "> 2 standard errors"
    measured = f"{gain:.2f} ± {error:.2f}"
    if largest(*given) <= (subject.tolerance_of_one if subject.exact else 0.0):
        return Check("context", False, 0.0, allowed, "the tokens already read change no score")
    if by_full[0] <= max(4 * by_full[1], 0.1):  # without a gain far beyond chance the check proves nothing
        note = f"the context is seen, but even with full attention the model does not copy ({by_full[0]:.2f} nats)"
        return Check("context", None, measured, allowed, note)
    note = f"nats per token by which a copy of {string} random tokens is easier ({by_full[0]:.2f} with full)"
    return Check("context", gain > 2 * error, measured, allowed, note)


def forgetting(subject: Subject, reader: Reader) -> Check:
    variant, layers = subject.forgetful, subject.lm.num_layers
    if variant is None or variant.reach is None:
        return Check("forgetting", None, "", "", f"every token can influence the scores under {subject.method}")
    reach, first = layers * (variant.reach - 1) + 1, max(variant.first, 1)
    ids = subject.sampled(1, first + GONE + reach + subject.num_scored, seed=5)
    changed = ids.clone()
    changed[:, first : first + GONE] = subject.sampled(1, GONE, seed=6)
    given, other = (subject.nats(reader, one) for one in (ids, changed))
    note = f"{GONE} tokens that {layers} layers of its window cannot reach change no score"
    return subject.equal("forgetting", variant, largest(other, given), note, same_shapes=True)


def memory(subject: Subject, reader: Reader) -> Check:
    small, lm, rows = subject.small, subject.lm, subject.rows
    reader.chunk = 16
    memory = reader.read(rows[:, :-1])
    if memory.num_kept > small.kept_to_answer(memory.num_seen):  # some methods drop keys at the first score
        memory.score(rows[:, -1:])
    most = small.kept_to_answer(memory.num_seen)
    measured = f"{memory.num_kept:,} tokens, {memory_size(memory.num_bytes)}"
    note = f"held of {memory.num_seen:,} tokens in {len(rows)} rows{subject.tested(small)}"
    if most >= memory.num_seen:  # the rest of a model's state is its own
        return Check("memory", memory.num_kept <= most, measured, f"<= {most:,} tokens", note)
    text = rows.nbytes  # a memory may hold the text
    most_bytes = most * len(rows) * lm.key_bytes_per_token * SPARE + text
    passed = memory.num_kept <= most and memory.num_bytes <= most_bytes
    return Check("memory", passed, measured, f"<= {most:,} tokens, {memory_size(most_bytes)}", note)


def _string_nats(reader: Reader, ids: Tensor, string: int) -> Tensor:
    reader.chunk = 1024
    memory = reader.read(ids[:, : -string - 2])
    memory.read(ids[:, -string - 2 : -string])
    return memory.score(ids[:, -string:]).nats.cpu()


def _gain(with_it: Tensor, without: Tensor) -> tuple[float, float]:
    """Return the nats per token by which a copy is easier, and their standard error over texts."""
    each = (without - with_it)[:, GAP:].mean(-1)
    return float(each.mean()), float(each.std() / len(each) ** 0.5)
