"""Runs of `parallelize` whose workers are killed: they resume from a step in memory, in each layout."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.runs import states
from tests.engines.conftest import require_module
from tests.engines.lab import Lab, log_text, wait_for_end

#: Case -> the layout before a worker is lost, the layout after the loss, and the last step that is not repeated.
CASES = {
    "data": ("data", "data", 6),
    "shard": ("shard", "shard", 6),
    "pipeline": ("pipeline", "pipeline", 6),
    "tensor": ("tensor", "tensor", 6),
    "another layout": ("shard", "data", 6),
    "one rank's last step is not kept": ("shard", "shard", 5),
    "ranks kept different steps": ("data", "data", 4),
}
END = 12

#: This script first trains all cases without a loss. In each later attempt it continues the case of the previous
#: attempt to its end. Then it begins the next case, in which a worker is killed in step 7.
TRAINS = """
import json, os, signal, sys, time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.checkpoint import neighbour
from paceline.parallel import DataParallel, FullyShard, PipelineParallel, TensorParallel
from paceline.parallel.checkpoint import store
from paceline.parallel.exchange import gather
from paceline.system import spare_client

# Each state is kept, however long that takes.
neighbour._SHARE, neighbour._PAUSE_S, neighbour._MOST_FAILURES = 1e9, 0.0, 10**9
spare_client._FREE_S = spare_client._ANSWER_S = 60.0
torch.set_num_threads(1)
marks, cases, end = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
attempt, saved = int(os.environ["PACELINE_ATTEMPT"]), os.environ["PACELINE_CHECKPOINT_DIR"]
kinds = {
    "data": DataParallel(),
    "shard": FullyShard(),
    "pipeline": PipelineParallel(),
    "tensor": TensorParallel(plan={"0": "colwise", "2": "rowwise"}),
}
draw = torch.Generator().manual_seed(0)
x = torch.randn(40, 8, generator=draw, dtype=torch.float64)
data = TensorDataset(x, x.sum(1, keepdim=True).sin())

def build(kind, seed):
    torch.manual_seed(seed)  # after a loss, a value that is missing in the state would be noticed
    layers = (nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    model = nn.Sequential(*layers).double()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    par = paceline.parallelize(
        model, optimizer, DataLoader(data, batch_size=8, shuffle=True), loss=nn.functional.mse_loss,
        strategy=kinds[kind], microbatches=4 if kind == "pipeline" else 1, seed=3, check="off",
    )
    return par, scheduler

def save(par, scheduler, every, is_repeated):
    while True:
        par.save(every=every, schedulers=[scheduler])
        par.wait()
        sender = store._paces[par].neighbour
        if sender._handing is not None:
            sender._handing.join()
        # On a busy machine the process that keeps states may answer too late.
        if not is_repeated or all(gather(par.progress.steps in sender._images)):
            return

def train(par, scheduler, name, before=lambda step: None, after=lambda: None):
    while par.progress.steps < end:
        for batch in par.epoch(par.progress.epoch):
            before(par.progress.steps + 1)
            loss = float(par.step(batch))
            scheduler.step()
            if par.rank == 0:
                with open(marks / f"{name}.jsonl", "a") as file:
                    file.write(json.dumps([par.progress.steps, loss]) + "\\n")
            after()
            if par.progress.steps == end:
                return

if attempt == 1:
    for name, (kind, _, _) in cases.items():
        train(*build(kind, 1), f"undisturbed {name}")
    log, deadline = Path(os.environ["PACELINE_RUN_DIR"], "logs", "driver.log"), time.monotonic() + 600
    while "warm process is ready" not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
names = [*cases]
if attempt > 1:
    name = names[attempt - 2]
    os.environ["PACELINE_CHECKPOINT_DIR"] = f"{saved}/{name}"
    par, scheduler = build(cases[name][1], 2)
    assert par.load(schedulers=[scheduler])
    print(name, par.progress.steps, sorted(os.listdir(f"{saved}/{name}")) if os.path.exists(f"{saved}/{name}") else [])
    train(par, scheduler, name)
if attempt <= len(names):
    name = names[attempt - 1]
    os.environ["PACELINE_CHECKPOINT_DIR"] = f"{saved}/{name}"
    par, scheduler = build(cases[name][0], 1)
    assert not par.load(schedulers=[scheduler])
    last = cases[name][2]
    is_victim = par.rank == attempt % 2

    def before(step):
        if is_victim and step == 7:
            os.kill(os.getpid(), signal.SIGKILL)

    def after():
        if is_victim and par.progress.steps > last:
            # The worker is killed before its part of this state is in memory.
            store._paces[par].neighbour.keep = lambda *arguments: None
        save(par, scheduler, 4 if last == 4 else 1000, par.progress.steps <= last)

    train(par, scheduler, name, before, after)
"""


def notes(marks: Path, name: str) -> list[tuple[int, float]]:
    return [(step, loss) for step, loss in map(json.loads, (marks / f"{name}.jsonl").read_text().splitlines())]


@pytest.mark.skipif(not os.path.exists("/proc/self/cmdline"), reason="warm processes need Linux")
def test_killed_parallel_training_resumes_from_memory_in_each_layout_with_equal_losses(
    lab: Lab, tmp_path: Path
) -> None:
    require_module("torch")
    marks = tmp_path / "marks"
    marks.mkdir()
    values: dict[str, Any] = {"process_count_per_node": 2, "distributed_backend": "gloo", "max_restarts": len(CASES)}
    run = lab.submit(TRAINS, estimator=pl.PyTorch, arguments=[str(marks), json.dumps(CASES), str(END)], **values)
    # Allow ten minutes, because `import torch` may take long on a slow disk.
    assert wait_for_end(run, 600) == states.COMPLETED, (run.failure, log_text(run, 0), log_text(run, 1))

    assert [attempt.cause for attempt in run.record().attempts] == ["killed"] * len(CASES) + [None]
    for number, (name, (_, _, last)) in enumerate(CASES.items(), 2):
        found, expected = notes(marks, name), dict(notes(marks, f"undisturbed {name}"))
        assert [step for step, _ in found] == [*range(1, 7), *range(last + 1, END + 1)], name
        assert max(abs(loss - expected[step]) for step, loss in found) < 1e-12, name
        on_disk = ["step_4"] if last == 4 else []
        for rank in (0, 1):
            assert f"{name} {last} {on_disk}" in run.folder.rank_log(number, rank).read_text()
