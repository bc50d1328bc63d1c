"""From the shell to the first line of a trivial script on other machines: paceline against the engine's own tool.

    ssh     mpirun over ssh, two hosts
    slurm   sbatch of a script that starts the program on two nodes by srun
    ray     ray job submit

The machines are network namespaces of this one, as in the tests; all sides run on the same ones, in turn. The script
writes down when its first line ran; the last worker's counts.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from common import in_turn, median, program, report, seconds_to_marks

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.engines import ray_lab, slurm_lab
from tests.engines.hosts import Hosts, missing

ROUNDS = 7

SCRIPT = """
import os, time
now = time.time()
rank = next((os.environ[name] for name in ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID") if name in os.environ), "0")
with open(os.path.join({marks!r}, rank), "w") as file:
    file.write(repr(now))
"""


def sides(folder: Path, environment: Mapping[str, str], *commands: list[str]) -> list[Callable[[], float]]:
    """For each command, what gives the seconds from its start until the last worker has come to its first line."""
    marks = folder / "marks"
    (folder / "source").mkdir()
    (folder / "source" / "trivial.py").write_text(SCRIPT.format(marks=str(marks)))
    env = {**os.environ, **environment}
    return [functools.partial(seconds_to_marks, marks, command, env=env, cwd=folder) for command in commands]


def tell(name: str, tool: str, figures: list[list[float]]) -> None:
    ours, theirs = figures
    more = median(ours) - median(theirs)
    report(
        f"first_line_{name}",
        f"shell to first line on {name}, paceline run minus {tool}",
        "at most 1 s more",
        more <= 1.0,
        ours_s=median(ours),
        theirs_s=median(theirs),
        more_s=more,
        rounds=ROUNDS,
    )


def paceline_run(folder: Path, *options: str) -> list[str]:
    words = ["run", str(folder / "source" / "trivial.py"), "--compute", "there", "--python", sys.executable]
    return [program("paceline"), *words, *options]


def add_target(environment: Mapping[str, str], *words: str) -> None:
    command = [program("paceline"), "compute", "add", "there", *words]
    subprocess.run(command, check=True, env={**os.environ, **environment}, capture_output=True)


def on_ssh() -> None:
    with Hosts("pq", private=()).up(2) as hosts:
        folder = hosts.folder / "bench"
        folder.mkdir()
        environment = {"PACELINE_WORKSPACE": str(folder / "ws"), **hosts.ssh_environment()}
        if os.geteuid() == 0:
            environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        names = ",".join(hosts.names)
        add_target(environment, "--kind", "ssh", "--hosts", names, "--ssh-config", str(hosts.ssh_config))
        bare = [program("mpirun"), "--prtemca", "plm_ssh_agent", f"ssh -F {hosts.ssh_config}", "--host", names]
        bare += ["--prtemca", "oob_tcp_if_include", f"{hosts.own_address.rpartition('.')[0]}.0/24"]
        bare += ["--bind-to", "none", "-n", "2", sys.executable, str(folder / "source" / "trivial.py")]
        two = paceline_run(folder, "-j", "2x1", "--backend", "mpi")
        tell("ssh", "mpirun over ssh, 2 hosts", in_turn(ROUNDS, *sides(folder, environment, two, bare)))


def on_slurm() -> None:
    with slurm_lab.cluster("pq") as lab:
        folder = lab.hosts.folder / "bench"
        folder.mkdir()
        environment = {"PACELINE_WORKSPACE": str(folder / "ws"), **lab.environment}
        add_target(environment, "--kind", "slurm")
        wrapped = f"srun {sys.executable} {folder / 'source' / 'trivial.py'}"
        bare = ["sbatch", "--wait", "-N2", "--ntasks-per-node=1", f"--output={folder}/out", f"--wrap={wrapped}"]
        two = paceline_run(folder, "-j", "2x1", "--backend", "gloo")
        tell("slurm", "sbatch of srun, 2 nodes", in_turn(ROUNDS, *sides(folder, environment, two, bare)))


def on_ray() -> None:
    lab = ray_lab.RayLab().up()
    try:
        folder = lab.folder / "bench"
        folder.mkdir()
        token = {ray_lab.TOKEN_VARIABLE: ray_lab.TOKEN, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": ray_lab.TOKEN}
        environment = {"PACELINE_WORKSPACE": str(folder / "ws"), **token}
        add_target(environment, "--kind", "ray", "--address", lab.address, "--token-env", ray_lab.TOKEN_VARIABLE)
        bare = [program("ray"), "job", "submit", "--address", lab.address, "--"]
        bare += [sys.executable, str(folder / "source" / "trivial.py")]
        tell("ray", "ray job submit", in_turn(ROUNDS, *sides(folder, environment, paceline_run(folder), bare)))
    finally:
        lab.down()


def main() -> None:
    for name, lack, run in (
        ("ssh", missing(), on_ssh),
        ("slurm", slurm_lab.missing(), on_slurm),
        ("ray", ray_lab.missing(), on_ray),
    ):
        if lack:
            print(f"skipped {name}: this machine lacks {lack}")
        elif len(sys.argv) == 1 or name in sys.argv[1:]:
            run()


if __name__ == "__main__":
    main()
