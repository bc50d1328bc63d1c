"""List the GPUs of this machine by nvidia-smi, the driver's tool.

Machines on which Paceline is not installed run a copy of this file with their own Python (3.6 or later). So the file
imports only the standard library, and its annotations are strings.
"""

import os

#: The environment variable that lists the devices ("0,1", or "" for none), so that `nvidia-smi` is not run.
GPUS_VARIABLE = "PACELINE_GPUS"


def devices() -> "tuple[str, ...]":
    """Return the GPUs that runs may use, such as ("0", "1").

    Read the variable `PACELINE_GPUS`, or else `CUDA_VISIBLE_DEVICES`, or else the output of nvidia-smi. Return ()
    without a GPU driver. If a GPU is divided into MIG slices, return the slices in its place.
    """
    for name in (GPUS_VARIABLE, "CUDA_VISIBLE_DEVICES"):
        if name in os.environ:
            return tuple(part.strip() for part in os.environ[name].split(",") if part.strip() not in ("", "-1"))
    rows = [line.partition(",") for line in _lines("--query-gpu=index,mig.mode.current", "--format=csv,noheader")]
    found = [(index.strip(), mode.strip()) for index, _, mode in rows if index.strip().isdecimal()]
    if not any(mode == "Enabled" for _, mode in found):
        return tuple(index for index, _ in found)
    # nvidia-smi prints "GPU 0: NVIDIA A100 (UUID: GPU-5a...)" and "  MIG 3g.20gb     Device  0: (UUID: MIG-7c...)".
    modes, names, gpu = dict(found), [], ""  # type: dict[str, str], list[str], str
    for line in _lines("-L"):
        words = line.split()
        if words[0] == "GPU":
            gpu = words[1].rstrip(":")
            names += [gpu] if modes.get(gpu, "Enabled") != "Enabled" else []
        elif words[0] == "MIG" and modes.get(gpu) == "Enabled":
            names.append(words[-1].rstrip(")"))
    return tuple(names)


def _lines(*words: str) -> "list[str]":
    # Import these modules only here, because most hosts need not list their GPUs.
    import shutil
    import subprocess

    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        done = subprocess.run(
            [tool, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = done.stdout.decode(errors="replace").splitlines() if done.returncode == 0 else []
    return [line.strip() for line in lines if line.strip()]
