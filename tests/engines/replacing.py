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
#: This script trains by `parallelize`, with random numbers, running statistics, a scheduler, clipping and averaged weights.
PARALLEL = """
import json, os, sys, time
import torch
import paceline

marks, end = sys.argv[1], int(sys.argv[2])
is_new = os.environ.get("PACELINE_GENERATION", "0") != "0"
if is_new and os.path.exists(f"{marks}/slow"):
    open(f"{marks}/waits", "w").write(str(os.getpid()))
    time.sleep(600)
torch.manual_seed(3 + 100 * is_new)
net = torch.nn.Sequential(
    torch.nn.Linear(8, 16, bias=False), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)
).double()
optimizer = torch.optim.Adam(net.parameters(), 1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
rows = torch.randn(24, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
data = torch.utils.data.TensorDataset(rows, rows.sum(1, keepdim=True).sin())
loader = torch.utils.data.DataLoader(data, batch_size=12, shuffle=True)
par = paceline.parallelize(
    net, optimizer, loader, loss=torch.nn.functional.mse_loss, strategy=paceline.DataParallel(), clip_norm=0.5
)
average = par.average(0.9)
par.load(schedulers=[scheduler])
log = os.open(f"{marks}/steps_{par.rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
for epoch in range(end // 2):
    for batch in par.epoch(epoch):
        loss = par.step(batch).item()
        scheduler.step()
        step = par.progress.steps
        note = {"step": step, "loss": loss, "pid": os.getpid(), "attempt": os.environ["PACELINE_ATTEMPT"]}
        os.write(log, (json.dumps(note) + "\\n").encode())
        par.save(every=50, schedulers=[scheduler])
        if not os.path.exists(f"{marks}/fast"):
            time.sleep(0.1 if step < end / 2 else 1)
    if epoch == 0:
        # A new rank can't evaluate alone, but it repeats what follows a finished epoch.
        score = par.evaluate(loader, torch.nn.functional.mse_loss)
par.wait()
values = [*par.full_state_dict().values(), *average.full_state_dict().values(), torch.tensor(scheduler.get_last_lr())]
json.dump(score, open(f"outputs/score_{par.rank}.json", "w"))
json.dump([0.0, *torch.cat([one.flatten() for one in values]).tolist()], open(f"outputs/end_{par.rank}.json", "w"))
"""
#: This script starts trainings for which Paceline can't replace a lost worker alone, and stores the reason that each
#: training gives.
REASONS = """
import json, os, sys
import torch
import paceline
from paceline.parallel import exchange, rejoin

reasons = {}

def train(name, model=None, loader=None, before=lambda par, optimizer: par.load(), after=lambda par: None, **options):
    rejoin.Rejoining._trainings, exchange.journal.results = 0, []
    torch.manual_seed(3)
    model = model or torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = [(torch.ones(8, 4), torch.ones(8, 1))] * 2
    options = {"loss": torch.nn.functional.mse_loss, "strategy": paceline.DataParallel(), "check": "off", **options}
    par = paceline.parallelize(model, optimizer, loader, **options)
    before(par, optimizer)
    for batch in batches if loader is None else par.epoch(0):
        par.step(batch)
        after(par)
    path = f"{os.environ['PACELINE_RUN_DIR']}/attempts/1/group_{par.rank}.json"
    reasons[name] = json.load(open(path))["why_not"]

class Counts(torch.nn.Linear):
    calls = 0
    def forward(self, x):
        self.calls += 1
        return super().forward(x)

class Keeps(torch.nn.MSELoss):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

rows = torch.utils.data.TensorDataset(torch.ones(16, 4), torch.ones(16, 1))
drawn = torch.utils.data.RandomSampler(rows, replacement=True)
everyone = lambda par: torch.distributed.all_reduce(torch.ones(1))
train("fine")
train("a loader", loader=torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True))
train("no load", before=lambda par, optimizer: None)
train("a path", before=lambda par, optimizer: par.load(par.save(f"{os.environ['PACELINE_OUTPUT_DIR']}/saved")))
train("early", before=lambda par, optimizer: (par.load(), par.evaluate([(torch.ones(8, 4), torch.ones(8, 1))])))
train("a scheduler", before=lambda par, optimizer: (torch.optim.lr_scheduler.StepLR(optimizer, 3), par.load()))
train("a counter", Counts(4, 1))
train("a loss", loss=Keeps())
train("a list", loader=[(torch.ones(8, 4), torch.ones(8, 1))] * 2)
train("a sampler", loader=torch.utils.data.DataLoader(rows, batch_size=8, sampler=drawn))
train("a layout", strategy=paceline.FullyShard())
train("auto", strategy="auto")
train("messages", after=everyone)
train("elsewhere", after=lambda par: par.evaluate([(torch.ones(8, 4), torch.ones(8, 1))]))
json.dump(reasons, open(f"{os.environ['PACELINE_OUTPUT_DIR']}/reasons_{os.environ['RANK']}.json", "w"))
"""
SIZE, END = 3, 200
#: Settings of each run. `warm` is off, because workers that are forked from the tests' own process can't be handed over
#: to the supervisor.
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
        self.lab, self.marks, self.script = lab, marks, script
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
    expected, plain = Training(
        training.lab, plain, "fast", script=training.script, max_restarts=0, on_failure="restart"
    ).finish()
    for rank in range(SIZE):
        # Each entry of `ends` and `expected` has the sum of the losses and the final weights of a rank.
        assert max(abs(one - other) for one, other in zip(ends[rank], expected[rank], strict=True)) < 1e-12
        for step, loss in losses[rank].items():
            assert abs(loss - plain[0][step]) < 1e-12
    assert set().union(*losses) == set(range(1, END + 1))
