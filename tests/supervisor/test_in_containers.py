"""A run's commands in containers: on this machine, and on nodes that each found an engine of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.launchers import get_launcher
from paceline.plan import Prepared
from paceline.supervisor.in_containers import wrapped
from tests.helpers import make_job, make_launch


def prepared(number: int) -> Prepared:
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
    return Prepared(python=f"/layer{number}/bin/python", is_isolated=True, container=container)


def test_each_node_s_container_is_of_its_own_engine_image_and_user() -> None:
    # Story: what the first node had found was used for all, and the others had neither that image nor those packages.
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
