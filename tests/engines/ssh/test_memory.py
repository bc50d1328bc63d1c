"""The last steps of a run on two hosts, kept in the memory of both, after the loss of a worker, of one host and of both."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.checkpoint import files
from paceline.runs import states
from paceline.targets.configured import Configured, add
from tests.engines.hosts import Hosts
from tests.engines.lab import Lab, wait_for_end
from tests.helpers import wait_until

#: This script trains a small model in float64. Rank 0 saves each step in memory, and every 20th step on disk.
TRAINS = """
import json, os, sys, time
import torch
import torch.distributed as dist
from paceline import checkpoint
from paceline.checkpoint import saving

marks, end = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
optimizer = torch.optim.Adam(net.parameters(), 1e-2)
state, start = {"net": net, "optimizer": optimizer}, 0
if found := checkpoint.latest():
    found.load_into(state)
    start = found.step
log = os.open(f"{marks}/steps_{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
for step in range(start + 1, end + 1):
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    y = x.sum(1, keepdim=True).sin()
    loss = (net(x[rank::size]) - y[rank::size]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= size
    optimizer.step()
    whole = loss.detach() / size
    dist.all_reduce(whole)
    os.write(log, (json.dumps({
        "step": step, "loss": float(whole), "pid": os.getpid(), "attempt": int(os.environ["PACELINE_ATTEMPT"])
    }) + "\\n").encode())
    checkpoint.save(state, step, every=20)
    # Stay between two checkpoints on the disk, once the test wants to kill.
    while os.path.exists(f"{marks}/hold") and step % 20 == 14 and os.environ["PACELINE_ATTEMPT"] == "1":
        if (handing := getattr(saving._neighbour, "_handing", None)) is not None:
            handing.join()
        open(f"{marks}/held", "w").close()
        time.sleep(0.05)
    if not os.path.exists(f"{marks}/fast"):
        time.sleep(0.4)
"""
#: This script trains by `parallelize`: each rank has half of each tensor. It saves nothing on a disk, because the hosts
#: share no disk.
TRAINS_SHARDED = """
import json, os, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import paceline
from paceline.parallel.checkpoint import store

marks, end = sys.argv[1], int(sys.argv[2])
torch.manual_seed(int(os.environ["PACELINE_ATTEMPT"]) - 1)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
draws = (torch.Generator().manual_seed(step) for step in range(1, end + 1))
x = torch.cat([torch.randn(12, 8, generator=draw, dtype=torch.float64) for draw in draws])
par = paceline.parallelize(
    net, torch.optim.Adam(net.parameters(), 1e-2), DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), 12),
    loss=nn.functional.mse_loss, strategy=paceline.FullyShard(), check="off",
)
par.load()
log = os.open(f"{marks}/steps_{par.rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
for batch in par.epoch(0):
    loss = float(par.step(batch))
    os.write(log, (json.dumps({
        "step": par.progress.steps, "loss": loss, "pid": os.getpid(), "attempt": int(os.environ["PACELINE_ATTEMPT"])
    }) + "\\n").encode())
    par.save(every=1000)
    # Stay at a step whose number the test expects, once the test wants to kill.
    while os.path.exists(f"{marks}/hold") and par.progress.steps % 20 == 14 and os.environ["PACELINE_ATTEMPT"] == "1":
        if (handing := getattr(store._paces[par].neighbour, "_handing", None)) is not None:
            handing.join()
        open(f"{marks}/held", "w").close()
        time.sleep(0.05)
    if not os.path.exists(f"{marks}/fast"):
        time.sleep(0.4)
"""
END = 200


class Training:
    """A run of `TRAINS` on two hosts, and the steps that its ranks have noted."""

    def __init__(self, lab: Lab, marks: Path, script: str = TRAINS, end: int = END, **values: Any) -> None:
        self.marks = marks
        marks.mkdir(exist_ok=True)
        defaults: dict[str, Any] = {
            "estimator": pl.PyTorch,
            "node_count": 2,
            "distributed_backend": "gloo",
            "compute_target": "lab",
            "max_restarts": 1,
            "environment_variables": {"OMP_NUM_THREADS": "1"},
        }
        self.run = lab.submit(script, arguments=[str(marks), str(end)], **{**defaults, **values})

    def notes(self, rank: int, attempt: int = 1) -> list[dict[str, Any]]:
        path = self.marks / f"steps_{rank}"
        notes = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
        return [note for note in notes if note["attempt"] == attempt]

    def wait(self, is_so: Callable[[], object], what: str) -> None:
        def has_come() -> bool:
            assert not self.run.record().is_terminal, self.run.failure
            return bool(is_so())

        wait_until(has_come, f"{what}\n{self.run.folder.driver_log.read_text()}", 120)

    def last(self, attempt: int = 1) -> int:
        return max(note["step"] for rank in (0, 1) for note in self.notes(rank, attempt))

    def wait_until_kept(self) -> int:
        """Wait until hosts keep states in memory and pause between two checkpoints on the disk. Return the last step."""
        self.wait(lambda: self.run.folder.kept(1, 0).exists(), "the first state in memory")
        (self.marks / "hold").touch()
        self.wait((self.marks / "held").exists, "a step far from a checkpoint on the disk")
        return self.last()

    def finish(self) -> list[int]:
        """Return the first step of each rank in the second attempt, once the run is complete."""
        (self.marks / "fast").touch()
        assert wait_for_end(self.run) == states.COMPLETED, self.run.failure
        assert [len(self.notes(rank, 2)) > 0 for rank in (0, 1)] == [True, True]
        return [self.notes(rank, 2)[0]["step"] for rank in (0, 1)]

    def losses(self) -> dict[int, float]:
        return {note["step"]: note["loss"] for attempt in (1, 2) for note in self.notes(0, attempt)}


@pytest.fixture
def marks(ssh_network: Hosts) -> Iterator[Path]:
    """A folder that all hosts see. In the end, all hosts are up, and nothing is left on them."""
    network = ssh_network
    path = network.folder / "marks_memory"
    yield path
    shutil.rmtree(path, ignore_errors=True)
    for name in network.names:
        if name not in network.up_now:
            network.boot(name)
    wait_until(lambda: not any(network.processes(name) for name in network.names), "nothing runs on the hosts", 40)
    for name in network.names:
        left = network.run(name, ["sh", "-c", "ls /dev/shm; rm -rf /tmp/paceline-root/runs"])
        assert left.stdout == "", f"left on {name}"


@pytest.fixture
def ssh_lab(lab: Lab, ssh_network: Hosts) -> Lab:
    settings = {
        "hosts": list(ssh_network.names),
        "ssh_config": str(ssh_network.ssh_config),
        "python": sys.executable,
    }
    add(lab.workspace_dir, Configured(name="lab", kind="ssh", settings=settings))
    return lab


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, float]:
    """The loss of each step of a training that nothing disturbs, in one process."""
    import torch

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    losses = {}
    for step in range(1, END + 1):
        x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        loss = (net(x) - x.sum(1, keepdim=True).sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[step] = loss.item()
    return losses


def assert_same(found: dict[int, float], expected: dict[int, float]) -> None:
    assert found.keys() == expected.keys()
    assert max(abs(found[step] - expected[step]) for step in expected) < 1e-12


def assert_from_memory(starts: list[int], last: int) -> None:
    """Fail unless all ranks went on from the same state in memory. On a busy machine not each step's state is kept."""
    assert starts[0] == starts[1]
    assert max(last // 20 * 20 + 1, last - 8) < starts[0] <= last + 1


@pytest.mark.parametrize("victim", [0, 1])
def test_run_resumes_from_the_last_step_in_the_surviving_hosts_memory_after_a_host_is_lost(
    ssh_lab: Lab, ssh_network: Hosts, marks: Path, undisturbed: dict[int, float], victim: int
) -> None:
    training = Training(ssh_lab, marks)
    training.wait_until_kept()
    ssh_network.kill(f"pa{victim}")
    training.wait(lambda: len(training.run.record().attempts) == 2, "the second attempt")
    last = training.last()

    starts = training.finish()

    assert_from_memory(starts, last)
    assert_same(training.losses(), undisturbed)
    assert training.run.record().attempts[0].cause == "node_lost"


def test_all_ranks_resume_from_the_last_step_in_memory_after_a_killed_worker(
    ssh_lab: Lab, ssh_network: Hosts, marks: Path, undisturbed: dict[int, float]
) -> None:
    training = Training(ssh_lab, marks)
    training.wait_until_kept()
    ssh_network.run("pa1", ["kill", "-9", str(training.notes(1)[-1]["pid"])])
    training.wait(lambda: len(training.run.record().attempts) == 2, "the second attempt")
    last = training.last()

    starts = training.finish()

    assert_from_memory(starts, last)
    assert_same(training.losses(), undisturbed)


@pytest.mark.parametrize("victim", ["host", "worker"])
def test_sharded_model_resumes_from_the_last_step_that_both_hosts_have_in_memory(
    ssh_lab: Lab, ssh_network: Hosts, marks: Path, undisturbed: dict[int, float], victim: str
) -> None:
    training = Training(ssh_lab, marks, TRAINS_SHARDED, 100)
    training.wait_until_kept()
    if victim == "host":
        ssh_network.kill("pa1")
    else:
        ssh_network.run("pa1", ["kill", "-9", str(training.notes(1)[-1]["pid"])])
    training.wait(lambda: len(training.run.record().attempts) == 2, "the second attempt")
    last = training.last()

    starts = training.finish()

    assert_from_memory(starts, last)
    assert_same(training.losses(), {step: undisturbed[step] for step in range(1, 101)})


def test_run_resumes_from_the_newest_checkpoint_on_disk_if_both_hosts_are_lost(
    ssh_lab: Lab, ssh_network: Hosts, marks: Path, undisturbed: dict[int, float]
) -> None:
    training = Training(ssh_lab, marks)
    training.wait(lambda: training.run.folder.kept(1, 0).exists() and training.last() > 20, "a checkpoint on the disk")
    home = training.wait_until_kept() // 20 * 20
    checkpoints = training.run.folder.checkpoints
    training.wait(lambda: home in files.whole(files.parts_in(checkpoints)), "a checkpoint has come home")
    for name in ("pa0", "pa1"):
        ssh_network.kill(name)
    for name in ("pa0", "pa1"):
        ssh_network.boot(name)
    training.wait(lambda: len(training.run.record().attempts) == 2, "the second attempt")
    last = training.last()

    starts = training.finish()

    assert starts == [last // 20 * 20 + 1] * 2
    assert_same(training.losses(), undisturbed)
