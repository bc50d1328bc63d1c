"""Whether a training fits, before its first step, by what the machine and the model say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import paceline
from paceline.parallel import DataParallel, ParallelError
from paceline.system.memory import Memory
from tests.late import late

torch, nn = late("torch"), late("torch.nn")
MIB = 1 << 20


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Lets the machine have so many bytes free, and so much swap."""
    from paceline.parallel import auto, memory_plan

    def make(free: int, swap: int = 0, limit: str = "the machine's memory") -> None:
        found = Memory(64 << 30, free, limit)
        monkeypatch.setattr(auto, "memory", lambda: found)
        monkeypatch.setattr(memory_plan, "memory", lambda: found)
        monkeypatch.setattr(memory_plan, "swap_free", lambda: swap)

    return make


def trained(**values):
    """4 MiB of parameters, as much of gradients, twice that of Adam's moments."""
    model = nn.Linear(1024, 1024, bias=False)
    optimizer = values.pop("optimizer", torch.optim.AdamW)(model.parameters())
    return paceline.parallelize(model, optimizer, loss=nn.functional.mse_loss, strategy=DataParallel(), **values)


@pytest.mark.promise("training-worker-memory-refused-before")
def test_training_that_needs_more_than_the_free_memory_is_refused_with_both_amounts_in_the_error(machine) -> None:
    machine(11 * MIB)
    with pytest.raises(ParallelError) as error:
        trained()
    assert str(error.value) == (
        "Linear as one worker: the worker has to take 12.0 MiB beside its parameters (parameters 4.0 MiB, gradients 4.0 MiB, "
        "optimizer 8.0 MiB), and has 11.0 MiB free (the machine's memory). The training would end for want of memory. Use more "
        "workers that share the model, or a node with more memory. Fewer workers on a node leave each more; memory_bytes= says "
        "what a worker has, if you know better."
    )
    # `memory_bytes` replaces the measured memory, and an optimizer with less state needs less memory.
    assert trained(memory_bytes=16 * MIB).memory.free == 12 * MIB
    assert trained(optimizer=torch.optim.SGD).memory.needed == 8 * MIB
    with pytest.raises(ParallelError, match=r"has 11.0 MiB free \(memory_bytes=15728640\)"):
        trained(memory_bytes=15 * MIB)


def test_memory_shortage_is_only_a_warning_if_swap_is_free_and_no_control_group_limit_applies(machine) -> None:
    machine(11 * MIB, swap=2 * MIB)
    with pytest.warns(
        UserWarning, match=r"will take about 12.0 MiB .* has 11.0 MiB and 2.0 MiB of swap free .* may run out"
    ):
        trained()
    # Free swap does not count if a control group limits the memory.
    machine(11 * MIB, swap=2 * MIB, limit="the control group's limit")
    with pytest.raises(ParallelError, match="the control group's limit"):
        trained()


def test_memory_of_an_optimizer_that_can_not_be_copied_is_not_counted(machine) -> None:
    class Odd(torch.optim.SGD):
        def __init__(self, params, must=None):
            if must is None and not isinstance(params, list):
                must = 1
            super().__init__(params, lr=must)

    machine(5 * MIB)
    par = trained(optimizer=Odd)
    assert (par.memory.optimizer, par.memory.needed) == (None, 8 * MIB)


def test_memory_plan_counts_no_new_memory_for_optimizer_state_that_is_already_allocated(machine) -> None:
    model = nn.Linear(1024, 1024, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    machine(5 * MIB)
    par = paceline.parallelize(model, optimizer, loss=nn.functional.mse_loss, strategy=DataParallel())
    assert (par.memory.coming, par.memory.needed) == (4 * MIB, 16 * MIB)


def test_model_without_an_optimizer_has_no_memory_plan(machine) -> None:
    machine(0)
    par = paceline.parallelize(nn.Linear(8, 8), loss=nn.functional.mse_loss, strategy=DataParallel())
    assert par.memory is None


def test_memory_plan_is_stored_for_failure_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "attempts/2").mkdir(parents=True)
    monkeypatch.setenv("PACELINE_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("PACELINE_ATTEMPT", "2")
    trained()
    found = json.loads((tmp_path / "attempts/2/memory_0.json").read_text())
    assert (found["parameters"], found["gradients"], found["optimizer"]) == (4 * MIB, 4 * MIB, 8 * MIB)
