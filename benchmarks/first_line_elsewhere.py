"""From the shell to the first line of a trivial script on other machines: paceline against the engine's own tool.

    ssh              mpirun over ssh, two hosts
    slurm            sbatch of a script that starts the program on two nodes by srun
    ray              ray job submit of a program that starts the script on two nodes
    ray_one          ray job submit of the script itself, with a CPU of its own
    ray_datastore    as ray, where the cluster does not see the workspace; ray job submit takes a working directory

The machines are network namespaces of this one, as in the tests; all sides run on the same ones, in turn. The script
writes down when its first line ran; the last worker's counts.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import paceline as pl
from common import in_turn, median, program, report, seconds_to_marks
from elsewhere import Elsewhere, ray, slurm, ssh, wanted
from paceline.data.stores.datastore import Datastore

ROUNDS = 7
#: Ray's own tool takes seconds to end, so there are fewer.
RAY_ROUNDS = 3
GLOO = ("-j", "2x1", "--backend", "gloo")

SCRIPT = """
import os, time
now = time.time()
rank = next((os.environ[name] for name in ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID") if name in os.environ), "0")
with open(os.path.join({marks!r}, rank), "w") as file:
    file.write(repr(now))
"""

#: Two workers on two nodes, by Ray's own means: what paceline asks of Ray, too.
BY_RAY = """
import os, subprocess, sys
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

ray.init()
group = placement_group([{"CPU": 1}] * 2, strategy="STRICT_SPREAD")
group.wait(60)
script = open(sys.argv[1]).read()

@ray.remote(num_cpus=1)
def work(rank):
    subprocess.run([sys.executable, "-c", script], env={**os.environ, "RANK": str(rank)}, check=True)

def at(rank):
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)

ray.get([work.options(scheduling_strategy=at(rank)).remote(rank) for rank in range(2)])
"""


def script_in(there: Elsewhere) -> Path:
    """The script, in a folder of its own."""
    source = there.folder / "source"
    source.mkdir()
    (source / "trivial.py").write_text(SCRIPT.format(marks=str(there.folder / "marks")))
    return source / "trivial.py"


def compare(
    there: Elsewhere, name: str, where: str, tool: str, ours: list[str], theirs: list[str], rounds: int = ROUNDS
) -> None:
    """Run both in turn and report. theirs: the engine's own command."""

    def side(command: list[str]) -> Callable[[], float]:
        marks = there.folder / "marks"
        return functools.partial(seconds_to_marks, marks, command, env=there.environment, cwd=there.folder)

    mine, tools = in_turn(rounds, side(there.command("run", *ours)), side(theirs))
    more = median(mine) - median(tools)
    report(
        f"first_line_{name}",
        f"shell to first line on {where}, paceline run minus {tool}",
        "at most 1 s more",
        more <= 1.0,
        ours_s=median(mine),
        theirs_s=median(tools),
        more_s=more,
        rounds=rounds,
    )


def on_ssh() -> None:
    with ssh() as there:
        script, hosts = script_in(there), there.hosts
        bare = [program("mpirun"), "--prtemca", "plm_ssh_agent", f"ssh -F {hosts.ssh_config}"]
        bare += ["--host", ",".join(hosts.names)]
        bare += ["--prtemca", "oob_tcp_if_include", f"{hosts.own_address.rpartition('.')[0]}.0/24"]
        bare += ["--bind-to", "none", "-n", "2", sys.executable, str(script)]
        ours = there.run_words(script, "-j", "2x1", "--backend", "mpi")
        compare(there, "ssh", "2 ssh hosts", "mpirun over ssh", ours, bare)


def on_slurm() -> None:
    with slurm() as (there, _):
        script = script_in(there)
        bare = ["sbatch", "--wait", "-N2", "--ntasks-per-node=1", f"--output={there.folder}/out"]
        bare += [f"--wrap=srun {sys.executable} {script}"]
        compare(there, "slurm", "2 nodes of Slurm", "sbatch of srun", there.run_words(script, *GLOO), bare)


def on_ray() -> None:
    with ray() as (there, lab):
        script = script_in(there)
        (script.parent / "by_ray.py").write_text(BY_RAY)
        submit = [program("ray"), "job", "submit", "--address", lab.address]
        by_ray = [sys.executable, str(script.parent / "by_ray.py"), str(script)]
        ours, rounds = there.run_words(script, *GLOO), RAY_ROUNDS
        compare(there, "ray", "2 nodes of Ray", "ray job submit", ours, [*submit, "--", *by_ray], rounds)
        bare = [*submit, "--entrypoint-num-cpus", "1", "--", sys.executable, str(script)]
        ours = there.run_words(script)
        compare(there, "ray_one", "1 node of Ray", "ray job submit of the script itself", ours, bare, rounds)
        # In /tmp, of which each host has its own.
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as workspace:
            apart = Elsewhere(
                hosts=lab.hosts,
                folder=there.folder,
                environment={**there.environment, "PACELINE_WORKSPACE": f"{workspace}/ws"},
            )
            words = ["--address", lab.address, "--token-env", "RAY_LAB_TOKEN", "--datastore", "store"]
            apart.call("compute", "add", "there", "--kind", "ray", *words)
            Datastore.register(pl.Workspace(Path(f"{workspace}/ws")), "store", str(there.folder / "store"))
            by_ray = [sys.executable, "by_ray.py", "trivial.py"]
            bare = [*submit, "--working-dir", str(script.parent), "--", *by_ray]
            ours = apart.run_words(script, *GLOO)
            compare(apart, "ray_datastore", "2 nodes of Ray apart", "ray job submit", ours, bare, rounds)


def main() -> None:
    for name in wanted():
        {"ssh": on_ssh, "slurm": on_slurm, "ray": on_ray}[name]()


if __name__ == "__main__":
    main()
