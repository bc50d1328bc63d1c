"""Training whose lost workers start again alone, as tests of several targets watch it (`on_failure="replace"`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import paceline as pl
from paceline.runs import states
from tests.engines.lab import Lab, kill_together, processes_below, wait_for_end
from tests.helpers import wait_until

#: This script trains a small model in float64. After each step, each rank notes the step's number, its loss and its pid.
TRAINS = """
import json, os, sys, time
import torch
import horovod.torch as hvd

marks, end = sys.argv[1], int(sys.argv[2])
if os.environ.get("PACELINE_GENERATION", "0") != "0" and os.path.exists(f"{marks}/slow"):
    open(f"{marks}/waits", "w").write(str(os.getpid()))
    time.sleep(600)
hvd.init()
if os.path.exists(f"{marks}/forks"):
    if (child := os.fork()) == 0:  # it inherits all sockets
        time.sleep(600)
        os._exit(0)
    open(f"{marks}/child_{hvd.rank()}", "w").write(str(child))
torch.manual_seed(3 + int(os.environ.get("PACELINE_GENERATION", "0")))
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
optimizer = hvd.DistributedOptimizer(torch.optim.Adam(net.parameters(), 1e-2), net.named_parameters())
log = os.open(f"{marks}/steps_{hvd.rank()}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

def batch(step):
    rows = torch.randn(12, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return rows[hvd.rank()::hvd.size()], rows.sum(1, keepdim=True).sin()[hvd.rank()::hvd.size()]

@hvd.elastic.run
def train(state):
    while state.step < end:
        x, y = batch(state.step)
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        whole = hvd.allreduce(loss.detach(), name="loss").item()
        state.step += 1
        state.total += whole
        note = {"step": state.step, "loss": whole, "pid": os.getpid(), "attempt": os.environ["PACELINE_ATTEMPT"]}
        os.write(log, (json.dumps(note) + "\\n").encode())
        state.commit()
        if not os.path.exists(f"{marks}/fast"):
            time.sleep(0.1 if state.step < end / 2 else 1)  # so that the tests have time to see it

state = hvd.elastic.TorchState(net, optimizer, step=0, total=0.0)
train(state)
weights = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
json.dump([state.total, *weights.tolist()], open(f"outputs/end_{hvd.rank()}.json", "w"))
"""
SIZE, END = 3, 200
#: Without a warm process (see `torch_at_hand`), because a fork of the tests' own process could not pass forks to the supervisor.
WORLD: dict[str, Any] = {
    "warm": "off",
    "estimator": pl.PyTorch,
    "distributed_backend": "gloo",
    "process_count_per_node": SIZE,
    "environment_variables": {"OMP_NUM_THREADS": "1"},
}


class Training:
    """A run of `TRAINS`, and the steps that its ranks have noted."""

    def __init__(self, lab: Lab, marks: Path, *flags: str, script: str = TRAINS, **values: Any) -> None:
        marks.mkdir()
        for name in flags:
            (marks / name).touch()
        self.lab, self.marks = lab, marks
        values = {"max_restarts": 3, "on_failure": "replace", **WORLD, **values}
        self.run = lab.submit(script, arguments=[str(marks), str(END)], **values)

    def steps(self, rank: int) -> list[dict[str, Any]]:
        try:
            lines = (self.marks / f"steps_{rank}").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines]

    def wait_for_step(self, count: int = 3, ranks: Sequence[int] = range(SIZE)) -> list[int]:
        """The processes of the ranks, once each has noted so many steps more than now."""
        before = {rank: len(self.steps(rank)) for rank in ranks}

        def has_come() -> bool:
            assert not self.run.record().is_terminal, self.run.failure
            return all(len(self.steps(rank)) >= before[rank] + count for rank in ranks)

        wait_until(has_come, f"{count} steps of each rank\n{self.run.folder.driver_log.read_text()}", 120)
        return [self.steps(rank)[-1]["pid"] for rank in range(SIZE)]

    def kill(self, *pids: int) -> None:
        """Kill these workers, so that the supervisor sees all of them end in the same look."""
        kill_together(self.run, *pids)

    def finish(self) -> tuple[list[list[float]], list[dict[int, float]]]:
        """The ends of the ranks, and their losses by step, once the run is complete and nothing of it is left."""
        (self.marks / "fast").touch()
        assert wait_for_end(self.run) == states.COMPLETED, self.run.failure
        wait_until(lambda: not processes_below(self.lab.workspace_dir), "the run's processes have ended", 30)
        ends = [json.loads((self.run.folder.outputs / f"end_{rank}.json").read_text()) for rank in range(SIZE)]
        return ends, [{note["step"]: note["loss"] for note in self.steps(rank)} for rank in range(SIZE)]


def assert_same(training: Training) -> None:
    """Fail unless the run has the losses and weights of an undisturbed run."""
    ends, losses = training.finish()
    plain = training.marks.with_name("plain")
    expected, plain = Training(training.lab, plain, "fast", max_restarts=0, on_failure="restart").finish()
    for rank in range(SIZE):
        # The last values are the sum of the losses and the weights.
        assert max(abs(one - other) for one, other in zip(ends[rank], expected[rank], strict=True)) < 1e-12
        for step, loss in losses[rank].items():
            assert abs(loss - plain[0][step]) < 1e-12
    assert set().union(*losses) == set(range(1, END + 1))
