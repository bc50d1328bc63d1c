"""A program that runs checks of horovod.tensorflow on every rank of a world, one after the other.

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

ROOT = Path(__file__).parents[4]


def checks_of(name: str) -> list[str]:
    """The names of the module's checks, in the order in which they stand."""
    text = (Path(__file__).parent / "checks" / f"{name}.py").read_text()
    return [line[4:].partition("(")[0] for line in text.splitlines() if line.startswith("def check_")]


def main(folder: str, *names: str) -> None:
    sys.path.insert(0, str(ROOT))
    from paceline.compat import install

    install("horovod")
    import horovod.tensorflow as hvd  # type: ignore[import-not-found]
    import tensorflow as tf

    hvd.init(process_sets="dynamic")
    report = Path(folder) / f"rank_{hvd.rank()}.jsonl"
    modules = {name: importlib.import_module(f"tests.compat.horovod.tensorflow.checks.{name}") for name in names}
    # After TensorFlow and Keras are loaded: they have warnings of their own.
    warnings.simplefilter("error")
    for name, module in modules.items():
        for check in checks_of(name):
            tf.random.set_seed(1)
            failed = ""
            try:
                getattr(module, check)(hvd)
                hvd.allreduce(tf.constant(0), name="end_of_check")
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
