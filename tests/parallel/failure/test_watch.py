"""One rank fails, and every rank ends soon with the reason. Separate programs, because none survives."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.engines.conftest import require_engine
from tests.parallel.conftest import Ended, run_on_ranks

START = """
import os, signal, sys, time
import torch
from torch import nn
import torch.nn.functional as F
import paceline
from paceline.parallel import DataParallel, FullyShard, ParallelError, WorkerError
torch.set_num_threads(1)
RANK = int(os.environ["RANK"])
torch.manual_seed(RANK)

class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.calls = 0
    def forward(self, x):
        self.calls += 1
        if RANK == 1 and self.calls == 4:
            raise ZeroDivisionError("the lamp of rank one is out")
        return self.linear(x)

x, y = torch.ones(8, 3), torch.zeros(8, dtype=torch.long)

def spread(model, **options):
    return paceline.parallelize(model, torch.optim.SGD(model.parameters(), 0.1), loss=F.cross_entropy,
                                **({"strategy": DataParallel()} | options))
"""

pytestmark = pytest.mark.timeout(900)


#: Code for ranks that get no answer: a short grace period is enough, because their messages do not depend on its length.
IMPATIENT = """
from paceline.parallel import failure
failure.GRACE_S = 1.0
"""


def run(tmp_path: Path, code: str, size: int = 2) -> list[Ended]:
    require_engine("torch", find_spec("torch"))
    program = tmp_path / "program.py"
    program.write_text(START + code)
    return run_on_ranks(size, tmp_path / "outputs", str(program), timeout_s=300)


@pytest.mark.promise("first-error-rank-reports-ranks")
def test_every_rank_reports_the_first_traceback(tmp_path: Path) -> None:
    code = """
par = spread(Fails(), microbatches=2)
for _ in range(3):
    par.step((x, y))
"""
    ended = run(tmp_path, code, size=3)
    assert [end.returncode for end in ended] == [1, 1, 1]
    for rank, end in enumerate(ended):
        assert "ZeroDivisionError: the lamp of rank one is out" in end.output
        if rank != 1:
            assert "rank 1, microbatch 1 failed first" in end.output
            assert "in forward" in end.output


def test_every_rank_reports_an_error_in_a_pipeline_stage(tmp_path: Path) -> None:
    code = """
from paceline.parallel import PipelineParallel
armed = []
class Lamp(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.calls = 0
    def forward(self, x):
        if armed:
            self.calls += 1
            if self.calls == 6:
                raise ZeroDivisionError("the lamp of the last stage is out")
        return self.linear(x)
model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), Lamp(), nn.Linear(3, 2))
par = spread(model, strategy=PipelineParallel(2, cut=["2"]), microbatches=4, sample=(x, y))
armed.append(True)
for _ in range(3):
    par.step((x, y))
"""
    ended = run(tmp_path, code)
    assert [end.returncode for end in ended] == [1, 1], ended[0].output
    for end in ended:
        assert "ZeroDivisionError: the lamp of the last stage is out" in end.output
    assert "rank 1, stage 1, microbatch 1 failed first" in ended[0].output


def test_error_between_two_steps_is_reported_by_other_ranks(tmp_path: Path) -> None:
    code = """
par = spread(nn.Linear(3, 2))
par.step((x, y))
if RANK == 1:
    raise KeyError("no such lamp")
par.step((x, y))
"""
    ended = run(tmp_path, code)
    assert [end.returncode for end in ended] == [1, 1]
    assert "rank 1 failed first" in ended[0].output
    assert "KeyError: 'no such lamp'" in ended[0].output


def test_other_ranks_end_with_a_report_if_a_rank_catches_its_step_error_and_continues(tmp_path: Path) -> None:
    code = """
par = spread(Fails())
try:
    for _ in range(5):
        par.step((x, y))
except ZeroDivisionError:
    # As a notebook does, or a script that writes a report first.
    time.sleep(60 if RANK == 1 else 0)
"""
    from paceline.parallel import failure

    ended = run_and_stop(tmp_path, IMPATIENT + code)
    assert ended[0].returncode == 1
    assert "rank 1, microbatch 0 failed first" in ended[0].output
    assert failure.GRACE_S + 2 * failure.POLL_S < 10


def run_and_stop(tmp_path: Path, code: str) -> list[Ended]:
    """The same, where rank 1 would stay for a minute: rank 0 ends it."""
    kill = """
import atexit, threading
if RANK == 1:
    parent = os.getppid()
    def leave():
        while not os.path.exists(sys.argv[1]):
            time.sleep(0.1)
        os._exit(1)
    threading.Thread(target=leave, daemon=True).start()
else:
    before = os._exit
    def told(code):
        open(sys.argv[1], "w").close()
        before(code)
    os._exit = told
    atexit.register(lambda: open(sys.argv[1], "w").close())
"""
    require_engine("torch", find_spec("torch"))
    program = tmp_path / "program.py"
    program.write_text(START + kill + code)
    return run_on_ranks(2, tmp_path / "outputs", str(program), str(tmp_path / "over"), timeout_s=300)


@pytest.mark.promise("first-error-rank-reports-ranks")
def test_killed_rank_ends_the_other_ranks(tmp_path: Path) -> None:
    code = """
par = spread(nn.Linear(3, 2))
par.step((x, y))
if RANK == 1:
    os.kill(os.getpid(), signal.SIGKILL)
par.step((x, y))
"""
    ended = run(tmp_path, IMPATIENT + code)
    assert ended[1].returncode == -9
    assert ended[0].returncode == 1
    assert "ended without a word" in ended[0].output


@pytest.mark.promise("different-models-other-datasets-found")
def test_different_models_on_the_ranks_are_refused_by_parallelize(tmp_path: Path) -> None:
    code = """
for case in range(4):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    loss, lr = F.cross_entropy, 0.1
    if RANK == 1 and case == 0:
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    if RANK == 1 and case == 1:
        model[2].weight = model[2].weight.double() if False else nn.Parameter(model[2].weight.double())
    if RANK == 1 and case == 2:
        model[2].requires_grad_(False)
    if RANK == 1 and case == 3:
        lr = 0.2
    try:
        paceline.parallelize(model, torch.optim.SGD(model.parameters(), lr), loss=loss, strategy=DataParallel())
    except ParallelError as error:
        print("case", case, error)
# Other values are no other model: rank 0's are taken.
model = nn.Linear(3, 2)
spread(model)
print("sum", repr(float(model.weight.detach().sum())))
"""
    ended = run(tmp_path, code)
    assert [end.returncode for end in ended] == [0, 0], ended[0].output
    for end in ended:
        assert (
            "case 0 the ranks don't have the same model: parameter 0.weight is [4, 3] torch.float32 on rank 0; "
            in end.output
        )
        assert "case 1 the ranks don't have the same model: parameter 2.weight is" in end.output
        assert "case 2" in end.output
        assert "frozen on rank 1" in end.output
        assert "case 3 the ranks don't have the same model: optimizer group 0 is" in end.output
    assert ended[0].output.partition("sum")[2] == ended[1].output.partition("sum")[2]


def test_different_parallelize_arguments_on_the_ranks_are_refused(tmp_path: Path) -> None:
    code = """
from torch.utils.data import DataLoader, TensorDataset
from paceline.parallel import FullyShard
data = TensorDataset(torch.zeros(9, 3), torch.zeros(9, dtype=torch.long))
less = TensorDataset(torch.zeros(8, 3), torch.zeros(8, dtype=torch.long))
for case, odd in enumerate((
    {"strategy": FullyShard()},
    {"clip_norm": 1.0},
    {"loader": DataLoader(data, batch_size=3)},
    {"loader": DataLoader(less, batch_size=4)},
    {"loader": [(x, y)]},
)):
    same = {"loader": DataLoader(data, batch_size=4), "strategy": DataParallel()}
    model = nn.Linear(3, 2)
    try:
        given = same | odd if RANK == 1 else same
        paceline.parallelize(model, torch.optim.SGD(model.parameters(), 0.1), loss=F.cross_entropy, **given)
    except ParallelError as error:
        print("case", case, error)
# Wrong by itself, on one rank: the other one would wait for it.
try:
    spread(nn.Linear(3, 2), microbatches=1 - RANK)
except (ParallelError, WorkerError) as error:
    print("case 5", type(error).__name__, str(error).splitlines()[0])
"""
    ended = run(tmp_path, code)
    assert [end.returncode for end in ended] == [0, 0], ended[0].output
    for end in ended:
        assert "case 0 the ranks don't have the same model: strategy is DataParallel(" in end.output
        assert "case 1 the ranks don't have the same model: clip_norm is None on rank 0; 1.0 on rank 1" in end.output
        assert "case 2 the ranks don't have the same loader: 9 samples in batches of 4 on rank 0; " in end.output
        assert "case 3 the ranks don't have the same loader: 9 samples in batches of 4 on rank 0; 8" in end.output
        assert "case 4 the ranks don't have the same model: loader is 'DataLoader' on rank 0; 'list'" in end.output
    assert "case 5 WorkerError rank 1 failed first" in ended[0].output
    assert "microbatches=0: a whole number of at least 1" in ended[0].output
    assert "case 5 ParallelError microbatches=0" in ended[1].output


def test_rank_without_rows_returns_a_loss_of_the_same_dtype_as_other_ranks(tmp_path: Path) -> None:
    code = """
for strategy in (DataParallel(), FullyShard()):
    for precision in ("bf16", None):
        model = nn.Linear(3, 2) if precision else nn.Linear(3, 2).bfloat16()
        par = spread(model, strategy=strategy, precision=precision)
        rows = x if precision else x.bfloat16()
        losses = [par.step((rows[:number], y[:number])) for number in (4, 1, 3)]
        print([(loss.dtype, loss.item()) for loss in losses])
"""
    ended = run(tmp_path, code)
    assert [end.returncode for end in ended] == [0, 0], ended[0].output
    assert ended[0].output == ended[1].output
    assert ended[0].output.count("float32") == 12


@pytest.mark.parametrize("strategy", ["DataParallel()", "PipelineParallel()", "TensorParallel()"])
def test_training_step_skipped_by_one_rank_is_reported(strategy: str, tmp_path: Path) -> None:
    code = f"""
from paceline.parallel import PipelineParallel, TensorParallel
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.zeros(12, 3), torch.zeros(12, dtype=torch.long))
model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
par = spread(model, loader=DataLoader(data, batch_size=4), strategy={strategy}, microbatches=2)
try:
    for epoch in range(2):
        for number, batch in enumerate(par.epoch(epoch)):
            if RANK == 1 and number == 1:
                continue
            par.step(batch)
except ParallelError as error:
    print(error)
"""
    ended = run(tmp_path, code)
    assert [end.returncode for end in ended] == [0, 0], ended[0].output
    for end in ended:
        assert "rank 0 in epoch 0 at sample 8, step 1; rank 1 in epoch 0 at sample 12, step 1" in end.output


def test_collective_call_made_by_one_rank_only_is_named(tmp_path: Path) -> None:
    code = """
from paceline.parallel import failure as failure_line
failure_line.STUCK_S = 10.0
par = spread(nn.Linear(3, 2))
par.step((x, y))
if RANK == 0:
    par.full_state_dict()
    par.evaluate([(x, y)], F.cross_entropy)
par.step((x, y))
par.step((x, y))
"""
    ended = run(tmp_path, code)
    assert all(end.returncode != 0 for end in ended)
    said = ended[0].output + ended[1].output
    assert "called full_state_dict() where rank 1 called step()" in said, said


def test_failure_report_names_the_rank_that_ended_while_another_rank_waits_for_it_in_save(tmp_path: Path) -> None:
    code = """
par = spread(nn.Linear(3, 2))
par.step((x, y))
if RANK == 0:
    par.save(sys.argv[0] + ".saved")
"""
    ended = run(tmp_path, code)
    assert [end.returncode for end in ended] == [1, 0]
    assert "rank 1 has come to the end of its script, and rank 0 waits for it in save()" in ended[0].output


def test_successful_end_prints_nothing(tmp_path: Path) -> None:
    code = """
par = spread(nn.Linear(3, 2))
par.step((x, y))
if RANK == 1:
    time.sleep(1.5)
"""
    ended = run(tmp_path, code)
    assert [(end.returncode, end.output) for end in ended] == [(0, ""), (0, "")]


def test_rank_ended_by_sigterm_exits_without_waiting_for_a_failure_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart waited 11 s for it after a killed rank."""
    import torch.distributed as dist

    from paceline.checkpoint import leaving
    from paceline.parallel.failure import ErrorLine

    asked: list[str] = []

    def told() -> str | None:
        # The second call reports the signal. A third call means that the loop has ignored it.
        asked.append("look")
        assert len(asked) < 3, "it goes on waiting"
        return leaving.SIGNAL if len(asked) > 1 else None

    monkeypatch.setattr(leaving, "asked", told)
    line = ErrorLine(1, 2, dist.HashStore())
    assert not line.wait_for_root()
    assert len(asked) == 2
    line.close()
