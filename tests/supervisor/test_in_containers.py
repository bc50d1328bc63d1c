"""A run's commands in containers: on this machine, and on nodes that each found an engine of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.job.plan import REMOTE_SHELL_PYTHON, NodeSetup
from paceline.launchers import get_launcher
from paceline.runs.folder import RunFolder
from paceline.supervisor.in_containers import left_its_container, wrapped
from tests.helpers import make_job, make_launch, write_tree


def prepared(number: int) -> NodeSetup:
    """What node `number` has found: podman there, and a layer of packages whose folder no other node has."""
    container: dict[str, Any] = {
        "engine": {"kind": "podman", "path": f"/bin{number}/podman", "version": "4", "is_rootless": False},
        "image": f"image{number}",
        "mounts": [[f"/layer{number}", True]],
        "host": {
            "inside": f"/lib{number}/inside.py",
            "library": [f"/lib{number}"],
            "user": [f"--user={number}"],
            "names": {"USER": f"user{number}"},
        },
    }
    return NodeSetup(python=f"/layer{number}/bin/python", is_isolated=True, container=container)


def test_each_node_uses_its_own_container_engine_image_and_user() -> None:
    # Regression: all nodes used the image and the user of the first node. But the other nodes lacked this image and
    # this user's packages.
    job = make_job(node_count=2, distributed_backend="gloo")
    launch = replace(
        make_launch(job), prepared=(prepared(1), prepared(2)), remote_shell=("/x/rsh",), library_dir=Path("/there/lib")
    )

    commands = wrapped(get_launcher(job.launcher).commands(launch), launch, [{"OMP_NUM_THREADS": "3"}, {}])

    for number, command in enumerate(commands, start=1):
        words = " ".join(command.argv)
        assert command.argv[0] == f"/bin{number}/podman"
        assert f" -- image{number} -I -S /lib{number}/inside.py " in words
        assert f"--entrypoint=/layer{number}/bin/python" in words
        assert f"source=/layer{number},target=/layer{number},readonly" in words
        assert f"--user={number} " in words
        assert "source=/there/lib,target=/there/lib,readonly" in words
        other = 3 - number
        assert f"/layer{other}" not in words
        assert f"/lib{other}" not in words
        assert f"user{number}" in command.environment.values()
    threads = [
        [value for name, value in command.environment.items() if name.endswith("OMP_NUM_THREADS")]
        for command in commands
    ]
    assert threads[0] == ["3"], "of the node's own shell"
    assert threads[1] != ["3"]


def test_mpirun_daemon_runs_in_a_container_of_each_remote_node() -> None:
    job = make_job(
        node_count=2, process_count_per_node=2, distributed_backend="mpi", environment_variables={"MINE": "1"}
    )
    same = {"image": "sha", "engine": {"kind": "docker", "path": "/bin/docker", "version": "27", "is_rootless": False}}
    found = tuple(
        replace(one, open_mpi=("/usr/bin/mpirun", (5, 0)), container={**(one.container or {}), **same})
        for one in (prepared(1), prepared(2))
    )
    found = (found[0], replace(found[1], python=found[0].python))
    nodes = tuple(replace(node, gpus=("0",) * rank) for rank, node in enumerate(make_launch(job).nodes))
    launch = replace(make_launch(job), nodes=nodes, prepared=found, remote_shell=("/bin/sh", "/x/rsh"))

    (command,) = wrapped(get_launcher(job.launcher).commands(launch), launch, [{}, {}])

    assert command.environment[REMOTE_SHELL_PYTHON] == found[0].python
    assert f"-1-0 --label paceline.run={launch.run_id} " in " ".join(command.argv)
    assert "--gpus=all" not in command.argv
    (shell,) = command.shells
    assert shell.node_rank == 1
    assert shell.argv[-3:] == ("--", "/bin/sh", "-c"), "the command line that is asked for is one more word"
    words = " ".join(shell.argv)
    assert f"--name paceline-{launch.run_id}-1-2 --label paceline.run={launch.run_id} " in words
    assert "source=/layer2,target=/layer2,readonly" in words
    assert f"source={launch.scratch_dir},target={launch.scratch_dir}" in words
    assert "--user=2 " in words
    assert " --gpus=all " in words
    # mpirun itself passes the user's variables to its workers.
    assert {name for name in shell.environment if "USER" not in name} == {"PACELINE_RUN_ID", "PACELINE_RUN_DIR"}
    assert shell.environment["PACELINE_RUN_ID"] == launch.run_id


def test_mpirun_on_one_remote_node_needs_no_remote_shell() -> None:
    job = make_job(process_count_per_node=2, distributed_backend="mpi")
    found = (replace(prepared(1), open_mpi=("/usr/bin/mpirun", (5, 0))),)
    launch = replace(make_launch(job), prepared=found, remote_shell=("/bin/sh", "/x/rsh"))
    (command,) = wrapped(get_launcher(job.launcher).commands(launch), launch, [{}])
    assert command.shells == ()


def test_container_exit_is_ignored_if_the_script_never_started_or_still_runs(tmp_path: Path) -> None:
    # Regression: podman exits with 0 after a signal that it does not forward to the script, and the run was recorded as
    # Completed.
    contained = replace(make_launch(make_job()), prepared=(prepared(1),))
    folder = RunFolder(tmp_path)
    assert left_its_container(contained, folder, 0, lambda pid: False)
    write_tree(folder.attempt(1), {"start_0.json": '{"pid": 7}'})
    assert not left_its_container(contained, folder, 0, lambda pid: False)
    assert left_its_container(contained, folder, 0, lambda pid: pid == 7)
    assert not left_its_container(make_launch(make_job()), folder, 1, lambda pid: True)
