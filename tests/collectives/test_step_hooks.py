"""What a worker's clock counts of torch, in a process of its own."""

from __future__ import annotations

from paceline.system import step_clock
from tests.helpers import run_python
from tests.ranks import clean_environment
from tests.warm import TORCH, run_alone

#: This script is one rank of Gloo. It uses DataLoader, DistributedDataParallel, an optimizer and a collective of its own.
TRAINS = """
from paceline.collectives import recorder, step_hooks
import os, sys, time
step_hooks.count_steps()
recorder.answer_recorder_requests(os.environ["PACELINE_WATCH_DIR"] + "/ask_0")
assert "torch" not in sys.modules
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
class Data(Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, number):
        time.sleep(0.02)
        return torch.ones(4)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in DataLoader(Data(), batch_size=2):
    model(batch).sum().backward()
    optimizer.step()
dist.all_reduce(torch.ones(1000))
from paceline import torch_private
work = torch_private.work_class()
assert work.wait.__name__ == "wait" and work.wait.__wrapped__, work.wait
assert torch_private.waited_s(model) >= 0.0
assert torch_private.waited_s(torch.nn.Linear(1, 1)) is None
assert not torch_private.time_every_step(torch.nn.Linear(1, 1))
# What is compiled as a whole is not stopped by it.
torch.compile(optimizer.step, backend="eager")()
dist.destroy_process_group()
"""


def test_step_clock_records_number_of_steps_data_loading_time_and_time_waiting_for_other_ranks(tmp_path):
    (tmp_path / "script.py").write_text(TRAINS)
    environment = clean_environment() | {"PACELINE_WATCH_DIR": str(tmp_path), "PACELINE_RANK": "0"}
    done = run_alone(str(tmp_path / "script.py"), loaded=TORCH, environment=environment, hides=True)
    assert done.returncode == 0, done.stderr
    found = step_clock.read(str(tmp_path / "steps_0"))
    assert found.steps in (3, 4)
    # The script sleeps for this time while it loads data.
    assert found.data_s >= 0.12
    assert found.wait_s > 0


def test_import_hook_that_counts_steps_is_not_installed_if_paceline_watch_dir_is_empty():
    code = "from paceline.collectives import step_hooks; import sys; n = len(sys.meta_path); step_hooks.count_steps()"
    assert run_python(f"{code}; print(len(sys.meta_path) - n)", environment={"PACELINE_WATCH_DIR": ""}) == "0\n"
