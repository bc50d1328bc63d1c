"""A program that runs checks on every rank of a world, one after the other, and writes down what came of each.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python world.py <folder for the reports> <module>.<check>...

A check is a function `check_*(ranks)` in `checks/<module>.py`; `sizes=(4,)` among its parameters says in which worlds it
runs, else the module's SIZES.
"""

from __future__ import annotations

import ast
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHECKS = Path(__file__).parent / "checks"


#: The names of the models in models.py, which imports torch.
CASES = ("mlp", "cnn_group", "cnn_batch", "transformer_tied", "transformer_untied", "long_skip")


@dataclass(frozen=True)
class Ranks:
    """What a check is given. folder: the same for all ranks, for this check alone."""

    rank: int
    size: int
    folder: Path


#: Module of checks -> the packages that it needs beside torch.
NEEDS = {"families": ("transformers", "peft")}


def modules() -> list[str]:
    return sorted(path.stem for path in CHECKS.glob("*.py") if path.stem != "__init__")


def lacking(module: str) -> str | None:
    """The first package that the module's checks need and that is not here."""
    return next((name for name in NEEDS.get(module, ()) if find_spec(name) is None), None)


def checks_of(module: str) -> dict[str, tuple[int, ...]]:
    """Check -> the sizes of the worlds in which it runs, in the order in which they stand. Read, not imported."""
    tree = ast.parse((CHECKS / f"{module}.py").read_text())
    sizes: tuple[int, ...] = (2,)
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "SIZES":
            sizes = ast.literal_eval(node.value)
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("check_"):
            own = [ast.literal_eval(value) for value in node.args.defaults]
            found[node.name] = own[0] if own else sizes
    return found


def main(folder: str, *names: str) -> None:
    sys.path.insert(0, str(ROOT))
    warnings.simplefilter("error")
    import torch

    from tests.ranks import run_checks

    torch.set_num_threads(1)
    # DDP's own doing: it registers hooks under a name that torch itself deprecates.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\..*")
    # What writes a checkpoint in torch 2.9 to 2.12 asks for a tensor's storage in a way of its own that it deprecates.
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
    from paceline.parallel import mesh

    place = mesh.start()

    def run(check: Callable[[Ranks], object], own: Path) -> None:
        torch.manual_seed(1)
        check(Ranks(place.rank, place.size, own))
        if place.size > 1:
            torch.distributed.barrier()

    def checks() -> Iterator[tuple[str, Callable[[], object]]]:
        for name in names:
            module, _, check = name.partition(".")
            own = Path(folder) / name
            own.mkdir(exist_ok=True)
            found = getattr(importlib.import_module(f"tests.parallel.checks.{module}"), check)
            yield name, partial(run, found, own)

    run_checks(Path(folder), place.rank, checks())


if __name__ == "__main__":
    main(*sys.argv[1:])
