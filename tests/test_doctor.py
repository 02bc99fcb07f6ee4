"""The doctor finds nothing wrong with methods that keep their promises, and the right thing with those that do not."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cli import done, farspan, last_line, refused
from torch import Tensor

from farspan import doctor
from farspan.demo import embedded_model
from farspan.doctor import Check, diagnose
from farspan.lm import LM, wrap
from farspan.methods import Method, method
from farspan.methods.full import Full
from farspan.methods.lambda_mask import LambdaMask
from farspan.methods.rope import Rope
from farspan.methods.sinks import Sinks
from farspan.reader import Memory, Reader, Scores, dense_reader

from tiny import EXAMPLES, saved, tiny_model

TEXT = "the quick brown fox jumps over the lazy dog, and 31 foxes 41 dogs; " * 20


def failed(checks: list[Check]) -> set[str]:
    return {check.name for check in checks if check.passed is False}


def unasked(checks: list[Check]) -> set[str]:
    return {check.name for check in checks if check.passed is None}


def of(checks: list[Check], name: str) -> Check:
    return next(check for check in checks if check.name == name)


@pytest.fixture(scope="module")
def demo() -> LM:
    return embedded_model()


# methods that keep their promises


@pytest.mark.parametrize(
    ("text", "do_not_apply"),
    [
        ("full", {"at work", "rope", "forgetting"}),
        ("sinks:window=20,sinks=3,stride=8", {"rope"}),
        ("lambda_mask:window=200,sinks=3", {"rope"}),
        ("rope:type=yarn,factor=4,original=64", {"forgetting"}),
        ("rope:type=truncated,original=64", {"forgetting"}),
        ("rope:type=dynamic,original=40", {"rope", "forgetting"}),
        ("topk:k=6", {"rope", "forgetting"}),
        ("selfextend:group=4,window=20", {"rope", "forgetting"}),
        ("selfextend:group=4", {"rope", "forgetting"}),
        ("dca", {"rope", "forgetting"}),
        ("rope:type=yarn,factor=4,original=64+dca:chunk=24,local=6+temperature:original=12", {"forgetting"}),
        ("temperature:original=12", {"rope", "forgetting"}),
        ("snapkv:capacity=40,window=9", {"left padding", "rope", "forgetting"}),
        ("tova:share=0.3", {"left padding", "rope", "forgetting"}),
        ("knorm:share=0.3", {"left padding", "rope", "forgetting"}),
        ("knorm:capacity=40", {"left padding", "rope", "forgetting"}),
        ("ape:piece=16", {"left padding", "rope", "forgetting"}),
        ("rope:type=linear,factor=2+sinks:window=20,sinks=3+temperature:original=12", set()),
        ("replug:piece=16,tail=4", {"left padding", "rope", "forgetting"}),
        ("rope:type=ntk,factor=2+topk:k=6+replug:piece=30", {"left padding", "forgetting"}),
    ],
)
def test_a_method_that_keeps_its_promises_passes(text: str, do_not_apply: set[str], lm: LM) -> None:
    checks = diagnose(lm, method(text), TEXT)
    assert [check.name for check in checks] == list(doctor.ORDER)
    assert not failed(checks), [check for check in checks if check.passed is False]
    assert unasked(checks) - {"context"} == do_not_apply
    assert all(check.note for check in checks)


OTHERS = [(architecture, "sinks:window=20,sinks=3") for architecture in ("gpt_neox", "gemma2", "smollm3")]
OTHERS += [("gemma3", texts[0]) for texts in EXAMPLES.values()]


@pytest.mark.parametrize(("architecture", "text"), OTHERS)
def test_other_architectures_pass_too(architecture: str, text: str, tokenizer: Any) -> None:
    checks = diagnose(wrap(tiny_model(architecture), tokenizer, architecture), method(text), TEXT)
    assert not failed(checks), [check for check in checks if check.passed is False]


def test_a_model_that_was_trained_uses_its_context(demo: LM) -> None:
    checks = diagnose(demo, method("sinks:window=64,sinks=4"))
    assert not failed(checks)
    assert of(checks, "context").passed


def test_a_model_that_cannot_copy_is_not_blamed_on_the_method(lm: LM) -> None:
    context = of(diagnose(lm, Full(), TEXT), "context")
    assert context.passed is None
    assert "even with full attention the model does not copy" in context.note


# those that do not


@dataclass
class Spoilt(Reader):
    """A reader whose memories score as `spoil` makes of it."""

    inner: Reader
    spoil: Callable[["SpoiltMemory", Tensor, Scores], Scores]

    def __post_init__(self) -> None:
        self.lm = self.inner.lm

    @property
    def chunk(self) -> int:
        return self.inner.chunk

    @chunk.setter
    def chunk(self, tokens: int) -> None:
        self.inner.chunk = tokens

    def read(self, *passages: Tensor, **options: Any) -> Memory:
        return SpoiltMemory(self, self.inner.read(*passages, **options))  # type: ignore[return-value]


@dataclass
class SpoiltMemory:
    reader: Spoilt
    inner: Memory

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def score(self, ids: Tensor, keep: slice | None = None) -> Scores:
        return self.reader.spoil(self, ids, self.inner.score(ids, keep))


@dataclass(frozen=True)
class Spoiling(Method):
    """The model as it is, but for what `spoil` does; read shrunk or as it is, it is the same."""

    spoil: Callable[[SpoiltMemory, Tensor, Scores], Scores] = field(compare=False)

    def __str__(self) -> str:
        return "spoiling"

    def kept(self, num_tokens: int) -> int:
        return num_tokens

    @contextmanager
    def on(self, lm: LM) -> Iterator[Reader]:
        yield Spoilt(dense_reader(lm), self.spoil)  # type: ignore[misc]


def by_chunk(memory: SpoiltMemory, ids: Tensor, scores: Scores) -> Scores:
    return replace(scores, nats=scores.nats + (0.1 if memory.reader.chunk == 7 else 0.0))


def peeks(memory: SpoiltMemory, ids: Tensor, scores: Scores) -> Scores:
    return replace(scores, nats=scores.nats + 1e-2 * (ids.roll(-1, 1) % 7))


def by_rows(memory: SpoiltMemory, ids: Tensor, scores: Scores) -> Scores:
    return replace(scores, nats=scores.nats + (0.1 if len(ids) == 2 and ids.shape[1] == 32 else 0.0))


def by_padding(memory: SpoiltMemory, ids: Tensor, scores: Scores) -> Scores:
    return replace(scores, nats=scores.nats + (0.1 if bool((ids < 0).any()) else 0.0))


def forgets_all(memory: SpoiltMemory, ids: Tensor, scores: Scores) -> Scores:
    return replace(scores, nats=torch.ones_like(scores.nats))


def no_numbers(memory: SpoiltMemory, ids: Tensor, scores: Scores) -> Scores:
    return replace(scores, nats=scores.nats * torch.nan)


@pytest.mark.parametrize(
    ("spoil", "red"),
    [
        (by_chunk, {"cuts"}),
        (peeks, {"causality", "right padding"}),  # padding is a later token, too
        (by_rows, {"rows"}),
        (by_padding, {"right padding"}),
        (forgets_all, {"context", "right padding"}),
    ],
)
def test_a_reader_that_breaks_a_promise_is_found(spoil: Any, red: set[str], lm: LM) -> None:
    checks = diagnose(lm, Spoiling(spoil), TEXT)
    assert failed(checks) == red
    assert of(checks, "no-op").passed is None


def test_a_model_that_gives_no_numbers_does_not_run(lm: LM) -> None:
    assert "runs" in failed(diagnose(lm, Spoiling(no_numbers), TEXT))


def test_weights_that_are_no_numbers_are_not_a_trace(tokenizer: Any) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    checks = diagnose(wrap(model, tokenizer, "nan"), method("full"), TEXT)
    assert "runs" in failed(checks)
    assert of(checks, "no trace").passed


@dataclass(frozen=True)
class NoWindow(Sinks):
    """Sinks that reads everything."""

    @contextmanager
    def on(self, lm: LM) -> Iterator[Reader]:
        yield dense_reader(lm)


def test_a_window_that_is_none_is_found(demo: LM) -> None:
    assert failed(diagnose(demo, NoWindow(20))) == {"at work", "forgetting", "memory"}


def test_a_small_change_of_a_model_with_random_weights_is_not_judged(lm: LM) -> None:
    check = of(diagnose(lm, NoWindow(20), TEXT), "at work")
    assert check.passed is None
    assert "the model predicts text no better than chance" in check.note


@dataclass(frozen=True)
class AlwaysSmall(LambdaMask):
    """A window that is smaller than it says."""

    @contextmanager
    def on(self, lm: LM) -> Iterator[Reader]:
        with LambdaMask(min(self.window, 20), self.sinks).on(lm) as reader:
            yield reader


def test_what_is_not_the_model_inside_its_window_is_found(lm: LM) -> None:
    # the other checks are made on a window of 25, of which it keeps 20
    assert "no-op" in failed(diagnose(lm, AlwaysSmall(40, 3), TEXT))
    assert failed(diagnose(lm, AlwaysSmall(20, 3), TEXT)) == {"no-op"}


@dataclass(frozen=True)
class IgnoredRope(Rope):
    """A scaling that nobody listens to."""

    @contextmanager
    def on(self, lm: LM) -> Iterator[Reader]:
        yield dense_reader(lm)


def test_a_rope_scaling_that_is_ignored_is_found(demo: LM) -> None:
    checks = diagnose(demo, IgnoredRope("yarn", 4.0))
    assert failed(checks) == {"at work", "rope"}
    assert "is ignored" in of(checks, "rope").note


@dataclass(frozen=True)
class OtherRope(Rope):
    """A scaling by another formula."""

    @contextmanager
    def on(self, lm: LM) -> Iterator[Reader]:
        with Rope("linear" if self.factor > 1 else self.type, self.factor).on(lm) as reader:
            yield reader


def test_a_rope_of_another_formula_is_found(lm: LM) -> None:
    assert failed(diagnose(lm, OtherRope("ntk", 4.0), TEXT)) == {"rope"}


@dataclass(frozen=True)
class Undeclared(Full):
    """Full attention that declares neither a neutral setting nor a small one, as a method of a user can."""

    def neutral(self, num_tokens: int) -> None:  # type: ignore[override]
        return None


def test_a_method_without_small_settings_is_not_called_the_model_as_it_is(lm: LM) -> None:
    notes = {one.name: one.note for one in diagnose(lm, Undeclared(), TEXT)}
    assert notes["at work"] == "full declares no setting (`small`) that changes a short text"
    assert {one.name: one.note for one in diagnose(lm, Full(), TEXT)}["at work"] == "full is the model as it is"


@dataclass(frozen=True)
class LeavesHook(Full):
    @contextmanager
    def on(self, lm: LM) -> Iterator[Reader]:
        lm.model.get_decoder().layers[0].register_forward_hook(lambda *_: None)
        yield dense_reader(lm)


@dataclass(frozen=True)
class LeavesAfterError(Full):
    @contextmanager
    def on(self, lm: LM) -> Iterator[Reader]:
        weight = lm.model.get_decoder().layers[0].mlp.up_proj.weight
        own = float(weight.data[0, 0])
        weight.data[0, 0] = own + 1e-7
        yield dense_reader(lm)
        weight.data[0, 0] = own


@pytest.mark.parametrize(("kind", "what"), [(LeavesHook, "hooks"), (LeavesAfterError, "up_proj")])
def test_a_trace_that_is_left_is_found(kind: type[Method], what: str, lm: LM) -> None:
    checks = diagnose(lm, kind(), TEXT)
    assert failed(checks) == {"no trace"}
    assert what in of(checks, "no trace").note


def test_frequencies_of_half_precision_are_found_and_rope_methods_mend_them(tokenizer: Any) -> None:
    lm = wrap(tiny_model().to(torch.bfloat16), tokenizer, "bf16")
    inv_freq = of(diagnose(lm, Full(), TEXT), "inv_freq")
    assert inv_freq.passed is False
    assert inv_freq.measured == "bfloat16"
    assert of(diagnose(lm, method("rope:type=yarn,factor=4"), TEXT), "inv_freq").passed


def test_frequencies_that_were_rounded_once_are_found(lm: LM) -> None:
    buffers = lm.model.model.rotary_emb._buffers
    buffers["inv_freq"] = buffers["inv_freq"].bfloat16().float()
    checks = diagnose(lm, Full(), TEXT)
    assert failed(checks) == {"inv_freq"}
    assert 1e-4 < float(of(checks, "inv_freq").measured) < 0.005


def test_a_padding_mask_that_is_ignored_is_found(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = lm.model.model.forward
    monkeypatch.setattr(
        lm.model.model, "forward", lambda *args, **kwargs: forward(*args, **kwargs | {"attention_mask": None})
    )
    assert failed(diagnose(lm, Full(), TEXT)) == {"left padding"}


@pytest.mark.parametrize(
    ("architecture", "text", "reason"),
    [
        ("gpt2", "sinks:window=20", "learned positions"),
        ("gpt_oss", "rope:type=yarn,factor=4", "is scaled already (yarn): use full"),
    ],
)
def test_a_method_that_a_model_refuses_is_one_failed_check(
    architecture: str, text: str, reason: str, tokenizer: Any
) -> None:
    checks = diagnose(wrap(tiny_model(architecture), tokenizer, architecture), method(text), TEXT)
    assert [(check.name, check.passed) for check in checks] == [("runs", False)]
    assert reason in checks[0].note


def test_a_text_that_is_too_short_is_refused(lm: LM) -> None:
    with pytest.raises(ValueError, match=r"the text has \d+ tokens, and the checks read 256"):
        diagnose(lm, Full(), "too short")


def test_the_watch_is_told_of_each_check(lm: LM) -> None:
    told: list[tuple[str, int, int]] = []
    checks = diagnose(lm, Full(), TEXT, watch=lambda *one: told.append(one))
    assert {name for name, _, _ in told} == {check.name for check in checks}
    assert [done for _, done, _ in told] == list(range(len(checks)))
    assert {total for _, _, total in told} == {len(checks)}


# the command line


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("llama", "gpt2"):
        saved(folder / name, tokenizer, tiny_model(name))
    (folder / "text.txt").write_text(TEXT)
    return folder


def test_the_command_prints_a_table_and_one_line_of_json(folder: Path) -> None:
    options = ("--method", "topk:k=9", "--text", folder / "text.txt", "--device", "cpu")
    result = done(farspan("doctor", folder / "llama", *options, "--json"))
    told = last_line(result)
    assert (told["method"], told["failed"]) == ("topk:k=9", 0)
    assert [check["name"] for check in told["checks"]] == list(doctor.ORDER)
    assert "✓" in result.stderr
    assert "–" in result.stderr


def test_the_command_ends_with_one_when_a_check_fails(folder: Path) -> None:
    options = ("--method", "lambda_mask:window=9", "--text", folder / "text.txt", "--device", "cpu")
    result = farspan("doctor", folder / "gpt2", *options)
    assert result.exit_code == 1
    assert "✗" in result.stdout
    assert "0 of 1 checks passed" in result.stdout


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--method", "sinkz:window=9"), "did you mean 'sinks'"),
        (("--text", "no/such/text.txt"), "no/such/text.txt"),
        (("--device", "cpu", "--device-map", "auto"), "contradict"),
    ],
)
def test_the_command_refuses_what_cannot_be_meant(options: tuple[str, ...], reason: str, folder: Path) -> None:
    assert reason in refused(farspan("doctor", folder / "llama", *options))


def test_the_summary_is_json_whatever_was_measured(lm: LM) -> None:
    checks = diagnose(lm, Spoiling(no_numbers), TEXT)
    json.dumps([check.measured for check in checks], allow_nan=False)
