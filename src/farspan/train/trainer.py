"""The common part of all trainings on the Hugging Face Trainer: engine, checkpoints, log, and saved files."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any, Concatenate, TypeVar

import torch
from transformers import PrinterCallback, TrainerState, TrainingArguments

from farspan import files
from farspan.callback import MeasuringCallback
from farspan.cepe import CepeModel
from farspan.lm import LM, load
from farspan.loading.places import folder_of
from farspan.measuring import trackers
from farspan.methods.temperature import SCALES
from farspan.train import checkpoint as checkpoints
from farspan.train import engines
from farspan.train.checkpoint_trainer import AtBegin, CheckpointTrainer, Intervals
from farspan.train.config import CHECKPOINTS, SETTINGS, only_one_in, refuse_other_settings
from farspan.train.finite import refuse_not_finite
from farspan.train.interrupts import SavesWhenInterrupted
from farspan.train.optimizer import OptimizerSettings, build, rates, warmup_and_decay
from farspan.train.planning import end_plan, steps_in_words
from farspan.train.progress import LogFile, Notice, OnlyPlanned, Steps, TrainingWatch, parts_of
from farspan.train.schedule import Schedule
from farspan.train.settings import PretrainingSettings, RunSettings, TrainingSettings

S = TypeVar("S", bound=TrainingSettings)
NOBODY = TrainingWatch()
Train = Callable[Concatenate[S, ...], dict[str, Any]]


def training(train: Train[S]) -> Train[S]:
    """Decorate a function `train(settings, watch)` that trains in the folder `settings.out`, or continues a training
    that was stopped there, and returns the content of its training.json: parameters, tokens, losses, seconds, settings.

    The decorator first locks the folder, checks the settings that need no model, and sets the random seed. `watch` is
    called in the first process only. With `watch.plan` everything is checked as for the training, `watch.notice` gets
    lines that describe it, nothing is kept or written, and its numbers are returned, as of `OnlyPlanned`.

    Raises, when the training is called:
        ValueError: another process trains in the folder, or as `refuse_impossible`.
    """

    @wraps(train)
    def begun(settings: S, watch: TrainingWatch = NOBODY) -> dict[str, Any]:
        from transformers import set_seed

        first = engines.is_first_process()
        with only_one_in(Path(settings.out)) if first else nullcontext():
            engines.processes()
            # recorded, so that another number of processes or kind of machine does not change the training
            its = settings.trainer
            how = its.model_copy(update={"batch": its.rows_per_step, "bf16": its.uses_bf16})
            settings = settings.model_copy(update={"trainer": how})
            refuse_impossible(how, settings.optimizer)
            set_seed(settings.trainer.seed)
            try:
                return train(settings, watch if first else replace(NOBODY, plan=watch.plan, calibrate=watch.calibrate))
            except OnlyPlanned as planned:
                return planned.numbers

    return begun


def refuse_impossible(settings: RunSettings, optimizer: OptimizerSettings) -> None:
    """Raise ValueError for settings that are wrong for every model, before any long work: as `engines.refuse_unfit` and
    `warmup_and_decay`; a batch that is not a multiple of the micro-batches of all processes; or a tracker in
    `report_to` that is unknown or not installed."""
    from transformers.integrations import get_reporting_integration_callbacks

    engines.refuse_unfit(settings.engine, optimizer.name)
    rows_at_once = settings.micro_batch * engines.num_processes()
    if settings.batch and settings.batch % rows_at_once:
        raise ValueError(
            f"trainer.batch = {settings.batch} is not a multiple of trainer.micro_batch x processes = {rows_at_once}"
        )
    warmup_and_decay(optimizer, settings.steps)
    named = list(settings.report_to)
    try:
        trackers.refuse_missing(named)
        for reporter in get_reporting_integration_callbacks(named[0] if len(named) == 1 else named):  # also all, none
            reporter()
    except (ValueError, RuntimeError, ImportError) as error:
        raise ValueError(f"trainer.report_to = {named}: {error}") from error


def record_settings(settings: TrainingSettings, watch: TrainingWatch, lengths: Schedule | None = None) -> None:
    """Create a training's folder with `settings.json`, except in a plan; first refuse to continue a training that
    differs.

    Args:
        lengths: of the documents at each step, if they depend on the step.

    Raises:
        ValueError: as `refuse_other_settings` and `continued`; or the steps of the last checkpoint differ from those of
            a training of `trainer.steps` steps.
    """
    out, now = Path(settings.out), settings.trainer.steps
    refuse_other_settings(out, settings)
    checkpoint, state = continued(settings)
    was = state.max_steps if checkpoint else now

    def planned(steps: int) -> dict[str, Sequence[float]]:
        done = range(state.global_step)
        stages = [replace(lengths, steps=steps).stage(step) for step in done] if lengths else []
        return {"learning rates": rates(settings.optimizer, steps, len(done)), "lengths of documents": stages}

    if was != now and (other := [name for name, plan in planned(was).items() if plan != planned(now)[name]]):
        raise ValueError(
            f"trainer.steps = {now} cannot continue {checkpoint}, which is of a training of {was} steps, since the "
            f"{' and '.join(other)} depend on the number of steps: use trainer.steps = {was}, or another folder for out"
        )
    if watch.plan:
        return
    out.mkdir(parents=True, exist_ok=True)
    files.write(out / SETTINGS, json.dumps(settings.model_dump(mode="json"), indent=2) + "\n")


class PlacedArguments(TrainingArguments):
    """TrainingArguments for a model that is on its devices already."""

    place_model_on_device = False


def load_finite(name: str, what: str, trainer: RunSettings, **options: Any) -> LM:
    """Load a model that is trained or used in a training, with the attention kernel `trainer.attention`.

    Args:
        name: a folder or hub id, or `demo`, the embedded model.
        what: its role, for errors, such as "decoder".
        options: of `farspan.load`.

    Raises:
        ValueError: the model cannot be loaded, is a CEPE model, was trained with log-n scaling, or has weights that are
            not finite.
    """
    folder = folder_of(name)
    if _recorded(Path(folder), "model", "temperature")[1] or (Path(folder) / SCALES).exists():
        raise ValueError(
            f"{what} {name!r} was trained with log-n scaling (model.temperature), which its weights do not hold: it "
            "would be used here without it. Give the model that it was trained from"
        )
    # None: code that comes with the model is refused; a training has no option to allow it
    lm = load(folder, attention=trainer.attention, trust_remote_code=None, **options)
    if isinstance(lm.model, CepeModel):
        raise ValueError(f"{what} {name!r} is a CEPE model: give the decoder it was made from")
    refuse_not_finite(lm.model, f"{what} {name!r}")
    return replace(lm, name=name)


def _recorded(folder: Path, table: str, key: str) -> tuple[dict[str, Any], Any]:
    """Return the content of the training.json in a folder, and one of its settings; {} and None if it has none."""
    with suppress(ValueError, LookupError, TypeError, OSError):  # missing, damaged, or of another program or recipe
        found = files.read_json(folder / "training.json")
        return found, found["settings"][table][key]
    return {}, None


def save_whole(model: Any, dtype: torch.dtype, folder: Path) -> None:
    """Save a transformers model, its weights as `dtype`, except those that transformers keeps in float32, such as those
    that choose the experts."""
    kept = [*(model._keep_in_fp32_modules_strict or ())] if dtype in (torch.bfloat16, torch.float16) else []
    kept += [*(model._keep_in_fp32_modules or ())] if dtype == torch.float16 else []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and not any(f".{part}." in f".{name}." for part in kept):
            tensor.data = tensor.data.to(dtype)
    model.save_pretrained(folder)


def run(
    model: Any,
    rows: Any,
    settings: TrainingSettings,
    watch: TrainingWatch,
    *,
    held_out: Any = None,
    callbacks: Sequence[MeasuringCallback] = (),
    save: Callable[[Any, torch.dtype, Path], None] = save_whole,
    again: Callable[[], Any],
    row: int | None = None,
    base: str | None = None,
    inputs: Mapping[str, str] = MappingProxyType({}),
    base_dtype: torch.dtype = torch.float32,
    **options: Any,
) -> dict[str, Any]:
    """Train `model` and save it in `settings.out`; continue from the last checkpoint there, if there is one.

    Log a line every `log_every` steps and at each checkpoint. Return counts, losses, seconds, and if it was `finished`.

    Args:
        rows, held_out: Datasets with the attribute `corpus`; the loss of `held_out` is logged, in a pre-training.
        watch: called with each step, notice and measurement.
        callbacks: measure the model in training.
        save: saves the trained model, or a part of it, as a dtype in a folder.
        again: creates the model a second time; the weights of a sharded model are loaded into it to be saved.
        row: tokens of a row, if all have as many.
        base: fingerprint of the model that the training starts from; None for a new model.
        inputs: hashes of other inputs by name, such as `index`; they are returned too.
        base_dtype: of the saved weights if `trainer.dtype` is "auto".
        options: of TermsTrainer; without options, the model computes its own loss.

    Raises:
        OnlyPlanned: `watch.plan`.
        ValueError: as `continued`; a checkpoint of other inputs; another engine than asked; divergence; a full disk.
    """
    from farspan.train.terms_trainer import TermsTrainer

    out, how = Path(settings.out), settings.trainer
    checkpoint, before = continued(settings, watch.notice)
    interrupts = SavesWhenInterrupted(watch.notice)
    dtype = base_dtype if how.dtype == "auto" else getattr(torch, how.dtype)
    reports = [LogFile(out / "log.jsonl"), Steps(watch, dtype), checkpoints.Clock(before), Intervals(), interrupts]
    use_cache = getattr(getattr(model, "config", None), "use_cache", None)  # the Trainer turns it off
    trainer: CheckpointTrainer = (TermsTrainer if options else CheckpointTrainer)(
        model=model,
        args=_arguments(settings, engines.sharded(model), evaluates=held_out is not None, watch=watch),
        train_dataset=rows,
        eval_dataset=held_out,
        callbacks=[] if watch.plan else reports,
        optimizer_and_schedule=build(model, settings.optimizer, how.steps),
        **options,
    )
    trainer.remove_callback(PrinterCallback)  # which prints each entry of the log as a dict
    finished = checkpoint if before.global_step == how.steps else None
    when = {"continues": bool(checkpoint), "finished": bool(finished), "plan": watch.plan}
    every = inputs if held_out is None else {**inputs, "held_out": held_out.corpus.hash}
    recorded = checkpoints.refuse_other_inputs(out / CHECKPOINTS, rows.corpus, base, every, **when)
    read = _read(len(rows), row, how)
    trainer.add_callback(AtBegin(partial(_refuse_begin, trainer, settings, dtype, checkpoint)))
    if watch.plan:
        line = steps_in_words(how, read, row, checkpoint, finished=finished is not None)
        end_plan(trainer, callbacks, watch, line, read, how.steps - before.global_step)
    if finished is not None:
        trainer.restore(finished, before)
        watch.notice(f"already finished: {how.steps:,} steps. Nothing is trained; the model is saved again in {out}")
    else:
        for callback in callbacks:
            callback.attach(trainer)
        with interrupts.active(), engines.products(trainer.args):
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    parameters = sum(p.numel() for p in model.parameters())
    whole = _unsharded(model, again)
    if trainer.is_world_process_zero():
        if use_cache is not None:
            whole.config.use_cache = use_cache
        with checkpoints.writing(out), files.added(out, last="config.json") as new:
            save(whole, dtype, new)
    return {"finished": finished is not None, "parameters": parameters} | read | _results(trainer.state, how) | recorded


def _unsharded(model: Any, again: Callable[[], Any]) -> Any:
    """Return the model, in the first process with all its weights. All processes must call this."""
    if not engines.sharded(model):
        return model
    state = engines.whole_state(model)
    if not engines.is_first_process():
        return model
    assert state.keys() == dict(model.named_parameters()).keys(), "not the trained model"
    whole = again()
    whole.load_state_dict(state, strict=False)  # not strict: buffers are not in the state
    return whole


def _results(state: TrainerState, how: RunSettings) -> dict[str, Any]:
    """Return the losses and seconds of a training that has finished."""
    logged = [entry for entry in state.log_history if "loss" in entry][-1]
    # the Trainer also evaluates at the last step
    held_out_losses = [entry["eval_loss"] for entry in state.log_history if "eval_loss" in entry]
    return {
        # mean over the steps since the previous line, at most `log_every`, of the weighted sum of its parts
        "loss": logged["loss"],
        "losses": parts_of(logged),  # the parts by name, such as `sparse` and `window`, each in nats per token
        **({"held_out_loss": (held_out_losses or [None])[-1]} if isinstance(how, PretrainingSettings) else {}),
        "seconds": checkpoints.Clock.stored(state),  # up to the last checkpoint, of all sessions
        "sessions": checkpoints.Clock.sessions_of(state),
    }


def continued(settings: TrainingSettings, notice: Notice = lambda line: None) -> tuple[Path | None, TrainerState]:
    """Return the checkpoint from which a training continues, and its state; None and an empty state if it begins.

    Args:
        notice: called with a line for each checkpoint that is skipped.

    Raises:
        ValueError: a damaged checkpoint, or one of more than `trainer.steps` steps.
    """
    folder, now = Path(settings.out) / CHECKPOINTS, settings.trainer.steps
    checkpoint = checkpoints.last(folder, min(settings.trainer.save_every, now), notice)
    if checkpoint is None:
        return None, TrainerState()
    state = checkpoints.state_of(checkpoint)
    if state.global_step > now:
        raise ValueError(
            f"{checkpoint} is of a longer training than trainer.steps = {now}: use trainer.steps = {state.max_steps}, "
            "or another folder for out"
        )
    return checkpoint, state


def _read(rows: int, row: int | None, how: RunSettings) -> dict[str, int]:
    """Return the number of rows that all steps read together, and that of tokens if a row has `row` of them. The last
    step of an epoch can have fewer rows than a batch."""
    epochs, more = divmod(how.steps, -(-rows // how.rows_per_step))
    count = epochs * rows + more * how.rows_per_step
    return {"rows": count} | ({} if row is None else {"tokens": count * row})


def _arguments(
    settings: TrainingSettings, is_sharded: bool, *, evaluates: bool, watch: TrainingWatch
) -> TrainingArguments:
    """Return the Trainer's arguments; in a plan, those of a training that reports and saves nothing."""
    how = settings.trainer
    arguments: dict[str, Any] = {
        "output_dir": str(Path(settings.out) / CHECKPOINTS),
        "max_steps": how.steps,
        "per_device_train_batch_size": how.micro_batch,
        "per_device_eval_batch_size": how.micro_batch,
        "gradient_accumulation_steps": how.rows_per_step // (how.micro_batch * engines.num_processes()),
        "learning_rate": settings.optimizer.lr,  # for messages; the optimizer and its schedule are given
        "max_grad_norm": settings.optimizer.clip,
        "bf16": how.uses_bf16,
        "seed": how.seed,
        "data_seed": how.seed,
        "logging_steps": how.log_every,
        "disable_tqdm": True,
        "logging_nan_inf_filter": False,  # it would replace a loss of NaN by the mean of the others
        "save_steps": how.save_every,
        "report_to": [] if watch.plan else list(how.report_to),
        "dataloader_num_workers": how.workers,
        "dataloader_pin_memory": torch.cuda.is_available(),
        "remove_unused_columns": False,
    }
    if isinstance(how, PretrainingSettings):
        arguments |= {"torch_compile": how.compile, "eval_steps": how.evaluate_every}
        arguments["eval_strategy"] = "steps" if evaluates else "no"
    arguments |= engines.training_arguments(how.engine, how.uses_bf16, is_sharded)
    made = (PlacedArguments if is_sharded else TrainingArguments)(**arguments)
    made.mixed_precision = "bf16" if how.uses_bf16 else "no"  # not that of accelerate's environment variable
    engines.use_one_gpu(made, watch.notice)
    return made


def _refuse_begin(
    trainer: CheckpointTrainer, settings: TrainingSettings, dtype: torch.dtype, checkpoint: Path | None
) -> None:
    """Raise ValueError before the first step if another engine is in use than requested, it does not work with the
    optimizer or the dtype of the saved weights, or weights are not finite."""
    engines.refuse_other(settings.trainer.engine, trainer)
    engines.refuse_muon(engines.in_use(trainer), settings.optimizer.name)
    if engines.in_use(trainer) == "deepspeed":
        engines.refuse_rounding(settings.trainer.uses_bf16, dtype)
    trainer.refuse_weights(checkpoint)


def write_up(
    settings: TrainingSettings,
    summary: dict[str, Any],
    tokenizer: Any,
    card: Callable[[dict[str, Any], list[dict[str, Any]]], str] | None = None,
    draw: Callable[[list[dict[str, Any]], Path], Any] = lambda log, out: None,
) -> dict[str, Any]:
    """Write tokenizer, training.json and, with `card`, a model card and a picture to the folder of a trained model.
    Return the content of training.json: `summary` and the settings.

    Args:
        summary: with the result of `run`. If nothing was trained now, the entries of training.json are kept.
        card: returns the text of the model card, given the summary and the entries of the log.
        draw: draws the entries of the log into files of a folder.

    Raises:
        ValueError: the folder cannot be written, such as on a full disk.
    """
    out = Path(settings.out)
    recorded, steps = _recorded(out, "trainer", "steps")
    if summary.pop("finished", False) and steps == settings.trainer.steps:
        summary |= recorded
    summary["settings"] = settings.model_dump(mode="json")
    if engines.is_first_process():
        with checkpoints.writing(out):
            with files.added(out, last="tokenizer.json") as new:
                tokenizer.save_pretrained(new)
            files.write(out / "training.json", json.dumps(summary, indent=2) + "\n")
            if card is not None:
                log = read_log(out)
                draw(log, out)
                files.write(out / "README.md", card(summary, log))
    return summary


def read_log(out: Path) -> list[dict[str, Any]]:
    """Return the entries of log.jsonl in a training's folder."""
    file = out / "log.jsonl"
    return [
        files.parse_json(line, f"{file}, line {number}") for number, line in enumerate(file.read_text().splitlines(), 1)
    ]
