"""Read counters of the GPU driver from NVML, NVIDIA's management library.

Machines on which Paceline is not installed run a copy of this file with their own Python (3.6 or later). So the file
imports only the standard library, and its annotations are strings.
"""

import contextlib
import os
from typing import NamedTuple

TYPE_CHECKING = False  # mypy treats this name as true; typing is slow to import
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

_NVML_ERROR_INSUFFICIENT_SIZE = 7


class Gpu(NamedTuple):
    """The state of one GPU.

    percent: Percentage of the time in which a kernel ran, or None if unknown.
    memory, total: Used and installed memory in bytes, or None if unknown.
    processes: Pid -> its GPU memory in bytes.
    """

    number: int
    percent: "float | None"
    memory: "int | None"
    total: "int | None"
    processes: "dict[int, int]"
    watts: "float | None" = None


class Nvml:
    """The initialized library NVML."""

    def __init__(self, library: "Any") -> None:
        self._library = library

    @classmethod
    def begin(cls) -> "Nvml | None":
        """Return NVML, or None if there is no NVIDIA driver."""
        # Check the driver's device first: searching for a missing library takes longer.
        if not os.path.exists("/dev/nvidiactl"):
            return None
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL("libnvidia-ml.so.1")
            if library.nvmlInit_v2() == 0:
                return cls(library)
        return None

    def gpus(self) -> "list[Gpu]":
        """Return all GPUs in order."""
        import ctypes

        found = []
        for number, device in self._devices():
            # nvmlUtilization_t has two percentages of the time: when a kernel ran, and when memory was read or written.
            busy = (ctypes.c_uint * 2)()
            has_use = self._library.nvmlDeviceGetUtilizationRates(device, ctypes.byref(busy)) == 0
            # nvmlMemory_t has the fields total, free and used.
            memory = (ctypes.c_ulonglong * 3)()
            has_memory = self._library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0
            milliwatts = ctypes.c_uint()
            has_power = self._library.nvmlDeviceGetPowerUsage(device, ctypes.byref(milliwatts)) == 0
            found.append(
                Gpu(
                    number,
                    float(busy[0]) if has_use else None,
                    int(memory[2]) if has_memory else None,
                    int(memory[0]) if has_memory else None,
                    self._processes(device),
                    milliwatts.value / 1000 if has_power else None,
                )
            )
        return found

    def processes_by_name(self) -> "dict[str, dict[int, int]]":
        """Return {number or UUID of a GPU or MIG slice: {pid: its GPU memory in bytes}}."""
        import ctypes

        found = {}  # type: dict[str, dict[int, int]]
        for number, device in self._devices():
            found[str(number)] = found[self._uuid(device)] = self._processes(device)
            most = ctypes.c_uint()
            if self._library.nvmlDeviceGetMaxMigDeviceCount(device, ctypes.byref(most)) != 0:
                continue
            for place in range(most.value):
                part = ctypes.c_void_p()
                if self._library.nvmlDeviceGetMigDeviceHandleByIndex(device, place, ctypes.byref(part)) == 0:
                    found[self._uuid(part)] = self._processes(part)
        return found

    def _devices(self) -> "Iterator[tuple[int, Any]]":
        import ctypes

        count = ctypes.c_uint()
        if self._library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return
        for number in range(count.value):
            device = ctypes.c_void_p()
            if self._library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device)) == 0:
                yield number, device

    def _uuid(self, device: "Any") -> str:
        import ctypes

        text = ctypes.create_string_buffer(96)
        self._library.nvmlDeviceGetUUID(device, text, len(text))
        return text.value.decode(errors="replace")

    def _processes(self, device: "Any") -> "dict[int, int]":
        import ctypes

        class Info(ctypes.Structure):
            _fields_ = (
                ("pid", ctypes.c_uint),
                ("used", ctypes.c_ulonglong),
                ("gpu_instance", ctypes.c_uint),
                ("compute_instance", ctypes.c_uint),
            )

        ask = getattr(self._library, "nvmlDeviceGetComputeRunningProcesses_v3", None)
        if ask is None:
            return {}
        count, infos = ctypes.c_uint(64), (Info * 64)()
        code = ask(device, ctypes.byref(count), infos)
        if code == _NVML_ERROR_INSUFFICIENT_SIZE:
            infos = (Info * (count.value + 8))()
            count = ctypes.c_uint(len(infos))
            code = ask(device, ctypes.byref(count), infos)
        if code != 0:
            return {}
        # All bits are set if the driver does not know the value (under Windows's WDDM, or in some containers).
        return {one.pid: one.used if one.used != 2**64 - 1 else 0 for one in infos[: count.value]}
