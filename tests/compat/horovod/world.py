"""A program that runs checks on every rank of a world, one after the other, and writes down what came of each.

    mpirun -n 2 python world.py <folder for the reports> <module of checks>...

A check is a function `check_*(hvd)`. One that fails on any rank ends the world: the others can't be told to skip it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[3]


def checks_of(name: str) -> list[str]:
    """The names of the module's checks, in the order in which they stand."""
    text = (Path(__file__).parent / "checks" / f"{name}.py").read_text()
    return [line[4:].partition("(")[0] for line in text.splitlines() if line.startswith("def check_")]


def main(folder: str, *names: str) -> None:
    sys.path.insert(0, str(ROOT))
    warnings.simplefilter("error")
    import torch

    from paceline.compat import install

    install("horovod")
    import horovod.torch as hvd  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    hvd.init(process_sets="dynamic")
    report = Path(folder) / f"rank_{hvd.rank()}.jsonl"
    for name in names:
        module = importlib.import_module(f"tests.compat.horovod.checks.{name}")
        for check in checks_of(name):
            torch.manual_seed(1)
            failed = ""
            try:
                getattr(module, check)(hvd)
                hvd.barrier()
            except BaseException:
                failed = traceback.format_exc()
            with report.open("a") as file:
                file.write(json.dumps({"check": f"{name}.{check}", "failed": failed}) + "\n")
            if failed:
                # At once: the other ranks may be waiting for this one.
                os._exit(3)
    hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
