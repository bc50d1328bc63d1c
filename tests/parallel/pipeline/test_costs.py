"""Measuring a model's blocks leaves nothing of it behind."""

from __future__ import annotations

import gc
import weakref

import pytest

from paceline.parallel import strategy


def test_measuring_block_costs_keeps_no_references_to_the_models_weights() -> None:
    # Don't import torch at the top of the file, because pytest collects the tests without torch.
    import torch

    from paceline.parallel.batches.batch import default_split
    from paceline.parallel.batches.microbatches import cut
    from paceline.parallel.forecast.measure import measured
    from paceline.parallel.mesh import build, start
    from paceline.parallel.task import Task
    from tests.parallel.models import CASES

    case = CASES["transformer_untied"]
    model = case.make()
    task = Task(
        model=model,
        loss=case.loss,
        loss_weight=None,
        split=default_split,
        microbatches=1,
        precision=None,
        seed=0,
    )
    place = start()
    micros = cut(case.batch(4), task, build(place, strategy.Layout()))
    about = measured(model, task, micros, place.device, torch.optim.AdamW(model.parameters()))
    assert not about.reason
    assert about.optimizer_factor == 2
    assert sum(block.activation_bytes for block in about.blocks) > 0
    weights = {name: weakref.ref(param) for name, param in model.named_parameters()}
    del model, task
    gc.collect()
    # Regression: attention saves its output for the backward pass. This output and the autograd graph kept each other
    # alive, and with them the weights.
    assert [name for name, ref in weights.items() if ref() is not None] == []


def test_timer_calls_cuda_synchronize_only_if_cuda_is_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from paceline.parallel.pipeline.costs import now

    waited: list[bool] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(True))
    for is_used in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda used=is_used: used)
        assert now() <= now()
        assert bool(waited) is is_used
