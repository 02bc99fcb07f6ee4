"""The training callback: what it logs and records, and that a training does not notice it."""

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    PreTrainedTokenizerFast,
    ProcessorMixin,
    SequenceFeatureExtractor,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)
from transformers.integrations import integration_utils

import farspan.callback
from farspan import CurveCallback, PerplexityCallback, hf, measure, read_rows
from farspan.hf.training import set_aside, unwrapped
from farspan.lm import fingerprint, wrap
from farspan.reader import dense_reader
from farspan.record import read_header
from farspan.tasks.curve import BoundCurve

from tiny import VOCABULARY, tiny_model

Start = Callable[..., Trainer]


class Spy(TrainerCallback):
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        self.logs.append(logs | {"step": state.global_step})


@pytest.fixture
def text(tmp_path: Path) -> str:
    words = np.random.default_rng(0).choice(["quick", "brown", "fox", "jumps", "lazy", "dog", "over"], 4000)
    (tmp_path / "a.txt").write_text(" ".join(words))
    return str(tmp_path / "a.txt")


@pytest.fixture
def curves(text: str) -> Callable[..., CurveCallback]:
    """A callback of a small budget: a context of 64 trained tokens, so lengths up to 63."""
    small = {"text": text, "every": 2, "tokens": 1500, "trained_length": 64}
    return lambda *args, **options: CurveCallback(*args, **(small | options))


@pytest.fixture
def trainer(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Start:
    """A Trainer of a tiny Llama with dropout: `trainer(callback, ..., steps=5, ...)`."""
    ids = np.random.default_rng(0).integers(1, VOCABULARY, (40, 16)).tolist()
    rows = [{"input_ids": row, "labels": row} for row in ids]

    def start(*callbacks: TrainerCallback, steps: int = 5, model: Any = None, **changes: Any) -> Trainer:
        own = "processing_class", "optimizers"
        settings = {"processing_class": tokenizer} | {k: changes.pop(k) for k in own if k in changes}
        arguments = {"use_cpu": True, "save_strategy": "no", "logging_steps": 1, "report_to": [], "disable_tqdm": True}
        arguments |= {"per_device_train_batch_size": 2, "learning_rate": 1e-2, "dataloader_pin_memory": False}
        made = Trainer(
            model if model is not None else tiny_model(attention_dropout=0.3),
            TrainingArguments(str(tmp_path / "out"), max_steps=steps, **(arguments | changes)),
            default_data_collator,
            rows,
            **settings,
        )
        for callback in callbacks:
            if isinstance(callback, CurveCallback):
                callback.attach(made)
            else:
                made.add_callback(callback)
        return made

    return start


def logged(entries: list[dict[str, Any]], key: str) -> dict[int, float]:
    found = [(entry["step"], entry[key]) for entry in entries if key in entry]
    assert len(dict(found)) == len(found), "logged twice at one step"
    return dict(found)


# what it logs and records


def test_half_life_and_span_are_logged_every_so_many_steps_and_at_the_last(trainer: Start, curves: Any) -> None:
    before, after = Spy(), Spy()
    training = trainer(before, curves(), after)
    training.train()
    for name in ("farspan/half_life", "farspan/span", "farspan/seconds"):
        history = logged(training.state.log_history, name)
        assert list(history) == [2, 4, 5]
        assert logged(before.logs, name) == logged(after.logs, name) == history


def test_a_callback_given_to_the_trainer_measures_as_well_and_names_the_way_to_report(
    trainer: Start, curves: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "tensorboard", Spy)
    training = trainer(report_to=["tensorboard"])
    training.add_callback(curves())
    training.train()
    (spy,) = [one for one in training.callback_handler.callbacks if isinstance(one, Spy)]
    assert list(logged(training.state.log_history, "farspan/span")) == [2, 4, 5]
    assert not logged(spy.logs, "farspan/span")
    assert "CurveCallback are not reported to tensorboard: add it with .attach(trainer)" in caplog.text


def test_a_callback_that_was_given_and_attached_measures_once(trainer: Start, curves: Any) -> None:
    training, callback = trainer(), curves()
    training.add_callback(callback)
    callback.attach(training)
    assert training.callback_handler.callbacks.count(callback) == 1


def test_the_trainers_own_values_are_logged_as_well(trainer: Start, curves: Any) -> None:
    spy = Spy()
    trainer(spy, curves(every=1), logging_steps=2).train()
    assert list(logged(spy.logs, "loss")) == [2, 4]


def test_the_model_is_measured_before_its_first_step_if_asked(trainer: Start, curves: Any) -> None:
    training = trainer(curves(at_start=True))
    training.train()
    assert list(logged(training.state.log_history, "farspan/span")) == [0, 2, 4, 5]


def test_a_training_that_another_callback_ends_is_measured_at_its_end(trainer: Start, curves: Any) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 3

    training = trainer(curves(), Stop())
    training.train()
    assert list(logged(training.state.log_history, "farspan/span")) == [2, 3]


def test_the_last_checkpoint_holds_what_was_measured_last(trainer: Start, curves: Any, tmp_path: Path) -> None:
    trainer(curves(every=9), save_strategy="steps", save_steps=9).train()
    state = json.loads((tmp_path / "out" / "checkpoint-5" / "trainer_state.json").read_text())
    assert list(logged(state["log_history"], "farspan/span")) == [5]


def test_the_rows_are_those_of_the_model_at_that_step(
    trainer: Start, curves: Any, tokenizer: Any, text: str, tmp_path: Path
) -> None:
    trainer(curves(), save_strategy="steps", save_steps=2).train()
    folder = tmp_path / "out" / "farspan"
    made = read_header(folder)["settings"]
    what = {"text": text, "lengths": tuple(made["lengths"]), "repeats": made["repeats"], "out": tmp_path / "own"}
    saved = type(tiny_model()).from_pretrained(tmp_path / "out" / "checkpoint-2").eval()
    own = measure([wrap(saved, tokenizer, "step-2", trained_length=64)], ["full"], ["curve"], **what).rows
    found = {(row.example, row.length): row.scores for row in read_rows(folder) if row.model == "step-2"}
    assert found == {(row.example, row.length): row.scores for row in own}


def test_every_step_is_asked_the_same(trainer: Start, curves: Any, tmp_path: Path) -> None:
    trainer(curves()).train()
    asked: dict[str, set[tuple[str, int]]] = {}
    for row in read_rows(tmp_path / "out" / "farspan"):
        asked.setdefault(row.model, set()).add((row.example, row.length))
    assert list(asked) == ["step-2", "step-4", "step-5"]
    assert asked["step-2"] == asked["step-4"] == asked["step-5"]


def test_the_run_is_drawn_again_after_each_measurement(
    trainer: Start, curves: Any, tmp_path: Path, drawn: None
) -> None:
    sizes = []

    class Look(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
            if "farspan/span" in logs:
                sizes.append([(tmp_path / "runs" / f"training.{end}").stat().st_size for end in ("png", "svg")])

    trainer(Look(), curves(out=tmp_path / "runs")).train()
    assert len(sizes) == len({svg for _, svg in sizes}) == 3
    assert not (tmp_path / "out" / "farspan").exists()


# what the training does not notice


@pytest.mark.parametrize("how", ["", "bf16", "activation_checkpointing"])
def test_a_training_with_it_has_the_same_losses_bit_by_bit(trainer: Start, curves: Any, how: str) -> None:
    histories, weights = [], []
    for callbacks in ([], [curves(at_start=True)]):
        training = trainer(*callbacks, bf16=how == "bf16")
        if how == "activation_checkpointing":
            hf.checkpoint_activations(training.model)
        training.train()
        histories.append([logged(training.state.log_history, name) for name in ("loss", "grad_norm")])
        weights.append(list(training.model.parameters()))
    assert histories[0] == histories[1]
    assert len(histories[0][0]) == 5
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_random_generators_are_left_where_they_were(
    trainer: Start, curves: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, states = farspan.callback.measure_cell, []

    def draws(*args: Any, **options: Any) -> Any:
        random.random(), np.random.rand(), torch.rand(())
        return measured(*args, **options)

    class Look(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            states.append((random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()))

    monkeypatch.setattr(farspan.callback, "measure_cell", draws)
    trainer(Look(), curves(every=1), Look(), steps=1).train()
    assert states[0] == states[1]


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the model was like while it was measured, a tuple for each time."""
    measured, seen = farspan.callback.measure_cell, []

    def look(task: Any, method: Any, lm: Any, *args: Any, **options: Any) -> Any:
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        modes = any(m.training for m in lm.model.modules()), torch.is_grad_enabled()
        seen.append((*modes, autocast, dense_reader(lm).fallback))
        return measured(task, method, lm, *args, **options)

    monkeypatch.setattr(farspan.callback, "measure_cell", look)
    return seen


def test_every_module_keeps_its_own_mode(trainer: Start, curves: Any, measuring: list[Any]) -> None:
    modes = []

    class Freeze(TrainerCallback):
        def on_step_end(self, *args: Any, model: Any, **kwargs: Any) -> None:
            model.model.layers[0].self_attn.eval()

    class Look(TrainerCallback):
        def on_step_end(self, *args: Any, model: Any, **kwargs: Any) -> None:
            modes.append([module.training for module in model.modules()])

    trainer(Freeze(), Look(), curves(), Look(), steps=2).train()
    assert modes[-2] == modes[-1]
    assert set(modes[-1]) == {True, False}
    assert measuring[-1][:2] == (False, False)


@pytest.mark.parametrize("launched", [False, True])
def test_a_mixed_precision_training_is_measured_in_its_precision(
    trainer: Start, curves: Any, measuring: list[Any], tmp_path: Path, launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if launched:  # by `accelerate launch --mixed_precision bf16`
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    training = trainer(curves(), steps=2, bf16=not launched)
    training.train()
    assert measuring[0][2] == torch.bfloat16
    assert measuring[0][3] is None
    assert {row.status for row in read_rows(tmp_path / "out" / "farspan")} == {"ok"}
    assert training.model.forward.__wrapped__ is not None  # accelerate's autocast is around the model again


def test_a_model_is_measured_after_a_trainer_as_its_weights_in_a_new_model_are(
    trainer: Start, tokenizer: PreTrainedTokenizerFast, text: str, tmp_path: Path
) -> None:
    training, fresh = trainer(steps=2, bf16=True), tiny_model()
    training.train()
    fresh.load_state_dict(training.model.state_dict())
    what: dict[str, Any] = {"tasks": "perplexity", "lengths": [20, 40], "repeats": 2}
    state, found = torch.get_rng_state(), []
    for model in (training.model, fresh):
        lm = farspan.wrap(model, tokenizer, "tiny")
        rows = farspan.measure(lm, **what, text=text, out=tmp_path / str(len(found))).rows
        found.append([row.scores["nats"] for row in rows])
    assert found[0] == found[1]
    assert training.model.training
    assert training.model.forward.__wrapped__ is not None  # accelerate's autocast
    assert torch.equal(torch.get_rng_state(), state)


class Averaging(torch.optim.SGD):
    """SGD whose eval mode gives the weights other values, as a schedule-free optimizer does, and which rounds."""

    training = True

    @torch.no_grad()
    def moved(self, training: bool, by: float) -> None:
        if self.training != training:
            for p in self.param_groups[0]["params"]:
                p.add_(by)
        self.training = training

    def eval(self) -> None:
        self.moved(False, 0.1)

    def train(self) -> None:
        self.moved(True, -0.1)


def test_weights_are_those_that_the_optimizer_evaluates_with(
    trainer: Start, curves: Any, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    losses, prints = [], []

    class Stop(TrainerCallback):
        """Runs after the callback that measures, which therefore measures at the end of the epoch."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 3

    for callbacks in ((curves(), Stop()), (Stop(),)):
        model = tiny_model()
        optimizer = Averaging(model.parameters(), lr=1e-2)
        training = trainer(*callbacks, model=model, optimizers=(optimizer, None))
        training.train()
        assert optimizer.training
        losses.append([entry["loss"] for entry in training.state.log_history if "loss" in entry])
        optimizer.eval()
        prints.append(fingerprint(model))
    assert losses[0] == losses[1]
    assert prints[0] == prints[1]
    assert read_header(tmp_path / "out" / "farspan")["models"]["step-3"]["fingerprint"] == prints[0]


def test_the_random_generator_of_a_device_without_cuda_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    model, place, state, restored = tiny_model(), torch.device("mps", 0), torch.zeros(1), []
    monkeypatch.setattr(model, "parameters", lambda: [SimpleNamespace(device=place)])
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda device: state)
    monkeypatch.setattr(torch.mps, "set_rng_state", lambda *given: restored.append(given))
    with set_aside(model):
        assert not restored
    assert restored == [(state, place)]


def test_a_model_that_diverged_is_recorded_and_trained_on(trainer: Start, curves: Any, tmp_path: Path) -> None:
    model = tiny_model()
    model.model.norm.weight.data.fill_(torch.nan)
    training = trainer(curves(), model=model)
    training.train()
    assert training.state.global_step == 5
    assert {row.status for row in read_rows(tmp_path / "out" / "farspan")} == {"nan"}
    assert not logged(training.state.log_history, "farspan/span")


# the budget


@pytest.mark.parametrize(("protocol", "tokens"), [("nested", 1200), ("nested", 100_000), ("probe", 2500)])
def test_no_measurement_feeds_more_than_its_budget(
    trainer: Start, curves: Any, monkeypatch: pytest.MonkeyPatch, protocol: str, tokens: int
) -> None:
    measure, fed = farspan.callback.measure_cell, []

    def counted(task: Any, method: Any, lm: Any, *args: Any, **options: Any) -> Any:
        fed.append(0)
        hook = lm.model.get_input_embeddings().register_forward_pre_hook(add)
        yield_ = measure(task, method, lm, *args, **options)
        hook.remove()
        return yield_

    def add(module: Any, inputs: tuple[torch.Tensor]) -> None:
        fed[-1] += inputs[0].numel()

    monkeypatch.setattr(farspan.callback, "measure_cell", counted)
    trainer(curves(tokens=tokens, protocol=protocol), steps=2).train()
    assert len(fed) == 1
    assert 0 < fed[0] <= tokens


def test_a_budget_that_is_too_small_is_refused_with_one_that_is_not(trainer: Start, curves: Any) -> None:
    with pytest.raises(ValueError, match=r"tokens = 100 are too few for 6 lengths up to 63 tokens") as error:
        trainer(curves(tokens=100)).train()
    needed = int(re.search(r"tokens=(\d+)", str(error.value))[1])
    with pytest.raises(ValueError, match="too few"):
        trainer(curves(tokens=needed - 1)).train()
    trainer(curves(tokens=needed), steps=1).train()


def test_a_larger_budget_buys_repeats_and_then_lengths(trainer: Start, curves: Any, tmp_path: Path) -> None:
    bought = []
    for tokens in (1200, 2500, 10_000):
        trainer(curves(tokens=tokens, out=tmp_path / str(tokens)), steps=1).train()
        settings = read_header(tmp_path / str(tokens))["settings"]
        assert settings["lengths"][-1] == 63
        bought.append((settings["repeats"], len(settings["lengths"])))
    assert bought[0][0] < bought[1][0] == bought[2][0] == 4
    assert bought[1][1] < bought[2][1] == 16


@pytest.mark.parametrize(
    ("options", "largest"),
    [({}, 63), ({"longest": 40}, 40), ({"trained_length": None, "tokens": 50_000}, 511)],
    ids=str,
)
def test_lengths_end_where_asked_or_at_twice_the_trained_context(
    trainer: Start, curves: Any, tmp_path: Path, options: dict[str, Any], largest: int
) -> None:
    trainer(curves(**options), steps=1).train()
    assert read_header(tmp_path / "out" / "farspan")["settings"]["lengths"][-1] == largest


# stopped and continued


@pytest.fixture
def stopped(trainer: Start, curves: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training that was measured at steps 2 and 4, saved at step 3, and killed in its step 5."""

    class Kill(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 4:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer(curves(), Kill(), steps=6, save_strategy="steps", save_steps=3).train()


@pytest.mark.parametrize("batch", [2, 4])
def test_a_resumed_training_has_the_rows_of_its_own_steps(
    trainer: Start, curves: Any, stopped: None, tmp_path: Path, batch: int
) -> None:
    folder, settings = tmp_path / "out" / "farspan", {"steps": 6, "per_device_train_batch_size": batch}
    before = {row.model: row.scores for row in read_rows(folder)}
    training = trainer(curves(), **settings, save_strategy="steps", save_steps=3)
    training.train(resume_from_checkpoint=True)
    assert list(logged(training.state.log_history, "farspan/span")) == [2, 4, 6]
    rows, models = read_rows(folder), read_header(folder)["models"]
    assert list(Counter(row.model for row in rows)) == list(models) == ["step-2", "step-4", "step-6"]
    assert len(set(Counter(row.model for row in rows).values())) == 1
    now = {row.model: row.scores for row in rows}
    assert now["step-2"] == before["step-2"]
    assert (now["step-4"] == before["step-4"]) == (batch == 2)


def test_a_training_begun_anew_has_a_folder_of_its_own(
    trainer: Start, curves: Any, stopped: None, tmp_path: Path
) -> None:
    folders = []
    for resume in (False, True, False):
        callback = curves()
        trainer(callback, steps=2 if not resume else 4, save_strategy="steps", save_steps=2).train(
            resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2") if resume else None
        )
        folders.append((callback.folder.name, {row.model for row in read_rows(callback.folder)}))
    assert folders == [("farspan-2", {"step-2"}), ("farspan-2", {"step-2", "step-4"}), ("farspan-3", {"step-2"})]


def test_a_training_resumed_before_its_first_measurement_keeps_its_folder(
    trainer: Start, curves: Any, stopped: None, tmp_path: Path
) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # begins a folder, and measures nothing
        trainer(curves(), Stop(), steps=6, save_strategy="steps", save_steps=3).train()
    callback = curves()
    trainer(callback, steps=6, save_strategy="steps", save_steps=3).train(
        resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3")
    )
    assert callback.folder.name == "farspan-2"  # not the rows of another training
    assert {row.model for row in read_rows(callback.folder)} == {"step-4", "step-6"}


def test_a_training_resumed_with_other_settings_is_refused(trainer: Start, curves: Any, stopped: None) -> None:
    with pytest.raises(ValueError, match="made with other settings: seed was 0, now 1"):
        trainer(curves(seed=1), steps=6).train(resume_from_checkpoint=True)


def test_a_training_resumed_with_another_version_of_the_task_is_refused(
    trainer: Start, curves: Any, stopped: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundCurve, "version", BoundCurve.version + 1)
    with pytest.raises(ValueError, match=f"holds rows of version {BoundCurve.version - 1} of the task curve"):
        trainer(curves(), steps=6).train(resume_from_checkpoint=True)


def test_a_training_resumed_with_another_state_of_the_text_is_refused(
    trainer: Start, curves: Any, stopped: None, text: str, tmp_path: Path
) -> None:
    before = Path(text).read_text()
    Path(text).write_text(before.replace("dog", "fox"))
    rows = (tmp_path / "out" / "farspan" / "rows.jsonl").read_text()
    with pytest.raises(ValueError, match=r"the text '.*a.txt' has changed since step-2 was measured: its hash was"):
        trainer(curves(), steps=6).train(resume_from_checkpoint=True)
    assert (tmp_path / "out" / "farspan" / "rows.jsonl").read_text() == rows
    Path(text).write_text(before)
    trainer(curves(), steps=6).train(resume_from_checkpoint=True)


# models it finds, and models it refuses


def test_no_lengths_are_refused(trainer: Start, text: str) -> None:
    with pytest.raises(ValueError, match="lengths: got none, expected one or more"):
        trainer(PerplexityCallback(text=text, lengths=[]), steps=1).train()


def test_a_trainer_without_a_tokenizer_is_refused(trainer: Start, curves: Any, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer: give it one, CurveCallback\(tokenizer\)"):
        trainer(curves(), processing_class=None).train()
    trainer(curves(tokenizer), processing_class=None, steps=1).train()


class Processor(ProcessorMixin):
    """A processor, such as that of a model of text and images."""

    def __init__(self, tokenizer: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer)


def test_the_tokenizer_of_a_processor_is_used(trainer: Start, curves: Any, tokenizer: Any) -> None:
    measured = trainer(curves(), processing_class=Processor(tokenizer), steps=2)
    measured.train()
    assert logged(measured.state.log_history, "farspan/span")
    with pytest.raises(ValueError, match="CurveCallback has no tokenizer"):
        trainer(curves(), processing_class=SequenceFeatureExtractor(1, 16_000, 0.0)).train()


@pytest.mark.parametrize("attached", [True, False])
def test_a_second_callback_of_a_class_is_refused(trainer: Start, curves: Any, tmp_path: Path, attached: bool) -> None:
    """It would find the values of the first in the log history, and never measure."""
    training = trainer(curves(out=tmp_path / "first"))
    second = curves(out=tmp_path / "second")
    second.attach(training) if attached else training.add_callback(second)
    with pytest.raises(ValueError, match="several CurveCallback in one Trainer: expected one"):
        training.train()


def test_a_trainer_trains_twice_with_one_callback(trainer: Start, curves: Any) -> None:
    training = trainer(curves(), steps=2)
    for _ in range(2):
        training.train()
        assert list(logged(training.state.log_history, "farspan/span")) == [2]


def test_a_number_of_steps_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="every: got 0, expected a whole number of steps, at least 1"):
        CurveCallback(every=0)


def test_a_compiled_model_is_measured_as_it_is(trainer: Start, curves: Any, tmp_path: Path) -> None:
    model = tiny_model()
    assert unwrapped(torch.compile(model, backend="eager")) is model
    assert unwrapped(torch.nn.DataParallel(model)) is model


def test_sharded_parameters_are_refused(trainer: Start, curves: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = tiny_model()
        assert unwrapped(model) is model
        with pytest.raises(ValueError, match=r"sharded over processes \(FSDP, DeepSpeed ZeRO-3"):
            unwrapped(fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,))))
    finally:
        torch.distributed.destroy_process_group()


def test_zero_3_is_refused_when_the_training_begins(trainer: Start, curves: Any) -> None:
    model = tiny_model()
    model.model.norm.weight.ds_id = 0  # what DeepSpeed marks its parameters with
    with pytest.raises(ValueError, match="train without it and measure the checkpoints"):
        trainer(curves(), model=model).train()


def test_only_the_first_process_measures(curves: Any, tmp_path: Path) -> None:
    callback, model = curves(), tiny_model()
    state = SimpleNamespace(is_world_process_zero=False, global_step=2, log_history=[])
    control = SimpleNamespace(should_training_stop=True)
    args = SimpleNamespace(output_dir=str(tmp_path))
    callback.on_train_begin(args, state, control, model=model)
    callback.on_step_end(args, state, control, model=model)
    assert state.log_history == []
    assert not (tmp_path / "farspan").exists()


def test_trained_tokens_before_each_text_are_not_left_out() -> None:
    peft = pytest.importorskip("peft")
    tuned = peft.get_peft_model(tiny_model(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(ValueError, match="PeftModelForCausalLM puts trained tokens before each text"):
        unwrapped(tuned)
