"""A training on this machine in which one rank holds up the others, and is named."""

from __future__ import annotations

import re

import pytest

from paceline.runs import states
from tests.engines.lab import Lab, wait_for_end
from tests.helpers import wait_until

pytestmark = pytest.mark.usefixtures("torch_at_hand")

#: In this script, rank 2 loads its data slowly. The others wait for rank 2 inside DistributedDataParallel.
HOLDS_UP = """
import os, time, torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
dist.init_process_group("gloo")
class Data(Dataset):
    def __len__(self):
        return 10**9
    def __getitem__(self, number):
        return self.load()
    def load(self):
        if dist.get_rank() == 2:
            time.sleep(0.03)
        return torch.ones(16)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for batch in DataLoader(Data(), batch_size=4):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.promise("rank-holds-up-others-named")
def test_rank_that_delays_the_others_is_reported_with_its_line(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_SAMPLE_SECONDS", "1")
    run = lab.submit(HOLDS_UP, process_count_per_node=3, distributed_backend="gloo")

    # Repeat the measurement, because on a busy machine another rank than rank 2 may be slow for a while.
    def is_placed() -> bool:
        assert run.status not in states.TERMINAL, run.failure
        pace = run.pace()
        slow = pace.straggler
        return (
            slow is not None
            and slow.place is not None
            and (slow.ranks, slow.why) == ((2,), "data")
            and slow.factor > 1.25
            and re.match(r"train\.py:12, `(Data\.)?load`", slow.place) is not None
            and pace.ranks[0].others > 0.2 > pace.ranks[2].others
            and pace.ranks[2].data > 0.5 > pace.ranks[0].data
        )

    wait_until(is_placed, "rank 2 is named, with its line and its share of the time", 80)

    def is_sampled() -> bool:
        found = [one.by_rank for one in run.profile(seconds=1).functions() if one.function.endswith("load")]
        return bool(found) and found[0][2] > 0.5 > found[0][0]

    wait_until(is_sampled, "the profile shows it too", 30)
    series = run.resources()
    assert sorted(series["ranks"]) == [0, 1, 2]
    assert series["ranks"][2]["data_percent"].max > 50
    assert series["nodes"][0]["cpu_percent"].values
    run.cancel()
    assert wait_for_end(run) == states.CANCELED
    assert run.pace().is_over
