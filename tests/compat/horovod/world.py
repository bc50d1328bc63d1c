"""A program that runs checks on every rank of a world, one after the other, and writes down what came of each.

    mpirun -n 2 python world.py <folder for the reports> <module of checks>...

A check is a function `check_*(hvd)`.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[3]
CHECKS = Path(__file__).parent / "checks"


def main(folder: str, *names: str) -> None:
    sys.path.insert(0, str(ROOT))
    warnings.simplefilter("error")
    # torch 2.12 warns about every first sparse tensor, although each tensor is created with an explicit check_invariants.
    warnings.filterwarnings("ignore", message="Sparse invariant checks are implicitly disabled")
    import torch

    from paceline.compat import install
    from tests.ranks import checks_in, run_checks

    install("horovod")
    import horovod.torch as hvd  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    hvd.init(process_sets="dynamic")

    def run(check: Callable[[object], object]) -> None:
        torch.manual_seed(1)
        check(hvd)
        hvd.barrier()

    def checks() -> Iterator[tuple[str, Callable[[], object]]]:
        for name in names:
            module = importlib.import_module(f"tests.compat.horovod.checks.{name}")
            for check in checks_in(CHECKS, name):
                yield f"{name}.{check}", partial(run, getattr(module, check))

    run_checks(Path(folder), hvd.rank(), checks())
    hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
