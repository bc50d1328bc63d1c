"""How busy this machine is: processors, memory, GPUs. Read from the kernel and from the driver's own library (NVML)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any


class LoadMeter:
    """Measures from one look to the next.

    devices: the GPUs that count, by their numbers; None for all.
    """

    def __init__(self, devices: tuple[str, ...] | None = None) -> None:
        self._devices = None if devices is None or not all(one.isdigit() for one in devices) else set(map(int, devices))
        self._before = _ticks()
        self._nvml: Any = None
        self._has_looked = False

    def look(self) -> dict[str, float]:
        """cpu_percent: of all cores, since the last look. memory_gib: in use. gpu0_percent, gpu0_memory_gib: of each GPU. What
        this machine does not tell is left out."""
        found: dict[str, float] = {}
        now = _ticks()
        if now is not None and self._before is not None and now[1] > self._before[1]:
            busy, all_of = now[0] - self._before[0], now[1] - self._before[1]
            found["cpu_percent"] = round(100 * busy / all_of, 1)
        self._before = now
        if (memory := memory_used()) is not None:
            found["memory_gib"] = round(memory / (1 << 30), 3)
        return found | self._gpus()

    def _gpus(self) -> dict[str, float]:
        if not self._has_looked:
            self._has_looked = True
            self._nvml = _nvml()
        if self._nvml is None:
            return {}
        import ctypes

        found: dict[str, float] = {}
        count = ctypes.c_uint()
        if self._nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return {}
        for number in range(count.value):
            if self._devices is not None and number not in self._devices:
                continue
            device = ctypes.c_void_p()
            if self._nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device)) != 0:
                continue
            # nvmlUtilization_t: percent of the time in which a kernel ran, and in which memory was read or written.
            busy = (ctypes.c_uint * 2)()
            if self._nvml.nvmlDeviceGetUtilizationRates(device, ctypes.byref(busy)) == 0:
                found[f"gpu{number}_percent"] = float(busy[0])
            # nvmlMemory_t: total, free, used.
            memory = (ctypes.c_ulonglong * 3)()
            if self._nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0:
                found[f"gpu{number}_memory_gib"] = round(memory[2] / (1 << 30), 3)
        return found


def memory_used() -> int | None:
    """Bytes of the machine's memory that programs hold and that could not be had at once; None where nothing tells."""
    found: Mapping[str, int] = {}
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/meminfo", encoding="ascii") as file:
        found = {line.split(":")[0]: int(line.split()[1]) << 10 for line in file}
    total, available = found.get("MemTotal"), found.get("MemAvailable")
    return None if total is None or available is None else total - available


def _ticks() -> tuple[int, int] | None:
    """(busy, all) of the processors since the machine's start; proc_stat(5)."""
    with contextlib.suppress(OSError, ValueError), open("/proc/stat", encoding="ascii") as file:
        numbers = [int(word) for word in file.readline().split()[1:9]]
        # idle and iowait; time of guests is in the user's already.
        return sum(numbers) - numbers[3] - numbers[4], sum(numbers)
    return None


def _nvml() -> Any:
    """The driver's library, begun; None where there is no driver."""
    # Looked for by what the driver makes: to search for a library that is not there takes longer.
    if not os.path.exists("/dev/nvidiactl"):
        return None
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2() == 0:
            return library
    return None
