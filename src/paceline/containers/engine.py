"""Find a container engine that works.

A program with the right name may not work: docker needs its daemon, and a program `docker` may be podman. So this
module asks each program for its name, and for an answer that only a working engine can give.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from paceline.errors import EngineError, LauncherError
from paceline.system import processes

#: Variable that names the engine to use: a program on PATH, or a path.
ENGINE_VARIABLE = "PACELINE_CONTAINER_ENGINE"

#: Engines in the order of preference. Podman needs no daemon, and its containers are children of their run.
_PROGRAMS = ("podman", "docker", "apptainer", "singularity")
# Matches a version text such as "podman version 4.9.3", "Docker version 24.0.7, build afdd53b", "singularity-ce version 4.1.0".
_NAMES_ITSELF = re.compile(r"(?im)^(podman|docker|apptainer|singularity)(?:-ce|-pro)?\s+version:?\s+v?([^\s,]+)")
#: Seconds to wait for an engine's answer. podman's first call after a boot sets up its storage, which may take long.
_ANSWER_S = 60.0


@dataclass(frozen=True, kw_only=True)
class ContainerEngine:
    """A working container engine.

    Attributes:
        kind: "podman", "docker", "apptainer" or "singularity", as the program itself reports.
        path: The path of the engine's client.
        is_rootless: Whether root in a container is the calling user on the host. None: podman was not asked.
    """

    kind: str
    path: str
    version: str
    is_rootless: bool | None = False

    @property
    def keeps_containers(self) -> bool:
        """Whether containers can outlast their client, unlike Apptainer's."""
        return self.kind in ("podman", "docker")

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ContainerEngine:
        return cls(**data)

    def __str__(self) -> str:
        return f"{self.kind} {self.version}{' (rootless)' if self.is_rootless else ''}"


def find_engine(environment: Mapping[str, str] | None = None, *, to_start: bool = True) -> ContainerEngine:
    """Return the container engine that `PACELINE_CONTAINER_ENGINE` names, or else the first working engine.

    Args:
        environment: Environment variables. None: this process's variables.
        to_start: Also ask podman whether it is rootless. Only callers that start containers need this; it takes 0.2 s.

    Raises:
        LauncherError: No engine works. The message lists the tried programs, their problems, and how to install one.
        EngineError: No engine works, and at least one program did not answer in time.
    """
    variables = os.environ if environment is None else environment
    named = variables.get(ENGINE_VARIABLE)
    reasons, is_silent = [], False
    for program in (named,) if named else _PROGRAMS:
        path = shutil.which(program, path=variables.get("PATH", os.defpath))
        if path is None:
            reasons.append(f"there is no {program} on PATH" if os.sep not in program else f"{program} can't be run")
            continue
        try:
            # Make the path absolute: processes of a run start in other folders, and PATH may have relative entries.
            answer = _ask(os.path.abspath(path), variables, to_start)
        except subprocess.TimeoutExpired as error:
            is_silent = True
            answer = f"`{shlex.join(error.cmd[:2])}` gave no answer in {_ANSWER_S:g} s"
        if isinstance(answer, ContainerEngine):
            return answer
        reasons.append(answer)
    if is_silent:
        raise EngineError(
            f"custom_docker_image needs a container engine, and none answers: {'; '.join(reasons)}. Call the engine by hand "
            f"first, then try again; or name another engine with {ENGINE_VARIABLE}."
        )
    if named:
        raise LauncherError(
            f"{ENGINE_VARIABLE}={named!r}, but {reasons[0]}. Name a podman, docker or apptainer that works, or unset it."
        )
    raise LauncherError(
        "custom_docker_image needs podman, docker or apptainer, and none of them can be used: "
        f"{'; '.join(reasons)}. Install podman (apt-get install podman, dnf install podman), or start Docker's daemon, "
        f"or name an engine elsewhere with {ENGINE_VARIABLE}."
    )


def _ask(path: str, variables: Mapping[str, str], to_start: bool) -> ContainerEngine | str:
    code, text = _output([path, "--version"], variables)
    itself = _NAMES_ITSELF.search(text)
    if code != 0 or itself is None:
        return f"{path} is not a known container engine ({_first_line(text) or f'exit code {code}'})"
    kind, version = itself[1].lower(), itself[2]
    if kind == "podman":
        return _podman(path, version, variables, to_start)
    if kind == "docker":
        return _docker(path, variables)
    # apptainer needs no further checks: it has no daemon, and always runs as the calling user.
    return ContainerEngine(kind=kind, path=path, version=version, is_rootless=True)


def _podman(path: str, version: str, variables: Mapping[str, str], to_start: bool) -> ContainerEngine | str:
    if to_start:
        questions = [["info", "--format", "{{.Host.Security.Rootless}} {{.Host.ServiceIsRemote}}"]]
    else:
        # `ps` fails if podman does not work, whereas `version` succeeds anyway. Only a remote podman reports a server.
        questions = [["ps", "--quiet"], ["version", "--format", "unknown {{if .Server}}true{{else}}false{{end}}"]]
    for question in questions:
        code, text = _output([path, *question], variables)
        if code != 0:
            break
    answer = text.split()
    if code != 0 or len(answer) < 2:
        return f"{path} does not work: {_last_line(text) or f'`podman {question[0]}` ended with exit code {code}'}"
    if answer[-1] == "true":
        # This podman is the client of a `podman machine`, as on macOS, or of a remote host.
        return f"{path} serves another machine, where this one's folders are not"
    is_rootless = {"true": True, "false": False}.get(answer[-2])
    return ContainerEngine(kind="podman", path=path, version=version, is_rootless=is_rootless)


def is_rootless(engine: ContainerEngine) -> bool:
    """Return whether the container engine runs without root, False if unknown."""
    if engine.is_rootless is None:
        try:
            answer = _podman(engine.path, engine.version, os.environ, to_start=True)
        except subprocess.TimeoutExpired:
            return False
        return isinstance(answer, ContainerEngine) and bool(answer.is_rootless)
    return engine.is_rootless


def _docker(path: str, variables: Mapping[str, str]) -> ContainerEngine | str:
    code, text = _output([path, "info", "--format", "server={{.ServerVersion}} {{json .SecurityOptions}}"], variables)
    server = re.search(r"server=(\S+) (.*)", text)
    # Older docker clients return exit code 0 and an empty version if there is no daemon.
    if code != 0 or server is None:
        reason = _last_line(text) or f"`docker info` ended with exit code {code}"
        return f"{path} has no daemon that answers it: {reason}"
    return ContainerEngine(kind="docker", path=path, version=server[1], is_rootless="name=rootless" in server[2])


def _output(argv: list[str], variables: Mapping[str, str]) -> tuple[int, str]:
    """Run a program. Return its exit code and combined output.

    Raises:
        subprocess.TimeoutExpired: The program timed out.
    """
    try:
        done = processes.said_by(argv, timeout_s=_ANSWER_S, environment=variables)
    except OSError as error:
        return -1, error.strerror or str(error)
    # Put standard output last, or after a failure standard error, because callers read the last line.
    if done.returncode != 0:
        return done.returncode, f"{done.stdout}\n{done.stderr}"
    return done.returncode, f"{done.stderr}\n{done.stdout}"


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "").rstrip(".")
