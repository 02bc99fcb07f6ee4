"""Commands on a disk that is full, in little memory, and two at once in one folder.

A small disk is a tmpfs over the working folder: it needs root, and is left out without. After room was made the command
is repeated, and must end as one that never lacked it.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from attack.harness import Command, End, Finding, Stage, judge
from attack.kills import COMMANDS, CURVE, Killed, difference, origin_of, ran_out, rows, weights, whole

SHARES = (0.0, 0.02, 0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 0.97)  # of what the command writes
MEMORY = (8, 24, 64, 128, 256, 512)  # MiB of address space beyond what is taken when the command begins


@dataclass(frozen=True)
class Limited:
    kind: str  # disk, memory, twice or cache
    killed: Killed
    amount: float = 0.0

    @property
    def name(self) -> str:
        amounts = {"disk": f"disk of {self.amount:.0%}", "memory": f"{self.amount:.0f} MiB of memory"}
        amounts["container"] = f"{self.amount:.0f} MiB"
        return f"{self.killed.name}, {amounts.get(self.kind, self.kind)}"


def all_limits() -> Iterator[Limited]:
    for killed in COMMANDS:
        if can_mount():
            yield from (Limited("disk", killed, share) for share in SHARES)
        yield from (Limited("memory", killed, amount) for amount in MEMORY)
        yield Limited("two in one folder", killed)
        yield Limited("two with one cache", killed)
    yield from (Limited("container", CONTAINED, amount) for amount in CONTAINERS)


CONTAINED = Killed("curve in a container", (*CURVE, "--text", "docs", "--lengths", "256,512", "--repeats", "8"), rows)
CONTAINERS = (125, 160, 320)  # MiB that it may take; 110 are enough for it with --batch 1


def can_mount() -> bool:
    """Whether a tmpfs can be mounted here."""
    if os.geteuid() != 0:
        return False
    with tempfile.TemporaryDirectory() as folder:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "none", folder], capture_output=True, check=False)
        if mounted.returncode:
            return False
        subprocess.run(["umount", folder], check=True)
    return True


@contextmanager
def small_disk(stage: Stage, origin: Path, room: int) -> Iterator[Path]:
    """A copy of a folder on a disk with `room` bytes left."""
    place = Path(tempfile.mkdtemp(dir=stage.folder))
    here = place / "work"
    here.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g", "none", str(here)], check=True)
    try:
        shutil.copytree(origin, here, symlinks=True, dirs_exist_ok=True)
        resize(here, room)
        yield here
    finally:
        subprocess.run(["umount", "-l", str(here)], check=True)
        shutil.rmtree(place, ignore_errors=True)


def resize(here: Path, room: int) -> None:
    free = os.statvfs(here)
    used = (free.f_blocks - free.f_bfree) * free.f_frsize
    subprocess.run(["mount", "-o", f"remount,size={used + room}", str(here)], check=True)


def attack(stage: Stage, one: Limited) -> list[Finding]:
    if one.kind == "disk":
        return _full(stage, one)
    if one.kind == "memory":
        return _little_memory(stage, one)
    if one.kind == "container":
        return _contained(stage, one)
    return _two(stage, one)


def _full(stage: Stage, one: Limited) -> list[Finding]:
    known = whole(stage, one.killed)
    with small_disk(stage, origin_of(stage, one.killed), int(one.amount * sum(known.sizes))) as here:
        (end,) = stage.zygote.run(Command(one.killed.argv, here))
        found = [] if end.code == 0 else judge(end, expect="refused", names=("space", "No space", "full"))
        resize(here, 1 << 29)
        return found + _repeated(stage, one, here)


def _repeated(stage: Stage, one: Limited, here: Path) -> list[Finding]:
    """What the command leaves, repeated without limits, against what it leaves that never had any."""
    known = whole(stage, one.killed)
    (end,) = stage.zygote.run(Command(one.killed.argv, here))
    if end.code:
        return [Finding("blocked", f"repeated: exit code {end.code}: {end.stderr[-400:]}")]
    digest = one.killed.digest(here)
    if one.killed.digest is rows:  # a length that ran out is tried again, also where --lengths auto would have ended
        for key in ran_out(here) - known.digest.keys():
            digest.pop(key, None)
    return [] if digest == known.digest else [Finding("changed", difference(known.digest, digest))]


def _little_memory(stage: Stage, one: Limited) -> list[Finding]:
    with stage.copy(origin_of(stage, one.killed)) as here:
        limits = {"memory": int(one.amount) << 20}
        (end,) = stage.zygote.run(Command(one.killed.argv, here, limits=limits))
        return judge(end, expect="any", names=("memory",)) + _repeated(stage, one, here)


def _two(stage: Stage, one: Limited) -> list[Finding]:
    """Two at once: one ends well, the other as well or refused in a line; in folders of their own both end well."""
    with stage.copy(origin_of(stage, one.killed)) as here:
        if one.kind == "two in one folder":
            ends = stage.zygote.run(Command(one.killed.argv, here), Command(one.killed.argv, here))
            found = _refused(ends)
            if one.killed.digest is weights and not any(end.code for end in ends):
                found.append(Finding("silent", "two trainings went on in one folder"))
            return found + _repeated(stage, one, here)
        with stage.copy(origin_of(stage, one.killed)) as other:
            env = {"FARSPAN_CACHE": str(here / "cache")}
            ends = stage.zygote.run(Command(one.killed.argv, here, env=env), Command(one.killed.argv, other, env=env))
            found = [finding for end in ends for finding in judge(end, expect="ok")]
            return found + _repeated(stage, one, other)


def _refused(ends: list[End]) -> list[Finding]:
    if all(end.code for end in ends):
        return [Finding("blocked", f"both end with an error: {[end.stderr[-200:] for end in ends]}")]
    return [finding for end in ends if end.code for finding in judge(end, expect="refused", names=("another",))]


# a container's limit


CGROUPS = Path("/sys/fs/cgroup")


@contextmanager
def cgroup(limit: int) -> Iterator[Path | None]:
    """A group of processes below this one's own that may take `limit` bytes; None where none can be made."""
    split = [line.split(":") for line in Path("/proc/self/cgroup").read_text().splitlines()]
    lines = {controller: path for _, controller, path in split}
    old = "memory" in lines
    first = CGROUPS / "memory" / lines["memory"].lstrip("/") if old else CGROUPS / lines[""].lstrip("/")
    file = "memory.limit_in_bytes" if old else "memory.max"
    place = first / f"farspan-attack-{os.getpid()}"
    try:
        place.mkdir()
        (place / file).write_text(str(limit))
    except OSError:
        with contextlib.suppress(OSError):
            place.rmdir()
        yield None
        return
    try:
        yield place
    finally:
        with contextlib.suppress(OSError):
            place.rmdir()


def _contained(stage: Stage, one: Limited) -> list[Finding]:
    with cgroup(int(one.amount) << 20) as place:
        if place is None:
            return []
        with stage.copy() as here:
            (end,) = stage.zygote.run(Command(one.killed.argv, here, limits={"cgroup": str(place)}))
            found = judge(end, expect="any", names=("memory",))
            return found + _repeated(stage, one, here)
