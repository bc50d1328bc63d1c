"""What the GPUs' driver tells, by its own library (NVML), which every driver brings; no package is needed."""

from __future__ import annotations

import contextlib
import os
from typing import Any, NamedTuple

_NVML_ERROR_INSUFFICIENT_SIZE = 7


class Gpu(NamedTuple):
    """One GPU. percent: of the time in which a kernel ran. memory, total: bytes. processes: pid -> bytes that it holds."""

    number: int
    percent: float | None
    memory: int | None
    total: int | None
    processes: dict[int, int]


class Nvml:
    """The driver's library, begun."""

    def __init__(self, library: Any) -> None:
        self._library = library

    @classmethod
    def begin(cls) -> Nvml | None:
        """None where there is no driver."""
        # Looked for by what the driver makes: to search for a library that is not there takes longer.
        if not os.path.exists("/dev/nvidiactl"):
            return None
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL("libnvidia-ml.so.1")
            if library.nvmlInit_v2() == 0:
                return cls(library)
        return None

    def gpus(self) -> list[Gpu]:
        """All of them, in the order of their numbers."""
        import ctypes

        count = ctypes.c_uint()
        if self._library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        found = []
        for number in range(count.value):
            device = ctypes.c_void_p()
            if self._library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device)) != 0:
                continue
            # nvmlUtilization_t: percent of the time in which a kernel ran, and in which memory was read or written.
            busy = (ctypes.c_uint * 2)()
            has_use = self._library.nvmlDeviceGetUtilizationRates(device, ctypes.byref(busy)) == 0
            # nvmlMemory_t: total, free, used.
            memory = (ctypes.c_ulonglong * 3)()
            has_memory = self._library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0
            found.append(
                Gpu(
                    number,
                    float(busy[0]) if has_use else None,
                    int(memory[2]) if has_memory else None,
                    int(memory[0]) if has_memory else None,
                    self._processes(device),
                )
            )
        return found

    def _processes(self, device: Any) -> dict[int, int]:
        import ctypes

        class Info(ctypes.Structure):
            """nvmlProcessInfo_t of the calls that end in _v3."""

            _fields_ = (
                ("pid", ctypes.c_uint),
                ("used", ctypes.c_ulonglong),
                ("gpu_instance", ctypes.c_uint),
                ("compute_instance", ctypes.c_uint),
            )

        ask = getattr(self._library, "nvmlDeviceGetComputeRunningProcesses_v3", None)
        if ask is None:
            return {}
        count = ctypes.c_uint(64)
        infos = (Info * 64)()
        code = ask(device, ctypes.byref(count), infos)
        if code == _NVML_ERROR_INSUFFICIENT_SIZE:
            infos = (Info * (count.value + 8))()
            count = ctypes.c_uint(len(infos))
            code = ask(device, ctypes.byref(count), infos)
        if code != 0:
            return {}
        # All ones where the driver does not tell (as under Windows's WDDM, or in some containers).
        return {one.pid: one.used if one.used != 2**64 - 1 else 0 for one in infos[: count.value]}
