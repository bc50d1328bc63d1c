"""How long a run takes from the death of a worker to the next step, how many steps it repeats, and whether its loss is the same.

A run of 2 to 4 workers on this machine trains in float64. Again and again a worker, drawn at random, is killed by SIGKILL. The
next step counts from the moment at which the last rank has finished a step after the kill. The losses of all steps are those of
a run that nobody disturbs. The scripts are plain: DistributedDataParallel with `paceline.checkpoint`, `parallelize`, and
`hvd.elastic.run`. With `--replace` only the killed worker starts again, where the script allows it.

With `--minutes` three workers take steps of 0.2 s, and one of them is killed every 30 s. Goodput is the part of the time that the
steps would have taken without kills.

    python benchmarks/recovery.py [--kills 25] [--seed 1] [ddp_gloo ddp_mpi parallel_gloo parallel_mpi elastic_gloo ...]
    python benchmarks/recovery.py --replace parallel_gloo elastic_gloo
    python benchmarks/recovery.py --replace --minutes 60 parallel_gloo
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
        time.sleep(float(os.environ["STEP_S"]))

def batch(step):
    rows = torch.randn(16, 32, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return rows, rows.sum(1, keepdim=True).sin()
"""

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


def last(marks: Path, rank: int) -> dict[str, float] | None:
    """Return the last step of a rank, or None: without reading the thousands of steps before it."""
    try:
        with (marks / f"steps_{rank}").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:
        return None
    whole = [line for line in lines if line.startswith(b"{") and line.endswith(b"\n")]
    return json.loads(whole[-1]) if whole else None


def wait_for_steps(marks: Path, ranks: range) -> None:
    """Wait until each rank has finished a step."""
    deadline = time.time() + LIMIT_S
    while not all(last(marks, rank) for rank in ranks):
        assert time.time() < deadline, f"no step within {LIMIT_S:g} s"
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
    pause_s: tuple[float, float] = (0.3, 2.0),
    step_s: float = STEP_S,
) -> tuple[list, list, list[list[dict[str, float]]], pl.Run]:
    """Return the seconds from each kill to the next step, the repeated steps of each, each rank's steps, and the run.

    pause_s: Range of the seconds from a kill's first step to the next kill.
    """
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
            environment_variables={"BACKEND": backend, "STEP_S": str(step_s)},
            max_restarts=kills,
            warm=warm,
            on_failure=on_failure if kills else "restart",
        )
    )
    times, again, ranks = [], [], range(size)
    for number in range(kills):
        wait_for_steps(marks, ranks)
        if number == 0 and warm == "auto":
            wait_for_spare(run)
        time.sleep(rng.uniform(*pause_s))
        victim = rng.choice(ranks)
        os.kill(int(last(marks, victim)["pid"]), signal.SIGKILL)
        now = time.time()
        before = [last(marks, rank) for rank in ranks]
        deadline = time.time() + LIMIT_S
        while True:
            newest = [last(marks, rank) for rank in ranks]
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
    if step_s == STEP_S:
        (marks / "fast").touch()
    run.wait_for_completion()
    return times, again, [steps(marks, rank) for rank in ranks], run


def loss_difference(whole: list[list[dict[str, float]]], found: list[list[dict[str, float]]], end: int) -> float:
    """The largest difference of a loss between an undisturbed run and another, each given as the steps of its ranks."""
    assert {int(one["step"]) for rank in found for one in rank} == set(range(end)), "some step was never done"
    # A killed rank may not have written down a step that the others have finished.
    return max(
        abs(before[int(one["step"])] - one["loss"])
        for before, rank in zip(({int(one["step"]): one["loss"] for one in rank} for rank in whole), found, strict=True)
        for one in rank
    )


SCRIPTS = {"ddp": DDP, "parallel": PARALLEL, "elastic": ELASTIC}


def measure(name: str, kills: int, seed: int, on_failure: str) -> None:
    kind, backend, *_ = name.split("_")
    limits = (1.5, 3.0) if kind == "ddp" else (1.0, 2.0)
    rng, times, again, differences = random.Random(seed), [], [], []
    with scratch() as folder:
        for size in (2, 3, 4):
            count = kills // 3 + (size - 2 < kills % 3)
            if not count:
                continue
            end = 200 + 60 * count
            *_, undisturbed, _ = train(folder, SCRIPTS[kind], backend, size, end, 0, rng)
            took, repeated, done, _ = train(
                folder, SCRIPTS[kind], backend, size, end, count, rng, on_failure=on_failure
            )
            times += took
            again += repeated
            differences.append(loss_difference(undisturbed, done, end))
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


def goodput(name: str, minutes: float, seed: int, on_failure: str) -> None:
    kind, backend, *_ = name.split("_")
    every_s, step_s, size, rng = 30.0, 0.2, 3, random.Random(seed)
    kills = max(1, round(minutes * 60 / every_s))
    end = int(kills * every_s / step_s)
    with scratch() as folder:
        *_, undisturbed, _ = train(folder, SCRIPTS[kind], backend, size, end, 0, rng)
        times, again, done, run = train(
            folder,
            SCRIPTS[kind],
            backend,
            size,
            end,
            kills,
            rng,
            on_failure=on_failure,
            pause_s=(every_s - 1, every_s - 1),
            step_s=step_s,
        )
        difference, ettr = loss_difference(undisturbed, done, end), run.goodput().ettr
    first: dict[int, float] = {}
    for one in sorted((one for rank in done for one in rank), key=lambda one: one["at"]):
        first.setdefault(int(one["step"]), one["at"])
    each_s = median([first[step] - first[step - 1] for step in range(1, end)])
    part = (end - 1) * each_s / (first[end - 1] - first[0])
    report(
        f"goodput_{name}{'_replace' if on_failure == 'replace' else ''}",
        f"{kind} over {backend}, one of {size} workers killed every {every_s:g} s, steps of {step_s:g} s: goodput",
        "at least 0.95, loss equal to 1e-12",
        part >= 0.95 and difference <= 1e-12,
        goodput=part,
        ettr_of_usage=ettr,
        step_median_s=each_s,
        recovery_median_s=median(times),
        recovery_longest_s=max(times),
        steps_again=max(again),
        loss_difference=difference,
        kills=kills,
        minutes=(first[end - 1] - first[0]) / 60,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replace", action="store_const", const="replace", default="restart", dest="on_failure")
    parser.add_argument("names", nargs="*", default=["ddp_gloo", "ddp_mpi", "parallel_gloo", "parallel_mpi"])
    given = parser.parse_args()
    for each in given.names:
        if given.minutes:
            goodput(each, given.minutes, given.seed, given.on_failure)
        else:
            measure(each, given.kills, given.seed, given.on_failure)
