"""The machines on which the benchmarks of other targets run: network namespaces of this one, as in the tests."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from common import program

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.engines import ray_lab, slurm_lab
from tests.engines.hosts import Hosts, missing


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """A target `there` in a workspace of its own. folder: seen by all its machines."""

    hosts: Hosts
    folder: Path
    environment: Mapping[str, str]

    def command(self, *words: str) -> list[str]:
        return [program("paceline"), *words]

    def run_words(self, script: Path, *options: str) -> list[str]:
        """What runs a script on the target."""
        return [str(script), "--compute", "there", "--python", sys.executable, *options]

    def call(self, *words: str) -> str:
        """What a call of paceline prints."""
        done = subprocess.run(self.command(*words), env=self.environment, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(self, script: Path, *options: str) -> Path:
        """The folder of a run that was submitted."""
        told = json.loads(self.call("submit", "--json", *self.run_words(script, *options)))
        return Path(self.environment["PACELINE_WORKSPACE"]) / "runs" / told["run_id"]


@contextlib.contextmanager
def ssh(count: int = 2, *settings: str) -> Iterator[Elsewhere]:
    with Hosts("pq", private=()).up(count) as hosts:
        environment = {**hosts.ssh_environment()}
        if os.geteuid() == 0:
            environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        words = ("--hosts", ",".join(hosts.names), "--ssh-config", str(hosts.ssh_config))
        yield _there(hosts, environment, "ssh", *words, *settings)


@contextlib.contextmanager
def slurm() -> Iterator[tuple[Elsewhere, slurm_lab.SlurmLab]]:
    with slurm_lab.cluster("pq") as lab:
        yield _there(lab.hosts, lab.environment, "slurm"), lab


@contextlib.contextmanager
def ray() -> Iterator[tuple[Elsewhere, ray_lab.RayLab]]:
    with ray_lab.cluster() as lab:
        token = {ray_lab.TOKEN_VARIABLE: ray_lab.TOKEN, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": ray_lab.TOKEN}
        yield _there(lab.hosts, token, "ray", "--address", lab.address, "--token-env", ray_lab.TOKEN_VARIABLE), lab


#: name -> what this machine lacks for it, in words.
LACKS = {"ssh": missing, "slurm": slurm_lab.missing, "ray": ray_lab.missing}


def wanted() -> Iterator[str]:
    """The engines that the command line names, or all, without those that this machine can't have."""
    for name, lacks in LACKS.items():
        if lack := lacks():
            print(f"skipped {name}: this machine lacks {lack}")
        elif len(sys.argv) == 1 or name in sys.argv[1:]:
            yield name


def _there(hosts: Hosts, environment: Mapping[str, str], kind: str, *settings: str) -> Elsewhere:
    folder = hosts.folder / "bench"
    folder.mkdir()
    environment = {**os.environ, **environment, "PACELINE_WORKSPACE": str(folder / "ws")}
    found = Elsewhere(hosts=hosts, folder=folder, environment=environment)
    found.call("compute", "add", "there", "--kind", kind, *settings)
    return found
