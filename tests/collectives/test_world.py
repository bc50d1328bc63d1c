from __future__ import annotations

import subprocess
import sys

import pytest

from paceline.collectives import ArgumentError, world
from tests.helpers import run_python
from tests.ranks import clean_environment

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("environ", "chosen"),
    [
        (TORCHRUN, "gloo"),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}, "gloo"),
        (TORCHRUN | {"OMPI_COMM_WORLD_SIZE": "2"}, "mpi"),
        ({"PMIX_RANK": "1"}, "mpi"),
        # If torchrun runs in a Slurm step or below mpirun, its workers inherit variables of Slurm or mpirun.
        (TORCHRUN | {"PMI_SIZE": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}, "gloo"),
        (TORCHRUN | {"HOROVOD_CONTROLLER": "MPI"}, "mpi"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "HOROVOD_CPU_OPERATIONS": "gloo"}, "gloo"),
        ({"HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_CONTROLLER": "gloo"}, "gloo"),
    ],
)
def test_environment_variables_of_the_launcher_choose_gloo_or_mpi_as_transport(environ, chosen):
    assert world.choice(environ) == chosen


@pytest.mark.parametrize(("has_mpi", "chosen"), [(True, "mpi"), (False, "alone")])
def test_process_without_a_launcher_chooses_mpi_if_installed(monkeypatch, has_mpi, chosen):
    monkeypatch.setattr(world.importlib.util, "find_spec", lambda name: object() if has_mpi else None)
    assert world.choice({}) == chosen
    assert world.choice({"WORLD_SIZE": "1"}) == chosen


def test_unknown_transport_is_named_in_the_error():
    with pytest.raises(ArgumentError, match="HOROVOD_CPU_OPERATIONS='ccl'"):
        world.choice({"HOROVOD_CPU_OPERATIONS": "ccl"})


def test_contradicting_transport_settings_are_refused():
    with pytest.raises(ArgumentError, match="HOROVOD_CONTROLLER=mpi and HOROVOD_CPU_OPERATIONS=gloo"):
        world.choice({"HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_CONTROLLER": "mpi"})


def test_mpi_world_that_has_lost_a_rank_cannot_be_joined_again():
    pytest.importorskip("mpi4py")
    code = (
        "from paceline.collectives import CollectivesError, mpi, world\n"
        "joined = world.join({'HOROVOD_CONTROLLER': 'mpi'})\n"
        "mpi.abandon()\n"
        "for lost in ([], [1]):\n"
        "    joined.lost_ranks.update(lost)\n"
        "    try: world.join({'HOROVOD_CONTROLLER': 'mpi'})\n"
        "    except CollectivesError as error: print(type(error).__name__, str(error))\n"
    )
    again = ", and MPI can't go on in this process{}. Let the run be restarted (max_restarts)."
    assert run_python(code).splitlines() == [
        "CollectivesError communication has failed before" + again.format(""),
        "LostRankError rank 1 was lost" + again.format(" without it"),
    ]


def test_single_rank_leaves_no_shared_memory_file():
    # Regression: each process that used MPI without a launcher left a file of 16 MiB in /dev/shm.
    pytest.importorskip("mpi4py")
    code = (
        "import os; from paceline.collectives import mpi; print(mpi.world().size, 'OMPI_MCA_btl' in os.environ);"
        "print([line for line in open('/proc/self/maps') if 'sm_segment' in line])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, env=clean_environment()
    )
    assert done.stdout.splitlines() == ["1 False", "[]"], done.stderr


def test_single_rank_starts_without_the_variable_home():
    # Regression: if a process (such as a system service) had no variable HOME, its first call of Open MPI ended the process.
    pytest.importorskip("mpi4py")
    code = "import os; from paceline.collectives import mpi; print(mpi.world().size, 'HOME' in os.environ)"
    environment = clean_environment()
    environment.pop("HOME", None)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert done.stdout == "1 False\n", done.stderr
