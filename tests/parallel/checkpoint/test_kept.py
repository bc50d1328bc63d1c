"""States of `par.save` in the memory of another process: which state `par.load` takes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import paceline
from paceline import checkpoint
from paceline.parallel import DataParallel
from paceline.system import kept_states
from tests.checkpoint.conftest import as_if_new  # noqa: F401
from tests.checkpoint.test_neighbour import memory, states  # noqa: F401
from tests.late import late

if TYPE_CHECKING:
    from paceline.system.kept_states import KeptStates

torch, nn = late("torch"), late("torch.nn")
store = late("paceline.parallel.checkpoint.store")


@pytest.fixture
def folder(states: KeptStates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
    """The run's folder of checkpoints."""
    pytest.importorskip("torch")
    monkeypatch.setenv("PACELINE_CHECKPOINT_DIR", str(tmp_path / "saved"))
    return tmp_path / "saved"


def training(seed: int) -> tuple[Any, Any]:
    """A new training, and its scheduler."""
    torch.manual_seed(seed)
    model = nn.Linear(3, 1).double()
    optimizer = torch.optim.Adam(model.parameters())
    par = paceline.parallelize(model, optimizer, loss=nn.functional.mse_loss, strategy=DataParallel(), check="off")
    return par, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def step(par: Any, scheduler: Any, every: int, schedulers: Any = None) -> None:
    x = torch.full((4, 3), 1.0 + par.progress.steps, dtype=torch.float64)
    par.step((x, x.sum(1, keepdim=True)))
    scheduler.step()
    par.save(every=every, schedulers=[scheduler] if schedulers is None else schedulers)
    par.wait()
    if (handing := store._paces[par].neighbour._handing) is not None:
        handing.join(60)


def same(par: Any, other: Any) -> bool:
    state, other_state = par.full_state_dict(), other.full_state_dict()
    return state.keys() == other_state.keys() and all(torch.equal(state[name], other_state[name]) for name in state)


def test_new_training_resumes_from_the_last_step_in_memory_with_optimizer_and_scheduler(folder: Path) -> None:
    (par, scheduler), (other, its) = training(1), training(2)
    for _ in range(3):
        step(par, scheduler, 1000)
    assert other.load(schedulers=[its])
    assert (other.progress, its.state_dict(), same(par, other)) == (par.progress, scheduler.state_dict(), True)
    for one in ((par, scheduler), (other, its)):
        step(*one, 1000)
    assert same(par, other)
    # The state is only in memory. `checkpoint.latest` does not return it, because it is a state of `parallelize` and
    # not of `paceline.checkpoint`.
    assert not folder.exists()
    assert checkpoint.latest() is None


def test_checkpoint_on_disk_is_loaded_after_the_first_save_and_if_it_is_newer(folder: Path) -> None:
    (par, scheduler), (other, its) = training(1), training(2)
    for _ in range(3):
        step(par, scheduler, 2)
    assert par.load(schedulers=[scheduler])
    assert par.progress.steps == 2
    par.save(folder / "step_9", schedulers=[scheduler])
    assert other.load(schedulers=[its])
    assert (other.progress.steps, same(par, other)) == (2, True)


def test_damaged_state_in_memory_is_reported_and_the_checkpoint_on_disk_is_loaded(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (par, scheduler), (other, its) = training(1), training(2)
    step(par, scheduler, 1)
    name = {"folder": str(folder / kept_states.PARALLEL), "step": 5, "rank": 0, "of": 1, "token": "aa"}
    kept_states.keep(os.environ["PACELINE_SPARE"], name, memory(b"no checkpoint"))  # type: ignore[arg-type]
    assert other.load(schedulers=[its])
    assert (other.progress.steps, same(par, other)) == (1, True)
    assert "the state of step 5 in memory is not used" in caplog.text


def test_training_continues_if_a_schedulers_state_cannot_be_stored_in_memory(folder: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, object]:
            return {"function": lambda: None}

        def load_state_dict(self, state: dict[str, object]) -> None: ...

    par, scheduler = training(1)
    step(par, scheduler, 1000, [Odd()])
    assert store._paces[par].neighbour._failures == 1
    assert not training(2)[0].load(schedulers=[Odd()])
