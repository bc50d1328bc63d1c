"""A run's containers: its commands wrapped in them, and why one did not start or ended without its script.

`paceline.containers` is loaded for runs with an image alone: every run waits for what its supervisor loads.
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
    """The commands as they are, or in containers where the nodes were prepared for them. shells: of each node."""
    if launch.prepared[0].container is None:
        return list(commands)
    # Without a remote shell all nodes are stand-ins on this machine, with one engine; else each node has found its own.
    if not launch.remote_shell:
        from paceline.containers import wrap_all

        return wrap_all(commands, launch, shell=shells[0], **_found(launch, 0))
    return [
        _with_shells(command, launch, shells) if command.is_launcher else _on_its_node(command, launch, shells)
        for command in commands
    ]


def beside_worker(launch: Launch, shells: Sequence[Mapping[str, str]], rank: int, program: str, *words: str) -> Command:
    """The command that runs one of Paceline's programs where a worker is: in its environment, and in its container where it
    has one. program: its file below the package.
    """
    place = launch.places[rank]
    command = replace(
        environment.with_paths(worker_command(launch, place), launch, shells[place.node_rank]),
        argv=(
            *(launch.prepared[place.node_rank].python, "-I", "-S"),
            *(f"{launch.library_dir}/paceline/{program}", *words),
        ),
        log=RunFolder(launch.run_dir).driver_log,
    )
    if launch.prepared[command.node_rank].container is None:
        return command
    from paceline.containers import HostFiles, wrap

    if launch.job.launcher == "mpi":
        # One container a node, or one for all that are stand-ins on this machine, named by its first rank.
        here = [
            place.rank for place in launch.places if not launch.remote_shell or place.node_rank == command.node_rank
        ]
        # `min`, for the container is named by the lowest of the ranks that it holds.
        rank = min(here)
    host = None
    if launch.remote_shell:
        container = launch.prepared[command.node_rank].container
        host = HostFiles.from_json(container["host"]) if container else None
    return wrap(
        command,
        launch,
        shell=shells[command.node_rank],
        host=host,
        beside=rank,
        **_found(launch, command.node_rank),
    )


def why_not_started(launch: Launch, exit_code: int, lines: Sequence[str]) -> str | None:
    """The engine's own reason for a worker that never came to its script; None where it was not the engine."""
    prepared = launch.prepared[0]
    if prepared.container is None:
        return None
    from paceline.containers import ContainerEngine, start_failure

    engine = ContainerEngine.from_json(prepared.container["engine"])
    return start_failure(engine, str(launch.job.environment.docker_image), prepared.python, exit_code, lines)


def _with_shells(command: Command, launch: Launch, shells: Sequence[Mapping[str, str]]) -> Command:
    """Mpirun in its node's container. It has the remote shell start its part on each other node, and that starts the workers
    there: so what the shell is asked for runs in a container of that node, one for the part and all its workers.
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
    """The command in a container of a node that has found an engine, an image and an environment of its own."""
    from paceline.containers import HostFiles, wrap

    node_rank = command.node_rank
    container = launch.prepared[node_rank].container
    assert container is not None, "all nodes were prepared for the same job"
    host = HostFiles.from_json(container["host"])
    return wrap(command, launch, shell=shells[node_rank], host=host, **_found(launch, node_rank))


def _found(launch: Launch, node_rank: int) -> dict[str, Any]:
    """The engine, image and mounts that a node was found to have for its containers, as `wrap` takes them."""
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
    """True if a worker's client has ended while its container had not, or was never made.

    podman ends with 0 at a SIGTERM that comes before it hands signals on: as if the script had ended well.
    is_alive: asked for the process that the worker has noted.
    """
    if launch.prepared[0].container is None:
        return False
    start = read_json(folder.worker_start(launch.attempt, rank))
    return start is None or is_alive(start["pid"])
