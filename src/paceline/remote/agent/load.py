"""How busy this machine and a run's workers on it are. Read from the kernel and from the GPUs' driver, by the standard library.

A look costs what it reads: one file for the machine's processors, one for each disk's and network's counts, three for each
process of a worker. Who is below whom is looked up seldom, for that takes all processes of the machine.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from typing import Any

from paceline.remote.agent.nvml import Gpu, Nvml
from paceline.system.memory import memory

_GIB, _MIB = 1 << 30, 1 << 20
_SECTOR = 512
#: Beginnings of names of block devices that are made of others, or of none.
_NO_DISKS = ("loop", "ram", "zram", "dm-", "md", "sr", "fd")


class LoadMeter:
    """Measures from one look to the next.

    devices: the GPUs that count, by their numbers; None for all.
    """

    def __init__(self, devices: tuple[str, ...] | None = None) -> None:
        self._devices = None if devices is None or not all(one.isdigit() for one in devices) else set(map(int, devices))
        self._before = _ticks()
        self._counts: dict[str, tuple[float, int]] = {}
        self._nvml: Nvml | None = None
        self._has_looked = False
        self._workers: Any = None

    def look(self, workers: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The machine's load; what it does not tell is left out.

        cpu_percent: of all cores, since the last look. memory_gib, memory_total_gib: in use, and what there is. disk_read_mib_s,
        disk_write_mib_s, net_in_mib_s, net_out_mib_s: of its disks, and of its networks without what stays on the machine.
        gpu0_percent, gpu0_memory_gib, gpu0_memory_total_gib: of each GPU. ranks: rank -> the worker's load (`worker_load`), of
        those that are asked for.

        workers: {"folder": the workers' watch folder, "ranks": rank -> pid, 0 where it is not known, "run_id"}.
        """
        found: dict[str, Any] = {}
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
        if workers is not None:
            if self._workers is None:
                # Here: an agent is to start quickly, and is asked for it later.
                from paceline.remote.agent.worker_load import WorkerLoads

                self._workers = WorkerLoads()
            found["ranks"] = self._workers.look(workers, gpus)
        return found

    def _rate(self, name: str, count: int) -> float | None:
        now = time.monotonic()
        before_s, before = self._counts.get(name, (now, count))
        self._counts[name] = (now, count)
        # A count may begin anew, with its device.
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
    if gpu.memory is not None and gpu.total is not None:
        found[f"gpu{gpu.number}_memory_gib"] = round(gpu.memory / _GIB, 3)
        found[f"gpu{gpu.number}_memory_total_gib"] = round(gpu.total / _GIB, 3)
    return found


def _ticks() -> tuple[int, int] | None:
    """(busy, all) of the processors since the machine's start; proc_stat(5)."""
    with contextlib.suppress(OSError, ValueError), open("/proc/stat", encoding="ascii") as file:
        numbers = [int(word) for word in file.readline().split()[1:9]]
        # idle and iowait; time of guests is in the user's already.
        return sum(numbers) - numbers[3] - numbers[4], sum(numbers)
    return None


def _disks() -> dict[str, int]:
    """Bytes that were read from the machine's disks and written to them."""
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
    """Bytes that came in and went out, over interfaces and InfiniBand, without the machine's talk with itself."""
    received = sent = 0
    found = False
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/net/dev", encoding="ascii") as file:
        for line in file.readlines()[2:]:
            name, _, counts = line.partition(":")
            # What goes through bridges and their ends is counted at the real interface, or stays here.
            if name.strip() == "lo" or name.strip().startswith(("veth", "br-", "docker", "virbr", "cni")):
                continue
            words = counts.split()
            received, sent, found = received + int(words[0]), sent + int(words[8]), True
    for folder in _ports():
        with contextlib.suppress(OSError, ValueError):
            # In words of four bytes.
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
