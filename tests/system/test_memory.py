"""The memory that a program may still use, by the kernel's count and the control groups' limits."""

from __future__ import annotations

import pytest

from paceline.system import memory as module
from paceline.system.memory import Memory, groups, memory

GIB = 1 << 30
MEMINFO = f"MemTotal: {64 * GIB >> 10} kB\nMemFree: 1 kB\nMemAvailable: {40 * GIB >> 10} kB\n"


def machine(monkeypatch, files):
    monkeypatch.setattr(module, "_read", lambda path: files.get(path, ""))
    folders = {path.rpartition("/")[0] for path in files}
    monkeypatch.setattr(module.os.path, "isdir", lambda path: path in folders)


def test_memory_size_is_read_from_the_machine_if_the_cgroup_has_no_limit(monkeypatch):
    files = {"/proc/meminfo": MEMINFO, "/proc/self/cgroup": "0::/user\n", "/sys/fs/cgroup/user/memory.max": "max\n"}
    machine(monkeypatch, files)
    assert memory() == Memory(64 * GIB, 40 * GIB, "the machine's memory")


@pytest.mark.promise("training-worker-memory-refused-before")
@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        (
            "0::/job/step\n",
            {
                # The step has no limit, but the job above it has one.
                "/sys/fs/cgroup/job/step/memory.max": "max",
                "/sys/fs/cgroup/job/memory.max": str(8 * GIB),
                "/sys/fs/cgroup/job/memory.current": str(6 * GIB),
                "/sys/fs/cgroup/job/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            },
        ),
        (
            "7:memory,cpu:/job\n3:pids:/other\n",
            {
                "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(8 * GIB),
                "/sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(6 * GIB),
                "/sys/fs/cgroup/memory/job/memory.stat": f"total_inactive_file {GIB}\n",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63),
            },
        ),
        (
            # In a container, the path leads above the groups that the container sees.
            "0::/../../docker/abc\n",
            {
                "/sys/fs/cgroup/memory.max": str(8 * GIB),
                "/sys/fs/cgroup/memory.current": str(5 * GIB),
            },
        ),
    ],
    ids=["version 2", "version 1", "a container"],
)
def test_memory_limit_of_a_control_group_is_respected(monkeypatch, cgroup, files):
    machine(monkeypatch, {"/proc/meminfo": MEMINFO, "/proc/self/cgroup": cgroup, **files})
    assert memory() == Memory(8 * GIB, 3 * GIB, "the control group's limit")
    assert groups()


def test_memory_of_this_machine_is_positive():
    found = memory()
    assert 0 < found.available <= found.total
