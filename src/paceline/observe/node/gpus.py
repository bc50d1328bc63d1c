"""The GPUs of this machine, without any framework: what the driver's own tool lists.

Hosts without Paceline run this text, in front of `paceline.targets.host_leases`, with their own Python, 3.6 or later: standard
library only, annotations in quotes.
"""

import os

#: Says by hand which devices there are ("0,1", or "" for none), where `nvidia-smi` does not tell.
GPUS_VARIABLE = "PACELINE_GPUS"


def devices() -> "tuple[str, ...]":
    """The devices that runs may use, as `CUDA_VISIBLE_DEVICES` spells them.

    Those of `PACELINE_GPUS`, else those of the shell's `CUDA_VISIBLE_DEVICES`, else all that nvidia-smi lists; none
    where there is no driver.
    """
    for name in (GPUS_VARIABLE, "CUDA_VISIBLE_DEVICES"):
        if name in os.environ:
            return tuple(part.strip() for part in os.environ[name].split(",") if part.strip() not in ("", "-1"))
    # Loaded here, where they are needed at last: most hosts are asked for no GPUs.
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
