"""A run's containers: its commands wrapped in them, why one did not start, and none of them left in the end.

`paceline.containers` is loaded for runs with an image alone: every run waits for what its supervisor loads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.errors import LauncherError
from paceline.job import Job
from paceline.plan import Command, Launch


def wrapped(commands: Sequence[Command], launch: Launch, shells: Sequence[Mapping[str, str]]) -> list[Command]:
    """The commands as they are, or in containers where the nodes were prepared for them. shells: of each node."""
    container = launch.prepared[0].container
    if container is None:
        return list(commands)
    from paceline.containers import Engine, Host, Mount, wrap, wrap_all

    shm_size = launch.job.environment.shm_size
    if not launch.remote_shell:
        made = wrap_all(
            commands,
            launch,
            engine=Engine.from_json(container["engine"]),
            image=container["image"],
            shm_size=shm_size,
            mounts=[Mount(path=Path(path), read_only=read_only) for path, read_only in container["mounts"]],
            shell=shells[0],
        )
        assert made is not None, "nobody asked to stop"
        return made
    found = []
    for command in commands:
        # Each node has found an engine, an image and an environment of its own.
        container = launch.prepared[command.node_rank].container
        assert container is not None, "all nodes were prepared for the same job"
        found.append(
            wrap(
                command,
                launch,
                engine=Engine.from_json(container["engine"]),
                image=container["image"],
                shm_size=shm_size,
                mounts=[Mount(path=Path(path), read_only=read_only) for path, read_only in container["mounts"]],
                shell=shells[command.node_rank],
                host=Host.from_json(container["host"]),
            )
        )
    return found


def why_not_started(launch: Launch, exit_code: int, lines: Sequence[str]) -> str | None:
    """The engine's own reason for a worker that never came to its script; None where it was not the engine."""
    prepared = launch.prepared[0]
    if prepared.container is None:
        return None
    from paceline.containers import Engine, start_failure

    engine = Engine.from_json(prepared.container["engine"])
    return start_failure(engine, str(launch.job.environment.docker_image), prepared.python, exit_code, lines)


def remove_containers(job: Job, run_id: str) -> None:
    """End what an engine still has of the run; nothing for a run without an image. Never raises."""
    if job.environment.docker_image is None:
        return
    from paceline.containers import find_engine, remove

    try:
        remove(find_engine(), run_id)
    except LauncherError:
        return  # whoever took the engine away took its containers with it
