from __future__ import annotations

from pathlib import Path

import pytest

from paceline.environments.environment import Environment
from paceline.errors import TargetError
from paceline.targets.slurm import SlurmTarget
from paceline.targets.slurm.mpi import plugins_in, starter
from paceline.targets.slurm.scheduler import CommandResult
from paceline.targets.slurm.settings import SlurmSettings
from tests.helpers import make_job
from tests.targets.slurm.conftest import FakeSlurm

BEFORE_22 = "srun: MPI types are...\nsrun: cray_shasta\nsrun: none\nsrun: pmi2\nsrun: pmix\nsrun: pmix_v3\n"
SINCE_22 = "MPI plugin types are...\n\tpmix\n\tnone\n\tpmi2\nspecific pmix plugin versions available: pmix_v3,pmix_v4\n"
WITHOUT = "MPI plugin types are...\n\tnone\n\tcray_shasta\n\tpmi2\n"
MPI = make_job(distributed_backend="mpi", node_count=2, process_count_per_node=2)


@pytest.mark.parametrize(
    ("out", "err", "plugins"),
    [
        ("", BEFORE_22, ["cray_shasta", "none", "pmi2", "pmix", "pmix_v3"]),
        (SINCE_22, "", ["pmix", "none", "pmi2", "pmix_v3", "pmix_v4"]),
        (WITHOUT, "", ["none", "cray_shasta", "pmi2"]),
    ],
)
def test_mpi_plugins_are_parsed_from_srun_output_of_each_slurm_version(out: str, err: str, plugins: list[str]):
    assert plugins_in(CommandResult(returncode=0, stdout=out, stderr=err)) == plugins


@pytest.mark.parametrize("wanted", ["pmix", "pmix_v5"])
def test_missing_mpi_plugin_of_srun_raises_target_error_before_a_run_is_created(slurm: FakeSlurm, wanted: str):
    slurm.say("srun", WITHOUT if wanted == "pmix" else SINCE_22)
    with pytest.raises(
        TargetError, match=rf"mpi='{wanted}', but this Slurm's srun has no such plugin; it has .*none.*mpi='mpirun'"
    ):
        SlurmTarget("cluster", {"mpi": wanted}).check(MPI)
    assert slurm.calls == ["srun --mpi=list"]


def test_mpi_plugins_are_not_checked_for_jobs_without_mpi_or_targets_without_the_mpi_setting(slurm: FakeSlurm):
    SlurmTarget("cluster", {"mpi": "pmix"}).check(make_job())
    SlurmTarget("cluster").check(MPI)
    assert slurm.count("srun") == 0


def test_srun_launch_of_a_job_in_a_container_is_refused(slurm: FakeSlurm):
    job = make_job(distributed_backend="mpi", environment=Environment(docker_image="pytorch"))
    with pytest.raises(TargetError, match=r"custom_docker_image='pytorch'.*mpi='mpirun'"):
        SlurmTarget("cluster", {"mpi": "pmix"}).check(job)


def test_srun_gets_the_node_of_each_worker(slurm: FakeSlurm, tmp_path: Path):
    settings = SlurmSettings.of("cluster", {"mpi": "pmix_v4"})
    environment = {
        "PATH": str(slurm.folder / "bin"),
        "SLURM_CONF": "/etc/x.conf",
        "SLURM_PMIX_TIMEOUT": "9",
        "SLURM_NTASKS": "4",
    }
    made = starter(MPI, settings, "7", ("n1", "n4"), environment)
    assert made is not None
    assert (made.name, made.environment) == ("srun", {"SLURM_CONF": "/etc/x.conf", "SLURM_PMIX_TIMEOUT": "9"})
    assert {"--jobid=7", "--overlap", "--mpi=pmix_v4", "--nodes=2", "--ntasks=4"} <= set(made.argv)
    assert {"--distribution=arbitrary", "--nodelist=n1,n1,n4,n4"} <= set(made.argv)
    assert starter(MPI, SlurmSettings.of("cluster", {}), "7", ("n1", "n4"), environment) is None
    with pytest.raises(TargetError, match="node n1 has no srun on its PATH"):
        starter(MPI, settings, "7", ("n1", "n4"), {"PATH": str(tmp_path)})


def test_preview_shows_the_srun_command(slurm: FakeSlurm):
    shown = SlurmTarget("cluster", {"mpi": "pmix"}).preview(MPI).starter
    assert shown is not None
    assert shown.argv[:2] == ("srun", "--jobid=JOB_ID")
    assert "--nodelist=cluster-0,cluster-0,cluster-1,cluster-1" in shown.argv
    assert SlurmTarget("cluster").preview(MPI).starter is None
