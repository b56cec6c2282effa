"""A host has room if its disks, its memory, and every cgroup around the agent have room."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from rallypoint.agent.config.rlimits import Quantity, parse_quantity
from rallypoint.agent.health.checks import CheckContext, check_disks, check_memory

NOWHERE = CheckContext()
GIB = 1 << 30


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A disk of 100 GiB with 10 GiB free; a test may change its other values."""
    figures = SimpleNamespace(
        f_frsize=4096, f_blocks=100 * GIB // 4096, f_bavail=10 * GIB // 4096, f_files=9, f_favail=3
    )
    monkeypatch.setattr(os, "statvfs", lambda _: figures)
    return figures


def test_a_disk_has_room_or_its_free_space_is_reported(disk: SimpleNamespace, tmp_path: Path) -> None:
    """The requirement is in bytes, or a part of the whole."""
    where = CheckContext((tmp_path, tmp_path))
    assert check_disks(where, parse_quantity("10GiB")) is None
    assert check_disks(where, parse_quantity("10%")) is None
    assert check_disks(where, parse_quantity("11GiB")) == (
        f"10.0 GiB of 100.0 GiB are free at {tmp_path}; 11.0 GiB required"
    )
    assert check_disks(where, parse_quantity("12%")) == (
        f"10.0 GiB of 100.0 GiB are free at {tmp_path}; 12.0 GiB (12 %) required"
    )


def test_a_disk_without_inodes_has_no_room(disk: SimpleNamespace, tmp_path: Path) -> None:
    """Free bytes do not help. A file system that counts no inodes (btrfs) has enough."""
    disk.f_favail = 0
    assert "no inode left" in (check_disks(CheckContext((tmp_path,)), Quantity(bytes=0)) or "")
    disk.f_files = 0
    assert check_disks(CheckContext((tmp_path,)), Quantity(bytes=0)) is None


def test_a_folder_that_is_gone_is_no_healthy_one(tmp_path: Path) -> None:
    """The disk it was on may be broken."""
    with pytest.raises(OSError, match="none"):
        check_disks(CheckContext((tmp_path / "none",)), Quantity(bytes=0))


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A host of 64 GiB with 8 available, on which the agent is in the cgroup /jobs/mine of version 2."""
    meminfo = "MemTotal: 67108864 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB\nHugePages_Total: 0\n"
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(meminfo)
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/jobs/mine\n")
    return tmp_path


def group(folder: Path, limit: str, used: int, cache: int, version: int = 2) -> None:
    """Write a cgroup with a limit."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {cache}\n")


def look(host: Path, least: str) -> str | None:
    return check_memory(NOWHERE, parse_quantity(least), host / "proc", host / "cgroups")


def test_memory_is_what_the_kernel_calls_available(host: Path) -> None:
    """Little memory is free on a host that reads files."""
    assert look(host, "8GiB") is None
    assert look(host, "9GiB") == "8.0 GiB of 64.0 GiB of memory are available; 9.0 GiB required"
    assert look(host, "12%") is None
    assert "(13 %) required" in (look(host, "13%") or "")


def test_each_cgroup_around_the_agent_counts(host: Path) -> None:
    """The host's 8 GiB do not help a cgroup with a limit of 4; unused file pages count as available."""
    group(host / "cgroups" / "jobs" / "mine", "max", 3 * GIB, 0)
    group(host / "cgroups" / "jobs", str(4 * GIB), 3 * GIB, GIB)
    assert look(host, "2GiB") is None
    assert look(host, "3GiB") == (
        "2.0 GiB of its cgroup's memory limit of 4.0 GiB are left; 3.0 GiB required"
    )


def test_a_container_sees_its_cgroup_as_the_root(host: Path) -> None:
    """/proc shows the host's path, which does not exist in the container."""
    group(host / "cgroups", str(4 * GIB), 4 * GIB, 0)
    assert "0 B of its cgroup's memory limit of 4.0 GiB" in (look(host, "1GiB") or "")


def test_the_first_version_of_cgroups_counts_too(host: Path) -> None:
    """Its files have other names."""
    (host / "proc" / "self" / "cgroup").write_text("5:cpu,cpuacct:/x\n4:memory:/mine\n1:name=systemd:/x\n")
    group(host / "cgroups" / "memory" / "mine", str(4 * GIB), 3 * GIB, 0, version=1)
    assert look(host, "1GiB") is None
    assert "1.0 GiB of its cgroup's memory limit of 4.0 GiB" in (look(host, "2GiB") or "")
