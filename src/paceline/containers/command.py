"""The command line that runs a command in a container, as a pure function of the command and its launch.

What is shared with the host, and why:

    network           MASTER_ADDR, ports and interfaces mean the same inside
    process ids       a worker's report of its pid, signals and Open MPI's local ranks too
    /dev/shm          without shm_size the host's; with it one of that size, which the workers of a node share as well
                      (memory.py), for NCCL's transport between them. Apptainer has the host's in any case
    user              files in the run's folder belong to who submitted
    run, work, scratch and library folders, data     under the same paths

The rest is the image's: PATH, LD_LIBRARY_PATH, /tmp, /etc. Of the environment only what Paceline sets and the user's
`environment_variables` go in, and no value of them ever stands on a command line, which every user of a machine can read.
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

#: On each container, with the run's id: by it they are found again.
RUN_LABEL = "paceline.run"

# Without links: only real folders are mounted, and the file has the same path inside.
INSIDE = str(Path(inside.__file__).resolve())


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A folder or file of the host that appears in the container under the same path, or at another."""

    path: Path
    read_only: bool = False
    at: Path | None = None

    @property
    def target(self) -> Path:
        return self.at or self.path


@dataclass(frozen=True, kw_only=True)
class HostFiles:
    """The machine that a container is on, as far as the container takes it over; found out on that machine.

    inside: path of `inside.py`. library: the folders that links on the workers' PYTHONPATH lead to.
    user: the engine's words for the user. names: of the user, as variables.
    """

    inside: str
    library: tuple[str, ...]
    user: tuple[str, ...]
    names: Mapping[str, str]

    @classmethod
    def here(cls, engine: ContainerEngine, library_dir: Path) -> HostFiles:
        """This machine."""
        library = tuple(str(path) for path in _library(library_dir))
        return cls(inside=INSIDE, library=library, user=tuple(_user(engine)), names=_who())

    def to_json(self) -> dict[str, Any]:
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
    """The command that runs `command` in a container of its own. `command` has its PYTHONPATH already (`with_paths`).

    image: what `check_image` returned. shm_size: of a /dev/shm of its own; memory: the container whose /dev/shm it
    shares (`hold_memory`); with neither it has the host's.
    mounts: beside the run's own folders: data, the environment's folder.
    shell: the environment that the command would have outside; it counts for those variables alone that `command` has a
        default for. host: the command's node, where that is not this machine.
    beside: the first rank of a container that runs: it is run in there, where the engine can do that, else in one like it.

    Raises:
        LauncherError: a path that can't be mounted.
    """
    prepared = launch.prepared[command.node_rank]
    host = host or HostFiles.here(engine, launch.library_dir)
    values = _variables(command, launch, shell or {}, host.names)
    folders = [
        Mount(path=launch.run_dir),
        # Within the run's folder, but for a launch that a test has made.
        *([] if launch.work_dir.is_relative_to(launch.run_dir) else [Mount(path=launch.work_dir)]),
        Mount(path=launch.scratch_dir),
        # What was not copied is linked to there.
        *([Mount(path=launch.original_dir, read_only=True)] if launch.original_dir else []),
        *(Mount(path=path, read_only=True) for path in (launch.library_dir, *map(Path, host.library))),
        *mounts,
    ]
    # A PATH that the user has set is taken as it is, without the environment's programs in front.
    options = (
        ["--path", prepared.bin_dir] if prepared.bin_dir and "PATH" not in launch.job.environment_variables else []
    )
    # The image's own temporary folders, which go with the container. Apptainer's /tmp is the host's, where nobody would remove
    # them.
    for home in ("/tmp", "/var/tmp") if engine.keeps_containers else ():
        options += ["--home", home]
    # Isolated and without site: packages of the image must not run before the environment is set.
    inner = (prepared.python, "-I", "-S", host.inside, *options, "--home", str(launch.scratch_dir), "--", *command.argv)
    marks = {name: command.environment[name] for name in ("PACELINE_RUN_ID", "PACELINE_RUN_DIR")}
    # Only podman and docker can enter a container that runs; apptainer's is a process, so another one like it is started.
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
    # By these two a run's processes are found, and the client is one.
    return replace(command, argv=argv, environment=marks | for_client(engine, values), defaults={})


def container_name(launch: Launch, rank: int) -> str:
    """Of the container that has this rank, and no lower one."""
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
    """The engine's command line that runs `command` in a container.

    variables: names, whose values the client has. user: the engine's words for it; None for this process's own.
    """
    mounted = [word for mount in distinct(mounts) for word in ("--mount", _mount_word(mount))]
    program, *arguments = command
    if not engine.keeps_containers:
        # Apptainer hands the host's whole environment and home in unless it is told not to.
        words = [engine.path, "exec", "--cleanenv", "--no-home", *mounted]
        words += ["--pwd", work_dir] if work_dir else []
        words += ["--nv"] if gpus else []
        # No names of variables: apptainer takes them out of the client's own environment, see `for_client`.
        return (*words, image, *command)
    # No --init: there is no first process to replace in the host's process ids. No log: the client's output is kept.
    # No pull: the image is named by the id that `check_image` has found, which no registry knows. No health check: an image's
    # own would run beside the workers.
    words = [engine.path, "run", "--rm", "--pull=never", "--log-driver=none", "--no-healthcheck", "--name", name]
    words += ["--detach"] if detach else []
    words += ["--label", f"{RUN_LABEL}={run_id}", "--network=host", "--pid=host", *ipc]
    # Folders of the user's home keep their SELinux labels: relabelling them (`:z`) would lock other programs out.
    words += ["--security-opt", "label=disable", *(_user(engine) if user is None else user)]
    words += _gpu_words(engine) if gpus else []
    words += mounted
    words += ["--workdir", work_dir] if work_dir else []
    # The name alone: the engine takes the value out of the client's environment, so it stands on no command line.
    words += [word for variable in variables for word in ("--env", variable)]
    # An image's own entry point would take the command for its arguments.
    return (*words, f"--entrypoint={program}", "--", image, *arguments)


def for_client(engine: ContainerEngine, values: Mapping[str, str]) -> dict[str, str]:
    """The client's own variables by which the container gets these."""
    if engine.keeps_containers:
        return dict(values)
    # APPTAINERENV_NAME is set inside as NAME, --cleanenv or not.
    return {f"{engine.kind.upper()}ENV_{name}": value for name, value in values.items()}


def _library(library_dir: Path) -> list[Path]:
    """The packages that links in the folder on the workers' PYTHONPATH lead to."""
    links = sorted(library_dir.iterdir()) if library_dir.is_dir() else []
    package = Path(INSIDE).parent.parent
    # A link that leads nowhere is passed over: engines refuse to mount what is not there.
    return list(dict.fromkeys([package, *(link.resolve() for link in links if link.is_symlink() and link.exists())]))


def distinct(mounts: Iterable[Mount]) -> list[Mount]:
    """The mounts without those that another one brings along; outer folders first, since later ones lie over them."""
    by_target: dict[Path, Mount] = {}
    for mount in mounts:
        # Engines take one mount for each target. Asked for twice, it can be written to if either wants that.
        known = by_target.get(mount.target)
        by_target[mount.target] = replace(mount, read_only=mount.read_only and (known is None or known.read_only))
    kept: dict[Path, Mount] = {}
    for target in sorted(by_target, key=lambda path: len(path.parts)):
        mount = by_target[target]
        # `parents` goes from the inside outwards, so this is the mount in which the target is to be seen already.
        above = next((kept[parent] for parent in target.parents if parent in kept), None)
        # Left out only where the outer mount shows the same files with the same rights.
        if above is None or above.read_only != mount.read_only or mount.at or above.at:
            kept[target] = mount
    return list(kept.values())


def _ipc(shm_size: str | None, memory: str | None) -> tuple[str, ...]:
    if memory is not None:
        return (f"--ipc=container:{memory}",)
    return ("--ipc=private", f"--shm-size={shm_size}") if shm_size else ("--ipc=host",)


def _mount_word(mount: Mount) -> str:
    """One line of comma-separated values, as all engines read it: a path may hold colons, commas and quotes."""
    # The words are read as one line of CSV, which has no way to write a line break.
    for path in (str(mount.path), str(mount.target)):
        if not path.startswith("/") or "\n" in path or "\r" in path:
            raise LauncherError(
                f"{path!r} can't be mounted in a container: a path has to be absolute and without line breaks. "
                "Put the workspace and the data elsewhere."
            )
    words = ["type=bind", f"source={mount.path}", f"target={mount.target}", *(["readonly"] if mount.read_only else [])]
    return ",".join('"' + word.replace('"', '""') + '"' if set(word) & {",", '"'} else word for word in words)


def _variables(command: Command, launch: Launch, shell: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    """The variables under the names by which they cross into the container.

    The names of our own are the same on both sides, so that a container's first process is known by them as well.
    """
    users = launch.job.environment_variables
    values: dict[str, str] = {}
    for name, value in command.environment.items():
        if name == "PATH" and name not in users:
            continue  # the host's
        values[name if name.startswith("PACELINE_") else inside.SET + name] = value
    for name, value in {**names, **command.defaults}.items():
        if name not in command.environment:
            # A value of the user's shell goes before a default of ours, as it does without a container; our default yields to
            # the image's own value.
            own = name in command.defaults and name in shell
            values[(inside.SET if own else inside.DEFAULT) + name] = shell[name] if own else value
    return values


def _who() -> dict[str, str]:
    """Names for a user id that the image's /etc/passwd does not have; `getpass.getuser()`, and so torch, fails without."""
    name = user_name(os.getuid())
    return {"USER": name, "LOGNAME": name}


def _user(engine: ContainerEngine) -> list[str]:
    """The same user inside: in a rootless engine's user namespace, that is, whom the engine maps there."""
    uid, gid = os.getuid(), os.getgid()
    if engine.kind == "podman":
        # Without keep-id, rootless podman maps this number to one of the user's subordinate ids, who can't write to the run's
        # folder.
        return ["--userns=keep-id", f"--user={uid}:{gid}"] if engine.is_rootless and uid else [f"--user={uid}:{gid}"]
    if engine.is_rootless:
        # Rootless docker has no keep-id: its root is the user outside, so files come out as theirs.
        return ["--user=0:0"]
    # Docker's daemon starts with the one group that is named; shared folders often need the others.
    groups = sorted({group for group in os.getgroups() if group != gid}) if uid else []
    return [f"--user={uid}:{gid}", *(word for group in groups for word in ("--group-add", str(group)))]


def _gpu_words(engine: ContainerEngine) -> list[str]:
    # All of them: given some alone, a container numbers those from 0, and CUDA_VISIBLE_DEVICES would name others.
    return ["--device=nvidia.com/gpu=all"] if engine.kind == "podman" else ["--gpus=all"]
