"""The same program under torchrun, under mpirun with Paceline's backend, and alone: one result."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.engines.conftest import require_engine
from tests.engines.lab import WHEEL, find_mpirun
from tests.parallel.conftest import LOADED, run_alone
from tests.warm import below_mpirun, forking_variables
from tests.warm.kinds import TORCH

PROGRAM = """
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import paceline
from paceline.parallel import DataParallel, FullyShard

torch.set_num_threads(1)
torch.manual_seed(0)
x, y = torch.randn(22, 6).double(), torch.randint(0, 3, (22,))
said = []
for strategy in (DataParallel(), FullyShard(), "auto"):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    par = paceline.parallelize(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader, loss=F.cross_entropy, strategy=strategy, clip_norm=0.5
    )
    losses = [float(par.step(batch)) for epoch in range(2) for batch in par.epoch(epoch)]
    losses.append(par.evaluate(DataLoader(TensorDataset(x, y), batch_size=5), F.cross_entropy))
    said.append(" ".join(f"{loss:.9f}" for loss in losses))
if par.rank == 0:
    backend = torch.distributed.get_backend() if torch.distributed.is_initialized() else "none"
    print("world", par.world_size, backend)
    print("\\n".join(said))
    print(par.reason)
"""

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_engine("torch", find_spec("torch"))
    path = tmp_path_factory.mktemp("program") / "train.py"
    path.write_text(PROGRAM)
    return path


def output(*command: str) -> list[str]:
    environment = dict(os.environ) | {
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        **forking_variables(TORCH, LOADED),
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def alone(program: Path) -> list[str]:
    return run_alone(program.with_name("output.txt"), str(program)).splitlines()


@pytest.mark.promise("same-file-runs-alone-under")
def test_script_without_a_launcher_is_one_process(alone: list[str]) -> None:
    assert alone[0] == "world 1 none"
    assert len(set(alone[1:4])) == 1
    assert alone[4] == "DataParallel(): there is one worker."


@pytest.mark.promise("same-file-runs-alone-under")
def test_result_under_torchrun_equals_that_of_one_process(program: Path, alone: list[str]) -> None:
    torchrun = Path(sys.executable).with_name("torchrun")
    found = output(sys.executable, str(torchrun), "--standalone", "--nproc-per-node", "2", str(program))
    assert found[0] == "world 2 gloo"
    assert found[1:4] == alone[1:4]
    assert found[4].startswith("DataParallel(2): ")


@pytest.mark.promise("same-file-runs-alone-under")
def test_result_under_mpirun_equals_that_of_one_process(program: Path, alone: list[str]) -> None:
    mpirun = find_mpirun(WHEEL)
    require_engine(WHEEL, mpirun)
    found = output(
        *(str(mpirun), "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none", "-n", "2"),
        *below_mpirun(2, str(program), also=LOADED),
    )
    assert found[0] == "world 2 mpi"
    assert found[1:4] == alone[1:4]
