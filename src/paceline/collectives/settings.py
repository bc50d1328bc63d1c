"""The engine's settings, read from the environment under the names that Horovod's users know."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.collectives.errors import ArgumentError


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the engine fuses, caches, waits and complains.

    fusion_bytes: small tensors of a type are reduced together in buffers of up to this size; 0: each on its own.
        No more than 1 MiB is used at a time: larger buffers leave the processor's cache, and are slower.
    cycle_s: how long the engine gathers what is submitted, as long as nobody waits for it; also the pause between two
        looks for news of a caller that has waited for a while.
    cache_capacity: how many names are agreed upon by number alone; 0: none.
    stall_warning_s: rank 0 names a tensor that some ranks have not submitted after this time; 0: never.
    stall_shutdown_s: pending operations fail after this time; 0: never.
    """

    fusion_bytes: int = 128 << 20
    cycle_s: float = 0.001
    cache_capacity: int = 1024
    stall_warning_s: float = 60.0
    stall_shutdown_s: float = 0.0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """The settings that HOROVOD_* variables make.

        Raises:
            ArgumentError: a variable holds no number, or a negative one.
        """
        warning_s = _number(environ, "HOROVOD_STALL_CHECK_TIME_SECONDS", cls.stall_warning_s)
        shutdown_s = _number(environ, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", cls.stall_shutdown_s)
        checked = environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") in ("", "0")
        return cls(
            fusion_bytes=int(_number(environ, "HOROVOD_FUSION_THRESHOLD", cls.fusion_bytes)),
            cycle_s=_number(environ, "HOROVOD_CYCLE_TIME", cls.cycle_s * 1e3) / 1e3,
            cache_capacity=int(_number(environ, "HOROVOD_CACHE_CAPACITY", cls.cache_capacity)),
            stall_warning_s=warning_s if checked else 0.0,
            stall_shutdown_s=shutdown_s if checked else 0.0,
        )


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
