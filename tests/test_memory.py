"""How much host memory is free: the system's and every cgroup's answer, read from faked trees."""

from __future__ import annotations

from pathlib import Path

from torch_offload.memory import available_host_bytes

MEMINFO = "MemTotal: 900 kB\nMemFree: 100 kB\nMemAvailable:    500 kB\n"
SYSTEM = 500 * 1024
V1 = "sys/fs/cgroup/memory"
V2 = "sys/fs/cgroup"


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def group_v1(root: Path, name: str, limit: int, used: int) -> None:
    write(root, f"{V1}/{name}/memory.limit_in_bytes", f"{limit}\n")
    write(root, f"{V1}/{name}/memory.usage_in_bytes", f"{used}\n")


def group_v2(root: Path, name: str, limit: int | str, used: int) -> None:
    write(root, f"{V2}/{name}/memory.max", f"{limit}\n")
    write(root, f"{V2}/{name}/memory.current", f"{used}\n")


def test_available_memory_here_is_a_number():
    assert (available_host_bytes() or 0) > 2**20


def test_it_is_unknown_where_nobody_says_it(tmp_path):
    assert available_host_bytes(tmp_path) is None
    write(tmp_path, "proc/self/cgroup", "\nnonsense\n0::/job\n")
    assert available_host_bytes(tmp_path) is None
    group_v2(tmp_path, "job", 100, 30)
    assert available_host_bytes(tmp_path) == 70


def test_the_tightest_of_nested_groups_counts(tmp_path):
    write(tmp_path, "proc/meminfo", MEMINFO)
    assert available_host_bytes(tmp_path) == SYSTEM
    write(tmp_path, "proc/self/cgroup", "0::/job/step\n")
    assert available_host_bytes(tmp_path) == SYSTEM
    group_v2(tmp_path, "job/step", "max", 10)
    assert available_host_bytes(tmp_path) == SYSTEM
    group_v2(tmp_path, "job", 300_000, 250_000)
    assert available_host_bytes(tmp_path) == 50_000
    group_v2(tmp_path, "", 300_000, 280_000)
    assert available_host_bytes(tmp_path) == 20_000
    group_v2(tmp_path, "job/step", 20_000, 19_000)
    assert available_host_bytes(tmp_path) == 1_000
    group_v2(tmp_path, "job/other", 10, 10)  # not ours
    assert available_host_bytes(tmp_path) == 1_000
    group_v2(tmp_path, "job", 300_000, 300_001)
    assert available_host_bytes(tmp_path) == 0


def test_file_cache_that_can_be_dropped_is_free(tmp_path):
    """Also what was read twice, which a checkpoint or a data set is; shared memory is not."""
    write(tmp_path, "proc/meminfo", MEMINFO)
    write(tmp_path, "proc/self/cgroup", "0::/job\n")
    group_v2(tmp_path, "job", 300_000, 290_000)
    stat = "anon 5\nfile 70000\nshmem 20000\ninactive_file 20000\nactive_file 30000\n"
    write(tmp_path, f"{V2}/job/memory.stat", stat)
    assert available_host_bytes(tmp_path) == 60_000


def test_version_1(tmp_path):
    write(tmp_path, "proc/meminfo", MEMINFO)
    write(tmp_path, "proc/self/cgroup", "5:cpu:/a\n4:memory,hugetlb:/a/b\n3:cpuset:/c\n")
    group_v1(tmp_path, "", 2**63 - 4096, 10**9)  # how version 1 says "max"
    assert available_host_bytes(tmp_path) == SYSTEM
    group_v1(tmp_path, "a", 1000, 400)
    assert available_host_bytes(tmp_path) == 600
    group_v1(tmp_path, "a/b", 500, 300)
    stat = "inactive_file 1\nactive_file 1\ntotal_inactive_file 20\ntotal_active_file 30\n"
    write(tmp_path, f"{V1}/a/b/memory.stat", stat)
    assert available_host_bytes(tmp_path) == 250
    group_v1(tmp_path, "c", 10, 10)  # another controller's group of that name
    assert available_host_bytes(tmp_path) == 250


def test_both_versions_at_once(tmp_path):
    """Hybrid systems mount version 2 for its tree alone; memory is counted by version 1."""
    write(tmp_path, "proc/meminfo", MEMINFO)
    lines = "4:memory:/user/a:b\n1:name=systemd:/user\n0::/user\n"
    write(tmp_path, "proc/self/cgroup", lines)
    write(tmp_path, f"{V2}/unified/user/cgroup.procs", "1\n")
    assert available_host_bytes(tmp_path) == SYSTEM
    group_v1(tmp_path, "user/a:b", 1000, 400)
    assert available_host_bytes(tmp_path) == 600


def test_a_container_sees_its_own_group_as_the_root(tmp_path):
    """The path may be one of the host's, which is not mounted inside."""
    write(tmp_path, "proc/meminfo", MEMINFO)
    for path in ("/", "/../../outside", "/system.slice/docker-0123.scope", "/kubepods/pod1/0123"):
        write(tmp_path, "proc/self/cgroup", f"0::{path}\n")
        group_v2(tmp_path, "", 1000, 400)
        assert available_host_bytes(tmp_path) == 600, path
        (tmp_path / V2 / "memory.max").unlink()
        write(tmp_path, "proc/self/cgroup", f"7:memory:{path}\n")
        group_v1(tmp_path, "", 800, 400)
        assert available_host_bytes(tmp_path) == 400, path


def test_groups_outside_of_the_mount_are_not_read(tmp_path):
    write(tmp_path, "proc/meminfo", MEMINFO)
    write(tmp_path, "sys/fs/memory.max", "10\n")
    write(tmp_path, "sys/fs/memory.current", "5\n")
    write(tmp_path, "proc/self/cgroup", "0::/job\n")
    group_v2(tmp_path, "", "max", 5)
    assert available_host_bytes(tmp_path) == SYSTEM
