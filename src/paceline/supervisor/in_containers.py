"""Wrap commands in a run's containers, and describe failures of containers.

`paceline.containers` is imported only for runs with an image, because every run waits for the supervisor's imports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.job.plan import REMOTE_SHELL_PYTHON, Command, Launch
from paceline.launchers import environment
from paceline.launchers.processes import worker_command
from paceline.runs.folder import RunFolder
from paceline.system.files import read_json


def wrapped(commands: Sequence[Command], launch: Launch, shells: Sequence[Mapping[str, str]]) -> list[Command]:
    """Return the commands, changed to run in containers if the job has an image.

    shells: The environment variables of each node.
    """
    if launch.prepared[0].container is None:
        return list(commands)
    # Without a remote shell, one container engine on this machine runs all simulated nodes. Otherwise each node has an engine.
    if not launch.remote_shell:
        from paceline.containers import wrap_all

        return wrap_all(commands, launch, shell=shells[0], **_found(launch, 0))
    return [
        _with_shells(command, launch, shells) if command.is_launcher else _on_its_node(command, launch, shells)
        for command in commands
    ]


def beside_worker(launch: Launch, shells: Sequence[Mapping[str, str]], rank: int, program: str, *words: str) -> Command:
    """Return a command that runs a Paceline program in a worker's environment and container.

    rank: The worker's rank.
    program: The program's file, relative to the package, such as "observe/node/look.py".
    words: Arguments of the program.
    """
    place = launch.places[rank]
    command = replace(
        environment.with_paths(worker_command(launch, place), launch, shells[place.node_rank]),
        argv=(
            *(launch.prepared[place.node_rank].python, "-I", "-S"),
            *(f"{launch.library_dir}/paceline/{program}", *words),
        ),
        log=RunFolder(launch.run_dir).driver_log,
        # Use no spare (a pre-started Python process), because it can fork only workers.
        spare="",
    )
    if launch.prepared[command.node_rank].container is None:
        return command
    from paceline.containers import HostFiles, wrap

    if launch.job.launcher == "mpi":
        # There is one container per node, or one for all simulated nodes on this machine.
        here = [
            place.rank for place in launch.places if not launch.remote_shell or place.node_rank == command.node_rank
        ]
        # The container has the name of the lowest rank in it.
        rank = min(here)
    host = None
    if launch.remote_shell:
        container = launch.prepared[command.node_rank].container
        host = HostFiles.from_json(container["host"]) if container else None
    return wrap(
        command, launch, shell=shells[command.node_rank], host=host, beside=rank, **_found(launch, command.node_rank)
    )


def why_not_started(launch: Launch, exit_code: int, lines: Sequence[str]) -> str | None:
    """Return the container engine's error if a worker's container never started."""
    prepared = launch.prepared[0]
    if prepared.container is None:
        return None
    from paceline.containers import ContainerEngine, start_failure

    engine = ContainerEngine.from_json(prepared.container["engine"])
    return start_failure(engine, str(launch.job.environment.docker_image), prepared.python, exit_code, lines)


def _with_shells(command: Command, launch: Launch, shells: Sequence[Mapping[str, str]]) -> Command:
    """Return mpirun's command, changed to run in a container of its node.

    On each other node, a daemon of mpirun starts the workers. The remote shell starts this daemon in a container of the
    node, so all workers of the node run in the container.
    """
    ranks: dict[int, list[int]] = {}
    for place in launch.places:
        ranks.setdefault(place.node_rank, []).append(place.rank)
    own = {"PACELINE_RUN_ID": launch.run_id, "PACELINE_RUN_DIR": str(launch.run_dir)}
    others = [
        Command(argv=("/bin/sh", "-c"), environment=own, node_rank=node_rank, ranks=tuple(there), log=command.log)
        for node_rank, there in ranks.items()
        if node_rank != command.node_rank
    ]
    python = {REMOTE_SHELL_PYTHON: launch.prepared[command.node_rank].python} if others else {}
    return replace(
        _on_its_node(replace(command, environment=command.environment | python), launch, shells),
        shells=tuple(_on_its_node(other, launch, shells) for other in others),
    )


def _on_its_node(command: Command, launch: Launch, shells: Sequence[Mapping[str, str]]) -> Command:
    from paceline.containers import HostFiles, wrap

    node_rank = command.node_rank
    container = launch.prepared[node_rank].container
    assert container is not None, "all nodes were prepared for the same job"
    host = HostFiles.from_json(container["host"])
    return wrap(command, launch, shell=shells[node_rank], host=host, **_found(launch, node_rank))


def _found(launch: Launch, node_rank: int) -> dict[str, Any]:
    from paceline.containers import ContainerEngine, Mount

    container = launch.prepared[node_rank].container
    assert container is not None, "all nodes were prepared for the same job"
    return {
        "engine": ContainerEngine.from_json(container["engine"]),
        "image": container["image"],
        "shm_size": launch.job.environment.shm_size,
        "mounts": [Mount(path=Path(path), read_only=read_only) for path, read_only in container["mounts"]],
    }


def left_its_container(launch: Launch, folder: RunFolder, rank: int, is_alive: Callable[[int], bool]) -> bool:
    """Return whether the container's client ended although the worker runs or never started.

    A podman client that gets SIGTERM too early exits with 0, as if the script had succeeded. False without a container.

    is_alive: Returns whether a process with this pid runs.
    """
    if launch.prepared[0].container is None:
        return False
    start = read_json(folder.worker_start(launch.attempt, rank))
    return start is None or is_alive(start["pid"])
