"""What a device says of its memory; how often the host waits for it."""

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from farspan.hf import device
from farspan.hf.device import container_free_bytes, free_bytes
from farspan.methods import method

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


def test_a_container_that_sees_its_own_group_as_the_root_is_found(tmp_path: Path) -> None:
    group(tmp_path / "groups", limit=str(100 * MIB), taken=30 * MIB)
    assert container_free_bytes(tmp_path / "groups", own(tmp_path, "0::/docker/0123abc")) == 70 * MIB


def test_without_a_limit_there_is_none(tmp_path: Path) -> None:
    group(tmp_path / "groups", limit="max", taken=30)
    assert container_free_bytes(tmp_path / "groups", own(tmp_path, "0::/", "3:cpuset:/")) is None
    assert container_free_bytes(tmp_path / "groups", tmp_path / "not there") is None


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


class Waits(TorchDispatchMode):
    """Counts the numbers read from tensors, for each of which the host waits until a GPU has finished."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "text",  # not top-k, which counts equal scores in every layer
    [
        "full",
        "sinks:window=40",
        "lambda_mask:window=40,sinks=2",
        "selfextend:group=8,window=20",
        "dca:chunk=30,local=5",
        "temperature:original=20",
        "snapkv:capacity=40",
        "tova:share=0.25",
        "knorm:share=0.25",
        "ape:piece=40",
        "replug:piece=40,tail=40",
        "rope:type=yarn,factor=4",
    ],
)
def test_a_method_does_not_wait_for_the_device_in_every_layer(text: str, tokenizer: Any) -> None:
    counts = []
    for layers in (2, 6):
        lm, ids = open_lm("llama", tokenizer, num_hidden_layers=layers), some_ids(1, 200)
        with method(text).on(lm) as reader, Waits() as waits:
            reader.read(ids[:, :190]).score(ids[:, 190:])
        counts.append(waits.count)
    assert counts[0] == counts[1]
