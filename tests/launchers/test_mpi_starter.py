from __future__ import annotations

import itertools

import pytest

from paceline.errors import LauncherError
from paceline.job.plan import NodeSetup, Starter
from paceline.launchers.mpi import MpiLauncher
from tests.helpers import make_job, make_launch
from tests.launchers.two_nodes import two_nodes

SRUN = Starter(argv=("/usr/bin/srun", "--mpi=pmix"), environment={"SLURM_CONF": "/etc/slurm.conf"})


def command(open_mpi=("/env/bin/mpirun", (5, 0)), gpus=(), container=None, **values):
    """The command of two nodes of two workers under srun."""
    job = make_job(distributed_backend="mpi", node_count=2, process_count_per_node=2, use_gpu=bool(gpus), **values)
    prepared = (NodeSetup(python="/env/bin/python", open_mpi=open_mpi, container=container),) * 2
    launch = make_launch(job, nodes=two_nodes("n", gpus), prepared=prepared, remote_shell=("rsh",), starter=SRUN)
    (made,) = MpiLauncher().commands(launch)
    return made


def scopes(made) -> dict[str, list[str]]:
    """What is set for which ranks: "0-1 n0" -> ["NODE_RANK=0", ...]."""
    found: dict[str, list[str]] = {"all": []}
    scope = "all"
    words = made.argv[: made.argv.index("--")]
    for option, value in itertools.pairwise(words):
        if option == "--for":
            scope = value
            found[scope] = []
        elif option == "--on":
            found[f"{scope} {value}"] = found.pop(scope)
            scope = f"{scope} {value}"
        elif option == "--set":
            found[scope].append(value)
    return found


def test_srun_starts_all_workers_with_one_command_line_that_has_all_places():
    made = command()
    assert made.argv[:3] == ("/usr/bin/srun", "--mpi=pmix", "/env/bin/python")
    assert made.argv[4] == "--srun"
    assert (made.node_rank, made.ranks, made.is_launcher) == (0, (0, 1, 2, 3), True)
    found = scopes(made)
    assert [scope for scope, values in found.items() if values] == ["0-1 n0", "2-3 n1"]
    for rank, scope in enumerate(("0-1 n0", "2-3 n1")):
        assert {f"NODE_RANK={rank}", "LOCAL_WORLD_SIZE=2", f"GLOO_SOCKET_IFNAME=eth{rank}"} <= set(found[scope])
    assert "LOCAL_RANK" not in str(found)  # srun says


def test_what_differs_between_workers_of_a_node_is_set_for_each():
    found = scopes(command(gpus=("0", "1")))
    assert [found[f"{rank}-{rank}"] for rank in range(4)] == [
        ["CUDA_VISIBLE_DEVICES=0"],
        ["CUDA_VISIBLE_DEVICES=1"],
    ] * 2


def test_srun_finds_its_own_settings_and_no_options_among_the_user_s_variables():
    made = command(environment_variables={"SLURM_HOSTFILE": "mine", "MINE": "1", "GLOO_SOCKET_IFNAME": "ib0"})
    assert made.environment["SLURM_CONF"] == "/etc/slurm.conf"
    assert "SLURM_HOSTFILE" not in made.environment
    assert (made.environment["MINE"], made.environment["GLOO_SOCKET_IFNAME"]) == ("1", "ib0")
    found = scopes(made)
    assert found["all"] == ["SLURM_HOSTFILE=mine"]
    assert "GLOO_SOCKET_IFNAME" not in str(found)


def test_open_mpi_talks_by_the_nodes_network_unless_the_shell_says_otherwise():
    assert command().defaults["OMPI_MCA_btl_tcp_if_include"] == "10.0.0.0/24"


@pytest.mark.parametrize(
    ("version", "kept"), [((5, 0), []), ((4, 1), ["SLURM_NODELIST", "SLURM_STEP_ID", "SLURM_JOBID"])]
)
def test_open_mpi_4_is_left_what_it_knows_srun_by(version, kept):
    made = command(open_mpi=("/env/bin/mpirun", version))
    assert [value for option, value in itertools.pairwise(made.argv) if option == "--keep"] == kept


def test_workers_in_containers_are_refused_with_the_way_out():
    with pytest.raises(LauncherError, match=r"can't be started by srun.*mpi='mpirun'"):
        command(container={"image": "x"})
