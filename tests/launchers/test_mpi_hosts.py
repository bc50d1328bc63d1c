from __future__ import annotations

import itertools

import pytest

from paceline.errors import LauncherError
from paceline.job.plan import NodeSetup
from paceline.launchers.mpi import MpiLauncher
from tests.helpers import make_job, make_launch
from tests.launchers.two_nodes import two_nodes

MPI = ("/env/bin/mpirun", (5, 0))


def launch(open_mpi=MPI, **values):
    """Two hosts of two workers, and a remote shell."""
    given = {
        "nodes": two_nodes("h"),
        "prepared": (NodeSetup(python="/env/bin/python", open_mpi=open_mpi),) * 2,
        "remote_shell": ("/env/bin/python", "/lib/a b/rsh.py"),
    }
    job = make_job(
        distributed_backend="mpi", node_count=2, process_count_per_node=2, environment_variables={"MINE": "1"}
    )
    return make_launch(job, **(given | values))


def pairs(argv):
    return list(itertools.pairwise(argv))


@pytest.mark.parametrize(
    ("version", "setting", "plm", "agent"),
    [((5, 0), "--prtemca", "ssh", "plm_ssh_agent"), ((4, 1), "--mca", "rsh", "plm_rsh_agent")],
)
def test_mpirun_uses_the_runs_remote_shell_for_other_hosts(version, setting, plm, agent):
    (command,) = MpiLauncher().commands(launch(open_mpi=("/env/bin/mpirun", version)))
    triples = list(zip(command.argv, command.argv[1:], command.argv[2:], strict=False))
    assert (setting, "plm", plm) in triples
    assert (setting, agent, "/env/bin/python '/lib/a b/rsh.py'") in triples
    assert (setting, "oob_tcp_keepalive_time", "5") in triples
    assert ("--mca", "btl_tcp_if_include", "10.0.0.0/24") in triples
    assert ("--host", "10.0.0.1:2,10.0.0.2:2") in pairs(command.argv)


def test_each_worker_starts_on_its_host_with_its_variables():
    (command,) = MpiLauncher().commands(launch())
    contexts = [
        list(part) for is_colon, part in itertools.groupby(command.argv, lambda word: word == ":") if not is_colon
    ]
    hosts = [context[context.index("-n") + 3] for context in contexts]
    assert hosts == ["10.0.0.1:2", "10.0.0.2:2"]
    interfaces = [word for context in contexts for word in context if "GLOO_SOCKET_IFNAME" in word]
    assert interfaces == [f"=GLOO_SOCKET_IFNAME=eth{rank}" for rank in (0, 1)]
    assert not any("LOCAL_RANK=" in word for word in command.argv)  # Open MPI sets the local rank itself


def test_mpirun_forwards_paceline_and_user_variables_to_other_hosts_but_not_gloo_socket_ifname():
    (command,) = MpiLauncher().commands(launch())
    forwarded = {value for word, value in pairs(command.argv) if word == "-x"}
    assert {
        "WORLD_SIZE",
        "MASTER_ADDR",
        "PYTHONPATH",
        "PATH",
        "PACELINE_RUN_DIR",
        "OMP_NUM_THREADS",
        "MINE",
    } <= forwarded
    assert "GLOO_SOCKET_IFNAME" not in forwarded


def test_nodes_with_different_open_mpi_versions_are_refused_and_the_error_names_each_version():
    prepared = (
        NodeSetup(python="/env/bin/python", open_mpi=MPI),
        NodeSetup(python="/env/bin/python", open_mpi=("/usr/bin/mpirun", (4, 1))),
    )
    with pytest.raises(LauncherError, match=r"h0 has /env/bin/mpirun \(5\.0\).*h1 has /usr/bin/mpirun \(4\.1\)"):
        MpiLauncher().commands(launch(prepared=prepared))


def in_images(*images, version=(5, 0)):
    """The arguments of a launch in containers of these images."""
    prepared = tuple(
        NodeSetup(python="/usr/bin/python3", open_mpi=("/usr/bin/mpirun", version), container={"image": image})
        for image in images
    )
    return {"prepared": prepared}


@pytest.mark.parametrize(
    ("version", "setting"),
    [((5, 0), ("--prtemca", "plm_ssh_num_concurrent", "2")), ((4, 1), ("--mca", "plm_rsh_num_concurrent", "2"))],
)
def test_open_mpi_daemon_in_a_container_stays_in_the_foreground(version, setting):
    # Regression: Open MPI's daemon went to the background. Then the container's first process ended, and with it the daemon.
    (command,) = MpiLauncher().commands(launch(**in_images("sha", "sha", version=version)))
    assert setting in list(zip(command.argv, command.argv[1:], command.argv[2:], strict=False))
    assert "--leave-session-attached" in command.argv
    (outside,) = MpiLauncher().commands(launch())
    assert "--leave-session-attached" not in outside.argv


def test_nodes_with_different_images_are_refused_and_the_error_names_the_image_of_each_node():
    # podman omits the prefix "sha256:" of an id, but docker does not.
    MpiLauncher().commands(launch(**in_images("sha256:" + "ab" * 32, "ab" * 32)))
    with pytest.raises(
        LauncherError, match=r"the same image on each: .* is abababababab on h0 and c{12} on h1\. .*sha256"
    ):
        MpiLauncher().commands(launch(**in_images("sha256:" + "ab" * 32, "c" * 64)))
