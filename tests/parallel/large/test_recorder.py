"""The calls of a constructor under `parallel.empty()` are repeated, for each parameter separately."""

from __future__ import annotations

from typing import Any

import pytest

from paceline import parallel
from paceline.parallel import ParallelError
from tests.late import late

torch = late("torch")
nn = late("torch.nn")
values_of = late("paceline.parallel.large.values")
models = late("tests.parallel.large.built")


def built() -> Any:
    with parallel.empty():
        return models.Built()


def test_model_built_inside_parallel_empty_keeps_its_tied_weights_constants_and_initializers() -> None:
    model = built()
    assert model.words.weight.is_meta
    assert model.head.weight is model.words.weight
    # Buffers and small tensors with given values are created at once.
    assert model.table.tolist() == [0, 1, 2, 3, 4, 5]
    assert model.scale.tolist() == [0.5] * 3
    parallel.initialise(model)
    assert model.head.weight is model.words.weight
    assert 0.017 < model.words.weight[4:].std().item() < 0.023
    assert not model.words.weight[3].any()
    assert 0.009 < model.plain.weight.std().item() < 0.011
    assert torch.equal(model.momentum, model.plain.weight)
    assert not model.momentum.requires_grad
    assert torch.allclose(model.turn.T @ model.turn, torch.eye(4), atol=1e-5)
    assert model.cut.abs().max().item() <= 0.6
    assert model.cut.std().item() > 0.2
    assert model.norm.weight.tolist() == [1.0] * 4
    # The two parameters of a weight normalisation get initial values that fit together.
    parts = model.weighted.parametrizations.weight
    assert torch.allclose(parts.original0, parts.original1.norm(dim=1, keepdim=True))
    x = torch.randn(2, 1, 4)
    assert model.cells(x)[0].shape == (2, 1, 4)


@pytest.mark.promise("built-without-values-worker-numbers")
def test_initial_values_depend_only_on_seed_and_parameter_name() -> None:
    one, two, other = parallel.initialise(built(), 1), parallel.initialise(built(), 1), parallel.initialise(built(), 2)
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name]), name
    assert not torch.equal(one.plain.weight, other.plain.weight)
    assert not torch.equal(one.plain.weight.flatten()[:30], one.cut.flatten()[:30])
    # A parameter that is initialised alone gets the same numbers as in a whole model.
    model = built()
    values = values_of.TensorValues(model, 1)
    assert torch.equal(values.whole("cut"), one.cut)
    # Initialisation does not use torch's own random generator.
    before = torch.get_rng_state()
    parallel.initialise(built(), 1)
    assert torch.equal(before, torch.get_rng_state())


def test_meta_device_model_is_initialized_by_its_modules() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Embedding(3, 4))
    parallel.initialise(model, 3)
    assert model[1].running_var.tolist() == [1.0] * 4
    assert model[0].weight.abs().max().item() <= 0.5
    with parallel.empty():
        same = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Embedding(3, 4))
    assert torch.equal(parallel.initialise(same, 3)[0].weight, model[0].weight)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("Reads", "a number is read from a parameter"),
        ("Copies", "reads the values of a parameter"),
        ("Large", "Large.rows"),
    ],
)
def test_reading_values_of_an_empty_model_raises(kind: str, message: str) -> None:
    with pytest.raises(ParallelError, match=message), parallel.empty():
        getattr(models, kind)()


def test_initialization_raises_and_names_a_parameter_without_values() -> None:
    with parallel.empty():
        model = models.Never()
    with pytest.raises(ParallelError, match="rows has no values, and Never does not say"):
        parallel.initialise(model)
    with torch.device("meta"):
        bare = nn.Module()
        bare.weight = nn.Parameter(torch.zeros(3))
    with pytest.raises(ParallelError, match="weight has no values"):
        parallel.initialise(bare)
    # A conversion outside of `empty()` replaces the parameter.
    with parallel.empty():
        model = nn.Linear(3, 3)
    model.double()
    with pytest.raises(ParallelError, match=r"weight was built under .* and converted"):
        parallel.initialise(model)
    with parallel.empty():
        model = nn.Linear(3, 3).double()
    assert parallel.initialise(model).weight.dtype is torch.float64


def test_large_constant_parameter_of_an_empty_model_takes_no_memory() -> None:
    class Table(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.full((2100, 2100), 0.25))

    with parallel.empty():
        model = Table()
    assert model.rows.is_meta
    found = parallel.initialise(model).rows
    assert found.min().item() == found.max().item() == 0.25


def test_models_built_after_leaving_parallel_empty_have_real_weights() -> None:
    with parallel.empty():
        nn.Linear(2, 2)
    assert not nn.Linear(2, 2).weight.is_meta
    assert nn.init.orthogonal_(torch.empty(3, 3)).isfinite().all()
