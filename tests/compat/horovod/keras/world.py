"""A program that runs checks of one Keras on every rank of a world, one after the other, and writes down what came of each.

    mpirun -n 2 python world.py <folder for the reports> <module to import as hvd> <module>.<check>...

A check is a function `check_*(hvd, keras)`.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[4]
CHECKS = Path(__file__).parent / "checks"


def main(folder: str, module_name: str, *names: str) -> None:
    sys.path.insert(0, str(ROOT))
    is_on_torch = os.environ.get("KERAS_BACKEND") == "torch"
    if is_on_torch:
        # Hide TensorFlow, because Keras would load it for seconds only to set TensorFlow's seed.
        sys.modules["tensorflow"] = None  # type: ignore[assignment]
    from paceline.compat import install
    from paceline.compat.horovod._keras import settings
    from paceline.compat.horovod.common import objects
    from tests.ranks import run_checks

    install("horovod")
    hvd = importlib.import_module(module_name)
    is_tensorflows = ".tensorflow." in module_name
    keras = settings.of_tensorflow() if is_tensorflows else settings.standalone()
    if not is_on_torch:
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(2)
    warnings.simplefilter("error")
    # Keras causes this warning with a variable on torch and NumPy 2.
    warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
    hvd.init(process_sets="dynamic")
    os.chdir(folder)

    def run(check: Callable[[Any, Any], object], library: Any) -> None:
        keras.utils.set_random_seed(1)
        check(hvd, library)
        assert set(objects.allgather_object(check.__name__, "check")) == {check.__name__}

    def checks() -> Iterator[tuple[str, Callable[[], object]]]:
        for name in names:
            module, _, check = name.partition(".")
            found = importlib.import_module(f"tests.compat.horovod.keras.checks.{module}")
            # The checks in `keras2` use models of tf_keras, all other checks use models of Keras 3.
            library = importlib.import_module(settings.KERAS_2) if module == "keras2" else keras
            yield name, partial(run, getattr(found, check), library)

    run_checks(Path(folder), hvd.rank(), checks())
    hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
