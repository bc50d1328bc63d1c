"""Measure the resource use of this machine and of a run's workers.

A sample reads one file each for processors, disks and networks, and three files for each process of a worker. Samples
seldom search for a worker's child processes, because the search reads all processes of the machine.

Values of a rank:

    cpu_percent                      since the last sample; 100 is one core
    memory_gib                       memory; pages shared with forked children count once
    read_mib_s, write_mib_s          disks and file servers, without the page cache
    net_in_mib_s, net_out_mib_s      TCP, also to ranks on this machine
    gpu_percent, gpu_memory_gib      use of the rank's busiest GPU; the rank's memory on all GPUs together
    steps_s, steps                   steps per second; steps since the worker's start (`paceline.system.step_clock`)
    data_percent, wait_percent       percentages of the time that the rank waited for data and for other ranks
    data_s, wait_s                   seconds of waiting for data and for other ranks, since the worker's start
    eval_percent, save_percent       percentages of the time in evaluations and checkpoints; eval_s, save_s: seconds
    pid, processes, age_s            the worker's process, the number of processes, seconds since the worker started
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence

from paceline.observe.node import process_state
from paceline.observe.node.counters import TcpCounts
from paceline.observe.node.messages import WatchedWorkers
from paceline.observe.node.nvml import Gpu, Nvml
from paceline.system import processes, step_clock
from paceline.system.memory import memory

_GIB, _MIB = 1 << 30, 1 << 20
_SECTOR = 512
_RAPL = "/sys/class/powercap"
#: Name prefixes of block devices to skip: virtual devices, and devices on top of disks, because the disks are counted.
_NO_DISKS = ("loop", "ram", "zram", "dm-", "md", "sr", "fd")

_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
#: Maximum share of a core for searching workers' child processes, and minimum seconds between two searches.
_SHARE, _FAMILY_S = 0.001, 5.0
#: If a worker's children have less than this share of its memory, count it in full: measuring its shared part is slow.
_SHARED = 0.2


class LoadMeter:
    """A meter of the machine's resource use between two samples.

    devices: The GPUs to measure; None for all.
    """

    def __init__(self, devices: tuple[str, ...] | None = None) -> None:
        self._devices = (
            None if devices is None or not all(one.isdecimal() for one in devices) else set(map(int, devices))
        )
        self._before = _ticks()
        self._counts: dict[str, tuple[float, int]] = {}
        self._nvml: Nvml | None = None
        self._has_looked = False
        self._workers: WorkerLoads | None = None

    def look(self, workers: WatchedWorkers | None = None) -> dict[str, object]:
        """Return the machine's resource use since the last call. Leave unknown values out.

        cpu_percent, cpu_watts: Use of all cores together, and the power of all processors.
        memory_gib, memory_total_gib: Used and installed memory.
        disk_read_mib_s, disk_write_mib_s: All disks together.
        net_in_mib_s, net_out_mib_s: All networks without loopback.
        gpu0_percent, gpu0_memory_gib, gpu0_memory_total_gib: GPU 0; further GPUs likewise.
        ranks: Rank -> values such as "cpu_percent" and "memory_gib", for the ranks of `workers`.
        """
        found: dict[str, object] = {}
        now = _ticks()
        if now is not None and self._before is not None and now[1] > self._before[1]:
            busy, all_of = now[0] - self._before[0], now[1] - self._before[1]
            found["cpu_percent"] = round(100 * busy / all_of, 1)
        self._before = now
        room = memory()
        found["memory_gib"] = round((room.total - room.available) / _GIB, 3)
        found["memory_total_gib"] = round(room.total / _GIB, 3)
        for name, count in {**_disks(), **_networks()}.items():
            if (rate := self._rate(name, count)) is not None:
                found[f"{name}_mib_s"] = round(rate / _MIB, 3)
        gpus = self._gpus()
        for gpu in gpus:
            if self._devices is None or gpu.number in self._devices:
                found |= _of_gpu(gpu)
        rates = [self._rate(name, microjoules) for name, microjoules in _packages().items()]
        if watts := [rate / 1e6 for rate in rates if rate is not None]:
            found["cpu_watts"] = round(sum(watts), 1)
        if workers is not None:
            if self._workers is None:
                self._workers = WorkerLoads()
            found["ranks"] = self._workers.look(workers, gpus)
        return found

    def _rate(self, name: str, count: int) -> float | None:
        now = time.monotonic()
        before_s, before = self._counts.get(name, (now, count))
        self._counts[name] = (now, count)
        # A count below the earlier count means that the device was reset, so its rate is unknown.
        return (count - before) / (now - before_s) if now > before_s and count >= before else None

    def _gpus(self) -> list[Gpu]:
        if not self._has_looked:
            self._has_looked = True
            self._nvml = Nvml.begin()
        return self._nvml.gpus() if self._nvml is not None else []


def _of_gpu(gpu: Gpu) -> dict[str, float]:
    found = {}
    if gpu.percent is not None:
        found[f"gpu{gpu.number}_percent"] = gpu.percent
    if gpu.watts is not None:
        found[f"gpu{gpu.number}_watts"] = gpu.watts
    if gpu.memory is not None and gpu.total is not None:
        found[f"gpu{gpu.number}_memory_gib"] = round(gpu.memory / _GIB, 3)
        found[f"gpu{gpu.number}_memory_total_gib"] = round(gpu.total / _GIB, 3)
    return found


def _packages() -> dict[str, int]:
    """Return {processor package: energy counter in microjoules}, {} without permission to read."""
    found = {}
    with contextlib.suppress(OSError, ValueError):
        for name in os.listdir(_RAPL):
            # Skip a part of a CPU package (intel-rapl:0:1): the counter of the package (intel-rapl:0) includes it.
            if name.startswith("intel-rapl:") and name.count(":") == 1:
                found[name] = _number(f"{_RAPL}/{name}/energy_uj")
    return found


def _ticks() -> tuple[int, int] | None:
    """Return the processors' (busy, all) clock ticks since boot (proc_stat(5)), or None."""
    with contextlib.suppress(OSError, ValueError), open("/proc/stat", encoding="ascii") as file:
        numbers = [int(word) for word in file.readline().split()[1:9]]
        # Leave out the times of guests (virtual machines), which the user time includes. Subtract idle and iowait.
        return sum(numbers) - numbers[3] - numbers[4], sum(numbers)
    return None


def _disks() -> dict[str, int]:
    read = written = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/diskstats", encoding="ascii") as file:
            lines = [line.split() for line in file]
        whole = {
            words[2]
            for words in lines
            if not words[2].startswith(_NO_DISKS) and os.path.isdir(f"/sys/block/{words[2]}")
        }
        for words in lines:
            if words[2] in whole:
                read, written = read + int(words[5]) * _SECTOR, written + int(words[9]) * _SECTOR
        if whole:
            return {"disk_read": read, "disk_write": written}
    return {}


def _networks() -> dict[str, int]:
    received = sent = 0
    found = False
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/net/dev", encoding="ascii") as file:
        for line in file.readlines()[2:]:
            name, _, counts = line.partition(":")
            # Skip bridges: their traffic stays on the machine, or also passes a real interface, which counts it.
            if name.strip() == "lo" or name.strip().startswith(("veth", "br-", "docker", "virbr", "cni")):
                continue
            words = counts.split()
            received, sent, found = received + int(words[0]), sent + int(words[8]), True
    for folder in _ports():
        with contextlib.suppress(OSError, ValueError):
            # InfiniBand counts words of four bytes.
            received += 4 * _number(f"{folder}/port_rcv_data")
            sent += 4 * _number(f"{folder}/port_xmit_data")
            found = True
    return {"net_in": received, "net_out": sent} if found else {}


def _ports() -> list[str]:
    top = "/sys/class/infiniband"
    try:
        return [
            f"{top}/{device}/ports/{port}/counters"
            for device in os.listdir(top)
            for port in os.listdir(f"{top}/{device}/ports")
        ]
    except OSError:
        return []


def _number(path: str) -> int:
    with open(path, encoding="ascii") as file:
        return int(file.read())


class WorkerLoads:
    """A meter of the workers' resource use between two samples."""

    def __init__(self) -> None:
        self._below: dict[int, list[int]] = {}
        self._next_family_s = 0.0
        self._next_shared_s = 0.0
        #: pid -> the process's proportional share (PSS) of its resident memory, as a fraction
        self._parts: dict[int, float] = {}
        #: By rank: time of the rank's last sample; and (`_clocks`) time and counts of the rank's step clock.
        self._looked_s: dict[str, float] = {}
        self._clocks: dict[str, tuple[float, dict[str, float]]] = {}
        self._cpu: dict[int, float] = {}
        self._io: dict[int, tuple[int, int]] = {}
        self._first_s: dict[str, float] = {}
        self._found: dict[str, int] = {}
        self._tcp = TcpCounts()

    def look(self, workers: WatchedWorkers, gpus: Sequence[Gpu]) -> dict[str, dict[str, float]]:
        """Return {rank: its values since the last call}, such as {"cpu_percent": 87.5}."""
        ranks = {str(rank): int(pid) for rank, pid in workers["ranks"].items()}
        now = time.monotonic()
        if missing := [rank for rank, pid in ranks.items() if not pid]:
            ranks |= self._by_environment(str(workers.get("run_id", "")), missing, now)
        self._look_at_family([pid for pid in ranks.values() if pid], now)
        found: dict[str, dict[str, float]] = {}
        living: dict[str, list[int]] = {}
        for rank, pid in ranks.items():
            pids = [one for one in (pid, *self._below.get(pid, ())) if one]
            told = self._of_processes(rank, pids, now) if pids else None
            clock = step_clock.read(os.path.join(str(workers["folder"]), f"steps_{rank}"))
            if told is None and clock is None:
                continue
            found[rank] = told or {}
            living[rank] = pids
            if clock is not None:
                found[rank] |= self._of_clock(rank, clock, now)
            found[rank] |= _on_gpus(pids, gpus)
        for rank, (received, sent) in self._tcp.look(living).items():
            found[rank] |= {"net_in_mib_s": round(received / _MIB, 3), "net_out_mib_s": round(sent / _MIB, 3)}
        return found

    def _of_processes(self, rank: str, pids: Sequence[int], now: float) -> dict[str, float] | None:
        cpu_s = read = written = 0.0
        passed = now - self._looked_s.get(rank, now)
        held: dict[int, int] = {}
        for pid in pids:
            seen = _process(pid)
            if seen is None:
                continue
            total_s, resident, age_s = seen
            held[pid] = resident
            counts = _disk_counts(pid)
            # Of a new process's CPU time and I/O, count only the part since the last sample, estimated by this share.
            share = min(1.0, passed / max(age_s, 0.01))
            cpu_s += max(0.0, total_s - self._cpu[pid] if pid in self._cpu else share * total_s)
            known = self._io.get(pid, (counts[0] * (1 - share), counts[1] * (1 - share)))
            self._cpu[pid], self._io[pid] = total_s, counts
            read, written = read + max(0.0, counts[0] - known[0]), written + max(0.0, counts[1] - known[1])
        if pids[0] not in held:
            return None
        self._looked_s[rank] = now
        first_s = self._first_s.setdefault(rank, now)
        found = {
            "pid": float(pids[0]),
            "processes": float(len(held)),
            "age_s": round(now - first_s, 1),
            "memory_gib": round(self._memory(held, now) / _GIB, 3),
        }
        if passed > 0:
            found |= {
                "cpu_percent": round(100 * cpu_s / passed, 1),
                "read_mib_s": round(read / passed / _MIB, 3),
                "write_mib_s": round(written / passed / _MIB, 3),
            }
        return found

    def _memory(self, held: Mapping[int, int], now: float) -> float:
        """Return the memory of a worker and its children. Count shared pages once.

        held: Pid -> resident bytes, the worker first. Exact sizes are slow to read, so they are read only at intervals.
        """
        worker, *below = held
        if sum(held[pid] for pid in below) <= _SHARED * held[worker]:
            return float(sum(held.values()))
        if now >= self._next_shared_s:
            began = time.thread_time()
            for pid, resident in held.items():
                if resident and (exact := _proportional(pid)) is not None:
                    self._parts[pid] = min(1.0, exact / resident)
            self._next_shared_s = now + max(_FAMILY_S, (time.thread_time() - began) / _SHARE)
        return sum(resident * self._parts.get(pid, 1.0) for pid, resident in held.items())

    def _of_clock(self, rank: str, clock: step_clock.Counts, now: float) -> dict[str, float]:
        times = {"data_s": clock.data_s, "wait_s": clock.wait_s, "eval_s": clock.eval_s, "save_s": clock.save_s}
        counts = {"steps": float(clock.steps), **times}
        found = {name: round(value, 3) for name, value in counts.items()}
        before_s, before = self._clocks.get(rank, (now, counts))
        self._clocks[rank] = (now, counts)
        if (passed := now - before_s) > 0 and counts["steps"] >= before["steps"]:
            found["steps_s"] = round((counts["steps"] - before["steps"]) / passed, 3)
            for name in ("data", "wait", "eval", "save"):
                part = (counts[f"{name}_s"] - before[f"{name}_s"]) / passed
                found[f"{name}_percent"] = round(100 * min(max(part, 0.0), 1.0), 1)
        return found

    def _look_at_family(self, pids: Sequence[int], now: float) -> None:
        if now < self._next_family_s and all(pid in self._below for pid in pids):
            return
        began = time.thread_time()
        self._below = below(pids)
        self._next_family_s = now + max(_FAMILY_S, (time.thread_time() - began) / _SHARE)
        kept = {pid for one, under in self._below.items() for pid in (one, *under)}
        for table in (self._cpu, self._io, self._parts):
            for pid in [pid for pid in table if pid not in kept]:
                del table[pid]

    def _by_environment(self, run_id: str, ranks: Sequence[str], now: float) -> dict[str, int]:
        self._found = {rank: pid for rank, pid in self._found.items() if os.path.exists(f"/proc/{pid}")}
        if now >= self._next_family_s and any(rank not in self._found for rank in ranks):
            for pid in sorted(processes.with_variable("PACELINE_RUN_ID", run_id)):
                if (rank := processes.environment_of(pid).get("PACELINE_RANK")) is not None:
                    self._found.setdefault(rank, pid)
        return {rank: self._found.get(rank, 0) for rank in ranks}


def below(pids: Sequence[int]) -> dict[int, list[int]]:
    """Return {pid: its descendants}, from one scan of the machine's processes."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal() and (words := processes.stat_of(int(name))):
            children.setdefault(int(words[1]), []).append(int(name))
    found: dict[int, list[int]] = {}
    for pid in pids:
        todo, under = [*children.get(pid, ())], []
        while todo:
            one = todo.pop()
            under.append(one)
            todo += children.get(one, ())
        found[pid] = under
    return found


def _process(pid: int) -> tuple[float, int, float] | None:
    """Return (CPU seconds, resident bytes, age in seconds) of a live process, or None."""
    words = processes.stat_of(pid)
    if words is None or words[0] in "ZX":
        return None
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(words[19]) / _TICKS
    return (int(words[11]) + int(words[12])) / _TICKS, int(words[21]) * _PAGE, age_s


def _disk_counts(pid: int) -> tuple[int, int]:
    found = process_state.table(f"/proc/{pid}/io")
    return int(found.get("read_bytes", 0)), int(found.get("write_bytes", 0))


def _proportional(pid: int) -> int | None:
    found = process_state.table(f"/proc/{pid}/smaps_rollup").get("Pss")  # a text such as "1234 kB"
    return int(found.split()[0]) << 10 if found else None


def _on_gpus(pids: Sequence[int], gpus: Sequence[Gpu]) -> dict[str, float]:
    own = set(pids)
    held = [
        (gpu, sum(used for pid, used in gpu.processes.items() if pid in own))
        for gpu in gpus
        if own & gpu.processes.keys()
    ]
    if not held:
        return {}
    return {
        "gpu_percent": max((gpu.percent or 0.0) for gpu, _ in held),
        "gpu_memory_gib": round(sum(used for _, used in held) / _GIB, 3),
    }
