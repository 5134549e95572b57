"""What Linux's control groups leave to this process: those of version 2 and 1, its own and all around it.

Functions take the folder under which /proc and /sys lie.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class _Files(NamedTuple):
    """The names of one version."""

    quota: str
    limits: tuple[str, ...]  # of memory: above the second, processes are slowed down until they hardly go on
    used: str
    of_all: str  # how names in memory.stat begin that count the groups within, too


_VERSION_2 = _Files("cpu.max", ("memory.max", "memory.high"), "memory.current", "")
_VERSION_1 = _Files("cpu.cfs_quota_us", ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_")


def num_cpus(root: Path = Path("/")) -> int | None:
    """As many whole processors as the tightest quota gives, at least 1; None without one."""
    counts: list[int] = []
    for folder, files in _groups("cpu", root):
        quota, _, period = read(folder / files.quota).partition(" ")
        period = period or read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():
            counts.append(max(1, int(quota) // int(period)))
    return min(counts, default=None)


def memory_left(root: Path = Path("/")) -> int | None:
    """Bytes that the tightest limit leaves; None without one. Below 0 where more is taken than may be."""
    rooms: list[int] = []
    for folder, files in _groups("memory", root):
        limits, used = [read(folder / name) for name in files.limits], read(folder / files.used)
        if used.isdigit():
            free = _given_back(read(folder / "memory.stat"), files) - int(used)
            rooms += [int(limit) + free for limit in limits if limit.isdigit()]
    return min(rooms, default=None)


def _given_back(stat: str, files: _Files) -> int:
    """Bytes of files that are kept until somebody wants the memory; not what a process has mapped, such as weights."""
    counts = dict(line.split(" ", 1) for line in stat.splitlines())
    mapped = "mapped_file" if files.of_all else "file_mapped"
    inactive, active, in_use = (int(counts.get(files.of_all + n, 0)) for n in ("inactive_file", "active_file", mapped))
    return max(0, inactive + active - in_use)


def read(path: Path) -> str:
    """What the system says in a file; empty where it has none."""
    try:
        return path.read_text(errors="surrogateescape").strip()  # names of groups are bytes
    except OSError:
        return ""


def _groups(controller: str, root: Path) -> Iterator[tuple[Path, _Files]]:
    """The folders of a controller, from the group of this process up. In a container some of them may be hidden."""
    mounts = root / "sys/fs/cgroup"
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount, files = (mounts / controller, _VERSION_1) if controllers else (mounts, _VERSION_2)
        inner = mount / path.strip("/")
        for folder in (inner, *inner.parents):
            yield folder, files
            if folder == mount:
                break
