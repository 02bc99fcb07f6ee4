"""What a device says of its memory; how often the host waits for it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from farspan.cepe import MODES
from farspan.hf import device
from farspan.hf.device import container_free_bytes, free_bytes, total_bytes
from farspan.lm import LM, wrap
from farspan.methods import method
from farspan.methods.topk import largest
from farspan.reader.logits import _scores

from cepe_models import tiny_cepe
from tiny import open_lm, some_ids

MIB = 2**20


def group(folder: Path, *, limit: str, taken: int, unused: int = 0, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
    for name, value in zip(names, (limit, taken), strict=True):
        (folder / f"memory.{name}").write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{'' if version == 2 else 'total_'}inactive_file {unused}\n")


def own(folder: Path, *lines: str) -> Path:
    (folder / "own").write_text("".join(f"{line}\n" for line in lines))
    return folder / "own"


@pytest.mark.parametrize("version", [1, 2])
def test_the_smallest_limit_of_a_container_and_of_those_around_it_counts(version: int, tmp_path: Path) -> None:
    groups, controllers = tmp_path / "groups", "memory" if version == 1 else ""
    inner, outer = groups / controllers / "outer" / "inner", groups / controllers / "outer"
    group(inner, limit=str(900 * MIB), taken=300 * MIB, unused=100 * MIB, version=version)
    process = own(tmp_path, "9:name=systemd:/", f"4:{controllers}:/outer/inner")
    assert container_free_bytes(groups, process) == 700 * MIB
    group(outer, limit=str(800 * MIB), taken=400 * MIB, version=version)
    assert container_free_bytes(groups, process) == 400 * MIB
    assert total_bytes(groups, process) == 800 * MIB


def test_a_container_that_sees_its_own_group_as_the_root_is_found(tmp_path: Path) -> None:
    group(tmp_path / "groups", limit=str(100 * MIB), taken=30 * MIB)
    assert container_free_bytes(tmp_path / "groups", own(tmp_path, "0::/docker/0123abc")) == 70 * MIB


def test_without_a_limit_there_is_none(tmp_path: Path) -> None:
    group(tmp_path / "groups", limit="max", taken=30)
    assert container_free_bytes(tmp_path / "groups", own(tmp_path, "0::/", "3:cpuset:/")) is None
    assert container_free_bytes(tmp_path / "groups", tmp_path / "not there") is None
    assert total_bytes(tmp_path / "groups", tmp_path / "not there") == psutil.virtual_memory().total


def test_free_memory_is_no_more_than_the_container_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "container_free_bytes", lambda: 12 * MIB)
    assert free_bytes(torch.device("cpu")) == 12 * MIB
    monkeypatch.setattr(device, "container_free_bytes", lambda: 0)
    assert free_bytes(torch.device("cpu")) == 0
    monkeypatch.setattr(device, "container_free_bytes", lambda: None)
    assert free_bytes(torch.device("cpu")) == pytest.approx(psutil.virtual_memory().available, rel=0.2)


def test_on_cuda_what_the_allocator_holds_back_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("mem_get_info", (5 * MIB, 80 * MIB)), ("memory_reserved", 60 * MIB)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20 * MIB)
    assert free_bytes(torch.device("cuda")) == 45 * MIB


ATEN = torch.ops.aten
READ = {ATEN._local_scalar_dense.default, ATEN.nonzero.default, ATEN.masked_select.default, ATEN.equal.default}
INDEXED = {ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default}


class Waits(TorchDispatchMode):
    """Counts what is read from tensors: numbers, or the places at which a mask is true. For each the host waits until a
    GPU has finished."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = function in INDEXED and any(one is not None and one.dtype == torch.bool for one in args[1])
        self.count += function in READ or masks
        return function(*args, **(kwargs or {}))

    def __enter__(self) -> "Waits":
        own = torch.Tensor.tolist

        def tolist(tensor: Tensor) -> Any:
            self.count += 1
            return own(tensor)

        self.patch = patch.object(torch.Tensor, "tolist", tolist)  # on a CPU it calls no operation
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.patch.stop()
        super().__exit__(*error)


class Elsewhere(Tensor):
    """A tensor in the CPU's memory that is treated as one on a GPU."""

    device = property(lambda self: torch.device("cuda"))


ATTENTION = [  # not top-k, which on a CPU counts equal scores in every layer
    "sinks:window=40",
    "lambda_mask:window=40,sinks=2",
    "selfextend:group=8,window=20",
    "dca:chunk=30,local=5",
    "temperature:original=20",
    "snapkv:capacity=40",
    "tova:share=0.25",
    "knorm:share=0.25",
]
LAYERS = (2, 6)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("text", ["full", *ATTENTION, "ape:piece=40", "replug:piece=40,tail=40"])
def test_a_method_does_not_wait_for_the_device_in_every_layer(text: str, architecture: str, tokenizer: Any) -> None:
    counts = []
    for layers in LAYERS:
        windows: Any = {"layer_types": ["sliding_attention", "full_attention"] * (layers // 2)}
        changes = {"num_hidden_layers": layers} | (windows if architecture == "gemma3" else {})
        lm, ids = open_lm(architecture, tokenizer, **changes), some_ids(1, 200)
        with method(text).on(lm) as reader, Waits() as waits:
            memory = reader.read(ids[:, :190])
            memory.score(ids[:, 190:])
            memory.generate(ids[:, 190:], 3)
        counts.append(waits.count)
    assert counts[0] == counts[1]


def test_a_method_on_rope_does_not_wait_for_the_device_in_every_layer(tokenizer: Any) -> None:
    counts = []
    for layers in LAYERS:
        lm, ids = open_lm("llama", tokenizer, num_hidden_layers=layers), some_ids(1, 200)
        with method("rope:type=yarn,factor=4").on(lm) as reader, Waits() as waits:
            reader.read(ids[:, :190]).score(ids[:, 190:])
        counts.append(waits.count)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("text", ATTENTION)
def test_a_model_called_under_a_method_does_not_wait_for_the_device_in_every_layer(text: str, tokenizer: Any) -> None:
    for layers in LAYERS:
        lm = open_lm("llama", tokenizer, num_hidden_layers=layers)
        with method(text).on(lm), torch.no_grad():
            for ids in (some_ids(1, 100), some_ids(1, 90)):
                with Waits() as waits:
                    lm.model(input_ids=ids)
                assert waits.count == 1  # whether positions have gaps


def test_positions_with_gaps_are_refused_in_every_call(lm: LM) -> None:
    ids, positions = some_ids(1, 30), torch.arange(30)[None]
    with method("topk:k=8").on(lm), torch.no_grad():
        lm.model(input_ids=ids, position_ids=positions)
        positions[:, 20:] += 1  # the same tensor
        with pytest.raises(ValueError, match=r"reads one text in each row: positions .* have gaps"):
            lm.model(input_ids=ids, position_ids=positions)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "olmo2"])
def test_cepe_does_not_wait_for_the_device_in_every_layer(architecture: str, mode: str, tokenizer: Any) -> None:
    """Also where the decoder normalises its keys."""
    counts = []
    for layers in LAYERS:
        lm = wrap(tiny_cepe(architecture, num_hidden_layers=layers), tokenizer, architecture)
        ids = some_ids(1, 100)
        with method(f"cepe:chunk=8,decoder_window=32,mode={mode}").on(lm) as reader, Waits() as waits:
            memory = reader.read(ids)
            memory.score(ids[:, :9])
            memory.generate(ids[:, :9], 3)
        counts.append(waits.count)
    assert counts[0] == counts[1]


def test_full_attention_waits_for_the_device_once_in_every_chunk(tokenizer: Any) -> None:
    """To learn that the model's own mask hides only later tokens."""
    counts, ids = [], some_ids(1, 200)
    for chunk in (40, 20):
        with method("full").on(open_lm("llama", tokenizer)) as reader, Waits() as waits:
            reader.chunk = chunk
            reader.read(ids)
        counts.append(waits.count)
    assert counts[1] - counts[0] == 5


@pytest.mark.parametrize("rounded", [True, False])
@torch.no_grad()
def test_scores_on_a_gpu_are_those_on_a_cpu_and_are_not_waited_for(rounded: bool) -> None:
    """Also of tokens whose logit is as large as another, of padding, and of logits that are not finite."""
    values, generator = torch.randn(40, 60, generator=torch.Generator().manual_seed(0)), np.random.default_rng(0)
    values = values.round() if rounded else values
    targets = torch.tensor(generator.integers(0, 60, 40))
    targets[::2], targets[7] = values[::2].argmax(-1), -1
    with Waits() as waits:
        chosen = [largest(values.clone().as_subclass(Elsewhere), k) for k in (1, 7, 59)]
        given = _scores(values.clone().as_subclass(Elsewhere), targets)
    assert waits.count == 0
    for k, one in zip((1, 7, 59), chosen, strict=True):
        assert torch.equal(one.as_subclass(Tensor), largest(values.clone(), k))
    for one, expected in zip(given, _scores(values, targets), strict=True):
        torch.testing.assert_close(one.as_subclass(Tensor), expected, rtol=0, atol=0, equal_nan=True)


def test_weights_of_passes_are_copied_to_the_device_once_and_not_for_every_block_of_logits(lm: LM) -> None:
    with method("replug:piece=10").on(lm) as reader:
        for weights in (None, torch.ones(4)):
            memory: Any = reader.read(some_ids(2, 40), weights=weights)
            memory.lm = SimpleNamespace(device=torch.device("meta"))
            assert memory._log_weights().device.type == "meta"
