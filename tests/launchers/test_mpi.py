from __future__ import annotations

import itertools
import os
import re
import shlex
import sys

import pytest

from paceline.environments.environment import Environment
from paceline.errors import LauncherError
from paceline.job.plan import NodeSetup, Starter
from paceline.launchers import mpi
from paceline.launchers.mpi import MPIRUN_VARIABLE, MpiLauncher, MpiLibrary, OpenMpi, find_open_mpi, mpi4py_library
from tests.helpers import RUN_ID, make_job, make_launch, write_program
from tests.launchers.two_nodes import two_nodes

MAIN = "/shared/team/.paceline/lib/0/paceline/worker/__main__.py"

SRUN = Starter(argv=("/usr/bin/srun", "--mpi=pmix"), environment={"SLURM_CONF": "/etc/slurm.conf"})


@pytest.fixture
def mpirun(tmp_path, monkeypatch):
    """Puts a program that gives its version as Open MPI's mpirun does first on the path: call it with the version."""

    def make(version: str, folder: str = "bin") -> str:
        program = write_program(tmp_path / folder / "mpirun", f"#!/bin/sh\necho 'mpirun (Open MPI) {version}'\necho\n")
        if folder == "bin":
            monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
        return str(program)

    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    mpi4py_loads(monkeypatch, None)
    return make


def mpi4py_loads(monkeypatch, library: MpiLibrary | None) -> None:
    """Let the worker's mpi4py load this library; None: it has no mpi4py."""
    monkeypatch.setattr(mpi, "mpi4py_library", lambda python: library)


def command_of(job, **values):
    (command,) = MpiLauncher().commands(make_launch(job, **values))
    return command


def text(command) -> str:
    """The command line, one line for each of mpirun's contexts."""
    return re.sub(r" : ", " :\n", shlex.join(command.argv).replace(MAIN, "MAIN"))


# --- tests of the command line


def test_open_mpi_5_command_oversubscribes_slots_without_binding_and_passes_worker_variables(mpirun):
    program = mpirun("5.0.8")
    command = command_of(make_job(distributed_backend="mpi", process_count_per_node=4, arguments=("--epochs", "5")))
    assert text(command) == (
        f"{program} --map-by slot:OVERSUBSCRIBE --bind-to none -n 4 /env/bin/python MAIN =--mpi "
        "=--set =LOCAL_WORLD_SIZE=4 =--set =HOROVOD_LOCAL_SIZE=4 "
        "=--set =NODE_RANK=0 =--set =GROUP_RANK=0 =--set =HOROVOD_CROSS_RANK=0 "
        "=-- =train.py =--epochs =5"
    )


def test_open_mpi_4_command_oversubscribes_slots_without_binding(mpirun):
    program = mpirun("4.1.6")
    command = command_of(make_job(distributed_backend="mpi", process_count_per_node=2))
    assert text(command).startswith(
        f"{program} --oversubscribe --map-by slot --bind-to none -n 2 /env/bin/python MAIN "
    )


def test_mpirun_command_for_simulated_nodes_sets_local_rank_variables_of_each_worker(mpirun):
    program = mpirun("5.0.8")
    command = command_of(make_job(distributed_backend="mpi", node_count=2, process_count_per_node=2))

    def worker(node, local):
        return (
            "-n 1 /env/bin/python MAIN =--mpi "
            f"=--set =LOCAL_RANK={local} =--set =HOROVOD_LOCAL_RANK={local} "
            "=--set =LOCAL_WORLD_SIZE=2 =--set =HOROVOD_LOCAL_SIZE=2 "
            f"=--set =NODE_RANK={node} =--set =GROUP_RANK={node} =--set =HOROVOD_CROSS_RANK={node} =-- =train.py"
        )

    assert text(command) == f"{program} --map-by slot:OVERSUBSCRIBE --bind-to none " + " :\n".join(
        worker(node, local) for node in (0, 1) for local in (0, 1)
    )


@pytest.mark.parametrize("argument", [":", "-n", "--", "--hostfile", "a b", "", "=x", "$HOME", "-x"])
def test_script_arguments_are_never_parsed_by_mpirun(mpirun, argument):
    mpirun("5.0.8")
    for nodes in (1, 2):
        command = command_of(make_job(distributed_backend="mpi", node_count=nodes, arguments=(argument, "end")))
        assert command.argv[-2:] == (f"={argument}", "=end")
        assert command.argv.count(":") == nodes - 1


def test_mpirun_command_sets_no_rank_variables(mpirun):
    mpirun("5.0.8")
    command = command_of(make_job(distributed_backend="mpi", process_count_per_node=2))
    assert "RANK" not in command.environment
    assert "LOCAL_RANK" not in command.environment
    assert not any(word.startswith(("=LOCAL_RANK=", "=RANK=")) for word in command.argv)
    assert (command.environment["WORLD_SIZE"], command.environment["MASTER_PORT"]) == ("2", "20000")


def test_one_mpirun_command_starts_all_workers(mpirun):
    mpirun("5.0.8")
    command = command_of(make_job(distributed_backend="mpi", node_count=3))
    assert (command.ranks, command.node_rank, command.is_launcher) == ((0, 1, 2), 0, True)
    assert str(command.log) == f"/shared/team/.paceline/runs/{RUN_ID}/logs/driver.log"


def test_environment_variables_set_by_the_user_are_not_replaced_for_mpirun(mpirun):
    mpirun("5.0.8")
    users = {"HOROVOD_LOCAL_SIZE": "7", "CUDA_VISIBLE_DEVICES": "9", "MASTER_PORT": "1234", "OMPI_MCA_btl": "self"}
    for nodes in (1, 2):
        job = make_job(distributed_backend="mpi", node_count=nodes, environment_variables=users)
        command = command_of(job, gpus=1)
        assert {name: command.environment[name] for name in users} == users
        assert not any(word.startswith(tuple(f"={name}=" for name in users)) for word in command.argv)


@pytest.mark.parametrize(
    ("visibility", "devices"), [("worker", ["0", "1", "2", "3"]), ("node", ["0,1", "0,1", "2,3", "2,3"])]
)
def test_workers_under_mpirun_see_their_own_gpu_or_all_gpus_of_the_node(mpirun, visibility, devices):
    mpirun("5.0.8")
    job = make_job(distributed_backend="mpi", node_count=2, process_count_per_node=2, gpu_visibility=visibility)
    seen = [word for word in command_of(job, gpus=2).argv if "CUDA_VISIBLE_DEVICES" in word]
    assert seen == [f"=CUDA_VISIBLE_DEVICES={device}" for device in devices]


def test_workers_under_mpirun_on_one_node_see_their_own_gpus(mpirun):
    mpirun("5.0.8")
    command = command_of(make_job(distributed_backend="mpi", process_count_per_node=2), gpus=2)
    assert [word for word in command.argv if "CUDA" in word] == [f"=CUDA_VISIBLE_DEVICES={n}" for n in (0, 1)]


@pytest.mark.parametrize(
    ("version", "name"), [("5.0.8", "PRTE_MCA_prte_tmpdir_base"), ("4.1.6", "OMPI_MCA_orte_tmpdir_base")]
)
def test_open_mpi_files_are_in_the_scratch_folder(mpirun, version, name):
    mpirun(version)
    variables = command_of(make_job(distributed_backend="mpi")).environment
    for variable in (name, "OMPI_MCA_btl_sm_backing_directory", "OMPI_MCA_btl_vader_backing_directory"):
        assert variables[variable] == "/dev/shm/paceline-0"


@pytest.mark.parametrize(("uid", "allowed"), [(0, True), (1000, False)])
def test_mpirun_is_allowed_to_run_as_root_only_for_root(mpirun, monkeypatch, uid, allowed):
    mpirun("5.0.8")
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM" in command_of(make_job(distributed_backend="mpi")).environment) is allowed


# --- tests of the choice of mpirun


@pytest.mark.parametrize(
    ("text", "version"), [("5.0.8", (5, 0)), ("4.1.6", (4, 1)), ("4.0.0rc2", (4, 0)), ("10.2.1", (10, 2))]
)
def test_major_and_minor_version_of_mpirun_are_parsed_from_its_output(mpirun, text, version):
    program = mpirun(text)
    assert find_open_mpi(sys.executable) == OpenMpi(program, version)


def test_mpirun_on_the_path_precedes_the_one_beside_python(mpirun):
    system, beside = mpirun("4.1.6"), mpirun("5.0.8", "env")
    assert find_open_mpi(os.path.join(os.path.dirname(beside), "python")).mpirun == system


def test_mpirun_beside_python_is_found_without_one_on_the_path(mpirun, monkeypatch, tmp_path):
    beside = mpirun("5.0.8", "env")
    monkeypatch.setenv("PATH", f"{tmp_path / 'empty'}:/usr/bin/nowhere")
    assert find_open_mpi(os.path.join(os.path.dirname(beside), "python")) == OpenMpi(beside, (5, 0))


def test_mpich_on_the_path_does_not_hide_open_mpi_beside_python(mpirun, tmp_path, monkeypatch):
    write_program(tmp_path / "bin/mpirun", "#!/bin/sh\necho 'HYDRA build details: 4.1'\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    beside = mpirun("5.0.8", "env")
    assert find_open_mpi(os.path.join(os.path.dirname(beside), "python")).mpirun == beside


def test_mpirun_given_in_the_paceline_environment_variable_is_used_before_the_one_on_the_path(mpirun, monkeypatch):
    mpirun("4.1.6")
    named = mpirun("5.0.8", "named")
    monkeypatch.setenv(MPIRUN_VARIABLE, named)
    assert find_open_mpi(sys.executable).mpirun == named


def test_mpirun_path_in_the_paceline_environment_variable_is_refused_if_it_does_not_exist(
    mpirun, monkeypatch, tmp_path
):
    mpirun("5.0.8")
    monkeypatch.setenv(MPIRUN_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(LauncherError, match=rf"{MPIRUN_VARIABLE}='.*nowhere' is not a program"):
        find_open_mpi(sys.executable)


# --- tests of the library that mpi4py loads


OPEN_MPI_5, OPEN_MPI_4 = MpiLibrary("Open MPI v5.0.11", (5, 0)), MpiLibrary("Open MPI v4.1.4", (4, 1))
MPICH = MpiLibrary("MPICH Version: 4.2.0", None)


@pytest.mark.promise("mpirun-mpi4py-s-library-another")
@pytest.mark.parametrize(
    ("system", "own", "library", "taken"),
    [
        ("4.1.4", "5.0.11", OPEN_MPI_5, "env"),  # mpi4py loads the wheel's library, so take the wheel's mpirun
        ("4.1.4", "5.0.11", OPEN_MPI_4, "bin"),  # mpi4py was built for the system's library
        ("5.0.3", "5.0.11", OPEN_MPI_5, "bin"),
        ("4.1.4", "4.0.2", OPEN_MPI_5, "bin"),  # neither mpirun matches; the collectives report a failure to connect
        ("4.1.4", "5.0.11", None, "bin"),  # no mpi4py is installed, so any mpirun will do
    ],
)
def test_mpirun_matches_the_mpi_library_that_mpi4py_loads(mpirun, monkeypatch, tmp_path, system, own, library, taken):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "own/python"))
    programs = {"bin": mpirun(system), "env": mpirun(own, "env")}
    mpi4py_loads(monkeypatch, library)
    assert find_open_mpi(os.path.join(os.path.dirname(programs["env"]), "python")).mpirun == programs[taken]


@pytest.mark.promise("mpirun-mpi4py-s-library-another")
def test_mpi4py_built_for_another_mpi_is_refused(mpirun, monkeypatch):
    program = mpirun("5.0.8")
    mpi4py_loads(monkeypatch, MPICH)
    with pytest.raises(LauncherError, match=rf"loads MPICH Version: 4\.2\.0, but {program} is of Open MPI 5\.0"):
        MpiLauncher().check(make_job(distributed_backend="mpi"))


def test_mpirun_given_in_the_paceline_environment_variable_is_not_checked_against_mpi4py(mpirun, monkeypatch):
    named = mpirun("5.0.8", "named")
    monkeypatch.setenv(MPIRUN_VARIABLE, named)
    mpi4py_loads(monkeypatch, MPICH)
    assert find_open_mpi(sys.executable).mpirun == named


@pytest.fixture
def none_of_our_own(tmp_path, monkeypatch):
    """The submitting environment has no mpirun."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "own/python"))


def test_mpirun_beside_the_submitting_python_is_used_if_no_other_exists(mpirun, tmp_path, monkeypatch):
    # Regression: a layered environment has the mpi4py of its base environment, but no mpirun beside its own
    # interpreter. So no mpirun was found.
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    own = mpirun("5.0.8", "own")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "own/python"))
    assert find_open_mpi(str(tmp_path / "layer/python")).mpirun == own


def test_missing_mpirun_names_the_install_command(mpirun, tmp_path, none_of_our_own):
    with pytest.raises(LauncherError, match=r"there is no mpirun .*pip install 'paceline\[mpi\]'"):
        find_open_mpi(str(tmp_path / "python"))


@pytest.mark.parametrize(
    ("script", "seen"),
    [
        ("echo 'HYDRA build details:'", "HYDRA build details:"),
        ("echo 'Intel(R) MPI Library' >&2", "Intel(R) MPI Library"),
        ("echo 'mpirun (Open MPI) 3.1.4'", "mpirun (Open MPI) 3.1.4"),
        ("exit 1", "gives no version"),
        # Regression: output of mpirun that is not UTF-8 raised a UnicodeDecodeError.
        (r"printf 'MPI der Universit\344t 3\n'", "MPI der Universit�t 3"),
    ],
)
def test_unsupported_mpirun_programs_are_named_in_the_error(
    mpirun, tmp_path, monkeypatch, none_of_our_own, script, seen
):
    program = write_program(tmp_path / "other/mpirun", f"#!/bin/sh\n{script}\n")
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    with pytest.raises(LauncherError) as refused:
        MpiLauncher().check(
            make_job(distributed_backend="mpi", environment=Environment(python=str(tmp_path / "python")))
        )
    assert f"Open MPI 4 or later, but found only {program} ({seen})" in str(refused.value)


def test_mpirun_version_is_read_even_if_the_home_variable_is_not_set(tmp_path, mpirun, monkeypatch):
    # Regression: without HOME, Open MPI 5 prints "Unable to get the user home directory" instead of its version. So it
    # was not recognized as Open MPI.
    program = write_program(
        tmp_path / "needs/mpirun", "#!/bin/sh\ntest -n \"$HOME\" || exit 1\necho 'mpirun (Open MPI) 5.0.8'\n"
    )
    monkeypatch.setenv(MPIRUN_VARIABLE, str(program))
    monkeypatch.delenv("HOME", raising=False)
    assert mpi._version_text(str(program)).startswith("mpirun (Open MPI) 5.0.8")


@pytest.mark.parametrize(
    ("script", "library"),
    [
        ("echo 'Open MPI v5.0.11, package: Open MPI a@b, ident: 5'", MpiLibrary("Open MPI v5.0.11", (5, 0))),
        ("echo 'Open MPI v4.1.4, package: x'", MpiLibrary("Open MPI v4.1.4", (4, 1))),
        ("printf 'MPICH Version:      4.2.0\\nMPICH ABI: 16\\n'", MpiLibrary("MPICH Version:      4.2.0", None)),
        ("echo 'Intel(R) MPI Library 2021.11'", MpiLibrary("Intel(R) MPI Library 2021.11", None)),
        ("echo 'ModuleNotFoundError: mpi4py' >&2; exit 1", None),
        ("echo 'Open MPI v5.0.11'; kill -9 $$", None),
        ("exit 0", None),
    ],
)
def test_mpi_library_is_the_one_mpi4py_reports(tmp_path, script, library):
    python = write_program(tmp_path / "python", f"#!/bin/sh\n{script}\n")
    assert mpi4py_library(str(python)) == library


def test_mpi_library_of_a_missing_interpreter_is_none(tmp_path):
    assert mpi4py_library(str(tmp_path / "nowhere")) is None


def test_mpi_library_is_read_without_initializing_mpi():
    pytest.importorskip("mpi4py")
    found = mpi4py_library(sys.executable)
    assert found is None or found.name


def command(open_mpi=("/env/bin/mpirun", (5, 0)), gpus=(), container=None, **values):
    """The command of two nodes of two workers under srun."""
    job = make_job(distributed_backend="mpi", node_count=2, process_count_per_node=2, use_gpu=bool(gpus), **values)
    prepared = (NodeSetup(python="/env/bin/python", open_mpi=open_mpi, container=container),) * 2
    launch = make_launch(job, nodes=two_nodes("n", gpus), prepared=prepared, remote_shell=("rsh",), starter=SRUN)
    (made,) = MpiLauncher().commands(launch)
    return made


def scopes(made) -> dict[str, list[str]]:
    """Return the variables by ranks: "0-1 n0" -> ["NODE_RANK=0", ...]."""
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


def test_one_srun_command_has_the_variables_of_every_worker():
    made = command()
    assert made.argv[:3] == ("/usr/bin/srun", "--mpi=pmix", "/env/bin/python")
    assert made.argv[4] == "--srun"
    assert (made.node_rank, made.ranks, made.is_launcher) == (0, (0, 1, 2, 3), True)
    found = scopes(made)
    assert [scope for scope, values in found.items() if values] == ["0-1 n0", "2-3 n1"]
    for rank, scope in enumerate(("0-1 n0", "2-3 n1")):
        assert {f"NODE_RANK={rank}", "LOCAL_WORLD_SIZE=2", f"GLOO_SOCKET_IFNAME=eth{rank}"} <= set(found[scope])
    assert "LOCAL_RANK" not in str(found)  # srun sets LOCAL_RANK itself


def test_srun_command_sets_the_gpu_variable_for_each_rank():
    found = scopes(command(gpus=("0", "1")))
    assert [found[f"{rank}-{rank}"] for rank in range(4)] == [
        ["CUDA_VISIBLE_DEVICES=0"],
        ["CUDA_VISIBLE_DEVICES=1"],
    ] * 2


def test_slurm_variables_set_by_the_user_are_passed_to_workers_but_not_to_srun():
    made = command(environment_variables={"SLURM_HOSTFILE": "mine", "MINE": "1", "GLOO_SOCKET_IFNAME": "ib0"})
    assert made.environment["SLURM_CONF"] == "/etc/slurm.conf"
    assert "SLURM_HOSTFILE" not in made.environment
    assert (made.environment["MINE"], made.environment["GLOO_SOCKET_IFNAME"]) == ("1", "ib0")
    found = scopes(made)
    assert found["all"] == ["SLURM_HOSTFILE=mine"]
    assert "GLOO_SOCKET_IFNAME" not in str(found)


def test_open_mpi_tcp_traffic_is_restricted_to_the_network_of_the_nodes_by_default():
    assert command().defaults["OMPI_MCA_btl_tcp_if_include"] == "10.0.0.0/24"


@pytest.mark.parametrize(
    ("version", "kept"), [((5, 0), []), ((4, 1), ["SLURM_NODELIST", "SLURM_STEP_ID", "SLURM_JOBID"])]
)
def test_open_mpi_4_keeps_three_slurm_variables_for_workers_and_open_mpi_5_keeps_none(version, kept):
    made = command(open_mpi=("/env/bin/mpirun", version))
    assert [value for option, value in itertools.pairwise(made.argv) if option == "--keep"] == kept


def test_srun_refuses_workers_in_containers_and_names_mpirun():
    with pytest.raises(LauncherError, match=r"can't be started by srun.*mpi='mpirun'"):
        command(container={"image": "x"})
