"""What a device says of its memory."""

from pathlib import Path

import psutil
import pytest
import torch

from farspan.hf import device
from farspan.hf.device import container_free_bytes, free_bytes

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
