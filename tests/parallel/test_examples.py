"""The examples of `examples/parallel` learn, launched as a user launches them; plain and parallel files differ little."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.engines.conftest import require_engine
from tests.parallel.conftest import LOADED, run_alone
from tests.warm import forking_variables
from tests.warm.kinds import TORCH

FOLDER = Path(__file__).parents[2] / "examples" / "parallel"


def losses(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"epoch \d+: loss (\d+\.\d+)", output)]


@pytest.fixture(scope="session")
def need_torch() -> None:
    require_engine("torch", find_spec("torch"))


def launched(folder: Path, script: str, ranks: int, *options: str) -> str:
    """What the script prints in a run of so many workers."""
    command = [sys.executable, "-m", "paceline", "run", str(FOLDER / script), "-j", f"1x{ranks}"]
    if ranks > 1:
        command += ["--backend", "gloo"]
    # The workers are forks of a program that has torch loaded, because loading torch would take most of the time.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= forking_variables(TORCH, LOADED)
    done = subprocess.run(
        [*command, "--", *options],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def alone(script: str, folder: Path, *options: str) -> str:
    """Return what the script prints in one process without a launcher."""
    return run_alone(folder / "output.txt", str(FOLDER / script), *options)


@pytest.fixture(scope="session")
def of_one_process(need_torch: None, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the transformer in one process. Its text is this Python's own source: each Python has others."""
    first, last = losses(alone("chars_parallel.py", tmp_path_factory.mktemp("alone"), "--pieces", "160"))
    assert last < first
    return [first, last]


def test_plain_examples_reduce_their_loss(need_torch: None, tmp_path: Path) -> None:
    require_engine("scikit-learn", find_spec("sklearn"))
    for script, options in (("digits_plain.py", ["--epochs", "2"]), ("chars_plain.py", ["--pieces", "160"])):
        first, last = losses(alone(script, tmp_path, *options))
        assert last < first


def test_digits_example_on_two_workers_reaches_90_percent_accuracy(need_torch: None, tmp_path: Path) -> None:
    require_engine("scikit-learn", find_spec("sklearn"))
    output = launched(tmp_path, "digits_parallel.py", 2)
    accuracies = [float(found) for found in re.findall(r"accuracy (\d\.\d+)", output)]
    assert len(accuracies) == 3, output
    assert accuracies[-1] > 0.9


# The checks in `checks/` compare each strategy with one process. The README's command runs the pipeline (tests/docs).
@pytest.mark.promise("transformer-learns-same-strategy")
@pytest.mark.parametrize(
    "strategy",
    ["data", *(pytest.param(name, marks=pytest.mark.proof) for name in ("pipeline", "tensor", "fully-sharded"))],
)
def test_transformer_example_on_two_workers_has_the_losses_of_one_process_under_every_strategy(
    of_one_process: list[float], tmp_path: Path, strategy: str
) -> None:
    output = launched(tmp_path, "chars_parallel.py", 2, "--pieces", "160", "--strategy", strategy)
    # The order of the samples, and so each step, is the same. AdamW amplifies rounding differences between processors.
    assert losses(output) == pytest.approx(of_one_process, abs=2e-3)


@pytest.mark.parametrize("name", ["digits", "chars"])
def test_parallel_example_adds_few_lines_to_the_plain_example(name: str) -> None:
    plain, parallel = ((FOLDER / f"{name}_{kind}.py").read_text().splitlines() for kind in ("plain", "parallel"))
    kept = difflib.SequenceMatcher(None, plain, parallel, autojunk=False)
    same = sum(block.size for block in kept.get_matching_blocks())
    assert same >= 0.6 * len(plain)
    assert len(parallel) <= len(plain) + 30
