"""Memory of a device (free bytes, peaks), waiting for its work, and recognising that memory ran out."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

OUT_OF_MEMORY = (
    "DefaultCPUAllocator",
    "out of memory",
    "can't allocate memory",
    "can't start new thread",
    "could not create a primitive",
)


@dataclass
class Peak:
    """The peak memory of a piece of work, above the memory in use before it."""

    num_bytes: int | None = None  # None: not known yet, or not on this system


def has_instructions(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a device multiplies matrices of a dtype without converting them first; True if unknown.

    For CPUs, oneDNN reports it: bfloat16 and float16 need AVX-512 or Arm's extensions.
    """
    checks = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    if device.type != "cpu" or dtype not in checks or not hasattr(torch.ops.mkldnn, checks[dtype]):
        return True
    return bool(getattr(torch.ops.mkldnn, checks[dtype])())


def wait(device: torch.device) -> None:
    """Wait until the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_bytes(device: torch.device) -> int:
    """Return the free memory: on CUDA including the unused part of torch's allocator, elsewhere at most what the
    container's (cgroup) limit leaves."""
    if device.type == "cuda":
        held_back = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held_back
    available, allowed = psutil.virtual_memory().available, container_free_bytes()
    return available if allowed is None else min(available, allowed)


GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def container_free_bytes(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> int | None:
    """Return the bytes left within the limits of this process's control groups (versions 1 and 2); None without limit.

    Inactive file pages do not count as used: the kernel drops them first.
    """
    return min((max(0, limit - taken) for limit, taken in _limits(groups, own)), default=None)


def total_bytes(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> int:
    """Return the memory of this machine, at most what the limits of this process's control groups allow."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _limits(groups, own))])


def _limits(groups: Path, own: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and used bytes, without inactive file pages, of each control group that has a limit."""
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = groups / controllers
        names = ("max", "current", "inactive_file")
        if controllers:
            names = ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")
        folder = root / path.lstrip("/")  # inside a container this may be the host's path, which does not exist there
        for group in (folder, *(parent for parent in folder.parents if parent.is_relative_to(root))):
            files = [group / f"memory.{name}" for name in (*names[:2], "stat")]
            if not all(file.exists() for file in files):
                continue
            limit, taken, stat = (file.read_text().strip() for file in files)
            if limit != "max":
                unused = dict(line.split() for line in stat.splitlines()).get(names[2], 0)
                yield int(limit), int(taken) - int(unused)


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory so far: of the accelerator, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource  # Unix only; psutil reports no peak there

    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kibibytes if sys.platform == "darwin" else kibibytes * 1024


@contextmanager
def peak_above(device: torch.device) -> Iterator[Peak]:
    """Record the peak memory inside the `with`. On a CPU it is the resident memory of the process, and known only on
    Linux, where the peak can be reset; the allocator first releases the memory it keeps from earlier work."""
    peak, status = Peak(), Path("/proc/self/status")
    wait(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        wait(device)
        peak.num_bytes = torch.cuda.max_memory_allocated(device) - before
    elif device.type == "cpu" and status.exists():
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
            trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the resident memory
        before = _resident(status, "VmRSS")
        yield peak
        peak.num_bytes = max(0, _resident(status, "VmHWM") - before)
    else:
        yield peak


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out: on an accelerator, in torch's CPU allocator, in oneDNN ("could
    not create") or for the stack of a thread."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)


def _resident(status: Path, name: str) -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])
