"""What `explain` says where there is no pipeline; with one it is checked on ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

import paceline
from paceline.parallel import DataParallel, ParallelError
from tests.late import late

torch, nn = late("torch"), late("torch.nn")


@pytest.fixture(scope="module", autouse=True)
def with_torch() -> None:
    """Import the modules that load torch before the first test: collecting the tests loads none."""
    global Explanation
    from paceline.parallel.explain import Explanation


def test_explain_on_one_worker_shows_its_memory() -> None:
    model = nn.Linear(1024, 1024, bias=False)
    par = paceline.parallelize(
        model, torch.optim.SGD(model.parameters()), loss=nn.functional.mse_loss, strategy=DataParallel()
    )
    text = par.explain()
    *lines, last = text.splitlines()
    assert lines == [
        "Linear on 1 worker: one worker",
        "  parameters: 4.0 MiB, of which this worker holds 4.0 MiB",
        "  memory for parameters, gradients and Adam's two moments: 16.0 MiB on each worker, and the activations of its rows",
    ]
    assert last.startswith(
        "  memory: 8.0 MiB are known to be needed here (parameters 4.0 MiB, gradients 4.0 MiB, optimizer 0 B); "
    )
    assert last.endswith(("machine's memory)", "control group's limit)"))


def test_saving_a_schedule_picture_of_a_model_without_a_pipeline_is_refused(tmp_path: Path) -> None:
    text = Explanation("nothing")
    text.events = []
    with pytest.raises(ParallelError, match="no pipeline"):
        text.save_png(tmp_path / "step.png")
