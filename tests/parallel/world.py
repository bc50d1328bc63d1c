"""A program that runs checks on every rank of a world, one after the other, and writes down what came of each.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python world.py <folder for the reports> <module>.<check>...

A check is a function `check_*(ranks)` in `checks/<module>.py`; `sizes=(4,)` among its parameters says in which worlds it
runs, else the module's SIZES. One that asks `ranks` for its cells is a matrix: by its name alone it does those cells that cover
it, and as `<module>.<check>:whole` all of them.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parents[2]
CHECKS = Path(__file__).parent / "checks"


#: The names of the models in models.py, repeated here because models.py imports torch.
CASES = ("mlp", "cnn_group", "cnn_batch", "transformer_tied", "transformer_untied", "long_skip")


WHOLE = ":whole"

_Cells = TypeVar("_Cells")
_Row = TypeVar("_Row")
_Column = TypeVar("_Column")


@dataclass(frozen=True)
class Ranks:
    """What a check is given.

    folder: the same for all ranks, for this check alone. is_whole: a matrix is done with all its cells.
    """

    rank: int
    size: int
    folder: Path
    is_whole: bool = False

    def cells(self, covering: _Cells, whole: _Cells) -> _Cells:
        """Those of a matrix to be done: the covering ones have each value of each axis."""
        return whole if self.is_whole else covering

    def grid(
        self, cases: Sequence[_Row], layouts: Sequence[_Column], *, with_all: Sequence[str] = ()
    ) -> list[tuple[_Row, list[_Column]]]:
        """Each case with the layouts that it is to be done on.

        with_all: names of the riskiest cases, which every layout has. The others have one in turn, unless it is the whole matrix.
        """
        return [
            (
                case,
                [
                    layout
                    for place, layout in enumerate(layouts)
                    if self.is_whole or getattr(case, "name", "") in with_all or place == number % len(layouts)
                ],
            )
            for number, case in enumerate(cases)
        ]


#: Module of checks -> packages that it needs in addition to torch.
NEEDS = {"families": ("transformers", "peft"), "torchvisions": ("torchvision",)}


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


def matrices(module: str) -> set[str]:
    """The module's checks that ask for their cells. Read, not imported."""
    text = (CHECKS / f"{module}.py").read_text()
    # Split the text once, because `ast.get_source_segment` would split it again for each function.
    lines = text.split("\n")
    return {
        node.name
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef)
        and re.search(r"\branks\.(cells|grid)\(", "\n".join(lines[node.lineno - 1 : node.end_lineno]))
    }


def main(folder: str, *names: str) -> None:
    sys.path.insert(0, str(ROOT))
    warnings.simplefilter("error")
    import torch

    from tests.ranks import run_checks

    torch.set_num_threads(1)
    # DDP registers its hooks under a name that torch itself deprecates.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\..*")
    # In torch 2.9 to 2.12, torch's checkpoint writer uses a tensor's storage in a deprecated way.
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
    from paceline.parallel import mesh

    place = mesh.start()

    def run(check: Callable[[Ranks], object], own: Path, is_whole: bool) -> None:
        torch.manual_seed(1)
        check(Ranks(place.rank, place.size, own, is_whole))
        if place.size > 1:
            torch.distributed.barrier()

    def checks() -> Iterator[tuple[str, Callable[[], object]]]:
        for name in names:
            module, _, check = name.removesuffix(WHOLE).partition(".")
            own = Path(folder) / name
            own.mkdir(exist_ok=True)
            found = getattr(importlib.import_module(f"tests.parallel.checks.{module}"), check)
            yield name, partial(run, found, own, name.endswith(WHOLE))

    run_checks(Path(folder), place.rank, checks())


if __name__ == "__main__":
    main(*sys.argv[1:])
