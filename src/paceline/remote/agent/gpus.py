"""The GPUs of this machine, without any framework: what the driver's own tool lists."""

from __future__ import annotations

import os
import shutil
import subprocess

#: Says by hand which devices there are ("0,1", or "" for none), where `nvidia-smi` does not tell.
GPUS_VARIABLE = "PACELINE_GPUS"


def devices() -> tuple[str, ...]:
    """The devices that runs may use, as `CUDA_VISIBLE_DEVICES` spells them.

    Those of `PACELINE_GPUS`, else those of the shell's `CUDA_VISIBLE_DEVICES`, else all that nvidia-smi lists; none
    where there is no driver.
    """
    for name in (GPUS_VARIABLE, "CUDA_VISIBLE_DEVICES"):
        if name in os.environ:
            return tuple(part.strip() for part in os.environ[name].split(",") if part.strip() not in ("", "-1"))
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    try:
        done = subprocess.run(
            [tool, "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return (
        tuple(line.strip() for line in done.stdout.splitlines() if line.strip().isdigit())
        if done.returncode == 0
        else ()
    )
