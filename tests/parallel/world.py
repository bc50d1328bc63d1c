"""A program that runs checks on every rank of a world, one after the other, and writes down what came of each.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python world.py <folder for the reports> <module of checks>

A check is a function `check_*(ranks)` in `checks/<module>.py`; `sizes=(4,)` among its parameters says in which worlds it
runs, else the module's SIZES. One that fails on any rank ends the world: the others can't be told to skip it.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import sys
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHECKS = Path(__file__).parent / "checks"


@dataclass(frozen=True)
class Ranks:
    """What a check is given. folder: the same for all ranks, for this check alone."""

    rank: int
    size: int
    folder: Path


def modules() -> list[str]:
    return sorted(path.stem for path in CHECKS.glob("*.py") if path.stem != "__init__")


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


def main(folder: str, module: str) -> None:
    sys.path.insert(0, str(ROOT))
    warnings.simplefilter("error")
    import torch

    torch.set_num_threads(1)
    # DDP's own doing: it registers hooks under a name that torch itself deprecates.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\..*")
    from paceline.parallel import mesh

    place = mesh.start()
    checks = importlib.import_module(f"tests.parallel.checks.{module}")
    report = Path(folder) / f"rank_{place.rank}.jsonl"
    for check, sizes in checks_of(module).items():
        if place.size not in sizes:
            continue
        torch.manual_seed(1)
        failed = ""
        own = Path(folder) / check
        own.mkdir(exist_ok=True)
        try:
            getattr(checks, check)(Ranks(place.rank, place.size, own))
            if place.size > 1:
                torch.distributed.barrier()
        except BaseException:
            failed = traceback.format_exc()
        with report.open("a") as file:
            file.write(json.dumps({"check": f"{module}.{check}", "failed": failed}) + "\n")
        if failed:
            # At once: the other ranks may be waiting for this one.
            os._exit(3)


if __name__ == "__main__":
    main(*sys.argv[1:])
