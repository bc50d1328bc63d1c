"""Build the command line that runs a command in a container, without starting it.

The container shares with the host:

    network           so that MASTER_ADDR, ports and interfaces mean the same inside
    process ids       for reported pids, signals, and Open MPI's local ranks
    /dev/shm          for NCCL: the host's or, with shm_size, one that only a node's workers share (`memory`). Apptainer always
                      uses the host's
    user              so that files in the run's folder belong to the submitter
    folders           the run's folder, and its working, scratch, library and data folders, under the same paths

All other files and variables come from the image: PATH, LD_LIBRARY_PATH, /tmp, /etc. A container also gets Paceline's
variables and the user's `environment_variables`, but not by a command line: every user could read the values.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.containers import inside
from paceline.containers.engine import ContainerEngine
from paceline.errors import LauncherError
from paceline.job.plan import Command, Launch
from paceline.system.lock_holder import user_name

#: Label that each container has, with the run's id, so that the run's containers can be found.
RUN_LABEL = "paceline.run"

# Resolve links: a container has the real folder, mounted under the real path, but not the links that lead to it.
INSIDE = str(Path(inside.__file__).resolve())


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A mount of a file or folder of the host in a container."""

    path: Path
    read_only: bool = False
    at: Path | None = None

    @property
    def target(self) -> Path:
        return self.at or self.path


@dataclass(frozen=True, kw_only=True)
class HostFiles:
    """A container's paths and options that depend on the host.

    Attributes:
        inside: The path of `inside.py`, the program that starts the command in the container.
        library: Folders to mount for `import paceline`: targets of the links in the workers' PYTHONPATH folder.
        user: The engine's options that select the user.
        names: Environment variables that hold the user's name.
    """

    inside: str
    library: tuple[str, ...]
    user: tuple[str, ...]
    names: Mapping[str, str]

    @classmethod
    def here(cls, engine: ContainerEngine, library_dir: Path) -> HostFiles:
        """Collect a container's paths and options on this machine."""
        library = tuple(str(path) for path in _library(library_dir))
        return cls(inside=INSIDE, library=library, user=tuple(_user(engine)), names=_who())

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> HostFiles:
        return cls(**{**data, "library": tuple(data["library"]), "user": tuple(data["user"])})


def wrap(
    command: Command,
    launch: Launch,
    *,
    engine: ContainerEngine,
    image: str,
    shm_size: str | None = None,
    memory: str | None = None,
    mounts: Sequence[Mount] = (),
    shell: Mapping[str, str] | None = None,
    host: HostFiles | None = None,
    beside: int | None = None,
) -> Command:
    """Return a command that runs `command` in a container.

    Args:
        command: The command, whose variables include PYTHONPATH (`with_paths`).
        launch: The launch to which the command belongs.
        engine: The container engine.
        image: The image's id or name, as `check_image` returns it.
        shm_size: The size of a private /dev/shm. Without `shm_size` and `memory`, the host's /dev/shm is used.
        memory: An idle container whose /dev/shm the new container shares, or None.
        mounts: Data and the environment's folder, besides the run's folders.
        shell: The submitter's environment variables. Their values replace the defaults of `command`.
        host: Paths and options of the node on which the command runs. None: the paths and options of this machine.
        beside: None to start a new container. A rank: podman and docker run the command in the running container whose
            lowest rank this is. Apptainer always starts a new container.

    Raises:
        LauncherError: A path can't be mounted.
    """
    prepared = launch.prepared[command.node_rank]
    host = host or HostFiles.here(engine, launch.library_dir)
    values = _variables(command, launch, shell or {}, host.names)
    folders = [
        Mount(path=launch.run_dir),
        # Mount the working folder too if it is outside of the run's folder, which happens only in tests.
        *([] if launch.work_dir.is_relative_to(launch.run_dir) else [Mount(path=launch.work_dir)]),
        Mount(path=launch.scratch_dir),
        # Files that were not copied are links to the original source folder in the working folder, so mount it too.
        *([Mount(path=launch.original_dir, read_only=True)] if launch.original_dir else []),
        *(Mount(path=path, read_only=True) for path in (launch.library_dir, *map(Path, host.library))),
        *mounts,
    ]
    # Add the environment's programs to PATH, unless the user has set PATH.
    options = (
        ["--path", prepared.bin_dir] if prepared.bin_dir and "PATH" not in launch.job.environment_variables else []
    )
    # Offer /tmp as HOME if /tmp is removed with the container. Apptainer's /tmp is the host's, where HOME's files would remain.
    for home in ("/tmp", "/var/tmp") if engine.keeps_containers else ():
        options += ["--home", home]
    # -I and -S: no code of the image's packages may run before the environment variables are set.
    inner = (prepared.python, "-I", "-S", host.inside, *options, "--home", str(launch.scratch_dir), "--", *command.argv)
    marks = {name: command.environment[name] for name in ("PACELINE_RUN_ID", "PACELINE_RUN_DIR")}
    # Only podman and docker can run a command in a running container. For apptainer, start one more container.
    if beside is not None and engine.keeps_containers:
        name = container_name(launch, beside)
        words = [engine.path, "exec", "--workdir", str(launch.work_dir)]
        words += [word for variable in values for word in ("--env", variable)]
        return replace(command, argv=(*words, name, *inner), environment=marks | dict(values), defaults={})
    argv = run_argv(
        engine,
        image,
        inner,
        run_id=launch.run_id,
        name=container_name(launch, command.ranks[0]),
        mounts=folders,
        variables=tuple(values),
        work_dir=str(launch.work_dir),
        ipc=_ipc(shm_size, memory),
        gpus=bool(launch.nodes[command.node_rank].gpus),
        user=host.user,
    )
    # The client is a process of the run, so give it the variables by which Paceline finds the run's processes.
    return replace(command, argv=argv, environment=marks | for_client(engine, values), defaults={})


def container_name(launch: Launch, rank: int) -> str:
    """Return the name of the container whose lowest rank is `rank`."""
    return f"paceline-{launch.run_id}-{launch.attempt}-{rank}"


def run_argv(
    engine: ContainerEngine,
    image: str,
    command: Sequence[str],
    *,
    run_id: str,
    name: str,
    mounts: Iterable[Mount] = (),
    variables: Sequence[str] = (),
    work_dir: str | None = None,
    ipc: Sequence[str] = ("--ipc=host",),
    gpus: bool = False,
    detach: bool = False,
    user: Sequence[str] | None = None,
) -> tuple[str, ...]:
    """Return the container engine's command line that runs `command`.

    variables: Names of environment variables that the container gets from the engine's client. user: The engine's
    options that select the user. None: the user of this process.
    """
    mounted = [word for mount in distinct(mounts) for word in ("--mount", _mount_word(mount))]
    program, *arguments = command
    if not engine.keeps_containers:
        # By default, apptainer would pass on the host's environment and home.
        words = [engine.path, "exec", "--cleanenv", "--no-home", *mounted]
        words += ["--pwd", work_dir] if work_dir else []
        words += ["--nv"] if gpus else []
        # Pass no variables on the command line: apptainer takes variables APPTAINERENV_... from its client.
        return (*words, image, *command)
    # No --init: the container shares the host's process ids. No log: Paceline keeps the client's output. No pull: a registry
    # does not know the image's local id. No health check: the image's check would run beside the workers.
    words = [engine.path, "run", "--rm", "--pull=never", "--log-driver=none", "--no-healthcheck", "--name", name]
    words += ["--detach"] if detach else []
    words += ["--label", f"{RUN_LABEL}={run_id}", "--network=host", "--pid=host", *ipc]
    # Don't check SELinux labels: relabelling (`:z`) a folder in the user's home would lock out other programs.
    words += ["--security-opt", "label=disable", *(_user(engine) if user is None else user)]
    words += _gpu_words(engine) if gpus else []
    words += mounted
    words += ["--workdir", work_dir] if work_dir else []
    # Pass only the name: the engine takes the value from the client's environment, so no command line shows it.
    words += [word for variable in variables for word in ("--env", variable)]
    # Replace the image's entry point, which would take the command as its arguments.
    return (*words, f"--entrypoint={program}", "--", image, *arguments)


def for_client(engine: ContainerEngine, values: Mapping[str, str]) -> dict[str, str]:
    """Return variables for the container engine's client that set `values` in the container."""
    if engine.keeps_containers:
        return dict(values)
    # The variable APPTAINERENV_NAME sets NAME in the container, even with --cleanenv.
    return {f"{engine.kind.upper()}ENV_{name}": value for name, value in values.items()}


def _library(library_dir: Path) -> list[Path]:
    links = sorted(library_dir.iterdir()) if library_dir.is_dir() else []
    package = Path(INSIDE).parent.parent
    # Skip a broken link: engines refuse to mount a missing path.
    return list(dict.fromkeys([package, *(link.resolve() for link in links if link.is_symlink() and link.exists())]))


def distinct(mounts: Iterable[Mount]) -> list[Mount]:
    """Return the mounts, outer folders first, without redundant inner mounts."""
    by_target: dict[Path, Mount] = {}
    for mount in mounts:
        # Engines allow one mount per target: keep the last mount, and make it writable if any mount of this target is writable.
        known = by_target.get(mount.target)
        by_target[mount.target] = replace(mount, read_only=mount.read_only and (known is None or known.read_only))
    kept: dict[Path, Mount] = {}
    for target in sorted(by_target, key=lambda path: len(path.parts)):
        mount = by_target[target]
        # `parents` begins with the innermost folder, so `next` returns the innermost mount around the target.
        above = next((kept[parent] for parent in target.parents if parent in kept), None)
        # Drop the inner mount only if the outer mount has the same files and rights.
        if above is None or above.read_only != mount.read_only or mount.at or above.at:
            kept[target] = mount
    return list(kept.values())


def _ipc(shm_size: str | None, memory: str | None) -> tuple[str, ...]:
    if memory is not None:
        return (f"--ipc=container:{memory}",)
    return ("--ipc=private", f"--shm-size={shm_size}") if shm_size else ("--ipc=host",)


def _mount_word(mount: Mount) -> str:
    # Refuse a path with a line break, because the engine reads the mount's words as one line of CSV.
    for path in (str(mount.path), str(mount.target)):
        if not path.startswith("/") or "\n" in path or "\r" in path:
            raise LauncherError(
                f"{path!r} can't be mounted in a container: a path has to be absolute and without line breaks. "
                "Put the workspace and the data elsewhere."
            )
    words = ["type=bind", f"source={mount.path}", f"target={mount.target}", *(["readonly"] if mount.read_only else [])]
    return ",".join('"' + word.replace('"', '""') + '"' if set(word) & {",", '"'} else word for word in words)


def _variables(command: Command, launch: Launch, shell: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    """Return the container's variables, with a prefix that `inside.py` removes.

    Paceline's own variables have no prefix: programs outside of the container recognize the run's processes by them.
    """
    users = launch.job.environment_variables
    values: dict[str, str] = {}
    for name, value in command.environment.items():
        if name == "PATH" and name not in users:
            continue  # this is the host's PATH, but the container uses the image's PATH
        values[name if name.startswith("PACELINE_") else inside.SET + name] = value
    for name, value in {**names, **command.defaults}.items():
        if name not in command.environment:
            # A variable of the user's shell or of the image takes precedence over Paceline's default.
            own = name in command.defaults and name in shell
            values[(inside.SET if own else inside.DEFAULT) + name] = shell[name] if own else value
    return values


def _who() -> dict[str, str]:
    name = user_name(os.getuid())
    return {"USER": name, "LOGNAME": name}


def _user(engine: ContainerEngine) -> list[str]:
    """Return the container engine's options that select the host's user."""
    uid, gid = os.getuid(), os.getgid()
    if engine.kind == "podman":
        # Without keep-id, rootless podman maps the user to a subordinate id, which can't write to the run's folder.
        return ["--userns=keep-id", f"--user={uid}:{gid}"] if engine.is_rootless and uid else [f"--user={uid}:{gid}"]
    if engine.is_rootless:
        # Rootless docker has no keep-id. The container's root is the calling user on the host, so files belong to this user.
        return ["--user=0:0"]
    # Docker's daemon sets only one group, but shared folders often need the user's other groups.
    groups = sorted({group for group in os.getgroups() if group != gid}) if uid else []
    return [f"--user={uid}:{gid}", *(word for group in groups for word in ("--group-add", str(group)))]


def _gpu_words(engine: ContainerEngine) -> list[str]:
    # Pass all GPUs: a subset would be numbered from 0, and CUDA_VISIBLE_DEVICES would name other GPUs.
    return ["--device=nvidia.com/gpu=all"] if engine.kind == "podman" else ["--gpus=all"]
