"""The memory cgroup of a process is found at any mount point, in both versions, and its counts are read."""

from __future__ import annotations

from pathlib import Path

from rallypoint.agent.failures.out_of_memory import MemoryGroup, memory_groups


class Host:
    """A host with the kernel's files in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "proc/self").mkdir(parents=True)

    def says(self, memberships: str, *mounts: str) -> None:
        """Write the cgroup files of this process in /proc."""
        (self.root / "proc/self/cgroup").write_text(memberships)
        (self.root / "proc/self/mountinfo").write_text("".join(f"{mount}\n" for mount in mounts))

    def group(self, path: str, *, kills: int, hits: int, limit: str) -> None:
        """Write a cgroup of version 2."""
        folder = self.root / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.events").write_text(f"low 0\nhigh 0\nmax 9\noom {hits}\noom_kill {kills}\n")
        (folder / "memory.max").write_text(f"{limit}\n")

    def old_group(self, path: str, *, kills: int, hits: int, limit: int) -> None:
        """Write a cgroup of version 1."""
        folder = self.root / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
        (folder / "memory.failcnt").write_text(f"{hits}\n")
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")


UNIFIED = "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
OLD = "31 25 0:27 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory"
OTHER = "32 25 0:28 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu"


def test_version_2_its_own_first_then_those_above(tmp_path: Path) -> None:
    """The root has no counts, and is left out."""
    host = Host(tmp_path)
    host.says("0::/job/step0\n", OTHER, UNIFIED)
    host.group("sys/fs/cgroup/job", kills=3, hits=2, limit="max")
    host.group("sys/fs/cgroup/job/step0", kills=2, hits=1, limit="1048576")
    assert memory_groups(tmp_path) == [
        MemoryGroup("/job/step0", 1 << 20, kills=2, hits=1),
        MemoryGroup("/job", None, kills=3, hits=2),
    ]


def test_version_1_wins_where_both_are_mounted_and_it_has_the_controller(tmp_path: Path) -> None:
    """Its largest limit means no limit."""
    host = Host(tmp_path)
    host.says("4:memory:/job\n1:cpu:/\n0::/\n", UNIFIED.replace("cgroup rw", "unified rw"), OTHER, OLD)
    host.old_group("sys/fs/cgroup/memory", kills=0, hits=0, limit=9223372036854771712)
    host.old_group("sys/fs/cgroup/memory/job", kills=1, hits=7, limit=4096)
    assert memory_groups(tmp_path) == [
        MemoryGroup("/job", 4096, kills=1, hits=7),
        MemoryGroup("/", None, kills=0, hits=0),
    ]


def test_in_a_container_the_path_begins_at_the_mount(tmp_path: Path) -> None:
    """This holds with a cgroup namespace of its own, and with the host's path."""
    host = Host(tmp_path)
    mount = UNIFIED.replace(" / /sys", " /docker/abc /sys")
    host.group("sys/fs/cgroup", kills=1, hits=1, limit="4096")
    host.group("sys/fs/else", kills=2, hits=2, limit="8192")
    for memberships in ("0::/docker/abc\n", "0::/\n", "0::/../else\n"):
        host.says(memberships, mount)
        assert memory_groups(tmp_path) == [MemoryGroup("/", 4096, kills=1, hits=1)]


def test_where_nothing_is_mounted_nothing_is_known(tmp_path: Path) -> None:
    """The same holds without /proc."""
    assert memory_groups(tmp_path) == []
    host = Host(tmp_path)
    host.says("0::/job\n", OTHER)
    assert memory_groups(tmp_path) == []
    host.says("", UNIFIED)
    assert memory_groups(tmp_path) == []


def test_this_host_is_read_without_an_error() -> None:
    """The test depends on no setting of this host."""
    assert all(group.kills >= 0 for group in memory_groups())
