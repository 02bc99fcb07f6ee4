"""What a measurement will cost, against what it did."""

import json
import resource
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from farspan import lm as lms
from farspan.hf import Stream
from farspan.lm import LM, load, wrap
from farspan.measuring import calibration
from farspan.measuring.grid import measure, plans
from farspan.measuring.loader import Load
from farspan.measuring.loop import measure_cell
from farspan.measuring.plan import plan
from farspan.measuring.setups import grid
from farspan.methods import method
from farspan.reader import DenseReader
from farspan.record import Run
from farspan.tasks import task
from farspan.tasks.cost import BoundCost
from farspan.tasks.curve import BoundCurve
from farspan.tasks.documents import Answering, Item
from farspan.tasks.zeroscrolls import BoundZeroScrolls

from cepe_models import tiny_cepe
from tiny import CONFIGS, PHIMOE, configure, saved, tiny_model
from toys import counting_text, curve_of, perplexity_of

LENGTHS = (20, 50, 110)


def few_words() -> BoundCurve:
    text = counting_text(4, 150)
    return curve_of(type(text)("few", "few", text.tokens % 250 + 1, text.starts))


NESTED, PAPER = (curve_of(few_words().target, protocol=protocol) for protocol in ("nested", "paper"))
PROBE = curve_of(few_words().target, protocol="probe", warmup=4, scored=8)
ITEMS = tuple(Item(name, "Story:\n", 9 * name, "\n\nWho?\nAnswer:\n", ("fox",)) for name in ("one", "two", "three"))
ANSWERS = BoundZeroScrolls("qasper", ITEMS, Answering(new_tokens=6, min_new_tokens=6), "none", "")
LAST, FIXED = (perplexity_of(few_words().target, targets, target_tokens=12) for targets in ("last", "fixed"))


@pytest.mark.parametrize(
    ("what", "how"),
    [
        (NESTED, "full"),
        (PAPER, "full"),
        (NESTED, "replug:piece=16"),
        (NESTED, "replug:piece=16,tail=25"),
        (PAPER, "replug"),
        (PROBE, "ape:piece=16"),
        (PROBE, "sinks:window=24+replug:piece=32"),
        (NESTED, "snapkv:capacity=24,window=8"),  # the text is read again after each score
        (LAST, "full"),
        (LAST, "tova:capacity=24"),
        (LAST, "ape:piece=16"),
        (FIXED, "replug:piece=16"),
        (BoundCost(new_tokens=5), "full"),  # and its warm-up
        (ANSWERS, "full"),
    ],
)
def test_the_tokens_of_a_plan_are_those_that_are_fed(
    what: Any, how: str, lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farspan.hf.check_cached_keys", lambda *args, **options: None)  # 24 tokens of an eviction
    cost = plan(what, method(how), lm, lengths=LENGTHS, repeats=3, batch=2, calibrate=False)
    fed = 0
    decoder = lm.model.get_decoder()

    def count(module: Any, args: Any, kwargs: Any) -> None:
        nonlocal fed
        is_probe = kwargs.get("past_key_values") is None  # of the model's attention, before a method replaces it
        if "forward" not in vars(module) and not is_probe:  # the former stands still while the head runs
            fed += kwargs["input_ids"].numel()

    with Run.open(tmp_path, {}) as run:  # the self-check ran while planning
        handle = decoder.register_forward_pre_hook(count, with_kwargs=True)
        measure_cell(what, method(how), lm, run, lengths=LENGTHS, repeats=3, batch=2)
        handle.remove()
    assert fed == cost.tokens > 0
    assert cost.seconds is None


@pytest.mark.parametrize(
    "architecture",
    ["llama", "qwen3", "mistral", "gemma3", "gpt2", "falcon", "bloom", "recurrent_gemma", "gemma4", "deepseek_v3"],
)
def test_flops_are_those_that_torch_counts(architecture: str, tokenizer: Any) -> None:
    lm = wrap(tiny_model(architecture), tokenizer, architecture)
    lm.model.set_attn_implementation("eager")  # of which torch counts every product
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        lm.model(input_ids=torch.ones(1, 100, dtype=torch.long), use_cache=False)
    assert lm.flops(0, 100, 100) == pytest.approx(counter.get_total_flops(), rel=0.04)  # norms and biases


def test_layers_with_a_window_attend_to_no_more_than_it(tokenizer: Any) -> None:
    lm = wrap(tiny_model("gemma3"), tokenizer, "gemma3")  # one layer of 40 tokens, one of all; 4 heads of 8
    assert lm.flops(100, 10, 0) - lm.flops(50, 10, 0) == 4 * 32 * 10 * 50
    assert lm.flops(30, 10, 0) - lm.flops(20, 10, 0) == 2 * 4 * 32 * 10 * 10
    assert lm.flops(50, 10, 0) - lm.flops(0, 10, 0) == 4 * 32 * 10 * (50 + 39)


@pytest.mark.parametrize(
    ("how", "seen"), [("sinks:window=20", 24), ("sinks:window=20,stride=8", 31), ("lambda_mask:window=20", 30)]
)
def test_a_window_of_a_method_limits_the_keys_that_a_plan_counts(how: str, seen: int, lm: LM) -> None:
    with method(how).on(lm) as reader:
        longer = reader.flops(500, 100, 0) - reader.flops(500, 20, 0)
    assert longer == 80 * lm.flops(seen - 1, 1, 0)


@pytest.mark.parametrize(("what", "lengths"), [(NESTED, (110,)), (LAST, LENGTHS)], ids=["curve", "perplexity"])
def test_a_plan_counts_the_kept_keys_of_an_eviction_and_the_text_that_is_read_again(
    what: Any, lengths: tuple[int, ...], lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm.model.set_attn_implementation("eager")  # of which torch counts every product,
    monkeypatch.setattr("farspan.hf.remap.takes", lambda *tensors: False)  # as it does not of the fused kernel
    monkeypatch.setattr("farspan.hf.check_cached_keys", lambda *args, **options: None)  # 24 tokens of an eviction
    counted, planned = dict[str, float](), dict[str, float]()
    for how in ("full", "knorm:capacity=8"):
        planned[how] = plan(what, method(how), lm, lengths=lengths, repeats=2, batch=2).flops
        with Run.open(tmp_path / how, {}) as run, FlopCounterMode(display=False) as counter:
            measure_cell(what, method(how), lm, run, lengths=lengths, repeats=2, batch=2)
        counted[how] = counter.get_total_flops()
    ratio = planned["knorm:capacity=8"] / planned["full"]
    assert ratio == pytest.approx(counted["knorm:capacity=8"] / counted["full"], rel=0.1)


def test_only_the_experts_that_a_token_passes_count(tokenizer: Any) -> None:
    one, two = (wrap(tiny_model("gpt_oss", num_experts_per_tok=n), tokenizer, "moe") for n in (1, 2))
    expert = 32 * 128 + 128 + 64 * 32 + 32  # gate and up, down, and their biases
    assert two.flops(0, 1, 0) - one.flops(0, 1, 0) == 2 * 2 * expert


def test_flops_equal_a_count_by_hand(lm: LM) -> None:
    hidden, feed_forward, layers, vocabulary = 32, 64, 2, 300
    matrices = layers * (2 * hidden * hidden + 2 * hidden * hidden // 2 + 3 * hidden * feed_forward)
    norms = (2 * layers + 1) * hidden
    attention = 4 * layers * hidden * 10 * (90 + 10)
    assert lm.flops(90, 10, 7) == 2 * (matrices + norms) * 10 + attention + 2 * hidden * vocabulary * 7


def test_a_calibrated_plan_says_a_time_that_grows_with_the_work(lm: LM) -> None:
    short, long = (
        plan(few_words(), method("full"), lm, lengths=lengths, repeats=4, batch=2, calibrate=True).seconds
        for lengths in ((20,), (20, 50, 80, 110, 140))
    )
    assert short is not None
    assert long is not None
    assert 0 < short < long


def test_the_memory_of_a_plan_covers_the_keys(tokenizer: Any) -> None:
    lm = wrap(tiny_model().to(torch.bfloat16), tokenizer, "tiny")
    cost = plan(few_words(), method("full"), lm, lengths=(140,), repeats=4, batch=4, calibrate=False)
    keys = 4 * 280 * 2 * 2 * 2 * 8 * 2  # rows, tokens, keys and values, layers, heads, dimension, bytes
    assert cost.extra_bytes > keys


# without weights


def planned(model: LM, how: str, **changes: Any) -> Any:
    options: dict[str, Any] = {"lengths": LENGTHS, "repeats": 3, "batch": 2} | changes
    return plan(few_words(), method(how), model, **options)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize(
    "architecture", ["llama", "mistral", "gemma3", "gemma2", "falcon", "gpt2", "bloom", "mamba2", "rwkv", "gpt_oss"]
)
def test_a_plan_of_config_and_tokenizer_equals_that_of_the_model(
    architecture: str, dtype: Any, tokenizer: Any, tmp_path: Path
) -> None:
    saved(tmp_path, tokenizer, tiny_model(architecture))
    whole = planned(load(tmp_path, dtype=dtype, device="cpu"), "full")
    (tmp_path / "model.safetensors").unlink()
    assert planned(load(tmp_path, dtype=dtype, device="cpu", weights=False), "full") == whole
    assert whole.weight_bytes > 10_000


@pytest.mark.parametrize(
    "how",
    [
        "sinks:window=20,sinks=3",
        "lambda_mask:window=20",
        "topk:k=6",
        "selfextend:group=4",
        "dca",
        "snapkv:capacity=20,window=6",
        "knorm:share=0.5",
        "temperature",
        "rope:type=yarn,factor=4",
        "rope:type=dynamic",
        "rope:type=truncated",
        "replug:piece=16",
        "rope:type=linear,factor=2+sinks:window=9",
    ],
)
def test_a_plan_under_a_method_needs_no_weights(how: str, folder: Path) -> None:
    assert planned(load(folder, device="cpu", weights=False), how) == planned(load(folder, device="cpu"), how)


@pytest.mark.parametrize("how", ["selfextend:group=8,window=16", "temperature+selfextend:group=8,window=16"])
def test_a_plan_counts_the_keys_that_are_held_twice_while_a_method_generates(how: str, tokenizer: Any) -> None:
    lm, length, new = wrap(tiny_model("llama"), tokenizer, "tiny"), 400, 8
    cost = BoundCost(new_tokens=new)
    full, grouped = (
        plan(cost, method(one), lm, lengths=(length,), repeats=1, chunk=16).extra_bytes for one in ("full", how)
    )
    twice = []
    with method(how).on(lm) as reader:
        memory = reader.read(torch.arange(length - 1)[None] % 50)
        kept = memory.stream.reading
        memory.generate(
            torch.tensor([[7]]),
            new,
            min_new_tokens=new,
            on_token=lambda _: twice.append([keys[:, :, :count] for keys, count in kept.turned.values()]),
        )
    needed = max(sum(keys.numel() * keys.itemsize for keys in at) for at in twice)
    assert needed > 0.4 * (length - 16) * lm.key_bytes_per_token
    assert needed <= grouped - full <= 1.4 * needed


@pytest.mark.parametrize("added", ["auto", "float32"])
def test_a_plan_of_an_encoder_and_its_decoder_needs_no_weights(added: str, tokenizer: Any, tmp_path: Path) -> None:
    model = tiny_cepe().bfloat16()
    model.save_pretrained(tmp_path)
    configure(tmp_path, **({} if added == "auto" else {"added_dtype": added}))
    tokenizer.save_pretrained(tmp_path)
    how = "cepe:chunk=8,decoder_window=32"
    whole = planned(load(tmp_path, device="cpu"), how)
    (tmp_path / "model.safetensors").unlink()
    assert planned(load(tmp_path, device="cpu", weights=False), how) == whole
    assert whole.parts["context_states"] > 0


@pytest.mark.parametrize(
    ("architecture", "how"),
    [
        ("gpt2", "sinks:window=9"),
        ("llama4", "sinks:window=9"),
        ("gpt_oss", "rope:type=ntk,factor=2"),
        ("gpt_oss", "sinks:window=9"),
        ("gpt_oss", "topk:k=2"),
        ("gpt_oss", "knorm:capacity=20"),
        ("phimoe", "rope:type=yarn,factor=4"),
        ("granite_hybrid", "topk:k=2"),
    ],
)
def test_what_a_config_shows_that_a_method_cannot_read_is_refused_in_the_same_words(
    architecture: str, how: str, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONFIGS, "phimoe", ("Phimoe", PHIMOE))
    saved(tmp_path, tokenizer, tiny_model(architecture))
    errors = []
    known = r"cannot be used with|learned positions|scaled already|does not rotate"
    for weights in (True, False):
        with pytest.raises(ValueError, match=known) as caught:
            planned(load(tmp_path, device="cpu", weights=weights), how)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


def test_a_plan_of_a_length_beyond_the_positions_gives_the_tokens_it_needs(tokenizer: Any) -> None:
    lm = wrap(tiny_model("gpt2"), tokenizer, "gpt2")
    curve = task("curve:protocol=nested").resolved([256], [512]).on(lm, "builtin:held-out")
    with pytest.raises(ValueError, match=r"needs 51\d tokens, gpt2 has 512 positions: give smaller lengths"):
        plan(curve, method("full"), lm, lengths=[256], repeats=2)


def test_rope_that_depends_on_the_length_is_planned_with_plain_forwards(folder: Path) -> None:
    configure(folder, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    cost = planned(load(folder, weights=False), "full")
    assert "dynamic" in cost.fallback
    assert cost == planned(load(folder), "full")


def test_a_model_without_weights_is_not_read(folder: Path, tmp_path: Path) -> None:
    lm = load(folder, weights=False)
    expected = "was loaded without weights, for plans: load it with them to read a text"
    with method("full").on(lm) as reader, pytest.raises(ValueError, match=expected):
        reader.read(torch.ones(1, 4, dtype=torch.long))
    with pytest.raises(ValueError, match=expected):
        measure([lm], tasks=["perplexity:target_tokens=8"], text="random", lengths=(16,), out=tmp_path / "run")
    with pytest.raises(ValueError, match=expected):
        planned(lm, "full", calibrate=True)


def test_the_weights_to_come_leave_less_memory_for_keys(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, few = load(folder, weights=False), {"lengths": (20,), "repeats": 4, "batch": None}
    monkeypatch.setattr("farspan.hf.free_bytes", lambda device: 2 * lm.num_bytes)
    batches = [planned(one, "full", **few).batch for one in (lm, load(folder, device="cpu"))]
    assert batches == [2, 4]
    monkeypatch.setattr("farspan.hf.free_bytes", lambda device: lm.num_bytes // 2)
    assert planned(lm, "full", **few).batch == 1


def test_plans_read_no_weights_unless_they_calibrate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError

    monkeypatch.setattr(lms, "load_weights", refuse)
    options: dict[str, Any] = {"text": "random", "lengths": (16, 32), "repeats": 2, "loader": Load(device="cpu")}
    what = grid([str(folder)], ["curve", "perplexity:target_tokens=8"], cost=True, **options)
    costs = [cost for *_, cost in plans([str(folder)], ["full"], what, tflops=0.5)]
    assert [cost.seconds for cost in costs] == [cost.flops / 0.5e12 for cost in costs]
    assert [cost.seconds for *_, cost in plans([str(folder)], ["full"], what)] == [None] * 3
    with pytest.raises(AssertionError):
        next(plans([str(folder)], ["full"], what, calibrate=True))
    monkeypatch.undo()
    assert next(plans([str(folder)], ["full"], what, calibrate=True)).cost.seconds > 0


def test_a_plan_leaves_out_what_the_run_already_has(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"text": "random", "repeats": 2, "loader": Load(device="cpu")}
    measured: dict[str, Any] = {**options, "lengths": (16, 32)}
    task, out = "perplexity:target_tokens=8", tmp_path / "run"
    what = grid([str(folder)], [task], **measured)

    def planned() -> dict[str, tuple[int, int, int]]:
        found = plans([str(folder)], ["full", "topk:k=4"], what, out=out, loader=options["loader"])
        return {how: (cost.num_examples, cost.tokens, cost.num_done) for _, how, _, _, cost in found}

    assert planned() == {"full": (2, 96, 0), "topk:k=4": (2, 96, 0)}
    measure(str(folder), "full", task, out=out, **measured)
    assert planned() == {"full": (0, 0, 4), "topk:k=4": (2, 96, 0)}
    rows = (out / "rows.jsonl").read_text().splitlines(keepends=True)
    (out / "rows.jsonl").write_text("".join(line for line in rows if '"length": 32, "repeat": 1' not in line))
    assert planned()["full"] == (1, 32, 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tflops": 0.0}, "tflops: got 0, expected a positive number"),
        ({"tflops": -1.0}, "tflops: got -1, expected a positive number"),
        ({"tflops": float("nan")}, "tflops: got nan, expected a positive number"),
        ({"tflops": 1.0, "calibrate": True}, "both give the time: use one of them"),
    ],
)
def test_impossible_ways_to_a_time_are_refused(given: dict[str, Any], message: str, folder: Path) -> None:
    what = grid([str(folder)], ["perplexity"], text="random", lengths=(400,))
    with pytest.raises(ValueError, match=message):
        next(plans([str(folder)], ["full"], what, **given))


SEVENTY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_size": 8192,
    "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def test_a_model_of_70_billion_weights_is_planned_in_seconds_without_them(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SEVENTY))
    tokenizer.save_pretrained(tmp_path)
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    lm = load(tmp_path, weights=False, device="cpu", dtype="bfloat16")
    cost = planned(lm, "full", batch=1)
    assert time.process_time() - started < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB

    layer = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192
    body, table = 80 * layer + 8192, 8192 * 128256
    rotary = 4 * 2 * 64  # bytes of frequencies in float32, and of their originals
    assert cost.weight_bytes - 2 * (body + 2 * table) in (rotary, rotary // 2)
    keys_of_a_token = 2 * 80 * 8 * 128 * 2  # keys and values, layers, key heads, dimension, bytes
    assert lm.key_bytes_per_token == keys_of_a_token
    # each repeat: a separator, 20, 30 and 60 tokens read; two rows of 20, 50 and 110 scored after them, the last half
    # by the head
    read, scored = [(0, 1), (1, 20), (21, 30), (51, 60)], [(21, 20, 10), (51, 50, 25), (111, 110, 55)]
    pairs = sum(n * (b + n) for b, n in read) + 2 * sum(n * (b + n) for b, n, _ in scored)
    tokens = sum(n for _, n in read) + 2 * sum(n for _, n, _ in scored)
    head = 2 * sum(k for *_, k in scored)
    assert cost.tokens == 3 * tokens
    assert cost.flops == 3 * (2 * body * tokens + 4 * 80 * 8192 * pairs + 2 * table * head)
    assert cost.extra_bytes > 220 * keys_of_a_token


# the time


@pytest.mark.parametrize("named", ["full", "replug:piece=200", "replug:piece=200,tail=100"])
def test_a_calibrated_time_is_that_of_the_operations_on_a_machine_where_only_they_take_time(
    named: str, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done = 0.0
    step = Stream.step

    def working(self: Stream, ids: torch.Tensor) -> torch.Tensor:
        nonlocal done
        done += 1e-9 * ids.shape[0] * lm.flops(self.num_seen, ids.shape[1], 0) + 0.001
        return step(self, ids)

    lm = load(folder, device="cpu")
    text, how = counting_text(4, 1500), method(named)
    task = curve_of(type(text)("few", "few", text.tokens % 250 + 1, text.starts))
    options: dict[str, Any] = {"lengths": (200, 700, 1400), "repeats": 4, "batch": 2, "chunk": 256}
    plan(task, how, lm, **options)  # the check of chunks is not part of it
    monkeypatch.setattr(Stream, "step", working)
    monkeypatch.setattr(calibration, "clock", lambda: done)
    cost = plan(task, how, lm, calibrate=True, **options)
    done = 0.0
    with Run.open(tmp_path / "run", {}) as run:
        measure_cell(task, how, lm, run, **options)
    assert cost.seconds == pytest.approx(done, rel=0.03)


def test_a_calibrated_time_counts_each_of_the_examples_that_a_task_reads_one_by_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done, step = 0.0, Stream.step

    def working(self: Stream, ids: torch.Tensor) -> torch.Tensor:
        nonlocal done
        done += 0.001  # as on a GPU, where a forward of several rows takes as long as one
        return step(self, ids)

    lm = load(folder, device="cpu")
    what, options = task("passkey:depths=2").on(lm, "builtin"), {"lengths": (420,), "repeats": 4, "batch": 4}
    plan(what, method("full"), lm, **options)  # the check of chunks is not part of it
    monkeypatch.setattr(Stream, "step", working)
    monkeypatch.setattr(calibration, "clock", lambda: done)
    cost = plan(what, method("full"), lm, calibrate=True, **options)
    done = 0.0
    with Run.open(tmp_path / "run", {}) as run:
        measure_cell(what, method("full"), lm, run, **options)
    assert cost.seconds == pytest.approx(done, rel=0.4)
    assert cost.batch == 1
    monkeypatch.undo()
    for one in (what, BoundCost()):
        together, alone = (plan(one, method("full"), lm, **options | {"batch": batch}) for batch in (4, 1))
        assert together == alone  # in memory too


@pytest.mark.parametrize("slow", [0.01, 0.3])  # seconds for one token of one row
def test_a_slow_machine_is_calibrated_with_fewer_rows_and_shorter_forwards(
    slow: float, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, longest = 0.0, 0.0
    step = Stream.step

    def working(self: Stream, ids: torch.Tensor) -> torch.Tensor:
        nonlocal now, longest
        seconds = slow * ids.shape[0] * lm.flops(self.num_seen, ids.shape[1], 0) / lm.flops(0, 1, 0)
        now, longest = now + seconds, max(longest, seconds)
        return step(self, ids)

    lm = load(folder, device="cpu")
    plan(few_words(), method("full"), lm, lengths=(140,), repeats=4)
    monkeypatch.setattr(Stream, "step", working)
    monkeypatch.setattr(calibration, "clock", lambda: now)
    cost = plan(few_words(), method("full"), lm, lengths=(140,), repeats=4, batch=4, calibrate=True)
    head = lm.flops(0, 0, 4 * 2 * 70)
    assert cost.seconds == pytest.approx(slow * (cost.flops - head) / lm.flops(0, 1, 0), rel=0.05)
    assert longest < 6
    assert now < 20


@pytest.mark.parametrize("how", ["full", "sinks:window=20,sinks=3"])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3", "smollm3"])
def test_a_text_that_is_skipped_leaves_a_memory_of_the_same_size(architecture: str, how: str, tokenizer: Any) -> None:
    lm, ids = wrap(tiny_model(architecture), tokenizer, architecture), torch.ones(2, 101, dtype=torch.long)
    with method(how).on(lm) as reader:
        read, skipped = reader.read(ids[:, :1]), reader.read(ids[:, :1])
        read.read(ids[:, 1:100])
        assert skipped.skip(99)
        for _ in range(2):
            assert (skipped.num_seen, skipped.num_kept) == (read.num_seen, read.num_kept)
            assert skipped.num_bytes == pytest.approx(read.num_bytes, rel=0.3)  # spare capacity
            read.read(ids[:, 100:])
            skipped.read(ids[:, 100:])


def test_a_memory_without_keys_does_not_skip(lm: LM) -> None:
    memory = DenseReader(lm, fallback="a test").read(torch.ones(1, 3, dtype=torch.long))
    assert not memory.skip(5)
    assert memory.num_seen == 3
