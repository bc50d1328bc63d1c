"""List the GPUs of this machine by the driver's own tool.

A host without Paceline receives this text, in front of `paceline.targets.leases`, for its own Python, 3.6 or later: only
the standard library, and annotations in quotes.
"""

import os

#: Overrides the list of devices ("0,1", or "" for none) where `nvidia-smi` is missing.
GPUS_VARIABLE = "PACELINE_GPUS"


def devices() -> "tuple[str, ...]":
    """Return the devices that runs may use, as `CUDA_VISIBLE_DEVICES` spells them.

    They come from `PACELINE_GPUS`, else from the shell's `CUDA_VISIBLE_DEVICES`, else from nvidia-smi; none without a driver.
    """
    for name in (GPUS_VARIABLE, "CUDA_VISIBLE_DEVICES"):
        if name in os.environ:
            return tuple(part.strip() for part in os.environ[name].split(",") if part.strip() not in ("", "-1"))
    # The import is late: most hosts are asked for no GPUs.
    import shutil
    import subprocess

    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    try:
        done = subprocess.run(
            [tool, "--query-gpu=index", "--format=csv,noheader"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    lines = [line.strip() for line in done.stdout.decode().splitlines()] if done.returncode == 0 else []
    return tuple(line for line in lines if line.isdigit())
