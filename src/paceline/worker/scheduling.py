"""Lets Linux take this worker for what it is: a program that computes, which no thread that wakes up is to interrupt.

Under the kernel's usual policy a thread that sends gradients takes the processor from the one that computes each time that it
wakes up, and that one goes on elsewhere, with cold caches. Under SCHED_BATCH (sched(7)) it waits for a pause, or for the end of
a time slice, a few milliseconds. A worker's share of the processors stays the same. What it starts inherits the policy.
"""

from __future__ import annotations

import os
import sys

# Not typing's: a worker loads this before its script.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Mapping

#: "batch", the default, or "normal": the policy stays as it is.
VARIABLE = "PACELINE_SCHEDULING"
_VALUES = ("batch", "normal")
#: Of the drivers of NVIDIA and AMD.
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd")


def begin(environ: Mapping[str, str] = os.environ) -> None:
    """Take the policy from now on; threads that are there already keep theirs. environ: the worker's variables.

    Nothing changes off Linux, under any policy but the usual one (`chrt --idle 0 paceline run ...`), and where this worker
    may use a GPU: to keep that busy, its thread has to go on as soon as it wakes up.
    """
    wanted = environ.get(VARIABLE) or "batch"
    if wanted not in _VALUES:
        print(f"paceline: {VARIABLE} is {wanted!r}; there are {' and '.join(_VALUES)}", file=sys.stderr)
    if wanted == "normal" or not hasattr(os, "SCHED_BATCH") or _may_use_gpu(environ):
        return
    try:
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError:  # a container that forbids it: a run goes on without
        pass


def _may_use_gpu(environ: Mapping[str, str]) -> bool:
    shown = environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:
        return shown not in ("", "-1")
    return any(os.path.exists(device) for device in _GPU_DEVICES)
