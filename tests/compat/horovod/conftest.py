"""Worlds of ranks that run all checks once; each test then reads what came of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.compat.horovod.world import CHECKS as _FOLDER
from tests.engines.conftest import require_engine
from tests.engines.lab import WHEEL, find_mpirun
from tests.ranks import MPI, Worlds, checks_in, clean_environment
from tests.warm import TORCH, below_mpirun, run_alone

_ALL = ("collectives", "semantics", "gradients", "optimizer", "training", "state", "elastic")
#: Number of ranks -> modules of checks to run on that many ranks. Two and four ranks run the checks that depend on the
#: number of ranks: Adasum needs a power of 2. Two ranks also run the checks that depend on the transport.
MODULES = {
    1: _ALL,
    2: ("collectives", "semantics", "optimizer", "elastic"),
    3: _ALL,
    4: ("collectives", "semantics"),
}
#: Modules that `make test` need not run on three ranks, because they also run on two ranks over Gloo, and the
#: collectives that they call run on three ranks over MPI.
REPEATED_ON_THREE = ("training", "state", "elastic")
#: Modules that test_on_gloo.py runs. The modules for gradients and optimizers are left out, because they call the same
#: collectives.
GLOO_MODULES = ("collectives", "semantics", "training", "state", "elastic")
_WORLD = Path(__file__).with_name("world.py")


def every_check(modules: tuple[str, ...]) -> list[str]:
    return [f"{module}.{check}" for module in modules for check in checks_in(_FOLDER, module)]


def is_repeated(ranks: int, check: str) -> bool:
    """Whether the check, as `module.check_*`, is left to `make proof` on so many ranks."""
    return ranks == 4 or (ranks == 3 and check.partition(".")[0] in REPEATED_ON_THREE)


def run_on_ranks(
    ranks: int, program: Path, *arguments: str, loaded: str = TORCH, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the program on so many ranks; one rank runs without a launcher. loaded: modules that they have loaded already."""
    mpirun = find_mpirun(WHEEL)
    require_engine(WHEEL, mpirun)
    environment = clean_environment() | MPI | variables
    if ranks == 1:
        return run_alone(str(program), *arguments, loaded=loaded, environment=environment)
    command = below_mpirun(ranks, str(program), *arguments, kind=loaded)
    command = [str(mpirun), "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none", "-n", str(ranks), *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=2700, env=environment, check=False)


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return Worlds(tmp_path_factory)


@pytest.fixture(scope="session")
def outcome(worlds: Worlds) -> Callable[[int, str], None]:
    """A function that fails as the check did on any of so many ranks."""

    def look(ranks: int, check: str) -> None:
        repeats = is_repeated(ranks, check)
        modules = [name for name in MODULES[ranks] if is_repeated(ranks, f"{name}.") is repeats]

        def start(folder: Path) -> str:
            return run_on_ranks(ranks, _WORLD, str(folder), *modules).stderr

        worlds.look(f"torch-on-{ranks}{'-again' if repeats else ''}", ranks, check, start)

    return look
