"""The engine's settings from the environment, under Horovod's names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from paceline.collectives.errors import ArgumentError
from paceline.system import processes

#: Seconds for which the engine collects submissions before a negotiation, on machines with and without spare cores. Without spare
#: cores, each poll interrupts the computation: on two cores, two ranks trained a transformer of 4 million parameters 4 to 12 %
#: faster with 20 ms than with 1 ms. A caller that waits for a result ends the collection at once.
_SPARE_CYCLE_S, _BUSY_CYCLE_S = 0.001, 0.02


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Settings of the engine's fusion, cache, waits and stall reports.

    Attributes:
        fusion_bytes: Small tensors of one type are reduced together in buffers of up to this size. 0 disables the
            buffers. At most 1 MiB is used at a time: larger buffers do not fit the processor's cache, and are slower.
        cycle_s: Seconds for which the engine collects submissions while no caller waits. None means 0.001 if a GPU is
            visible, or if each rank has a core in addition to OMP_NUM_THREADS cores. Otherwise None means 0.02.
        looks: Number of polls that a waiting caller makes without a pause. After them, the caller yields the core after
            each poll. The method `chosen` sets 1 if there are fewer cores than ranks.
        cache_capacity: How many operation names get a number, which replaces the request in messages. 0: no numbers.
        stall_warning_s: Seconds until rank 0 reports a tensor that some ranks have not submitted. 0 disables reports.
        stall_shutdown_s: Seconds until pending operations fail. 0 disables the limit.
    """

    fusion_bytes: int = 128 << 20
    cycle_s: float | None = None
    looks: int = 20
    cache_capacity: int = 1024
    stall_warning_s: float = 60.0
    stall_shutdown_s: float = 0.0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> EngineSettings:
        """Read the settings from HOROVOD_* variables."""
        warning_s = _number(environ, "HOROVOD_STALL_CHECK_TIME_SECONDS", cls.stall_warning_s)
        shutdown_s = _number(environ, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", cls.stall_shutdown_s)
        checked = environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") in ("", "0")
        return cls(
            fusion_bytes=int(_number(environ, "HOROVOD_FUSION_THRESHOLD", cls.fusion_bytes)),
            cycle_s=_number(environ, "HOROVOD_CYCLE_TIME", 1.0) / 1e3 if environ.get("HOROVOD_CYCLE_TIME") else None,
            cache_capacity=int(_number(environ, "HOROVOD_CACHE_CAPACITY", cls.cache_capacity)),
            stall_warning_s=warning_s if checked else 0.0,
            stall_shutdown_s=shutdown_s if checked else 0.0,
        )

    def chosen(self, local_ranks: int, environ: Mapping[str, str] = os.environ) -> EngineSettings:
        """Return these settings, with `cycle_s` and `looks` chosen for this machine."""
        cores, cycle_s, threads = processes.core_count(), self.cycle_s, environ.get("OMP_NUM_THREADS", "")
        if cycle_s is None:
            used = local_ranks * (int(threads) if threads.isdecimal() else 1)
            is_spare = bool(environ.get("CUDA_VISIBLE_DEVICES")) or cores >= used + local_ranks
            cycle_s = _SPARE_CYCLE_S if is_spare else _BUSY_CYCLE_S
        return replace(self, cycle_s=cycle_s, looks=self.looks if cores >= local_ranks else 1)

    @property
    def gathering_s(self) -> float:
        """Seconds for which the engine collects submissions, to reduce small arrays together."""
        assert self.cycle_s is not None, "chosen() gives one"
        return self.cycle_s


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ArgumentError(f"{name}={text!r} is not a number from 0 on. Unset it, or give one (default: {default:g}).")
    return value
