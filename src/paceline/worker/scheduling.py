"""Set a worker's Linux scheduling policy to SCHED_BATCH, so that waking threads don't interrupt the computation.

Under the default policy, a thread that sends gradients preempts the computing thread at each wakeup. The computing thread then
moves to another core with cold caches. Under SCHED_BATCH (sched(7)) the sending thread waits until the computing thread
pauses or its time slice ends. The worker's share of CPU time stays the same. Child processes inherit the policy.
"""

from __future__ import annotations

import os
import sys

# `typing` is slow to load, and a worker loads this module before its script, so don't import it
TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Variable with the workers' scheduling policy: "batch" (default), or "normal" to keep the inherited policy.
VARIABLE = "PACELINE_SCHEDULING"
_VALUES = ("batch", "normal")
#: Device files that exist if the driver of an NVIDIA or AMD GPU is loaded.
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd")


def begin(environ: Mapping[str, str] = os.environ) -> None:
    """Set the scheduling policy SCHED_BATCH for this thread and its later threads.

    Do nothing outside Linux, if the user has set a policy (`chrt --idle 0 paceline run ...`), or if `VARIABLE` is
    "normal". Also do nothing if the worker may use a GPU, because its threads must then run as soon as they wake up.
    """
    wanted = environ.get(VARIABLE) or "batch"
    if wanted not in _VALUES:
        print(f"paceline: {VARIABLE} is {wanted!r}; there are {' and '.join(_VALUES)}", file=sys.stderr)
    if wanted == "normal" or not hasattr(os, "SCHED_BATCH") or _may_use_gpu(environ):
        return
    try:
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError:  # a container may forbid changing the policy
        pass


def _may_use_gpu(environ: Mapping[str, str]) -> bool:
    shown = environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:
        return shown not in ("", "-1")
    return any(os.path.exists(device) for device in _GPU_DEVICES)
