"""How long a run takes from the death of a worker to the next step, how many steps it repeats, and whether its loss is the same.

A run of 2 to 4 workers on this machine trains in float64. Again and again a worker, drawn at random, is killed by SIGKILL. The
next step counts from the moment at which the last rank has finished a step after the kill. The losses of all steps are those of
a run that nobody disturbs. The scripts are plain: DistributedDataParallel with `paceline.checkpoint`, `parallelize`, and
`hvd.elastic.run`. With `--replace` only the killed worker starts again, where the script allows it.

    python benchmarks/recovery.py [--kills 25] [--seed 1] [ddp_gloo ddp_mpi parallel_gloo parallel_mpi elastic_gloo ...]
    python benchmarks/recovery.py --replace parallel_gloo elastic_gloo
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import time
from pathlib import Path

import paceline as pl
from common import median, report, scratch

#: A checkpoint each step: what a run repeats is then what the kill interrupted.
EVERY, STEP_S, LIMIT_S = 1, 0.05, 120.0

HEAD = """
import json, os, sys, time
import torch
torch.manual_seed(3)
marks = sys.argv[1]
end = int(sys.argv[2])
rank = int(os.environ["RANK"])
log = os.open(os.path.join(marks, f"steps_{rank}"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

def done(step, loss, group=0):
    values = {"step": step, "at": time.time(), "loss": float(loss), "pid": os.getpid()}
    attempt = 1000 * int(os.environ["PACELINE_ATTEMPT"]) + group
    os.write(log, (json.dumps(values | {"attempt": attempt}) + "\\n").encode())
    if not os.path.exists(os.path.join(marks, "fast")):
        time.sleep(STEP_S)

def batch(step):
    rows = torch.randn(16, 32, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return rows, rows.sum(1, keepdim=True).sin()
""".replace("STEP_S", str(STEP_S))

DDP = (
    HEAD
    + """
import torch.distributed as dist
from paceline import checkpoint

dist.init_process_group(os.environ["BACKEND"])
size = dist.get_world_size()
net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).double()
model = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
state = {"model": net, "optimizer": optimizer}
start = 0
if found := checkpoint.latest():
    found.load_into(state)
    start = found.step
for step in range(start, end):
    x, y = batch(step)
    loss = (model(x[rank::size]) - y[rank::size]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    checkpoint.save(state, step + 1, every=EVERY)
    done(step, loss.detach())
""".replace("EVERY", str(EVERY))
)

PARALLEL = (
    HEAD
    + """
import paceline
from paceline.parallel import regroup

net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).double()
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
data = [batch(step) for step in range(end)]
rows = torch.utils.data.TensorDataset(torch.cat([x for x, _ in data]), torch.cat([y for _, y in data]))
loader = torch.utils.data.DataLoader(rows, batch_size=16)
par = paceline.parallelize(net, optimizer, loader, loss=torch.nn.functional.mse_loss, strategy=paceline.DataParallel())
par.load()
for one in par.epoch(0):
    loss = par.step(one)
    par.save(every=EVERY)
    done(par._progress.steps - 1, loss, regroup.generation or 0)
""".replace("EVERY", str(EVERY))
)

ELASTIC = (
    HEAD
    + """
import horovod.torch as hvd
from paceline.collectives import current

hvd.init()
net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).double()
optimizer = hvd.DistributedOptimizer(torch.optim.Adam(net.parameters(), 1e-3), net.named_parameters())

@hvd.elastic.run
def train(state):
    while state.step < end:
        x, y = batch(state.step)
        optimizer.zero_grad()
        loss = (net(x[rank::hvd.size()]) - y[rank::hvd.size()]).square().mean()
        loss.backward()
        optimizer.step()
        state.step += 1
        done(state.step - 1, loss.detach(), current().generation)
        state.commit()

train(hvd.elastic.TorchState(net, optimizer, step=0))
"""
)


def steps(marks: Path, rank: int) -> list[dict[str, float]]:
    try:
        return [json.loads(line) for line in (marks / f"steps_{rank}").read_text().splitlines()]
    except (FileNotFoundError, ValueError):
        return []


def wait_for_step(marks: Path, ranks: range, since: float) -> list[dict[str, float]]:
    """Wait until each rank has finished a step that began after `since`; return these steps."""
    deadline = time.time() + LIMIT_S
    while True:
        found = [next((one for one in reversed(steps(marks, rank)) if one["at"] > since), None) for rank in ranks]
        if all(found):
            return [one for one in found if one is not None]
        assert time.time() < deadline, f"no step within {LIMIT_S:g} s of a kill"
        time.sleep(0.005)


def wait_for_spare(run: pl.Run) -> None:
    """Wait until a warm process is ready: the first kill is not in the first seconds of a run."""
    deadline = time.time() + LIMIT_S
    while "warm process is ready" not in run.folder.driver_log.read_text():
        assert time.time() < deadline, f"no warm process within {LIMIT_S:g} s"
        time.sleep(0.1)


def train(
    folder: Path,
    script: str,
    backend: str,
    size: int,
    end: int,
    kills: int,
    rng: random.Random,
    warm: str = "auto",
    on_failure: str = "restart",
) -> tuple[list, ...]:
    """Return the seconds from each kill to the next step, the repeated steps of each, and each rank's losses by step."""
    source, marks = folder / "source", folder / f"marks_{time.time_ns()}"
    source.mkdir(exist_ok=True)
    marks.mkdir()
    (source / "train.py").write_text(script)
    if not kills:
        (marks / "fast").touch()
    run = pl.Experiment(pl.Workspace.from_config(), "recovery").submit(
        pl.PyTorch(
            source,
            entry_script="train.py",
            arguments=[str(marks), str(end)],
            process_count_per_node=size,
            distributed_backend=backend,
            environment_variables={"BACKEND": backend},
            max_restarts=kills,
            warm=warm,
            on_failure=on_failure if kills else "restart",
        )
    )
    times, again, ranks = [], [], range(size)
    for number in range(kills):
        wait_for_step(marks, ranks, 0.0)
        if number == 0 and warm == "auto":
            wait_for_spare(run)
        time.sleep(rng.uniform(0.3, 2.0))
        victim = rng.choice(ranks)
        last = steps(marks, victim)[-1]
        os.kill(int(last["pid"]), signal.SIGKILL)
        now = time.time()
        before = [steps(marks, rank)[-1] for rank in ranks]
        deadline = time.time() + LIMIT_S
        while True:
            newest = [steps(marks, rank)[-1] for rank in ranks]
            if all(
                one["at"] > now and one["attempt"] > old["attempt"] for one, old in zip(newest, before, strict=True)
            ):
                break
            assert time.time() < deadline, f"no step within {LIMIT_S:g} s of a kill"
            time.sleep(0.005)
        pairs = zip(ranks, before, strict=True)
        fresh = [next(one for one in steps(marks, r) if one["attempt"] > old["attempt"]) for r, old in pairs]
        times.append(max(one["at"] for one in fresh) - now)
        again.append(int(max(one["step"] for one in before) + 1 - min(one["step"] for one in fresh)))
        print(f"  kill {number + 1}: {times[-1]:.2f} s, {again[-1]} steps again", flush=True)
    (marks / "fast").touch()
    run.wait_for_completion()
    return times, again, [{int(one["step"]): one["loss"] for one in steps(marks, rank)} for rank in ranks]


def measure(name: str, kills: int, seed: int, on_failure: str) -> None:
    kind, backend, *_ = name.split("_")
    script = {"ddp": DDP, "parallel": PARALLEL, "elastic": ELASTIC}[kind]
    limits = (1.5, 3.0) if kind == "ddp" else (1.0, 2.0)
    rng, times, again, differences = random.Random(seed), [], [], []
    with scratch() as folder:
        for size in (2, 3, 4):
            count = kills // 3 + (size - 2 < kills % 3)
            if not count:
                continue
            end = 200 + 60 * count
            undisturbed = train(folder, script, backend, size, end, 0, rng)
            took, repeated, losses = train(folder, script, backend, size, end, count, rng, on_failure=on_failure)
            times += took
            again += repeated
            assert set().union(*losses) == set(range(end)), "some step was never done"
            # A killed rank may not have written down a step that the others have finished.
            pairs = zip(undisturbed[-1], losses, strict=True)
            differences.append(max(abs(whole[step] - loss) for whole, found in pairs for step, loss in found.items()))
    ordered = sorted(times)
    p99 = ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)]
    report(
        f"recovery_{name}{'_replace' if on_failure == 'replace' else ''}",
        f"a worker of 2 to 4 killed at random, with a warm process: {kind} over {backend}, from the kill to the next step of all",
        f"median at most {limits[0]:g} s, p99 {limits[1]:g} s, at most one step again, loss equal to 1e-12",
        median(times) <= limits[0] and p99 <= limits[1] and max(again) <= 1 and max(differences) <= 1e-12,
        median_s=median(times),
        p99_s=p99,
        longest_s=max(times),
        steps_again=max(again),
        loss_difference=max(differences),
        kills=len(times),
        load_average=[round(one, 1) for one in os.getloadavg()],
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replace", action="store_const", const="replace", default="restart", dest="on_failure")
    parser.add_argument("names", nargs="*", default=["ddp_gloo", "ddp_mpi", "parallel_gloo", "parallel_mpi"])
    given = parser.parse_args()
    for each in given.names:
        measure(each, given.kills, given.seed, given.on_failure)
