"""What trainings do when something is wrong: they diverge, their checkpoints are damaged, the disk is full, the folder
is in use, a value of the config cannot be. Tables, easy to extend; every training is of a tiny model."""

import json
import math
import os
import pickle
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from pydantic import BaseModel
from safetensors.torch import load_file, save_file
from test_cli import farspan as cli
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from farspan.callback import CurveCallback, PerplexityCallback
from farspan.files import locked
from farspan.hf.products import is_used
from farspan.record import Row
from farspan.report.export import memory_size
from farspan.stats import MemoryLength
from farspan.train import cepe, distill, interrupts, lm, mlm, smt
from farspan.train.cards import measured_table, smt_card
from farspan.train.checkpoint import writing
from farspan.train.checkpoint_trainer import CheckpointTrainer
from farspan.train.config import read_config
from farspan.train.progress import TrainingWatch
from farspan.train.trainer import read_log

from cepe_models import tiny_encoder
from tiny import configure, files_no_larger_than, saved

KINDS: dict[str, tuple[Any, Any]] = {
    "lm": (lm.LmSettings, lm.train),
    "smt": (smt.SmtSettings, smt.train),
    "mlm": (mlm.MlmSettings, mlm.train),
    "cepe": (cepe.CepeSettings, cepe.train),
    "distill": (distill.DistillSettings, distill.train),
}
SENTENCE = "The quick brown fox jumps over the lazy dog, and what number {} thinks of it nobody has asked. "
ENDS = """
[optimizer]
lr = 1e-3
warmup_steps = 1
decay_fraction = 0.0
[trainer]
steps = 4
batch = 2
micro_batch = 1
bf16 = false
log_every = 2
save_every = 2
"""
CEPE = """
out = "?"
[model]
name = "{0}/model"
encoder = "{0}/encoder"
dtype = "float32"
[data]
text = "{0}/text"
decoder = 24
chunks = 3
chunk = 8
[watch]
every = 0
"""
CONFIGS = {
    "lm": 'out = "?"\n[data]\ntext = "{0}/text"\n[tokenizer]\nfolder = "{0}/model"\n[model]\nhidden = 16\n'
    "feed_forward = 32\nlayers = 1\nheads = 2\nkey_value_heads = 1\n" + ENDS + "window = 32\n",
    "smt": 'out = "?"\n[model]\nname = "{0}/model"\nwindow = 32\n[data]\ntext = "{0}/text"\n[lengths]\ntarget = 64\n'
    "every = 2\n[watch]\nevery = 0\n" + ENDS,
    "mlm": 'out = "?"\ndecoder = "{0}/model"\n[data]\ntext = "{0}/text"\n[encoder]\nhidden = 16\nfeed_forward = 32\n'
    "layers = 1\nheads = 2\n" + ENDS + "window = 32\n",
    "cepe": CEPE + ENDS,
    "distill": CEPE + "[distill]\n" + ENDS,
}
Make = Callable[..., Any]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A folder with a model, an encoder, a text and a config of each training."""
    folder = tmp_path_factory.mktemp("base")
    saved(folder / "model", tokenizer)
    tiny_encoder().save_pretrained(folder / "encoder")
    (folder / "text").mkdir()
    for number in range(3):
        (folder / "text" / f"{number}.txt").write_text("".join(SENTENCE.format(number * i) for i in range(12)))
    for kind, text in CONFIGS.items():
        (folder / f"{kind}.toml").write_text(text.format(folder))
    return folder


@pytest.fixture
def settings(base: Path, tmp_path: Path) -> Make:
    """`settings(kind, "table.key=value", ...)`: a training of less than a second, in `tmp_path / "out"`."""

    def made(kind: str, *overrides: str) -> Any:
        return read_config(base / f"{kind}.toml", KINDS[kind][0], [f"out={tmp_path / 'out'}", *overrides])

    return made


def train(kind: str, settings: Any) -> Any:
    return KINDS[kind][1](settings)


def results(out: Path) -> list[str]:
    """What of a finished training is in a folder."""
    return [name for name in ("model.safetensors", "cepe_adapter.safetensors", "README.md", "training.json")
            if (out / name).exists()]  # fmt: skip


@pytest.mark.skipif(not is_used(), reason="oneDNN is not used here")
def test_a_step_with_products_of_another_library_is_not_taken(
    settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward = torch.Tensor.backward

    def short(tensor: torch.Tensor, *args: Any, **options: Any) -> None:
        backward(tensor, *args, **options)
        torch.backends.mkldnn.enabled = False  # what torch does where oneDNN lacks memory

    monkeypatch.setattr(torch.Tensor, "backward", short)
    with pytest.raises(MemoryError, match="too little memory"):
        lm.train(settings("lm"))
    assert torch.backends.mkldnn.enabled
    assert not list((tmp_path / "out").rglob("checkpoint-*"))


# plans


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_counts_as_the_training_does_refuses_what_it_refuses_and_writes_nothing(
    settings: Make, tmp_path: Path, kind: str
) -> None:
    lines: list[str] = []
    plan, out = TrainingWatch(notice=lines.append, plan=True), tmp_path / "out"
    numbers = KINDS[kind][1](settings(kind), plan)
    assert not out.exists()
    summary = train(kind, settings(kind))
    assert numbers == {"steps": 4, "steps_left": 4} | {
        key: summary[key] for key in numbers if key in ("rows", "tokens")
    }
    assert f"{summary['trained' if 'trained' in summary else 'parameters']:,} of" in "".join(lines)
    assert f"{summary['tokens']:,} in all" in lines[-1] if kind != "smt" else lines[-1] == "4 steps of 2 rows"

    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.name != "lock"}
    assert KINDS[kind][1](settings(kind), plan)["steps_left"] == 0
    assert lines[-1].endswith("; the training is finished (checkpoint-4): nothing would be trained")
    KINDS[kind][1](settings(kind, "trainer.steps=8"), plan)
    assert lines[-1].endswith("; the training continues from checkpoint-4")
    for changed in ("optimizer.lr=0.5", "trainer.steps=2"):
        with pytest.raises(ValueError, match=r"trainer\.steps|optimizer\.lr") as planned:
            KINDS[kind][1](settings(kind, changed), plan)
        with pytest.raises(ValueError, match=re.escape(str(planned.value))):
            train(kind, settings(kind, changed))
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.name != "lock"} == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_calibrated_plan_times_steps_and_writes_nothing(settings: Make, tmp_path: Path, kind: str) -> None:
    lines: list[str] = []
    how = settings(kind, "trainer.steps=5", *(["distill.stored=false"] * (kind == "distill")))
    start = time.perf_counter()
    numbers = KINDS[kind][1](how, TrainingWatch(notice=lines.append, plan=True, calibrate=True))
    found = re.fullmatch(r"a step takes (.+) s here, 5 steps (.+) seconds; peak memory (.+)", lines[-1])
    assert found is not None, lines
    step, every = map(float, found.groups()[:2])
    assert 0 < 2 * step < time.perf_counter() - start
    assert every == pytest.approx(5 * step, abs=0.5 + 0.25 * step)  # both are rounded
    assert numbers["steps"] == numbers["steps_left"] == 5
    assert numbers["step_seconds"] == pytest.approx(step, rel=0.05)
    assert numbers["seconds"] == pytest.approx(5 * numbers["step_seconds"])
    assert numbers["peak_bytes"] > 100 * 2**20
    assert found[3] == memory_size(numbers["peak_bytes"])
    assert not (tmp_path / "out").exists()


def test_a_calibrated_plan_times_what_is_left_of_a_training(settings: Make) -> None:
    train("lm", settings("lm"))
    lines: list[str] = []
    KINDS["lm"][1](settings("lm", "trainer.steps=8"), TrainingWatch(notice=lines.append, plan=True, calibrate=True))
    assert ", 4 steps " in lines[-1]


def test_a_plan_trains_a_tokenizer_for_its_counts_and_keeps_none(base: Path, tmp_path: Path) -> None:
    chosen = [f"out={tmp_path / 'out'}", "tokenizer={vocabulary=300}"]
    done = cli(
        "train", "lm", base / "lm.toml", *(part for one in chosen for part in ("--set", one)), "--plan", "--json"
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found.pop("plan")[-1] == "4 steps of 2 rows of 32 tokens: 64 tokens a step, 256 in all"
    assert found == {"steps": 4, "steps_left": 4, "rows": 8, "tokens": 256}
    assert list(tmp_path.iterdir()) == []


# a training that diverges


@pytest.mark.parametrize("kind", ["lm", "smt", "mlm"])
def test_a_training_that_diverges_stops_and_saves_no_model(settings: Make, tmp_path: Path, kind: str) -> None:
    diverged = r"the training diverged: the (loss|norm of the gradient) is (nan|inf) .*steps? .*lr = 1e\+30"
    with pytest.raises(ValueError, match=diverged):
        train(kind, settings(kind, "optimizer.lr=1e30", "trainer.log_every=1", "trainer.steps=8"))
    assert results(tmp_path / "out") == []
    log = read_log(tmp_path / "out")
    assert "NaN" not in (tmp_path / "out" / "log.jsonl").read_text()
    assert log


@pytest.mark.parametrize(("kind", "step"), [*((kind, 3) for kind in KINDS), ("smt", 4)])
def test_one_loss_that_is_not_finite_ends_the_training_at_the_next_line_of_its_log(
    settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, step: int
) -> None:
    import transformers

    count, original = [0], transformers.Trainer.training_step

    def training_step(*arguments: Any, **options: Any) -> Any:
        count[0] += 1  # two micro-batches a step: the first of them has no finite loss, and a gradient that is finite
        return original(*arguments, **options) * (float("nan") if count[0] == 2 * step - 1 else 1)

    monkeypatch.setattr(transformers.Trainer, "training_step", training_step)
    with pytest.raises(ValueError, match=r"loss is nan in steps 3 to 4.*checkpoint-2\. Lower optimizer\.lr = 0\.001"):
        train(kind, settings(kind, "trainer.steps=6"))
    assert [path.name for path in (tmp_path / "out" / "checkpoints").glob("checkpoint-*")] == ["checkpoint-2"]
    assert results(tmp_path / "out") == []


def test_a_gradient_that_is_not_finite_ends_the_training(settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    monkeypatch.setattr(transformers.Trainer, "_clip_grad_norm", lambda self, model: torch.tensor(float("inf")))
    with pytest.raises(ValueError, match="the norm of the gradient is inf at step 2"):
        train("smt", settings("smt"))


def test_weights_that_are_not_finite_are_never_saved(
    settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, count = torch.optim.AdamW.step, [0]

    def step(self: Any, *arguments: Any, **options: Any) -> Any:
        done = original(self, *arguments, **options)
        count[0] += 1
        if count[0] == 4:  # after the last loss that is computed
            next(p for group in self.param_groups for p in group["params"]).data.view(-1)[0] = float("nan")
        return done

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    with pytest.raises(ValueError, match=r"diverged: weight .* holds NaN or infinity after step 4.*checkpoint-2"):
        train("smt", settings("smt"))
    assert results(tmp_path / "out") == []
    assert [path.name for path in (tmp_path / "out" / "checkpoints").glob("checkpoint-*")] == ["checkpoint-2"]


def test_a_training_that_diverges_ends_the_command_with_one_line(base: Path, tmp_path: Path) -> None:
    done = cli("train", "smt", str(base / "smt.toml"), "--set", f"out={tmp_path / 'o'}", "--set", "optimizer.lr=1e30")
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1].startswith("error: the training diverged: the ")
    assert "Traceback" not in done.stderr


def poisoned(base: Path, name: str, into: Path, value: float) -> Path:
    """A copy of a model with one weight that is no number."""
    shutil.copytree(base / name, into)
    file = into / "model.safetensors"
    weights = load_file(file)
    last = max(key for key in weights if "layers.0" in key)
    weights[last].view(-1)[-1] = value
    save_file(weights, file, metadata={"format": "pt"})
    return into


@pytest.mark.parametrize(
    ("kind", "which", "name"),
    [
        ("smt", "model", "model.name"),
        ("cepe", "model", "model.name"),
        ("cepe", "encoder", "model.encoder"),
        ("distill", "encoder", "model.encoder"),
        ("distill", "model", "distill.teacher"),
        ("mlm", "model", "encoder.start"),
    ],
)
def test_a_model_whose_weights_are_not_finite_is_refused_before_the_training(
    settings: Make, base: Path, tmp_path: Path, kind: str, which: str, name: str
) -> None:
    folder = poisoned(base, which, tmp_path / "bad", float("-inf" if which == "encoder" else "nan"))
    with pytest.raises(ValueError, match=r"bad' cannot be used: its weight .*layers\.0.* holds NaN or infinity"):
        train(kind, settings(kind, f"encoder={{start={str(folder)!r}}}" if kind == "mlm" else f"{name}={folder}"))
    assert not (tmp_path / "out" / "log.jsonl").exists()


# checkpoints


@dataclass
class Trained:
    """A finished training of each kind, to be continued."""

    folder: Path
    base: Path

    def continued(self, kind: str, tmp_path: Path, damage: Callable[[Path], None]) -> Any:
        """Damages a checkpoint of a copy and trains on."""
        out = tmp_path / "out"
        shutil.copytree(self.folder / kind, out)
        damage(out / "checkpoints" / "checkpoint-4")
        settings = read_config(self.base / f"{kind}.toml", KINDS[kind][0], [f"out={out}", "trainer.steps=6"])
        return train(kind, settings)


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    os.environ["FARSPAN_CACHE"] = str(folder / "cache")
    for kind in KINDS:
        train(kind, read_config(base / f"{kind}.toml", KINDS[kind][0], [f"out={folder / kind}"]))
    return Trained(folder, base)


START = {
    "lm": ("model={{start={0!r}}}", "tokenizer={{}}"),
    "smt": ("model.name={0}", "trained.what=all"),
    "cepe": ("model.name={0}",),
    "distill": ("distill.teacher={0}",),
}


def refuses_to_begin_with(settings: Make, folder: Path, message: str) -> None:
    for kind, overrides in START.items():
        with pytest.raises(ValueError, match=message):
            train(kind, settings(kind, *(one.format(str(folder)) for one in overrides)))


def test_a_cepe_model_is_refused_as_the_model_that_is_trained(settings: Make, trained: Trained) -> None:
    refuses_to_begin_with(settings, trained.folder / "cepe", "cepe' is a CEPE model: give the decoder")


@pytest.mark.parametrize("file", ["training.json", "log_n_scales.json"])
def test_a_model_that_reads_with_log_n_scaling_is_not_trained_further_without_it(
    settings: Make, trained: Trained, tmp_path: Path, file: str
) -> None:
    folder = tmp_path / "scaled"
    shutil.copytree(trained.folder / "smt", folder)
    content: dict[str, Any] = {"original": 32, "scales": [[1.0]]}
    if file == "training.json":
        content = json.loads((folder / file).read_text())
        content["settings"]["model"]["temperature"] = True
    (folder / file).write_text(json.dumps(content))
    refuses_to_begin_with(settings, folder, r"scaled' was trained with log-n scaling .* Give the model that it was")


class Evil:
    def __reduce__(self) -> Any:
        return os._exit, (3,)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def gone(file: Path) -> None:
    file.unlink(missing_ok=True)


def pickled(file: Path) -> None:
    file.write_bytes(pickle.dumps(Evil()))


def a_list(file: Path) -> None:
    if file.suffix == ".json":
        file.write_text("[1, 2]")
    elif file.suffix == ".safetensors":
        save_file({"0": torch.zeros(1)}, file)
    else:
        torch.save([1, 2], file)


def a_folder(file: Path) -> None:
    file.unlink(missing_ok=True)
    file.mkdir()


def a_link_to_itself(file: Path) -> None:
    file.unlink()
    file.symlink_to(file)


def with_state(**values: Any) -> Callable[[Path], None]:
    """A damage that sets values of trainer_state.json."""

    def damage(file: Path) -> None:
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    damage.__name__ = " ".join(f"{name}={value}" for name, value in values.items())
    return damage


def of_no_seconds(file: Path) -> None:
    state = json.loads(file.read_text())
    state["stateful_callbacks"]["Clock"] = {"attributes": {"seconds": "long"}}
    file.write_text(json.dumps(state))


def not_finite(file: Path) -> None:
    weights = load_file(file)
    weights[min(weights)].view(-1)[0] = float("inf")
    save_file(weights, file, metadata={"format": "pt"})


BINARY = (cut, empty, gone, pickled, a_list, a_folder)
DAMAGES: dict[str, tuple[Callable[[Path], None], ...]] = {
    "model.safetensors": (*BINARY, not_finite),
    "optimizer.pt": BINARY,
    "scheduler.pt": BINARY,
    "rng_state.pth": (*BINARY, a_link_to_itself),
    "trainer_state.json": (
        cut, empty, gone, a_list, with_state(what_comes_next=1), with_state(log_history=[]), with_state(log_history=5),
        with_state(global_step=3), with_state(stateful_callbacks={}), with_state(max_steps=0), of_no_seconds,
    ),
    "scaler.pt": (pickled, a_list),
}  # fmt: skip
# of smt all, and of each other kind one damage of each file, another one for each kind
CASES = [("smt", name, damage) for name, damages in DAMAGES.items() for damage in damages] + [
    (kind, name, damages[number % len(damages)])
    for number, kind in enumerate(("lm", "mlm", "cepe", "distill"))
    for name, damages in DAMAGES.items()
]


@pytest.mark.parametrize(("kind", "name", "damage"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_every_file_of_a_checkpoint_that_is_damaged_is_named(
    trained: Trained,
    tmp_path: Path,
    kind: str,
    name: str,
    damage: Callable[[Path], None],
    recwarn: pytest.WarningsRecorder,
) -> None:
    with pytest.raises(ValueError) as found:  # noqa: PT011
        trained.continued(kind, tmp_path, lambda folder: damage(folder / name))
    message = str(found.value)
    assert "object is not" not in message
    assert not [one for one in recwarn if "pickle protocol" in str(one.message)]
    file = tmp_path / "out" / "checkpoints" / "checkpoint-4" / name
    assert message.startswith(f"{file} is damaged, incomplete or of another version: ")
    assert f"Delete the folder {file.parent} and repeat the command: the training begins again" in message
    assert "\n" not in message
    assert len(message) < 1500


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_that_is_whole_is_continued(trained: Trained, tmp_path: Path, kind: str) -> None:
    assert trained.continued(kind, tmp_path, lambda folder: None)["loss"] > 0


def test_another_checkpoint_is_named_where_there_is_one(trained: Trained, tmp_path: Path) -> None:
    def damage(folder: Path) -> None:
        shutil.copytree(folder, folder.parent / "checkpoint-2")
        cut(folder / "optimizer.pt")

    with pytest.raises(ValueError, match=r"the training continues from checkpoint-2$"):
        trained.continued("smt", tmp_path, damage)


def test_a_checkpoint_that_was_not_written_to_its_end_is_passed_over_with_a_word(
    trained: Trained, base: Path, tmp_path: Path
) -> None:
    out, said = tmp_path / "out", list[str]()
    watch = TrainingWatch(notice=said.append)
    shutil.copytree(trained.folder / "smt", out)
    shutil.copytree(out / "checkpoints" / "checkpoint-4", out / "checkpoints" / "checkpoint-6")
    (out / "checkpoints" / "checkpoint-6" / "trainer_state.json").unlink()
    smt.train(read_config(base / "smt.toml", smt.SmtSettings, [f"out={out}", "trainer.steps=6"]), watch)
    assert [line for line in said if "checkpoint-6 has no trainer_state.json" in line and "checkpoint-4" in line]


def test_folders_of_other_names_beside_checkpoints_are_let_be(trained: Trained, tmp_path: Path) -> None:
    def best(folder: Path) -> None:
        shutil.copytree(folder, folder.parent / "checkpoint-best")

    trained.continued("smt", tmp_path, best)
    assert (tmp_path / "out" / "checkpoints" / "checkpoint-best" / "model.safetensors").exists()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", [cut, empty, a_list])
def test_settings_that_are_damaged_are_named(
    trained: Trained, tmp_path: Path, kind: str, damage: Callable[[Path], None]
) -> None:
    file = tmp_path / "out" / "settings.json"
    with pytest.raises(ValueError, match=r"settings\.json is damaged.*Delete .*settings\.json and repeat the command"):
        trained.continued(kind, tmp_path, lambda folder: damage(file))


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_that_is_refused_keeps_its_settings(trained: Trained, tmp_path: Path, kind: str) -> None:
    shutil.copytree(trained.folder / kind, tmp_path / "out")
    chosen = read_config(trained.base / f"{kind}.toml", KINDS[kind][0], [f"out={tmp_path / 'out'}", "trainer.steps=3"])
    with pytest.raises(ValueError, match=r"checkpoint-4 is of a longer training than trainer\.steps = 3"):
        train(kind, chosen)
    assert json.loads((tmp_path / "out" / "settings.json").read_text())["trainer"]["steps"] == 4


def test_a_damaged_checkpoint_ends_the_command_with_one_line(trained: Trained, base: Path, tmp_path: Path) -> None:
    shutil.copytree(trained.folder / "lm", tmp_path / "o")
    cut(tmp_path / "o" / "checkpoints" / "checkpoint-4" / "optimizer.pt")
    done = cli("train", "lm", str(base / "lm.toml"), "--set", f"out={tmp_path / 'o'}", "--set", "trainer.steps=6")
    assert done.exit_code == 2
    assert "optimizer.pt is damaged" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_stopped_training_names_the_checkpoint_from_which_it_continues_if_there_is_one(
    trained: Trained, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("farspan.train.lm.train", stop)
    shutil.copytree(trained.folder / "lm", tmp_path / "o")
    for out, kept in (
        ("o", "the same command continues from checkpoint-4"),
        ("new", "no checkpoint was saved yet: the same command begins again"),
    ):
        done = cli("train", "lm", str(base / "lm.toml"), "--set", f"out={tmp_path / out}")
        assert (done.exit_code, done.stderr.splitlines()[-1]) == (130, f"interrupted: {kept}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by", interrupts.SIGNALS)
def test_a_training_that_is_interrupted_saves_its_step_and_continues_as_if_it_was_not(
    trained: Trained, settings: Make, tmp_path: Path, handlers: None, kind: str, by: signal.Signals
) -> None:
    chosen, notices = settings(kind), list[str]()
    watch = TrainingWatch(step=lambda done, total, state: done == 3 and signal.raise_signal(by), notice=notices.append)
    with pytest.raises(KeyboardInterrupt):
        KINDS[kind][1](chosen, watch)
    assert [path.name for path in (tmp_path / "out" / "checkpoints").glob("checkpoint-*")] == ["checkpoint-3"]
    assert results(tmp_path / "out") == []
    assert any("a second signal (Ctrl-C) ends at once" in line for line in notices)
    assert [signal.getsignal(number) for number in interrupts.SIGNALS] == [signal.default_int_handler] * 2
    train(kind, chosen)
    name = "cepe_adapter.safetensors" if kind in ("cepe", "distill") else "model.safetensors"
    now, whole = (load_file(folder / name) for folder in (tmp_path / "out", trained.folder / kind))
    assert now.keys() == whole.keys()
    assert all(torch.equal(now[key], whole[key]) for key in whole)


def test_a_signal_after_the_last_step_is_not_lost(
    settings: Make, tmp_path: Path, handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = CheckpointTrainer._save_checkpoint

    def signalled(trainer: Any, *arguments: Any) -> None:
        if trainer.state.global_step == 4:
            signal.raise_signal(signal.SIGTERM)
        save(trainer, *arguments)

    monkeypatch.setattr(CheckpointTrainer, "_save_checkpoint", signalled)
    with pytest.raises(KeyboardInterrupt):
        smt.train(settings("smt"))
    assert results(tmp_path / "out") == []
    smt.train(settings("smt"))
    assert results(tmp_path / "out")


def test_a_signal_in_the_first_step_acts_at_once(settings: Make, tmp_path: Path, handlers: None) -> None:
    with pytest.raises(KeyboardInterrupt):
        smt.train(settings("smt"), TrainingWatch(step=lambda *_: signal.raise_signal(signal.SIGINT)))
    assert not list((tmp_path / "out" / "checkpoints").glob("checkpoint-*"))


def test_a_second_signal_ends_a_training_at_once(
    settings: Make, tmp_path: Path, handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts, "PAUSE", -1.0)

    def twice(done: int, total: int, state: str) -> None:
        for _ in range(2 * (done == 3)):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        smt.train(settings("smt"), TrainingWatch(step=twice))
    assert [path.name for path in (tmp_path / "out" / "checkpoints").glob("checkpoint-*")] == ["checkpoint-2"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.fixture
def handlers() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, as under the command line."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"),  # torch
        RuntimeError("basic_ios::clear: iostream error"),  # torch
        Exception("No space left on device (os error 28)"),  # tokenizers
    ],
    ids=str,
)
def test_a_full_disk_is_named_whatever_the_library_raises(error: Exception) -> None:
    with (
        pytest.raises(ValueError, match=r"^out/checkpoint-2 cannot be written: no space is left .* if it has none"),
        writing(Path("out/checkpoint-2")),
    ):
        raise error


@pytest.mark.parametrize("kind", ["smt", "cepe"])
def test_a_training_is_not_continued_from_a_base_with_another_config(
    trained: Trained, base: Path, tmp_path: Path, kind: str
) -> None:
    shutil.copytree(trained.folder / kind, tmp_path / "out")
    chosen = read_config(base / f"{kind}.toml", KINDS[kind][0], [f"out={tmp_path / 'out'}"])
    file = base / "model" / "config.json"
    before = file.read_text()
    try:
        configure(base / "model", rms_norm_eps=0.5)
        with pytest.raises(ValueError, match=r"config of the model that is trained has changed .* began: rms_norm"):
            train(kind, chosen)
    finally:
        file.write_text(before)


@pytest.mark.parametrize("kind", ["smt", "cepe"])
def test_a_finished_training_is_not_saved_again_from_another_base(
    trained: Trained, base: Path, tmp_path: Path, kind: str
) -> None:
    changed = poisoned(base, "model", tmp_path / "changed", 0.5)
    shutil.copytree(trained.folder / kind, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()}
    chosen = read_config(base / f"{kind}.toml", KINDS[kind][0], [f"out={tmp_path / 'out'}"])
    shutil.copytree(base / "model", tmp_path / "kept")
    try:
        shutil.copytree(changed, base / "model", dirs_exist_ok=True)
        with pytest.raises(ValueError, match="the model that is trained has changed since the training"):
            train(kind, chosen)
    finally:
        shutil.copytree(tmp_path / "kept", base / "model", dirs_exist_ok=True)
    now = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert {name for name in before if now[name] != before[name]} <= {"settings.json"}


def test_another_number_of_processes_does_not_change_the_batch(
    settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = settings("smt")
    without = chosen.model_copy(update={"trainer": chosen.trainer.model_copy(update={"batch": None})})
    smt.train(without)
    recorded = json.loads((tmp_path / "out" / "settings.json").read_text())
    assert recorded["trainer"]["batch"] == 1
    recorded["trainer"]["batch"] = None  # as older versions recorded it
    (tmp_path / "out" / "settings.json").write_text(json.dumps(recorded))
    smt.train(without)
    monkeypatch.setattr("farspan.train.engines.num_processes", lambda: 2)
    with pytest.raises(ValueError, match=r"trainer\.batch was 1, now 2"):
        smt.train(without)


@pytest.mark.parametrize("bf16", [False, True])
def test_the_precision_is_that_of_the_settings_whatever_accelerate_is_told(
    settings: Make, monkeypatch: pytest.MonkeyPatch, bf16: bool
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no" if bf16 else "bf16")  # as accelerate launch sets it
    used = set()
    original = CheckpointTrainer.training_step

    def training_step(trainer: Any, *given: Any) -> Any:
        used.add(trainer.accelerator.mixed_precision)
        return original(trainer, *given)

    monkeypatch.setattr(CheckpointTrainer, "training_step", training_step)
    smt.train(settings("smt", f"trainer.bf16={str(bf16).lower()}"))
    assert used == {"bf16" if bf16 else "no"}


def test_another_kind_of_machine_does_not_change_the_precision(
    settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, recorded = settings("smt", "trainer.bf16=auto"), tmp_path / "out" / "settings.json"
    monkeypatch.setattr(smt.SmtTrainer, "uses_bf16", False)
    assert smt.train(chosen)["settings"]["trainer"]["bf16"] is False
    monkeypatch.setattr(smt.SmtTrainer, "uses_bf16", True)
    with pytest.raises(ValueError, match=r"trainer\.bf16 was False, now True"):
        smt.train(chosen)
    before = json.loads(recorded.read_text())
    before["trainer"]["bf16"] = "auto"  # as older versions recorded it
    recorded.write_text(json.dumps(before))
    smt.train(chosen)


# the folder


@pytest.mark.parametrize("kind", KINDS)
def test_of_two_trainings_in_one_folder_the_second_is_refused(settings: Make, tmp_path: Path, kind: str) -> None:
    (tmp_path / "out" / "checkpoints").mkdir(parents=True)
    with (
        locked(tmp_path / "out" / "checkpoints" / "lock"),
        pytest.raises(ValueError, match=r"out.*is being written by another process"),
    ):
        train(kind, settings(kind))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["checkpoints"]


@pytest.mark.parametrize("kind", ["lm", "smt", "cepe"])
def test_a_training_writes_nothing_through_links(settings: Make, tmp_path: Path, kind: str) -> None:
    out, mine = tmp_path / "out", tmp_path / "mine"
    mine.write_text("mine")
    train(kind, settings(kind))
    for file in out.iterdir():
        if file.is_file() and file.name not in ("settings.json", "log.jsonl", "tokenizer.json"):  # these are read
            file.unlink()
            file.symlink_to(mine)
    train(kind, settings(kind))
    assert mine.read_text() == "mine"
    assert not list(out.glob(".farspan-part-*"))
    assert results(out)
    shutil.rmtree(out)
    out.mkdir()
    (out / "checkpoints").symlink_to(tmp_path)
    with pytest.raises(ValueError, match=r"checkpoints is a symbolic link: got .*Delete the link"):
        train(kind, settings(kind))


@pytest.mark.parametrize("kind", ["smt", "cepe"])
def test_a_training_names_no_option_that_it_does_not_have_for_code_of_a_model(
    settings: Make, base: Path, tmp_path: Path, kind: str
) -> None:
    shutil.copytree(base / "model", tmp_path / "model")
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(own))
    (tmp_path / "model" / "own.py").write_text("raise SystemExit")
    with pytest.raises(ValueError, match="Python code of its own, which is not run here: choose one without"):
        train(kind, settings(kind, f"model.name={tmp_path / 'model'}"))


def test_a_training_that_is_refused_before_it_begins_leaves_no_folder(settings: Make, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="less than one row"):
        train("lm", settings("lm", "trainer.window=100000", f"out={tmp_path / 'a' / 'b'}"))
    shutil.rmtree(tmp_path / "a", ignore_errors=True)
    with pytest.raises(ValueError, match="not a multiple"):
        train("lm", settings("lm", "trainer.batch=3", "trainer.micro_batch=2", f"out={tmp_path / 'a' / 'b'}"))
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out", ["", "  ", "a\\u0000b"])
def test_a_folder_without_a_name_is_refused(settings: Make, kind: str, out: str) -> None:
    with pytest.raises(ValueError, match=r"out: .*expected the name of a folder"):
        settings(kind, f'out="{out}"')


@pytest.mark.parametrize("inside", ["", "deeper"])
def test_a_file_where_the_folder_should_be_is_refused(settings: Make, tmp_path: Path, inside: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is not a folder"):
        train("smt", settings("smt", f"out={tmp_path / 'file' / inside}"))


@pytest.mark.parametrize(
    ("kind", "size"),
    [("lm", 5_000), ("smt", 5_000), ("smt", 20_000), ("mlm", 20_000), ("cepe", 20_000), ("distill", 5_000)],
)
def test_a_disk_that_takes_no_more_is_named(
    settings: Make, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, size: int
) -> None:
    monkeypatch.setenv("FARSPAN_CACHE", str(trained.folder / "cache"))  # which is filled
    chosen = settings(kind)
    with files_no_larger_than(size), pytest.raises((ValueError, OSError)) as found:
        train(kind, chosen)
    assert str(tmp_path / "out") in str(found.value)
    assert "\n" not in str(found.value)
    assert results(tmp_path / "out") == []
    train(kind, chosen)  # there is room again
    assert results(tmp_path / "out")


# what is saved


@pytest.mark.parametrize(
    ("dtype", "what"), [("float32", "qk"), ("float32", "lora"), ("bfloat16", "lora"), ("float16", "qk")]
)
def test_weights_that_are_not_trained_are_saved_bit_for_bit(
    base: Path, settings: Make, tmp_path: Path, dtype: str, what: str
) -> None:
    if what == "lora":
        pytest.importorskip("peft")
    shutil.copytree(base / "model", tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(base / "model", dtype=dtype).save_pretrained(tmp_path / "model")
    train("smt", settings("smt", f"model.name={tmp_path / 'model'}", f"trained.what={what}", "optimizer.lr=0.1"))
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "out"))
    assert {name: weight.dtype for name, weight in before.items()} == {name: w.dtype for name, w in after.items()}
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if "q_proj" in name or "k_proj" in name}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype


def test_what_was_added_to_a_decoder_is_saved_as_it_was_trained(settings: Make, base: Path, tmp_path: Path) -> None:
    train("cepe", settings("cepe", "model.train_encoder=false"))
    before = load_file(base / "encoder" / "model.safetensors")
    after = load_file(tmp_path / "out" / "cepe_adapter.safetensors")
    encoder = {name.removeprefix("encoder."): weight for name, weight in after.items() if name.startswith("encoder.")}
    assert encoder.keys() == before.keys()
    assert all(torch.equal(weight, encoder[name]) for name, weight in before.items())


# wrong values

WRONG = ("'x'", "''", "-1", "0", "nan", "1e300", "1" + "0" * 25, "[]", "[1, 'a']", '"\\u0000"')


def fields(table: Any, prefix: str = "") -> Iterator[str]:
    """The names of all fields and tables of a config, as `--set` takes them."""
    for name, field in table.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from fields(field.annotation, f"{prefix}{name}.")
        yield prefix + name


class FirstStepError(Exception):
    """Ends a training where its first step would begin."""


ELSEWHERE = {"lm": ("optimizer.", "trainer."), "cepe": ("optimizer.", "trainer.", "watch.")}  # fields that smt has too
OWN = {"mlm": ("encoder", "decoder", "mask_rate"), "distill": ("distill",)}
FIELDS = [
    (kind, field)
    for kind, (table, _) in KINDS.items()
    for field in fields(table)
    if (not field.startswith(ELSEWHERE.get(kind, ("?",))) or field not in fields(smt.SmtSettings))
    and field.startswith(OWN.get(kind, ("",)))
]


@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_a_wrong_value_of_a_config_trains_or_is_refused_in_one_line(
    settings: Make, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, field: str
) -> None:
    def training_step(*arguments: Any, **options: Any) -> Any:
        raise FirstStepError

    monkeypatch.setattr("transformers.Trainer.training_step", training_step)
    monkeypatch.chdir(tmp_path)
    for value in WRONG:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        try:
            train(kind, settings(kind, f"{field}={value}"))
        except FirstStepError:
            pass
        except ValueError as error:
            message = str(error)
            assert "\n" not in message, value
            assert len(message) < 1500, value
        else:
            pytest.fail(f"{field} = {value}: nothing was trained")


@pytest.mark.parametrize(
    ("kind", "overrides", "message"),
    [
        ("smt", ["optimizer.lr=inf"], r"optimizer\.lr: .*finite"),
        ("smt", ["smt.beta=nan"], r"smt\.beta: .*finite"),
        ("smt", ["optimizer.lr=1e31"], r"optimizer\.lr: got 1e\+31, expected at most 1e30$"),
        ("smt", ["optimizer.clip=true"], r"optimizer\.clip: got true, expected a number above 0$"),
        ("lm", ["trainer.steps=false"], r"trainer\.steps: got false, expected a whole number above 0$"),
        ("smt", ["trainer.steps=1" + "0" * 25], r"trainer\.steps: got 10{25}, expected at most 2,147,483,647$"),
        (
            "smt",
            ["trained.patterns=['*q_proj*']"],
            r"patterns = .* has no effect with what = 'qk'.*what = \"patterns\"",
        ),
        ("smt", ["trained.rank=4"], r"rank = 4 has no effect with what = 'qk'.*give what = \"lora\""),
        ("smt", ["trained.what=all", "trained.norms=false"], r"norms = False has no effect with what = 'all'"),
        *(
            (
                "smt",
                ["lengths={ target = 64 }", "lengths.mode=fixed", f"lengths.{name}=40"],
                rf"lengths: {name} = 40 has no effect with mode = 'fixed': .*give mode = \"progressive\" or \"cover\"",
            )
            for name in ("first", "by", "every")
        ),
        *(
            ("smt", [f"smt.draw={draw}", "smt.targets=3"], rf"smt: targets = 3 has no effect with draw = '{draw}'")
            for draw in ("skip:chunks=3", "pose", "random", "decoys", "recurrences", "full")
        ),
        (
            "smt",
            ["smt.draw=pose", "smt.first_target=mask"],
            "smt: first_target = 'mask' has no effect with draw = 'pose'",
        ),
        ("smt", ["smt.mixed=off", "smt.beta=2"], r"smt: beta = 2\.0 has no effect with mixed = 'off'"),
        ("lm", ["watch.curve=false"], r"watch: curve = False has no effect with every = 0: .*give an every above 0"),
        (
            "smt",
            ["watch.every=2", "watch.curve=false", "watch.tokens=99"],
            r"watch: tokens = 99 has no effect with curve = false",
        ),
        ("smt", ["optimizer.momentum=0.9"], r"optimizer: momentum = 0\.9 has no effect with name = 'adamw'.*\"muon\"$"),
        (
            "cepe",
            ["stage=warmup", "data.noise.rate=1"],
            r"data: noise\.rate = 1\.0 has no effect with stage = 'warmup'",
        ),
        ("cepe", ["data.index=i"], r"data: index = 'i' has no effect with a mixture without `retrieved`"),
        ("cepe", ["data.query=8"], r"data: query = 8 has no effect with a mixture without `retrieved`"),
        ("distill", ["distill.delta=1e-3"], r"distill: delta = 0\.001 has no effect with variant = 'drop'"),
        ("distill", ["distill.ce=0", "distill.kl=0"], r"distill: ce = 0 and kl = 0 leave no loss to train with"),
        ("cepe", ["model.states=99"], r"model\.states = 99 is more than the layers of encoder .*at most 2"),
        ("smt", ["lengths.target=1_000_000_000", "lengths.by=1"], r"needs trainer\.steps >= "),
        ("smt", ["optimizer.warmup_steps=9"], r"give optimizer\.warmup_steps <= 4, or a share of all steps"),
        ("lm", ["tokenizer.folder=nowhere/at-all"], r"tokenizer 'nowhere/at-all'"),
    ],
)
def test_what_cannot_be_or_would_do_nothing_is_named(
    settings: Make, kind: str, overrides: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        train(kind, settings(kind, *overrides))


def test_a_form_of_decay_without_a_decay_is_refused() -> None:
    with pytest.raises(ValueError, match="decay = 'cosine' has no effect with decay_fraction = 0: leave it out, or"):
        smt.SmtOptimizer(decay="cosine")
    assert smt.SmtOptimizer(decay="cosine", decay_fraction=0).decay_fraction == 0  # a decay that was turned off


def test_measurements_that_a_command_turns_off_keep_their_other_settings() -> None:
    assert not lm.LmWatchSettings(every=0, curve=False).curve


def test_too_little_memory_for_a_training_names_settings_that_need_less(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def training_step(*arguments: Any, **options: Any) -> NoReturn:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr("transformers.Trainer.training_step", training_step)
    stopped = cli("train", "smt", str(base / "smt.toml"), "--set", f"out={tmp_path / 'o'}")
    assert "out of memory: no memory; try --set trainer.micro_batch=1 or" in " ".join(stopped.stderr.split())


def test_the_end_of_a_training_names_the_parts_of_its_loss(base: Path, tmp_path: Path) -> None:
    done = cli("train", "smt", str(base / "smt.toml"), "--set", f"out={tmp_path / 'o'}")
    assert re.search(
        r"loss \d+\.\d{3} \(weighted sum of sparse \d\.\d{3} and window \d\.\d{3} nats per token\),", done.stdout
    )
    assert "{" not in done.stdout + done.stderr
    assert set(json.loads((tmp_path / "o" / "training.json").read_text())["losses"]) == {"sparse", "window"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_reading_of_a_text_and_the_first_step_are_announced(settings: Make, kind: str) -> None:
    lines: list[str] = []
    chosen = settings(kind)
    KINDS[kind][1](chosen, TrainingWatch(notice=lines.append))
    text = f"text {chosen.data.text!r}"
    begun = [lines.index(line) for line in (f"{text}: reading and tokenising", "training steps 1 to 4")]
    assert lines[begun[0] + 1].startswith(f"{text}: ")
    assert begun == sorted(begun)


# what is measured and told


@pytest.mark.parametrize("lost", [("oom", {}), ("nan", {"nats": None, "accuracy": 1.0})])
def test_a_mean_over_fewer_windows_than_at_other_steps_is_not_logged(
    lost: tuple[str, dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    watch = PerplexityCallback(lengths=(8, 16))
    watch._what = {"lengths": (8, 16)}
    good = [(8, "ok", {"nats": 1.0, "accuracy": 0.5}), (8, "ok", {"nats": 3.0, "accuracy": 0.1})]
    rows = [*good, (16, *good[0][1:]), (16, *lost)]
    named = ("length", "status", "scores")
    run = SimpleNamespace(
        rows=[SimpleNamespace(model="step-2", reason="why", **dict(zip(named, row, strict=True))) for row in rows]
    )
    found = watch.summarised(run, 2)
    assert found == {"perplexity_8": pytest.approx(math.exp(2.0)), "accuracy_8": pytest.approx(0.3)}
    assert "step 2: no perplexity at 16 tokens, since 1 of 2 windows have none: why" in caplog.text


def test_a_curve_that_lacks_rows_is_logged_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("farspan.callback.draw_memory", lambda *given: None)
    watch, scores = CurveCallback(), {"copy": 0.9, "control": 0.1, "scored": 40, "context": 160}
    watch.folder, watch._lm, watch._trained_at = Path(), SimpleNamespace(trained_length=64), 30  # type: ignore[assignment]
    settings = {"protocol": "nested", "target_text": "t"}
    rows = [
        Row(f"step-{step}", "full", "curve", 3, settings, length, i, 0, str(i), scores=scores | {"control_repeat": i})
        for step in (2, 4)
        for length in (80, 160)
        for i in range(2)
    ]
    rows[-1] = replace(rows[-1], status="oom", reason="why", scores={})
    for step, lacking in ((2, False), (4, True)):
        assert watch.summarised(SimpleNamespace(rows=rows), step)["span"] > 0  # type: ignore[arg-type]
        assert ("since 1 of 4 rows failed, first at 160 tokens: why" in caplog.text) == lacking


def test_a_card_has_no_number_where_a_step_has_none() -> None:
    measured = [{"step": 0, "farspan/perplexity_8": 2.0, "farspan/accuracy_8": 0.5},
                {"step": 4, "farspan/perplexity_16": 3.0, "farspan/accuracy_16": 0.25}]  # fmt: skip
    table = measured_table({"settings": {"watch": {"text": "builtin"}}}, measured)
    assert "| 8 | 2 | — | 0.500 | — |" in table
    assert "| 16 | — | 3 | — | 0.250 |" in table


def test_a_memory_length_beyond_the_lengths_measured_is_logged_and_marked_in_the_card(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("farspan.callback.draw_memory", lambda *_: None)
    watch = CurveCallback()
    watch.folder, watch._lm, watch._trained_at = Path(), SimpleNamespace(trained_length=64), 52
    lengths = SimpleNamespace(half_life=MemoryLength(52.0, censored=True), span=MemoryLength(48.0))
    watch._summaries = {2: (None, lengths)}
    found = watch.summarised(SimpleNamespace(rows=[]), 2)
    assert found == {"half_life": 52.0, "half_life_censored": 1, "span": 48.0, "span_censored": 0}
    log: list[dict[str, Any]] = [{"step": step, "farspan/perplexity_8": 2.0} for step in (0, 2)]
    for entry, values in zip(log, ({"half_life": 9.0, "span": 7.0}, found), strict=True):
        entry |= {f"farspan/{name}": value for name, value in values.items()}
    table = measured_table({"settings": {"watch": {"text": "builtin"}}}, log)
    assert "half-life in tokens, step 0, step 2: 9, >52." in table
    assert "span in tokens, step 0, step 2: 7, 48." in table
    assert "`>`, `<`: beyond the lengths measured." in table


@pytest.mark.parametrize(
    ("draw", "told"),
    [
        ("skip:repeat=0.2", True),
        ("skip:chunks=2,repeat=1", True),
        ("skip:repeat=0", False),
        ("skip:repeat=0.0", False),
        ("sparse", False),
    ],
)
def test_a_card_tells_of_a_training_on_the_task_of_the_forgetting_curve(
    base: Path, tmp_path: Path, draw: str, told: bool
) -> None:
    settings = read_config(base / "smt.toml", smt.SmtSettings, [f"out={tmp_path}", f"smt.draw={draw}"])
    summary = {"settings": settings.model_dump(mode="json"), "window": 32, "trained": 1, "parameters": 2, "rows": 8}
    summary["from"] = {"trained_length": 4096}
    assert "which was trained with contexts of 4,096 tokens" in smt_card(summary, [])
    assert ("do not compare this\nmodel's forgetting curve" in smt_card(summary, [])) == told


@pytest.mark.parametrize(
    ("draw", "rows"),
    [
        ("spans:span=4", "rows of 32 tokens from documents of up to 64, each token at its own position"),
        ("skip:chunks=3", "rows of 32 tokens from documents of up to 64, at positions of up to the same number"),
        ("full", "whole documents of up to 64 tokens"),
    ],
)
def test_a_card_names_the_draw_and_what_its_rows_are(base: Path, tmp_path: Path, draw: str, rows: str) -> None:
    settings = read_config(base / "smt.toml", smt.SmtSettings, [f"out={tmp_path}", f"smt.draw={draw}"])
    summary = {"settings": settings.model_dump(mode="json"), "window": 32, "trained": 1, "parameters": 2, "rows": 8}
    assert f"{rows} (the draw `{draw}`)." in smt_card(summary | {"from": {"trained_length": 4096}}, [])


@pytest.mark.parametrize("kind", ["lm", "smt"])
def test_a_saved_config_keeps_a_longer_context_and_the_cache(settings: Make, tmp_path: Path, kind: str) -> None:
    train(kind, settings(kind))
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved["use_cache"]  # the Trainer turns it off: without it, generating a token reads the whole text
    assert saved["max_position_embeddings"] == (512 if kind == "smt" else 32)  # the base's, beyond lengths.target = 64


def test_exponents_that_are_to_be_learned_are_trained(settings: Make) -> None:
    longer = "lengths={target=600, mode='fixed'}", "data.short=use"
    some = *longer, "model.temperature=learned", "trained.what=patterns"
    with pytest.raises(ValueError, match=r'trained\.patterns leaves out: add "\*log_n_scales"'):
        train("smt", settings("smt", *some, "trained.patterns=['*k_proj*']"))


def test_a_training_whose_damaged_settings_were_deleted_continues(settings: Make, tmp_path: Path) -> None:
    chosen, file = settings("lm"), tmp_path / "out" / "settings.json"
    done = train("lm", chosen)
    file.write_text("{")
    with pytest.raises(ValueError, match=r"is damaged.* Delete .* and repeat the command"):
        train("lm", chosen)
    file.unlink()
    assert train("lm", chosen)["loss"] == done["loss"]


def test_a_tokenizer_whose_training_was_killed_is_trained_again(
    settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = settings("lm", "tokenizer.folder=''", "tokenizer.vocabulary=280")
    original = os.replace

    def replace(file: Path, place: Path) -> None:
        if Path(place).name == "tokenizer.json":
            raise KeyboardInterrupt
        original(file, place)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        train("lm", chosen)
    monkeypatch.undo()
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    assert train("lm", chosen)["loss"] > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_model_that_no_training_made_is_not_replaced(settings: Make, tmp_path: Path, kind: str, name: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("{}")
    with pytest.raises(ValueError, match=rf"out = .*out' holds another model \({name}\).* choose another folder"):
        train(kind, settings(kind))
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]
