"""A program that runs checks of horovod.tensorflow on every rank of a world, one after the other.

    mpirun -n 2 python world.py <folder for the reports> <module>.<check>...

A check is a function `check_*(hvd)`.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[4]
CHECKS = Path(__file__).parent / "checks"


def main(folder: str, *names: str) -> None:
    sys.path.insert(0, str(ROOT))
    # TensorFlow leaves a file in TMPDIR for each function of a graph. mpirun needs short paths, so set it only here.
    os.environ["TMPDIR"] = folder
    from paceline.compat import install
    from tests.ranks import run_checks

    install("horovod")
    import horovod.tensorflow as hvd  # type: ignore[import-not-found]
    import tensorflow as tf

    hvd.init(process_sets="dynamic")
    asked = [name.split(".") for name in names]
    modules = {name: importlib.import_module(f"tests.compat.horovod.tensorflow.checks.{name}") for name, _ in asked}
    # Set this filter after the import of TensorFlow and Keras, because they cause warnings of their own.
    warnings.simplefilter("error")

    def run(check: Callable[[object], object]) -> None:
        tf.random.set_seed(1)
        check(hvd)
        hvd.allreduce(tf.constant(0), name="end_of_check")

    run_checks(
        Path(folder),
        hvd.rank(),
        ((f"{name}.{check}", partial(run, getattr(modules[name], check))) for name, check in asked),
    )
    hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
