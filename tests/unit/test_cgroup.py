"""Limits of control groups, as Linux tells them in files: version 2, version 1, nested, and in containers."""

from __future__ import annotations

from pathlib import Path

import pytest

from bitnet_inference import cgroup


def system(root: Path, groups: str, files: dict[str, str]) -> Path:
    """A folder with /proc/self/cgroup and files below /sys/fs/cgroup."""
    for name, text in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{name}": files[name] for name in files}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "300000 100000\n"}, 3),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/a.slice/b\n", {"a.slice/b/cpu.max": "max 100000\n", "a.slice/cpu.max": "200000 100000\n"}, 2),
        ("2:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "400000\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, 4),
        ("2:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, None),
        ("2:cpu:/hidden\n", {"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
        ("2:cpuset:/a\n", {"cpuset/a/cpu.cfs_quota_us": "200000\n", "cpuset/a/cpu.cfs_period_us": "100000\n"}, None),
    ],
    ids=["2", "less than one", "unlimited", "around it", "1", "1, unlimited", "in a container", "another controller"],
)
def test_processors(tmp_path: Path, groups: str, files: dict[str, str], expected: int | None) -> None:
    assert cgroup.num_cpus(system(tmp_path, groups, files)) == expected


STAT = "anon 5\ninactive_file 20\nactive_file 13\nfile_mapped 10\n"
STAT_1 = "mapped_file 900\n" + STAT + "total_mapped_file 7\ntotal_inactive_file 200\ntotal_active_file 37\n"


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"memory.max": "1000\n", "memory.current": "600\n"}, 400),
        ("0::/\n", {"memory.max": "1000\n", "memory.current": "600\n", "memory.stat": STAT}, 423),
        ("0::/\n", {"memory.max": "max\n", "memory.current": "600\n"}, None),
        ("0::/\n", {"memory.max": "1000\n", "memory.high": "900\n", "memory.current": "600\n"}, 300),
        ("0::/a/b\n", {"a/memory.max": "1000\n", "a/memory.current": "600\n", "a/b/memory.max": "max\n"}, 400),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": "1000\n", "memory/a/memory.usage_in_bytes": "600\n",
                           "memory/a/memory.stat": STAT_1}, 630),
        ("0::/\n", {"memory.max": "1000\n", "memory.current": "600\n", "memory.stat": "file_mapped 10\n"}, 400),
    ],
    ids=["2", "pages of files", "unlimited", "slowed down", "around it", "1", "all mapped"],
)  # fmt: skip
def test_memory(tmp_path: Path, groups: str, files: dict[str, str], expected: int | None) -> None:
    assert cgroup.memory_left(system(tmp_path, groups, files)) == expected


def test_a_system_without_groups_sets_no_limit(tmp_path: Path) -> None:
    assert cgroup.num_cpus(tmp_path) is None and cgroup.memory_left(tmp_path) is None
