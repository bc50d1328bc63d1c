"""The engine's settings, read from the environment under the names that Horovod's users know."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from paceline.collectives.errors import ArgumentError
from paceline.system import processes

#: How long is gathered where ranks have cores to spare, and where their own computing takes them all: there each look, and
#: each meeting of the ranks, stops that. On two cores two ranks' step of a transformer of 4 million parameters was 4 to 12 %
#: faster with 20 ms than with 1; what is left over is done as soon as somebody waits for it.
_SPARE_CYCLE_S, _BUSY_CYCLE_S = 0.001, 0.02


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Settings of how the engine fuses, caches, waits and complains.

    fusion_bytes: small tensors of a type are reduced together in buffers of up to this size; 0: each on its own.
        No more than 1 MiB is used at a time: larger buffers leave the processor's cache, and are slower.
    cycle_s: how long the engine gathers what is submitted, as long as nobody waits for it. None: 1 ms where the ranks of a
        machine have a core to spare each, beside OMP_NUM_THREADS of them, or a GPU is shown to them; else 20 ms.
    looks: so often whoever waits looks for news before it lets other processes have the core between two looks. 1 where
        `chosen` finds fewer cores than ranks.
    cache_capacity: how many names are agreed upon by number alone; 0: none.
    stall_warning_s: rank 0 names a tensor that some ranks have not submitted after this time; 0: never.
    stall_shutdown_s: pending operations fail after this time; 0: never.
    """

    fusion_bytes: int = 128 << 20
    cycle_s: float | None = None
    looks: int = 20
    cache_capacity: int = 1024
    stall_warning_s: float = 60.0
    stall_shutdown_s: float = 0.0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> EngineSettings:
        """The settings that HOROVOD_* variables make.

        Raises:
            ArgumentError: a variable holds no number, or a negative one.
        """
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
        """These, as they suit a machine with so many ranks: with a `cycle_s`."""
        cores, cycle_s, threads = processes.core_count(), self.cycle_s, environ.get("OMP_NUM_THREADS", "")
        if cycle_s is None:
            used = local_ranks * (int(threads) if threads.isdecimal() else 1)
            is_spare = bool(environ.get("CUDA_VISIBLE_DEVICES")) or cores >= used + local_ranks
            cycle_s = _SPARE_CYCLE_S if is_spare else _BUSY_CYCLE_S
        return replace(self, cycle_s=cycle_s, looks=self.looks if cores >= local_ranks else 1)

    @property
    def gathering_s(self) -> float:
        """The `cycle_s` of settings for which it was `chosen`."""
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
