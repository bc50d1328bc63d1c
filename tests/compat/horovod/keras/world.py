"""A program that runs checks of one Keras on every rank of a world, one after the other, and writes down what came of each.

    mpirun -n 2 python world.py <folder for the reports> <module to import as hvd> <module of checks>...

A check is a function `check_*(hvd, keras)`. One that fails on any rank ends the world: the others can't be told to skip it.
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


def main(folder: str, module_name: str, *names: str) -> None:
    sys.path.insert(0, str(ROOT))
    from paceline.compat import install
    from paceline.compat.horovod._keras import libraries
    from paceline.compat.horovod.common import objects

    install("horovod")
    hvd = importlib.import_module(module_name)
    is_tensorflows = ".tensorflow." in module_name
    keras = libraries.of_tensorflow() if is_tensorflows else libraries.standalone()
    if "tensorflow" in sys.modules:
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(2)
    warnings.simplefilter("error")
    # Keras's own, of a variable on torch with NumPy 2.
    warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
    hvd.init(process_sets="dynamic")
    os.chdir(folder)
    report = Path(folder) / f"rank_{hvd.rank()}.jsonl"
    for name in names:
        module = importlib.import_module(f"tests.compat.horovod.keras.checks.{name}")
        for check in checks_of(name):
            keras.utils.set_random_seed(1)
            failed = ""
            try:
                getattr(module, check)(hvd, keras)
                assert set(objects.allgather_object(check, "check")) == {check}
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
