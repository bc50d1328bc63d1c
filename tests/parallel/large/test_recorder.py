"""What a constructor does under `empty()` is done again, for each parameter by itself."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from paceline.parallel import ParallelError, empty, initialise  # noqa: E402
from paceline.parallel.large.values import TensorValues  # noqa: E402


class Built(nn.Module):
    """Ways in which models fill their parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 40)
        self.head = nn.Linear(40, 50, bias=False)
        self.head.weight = self.words.weight
        self.plain = nn.Linear(40, 40)
        self.cells = nn.LSTM(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.full((3,), 0.5))
        self.turn = nn.Parameter(torch.empty(6, 4))
        nn.init.orthogonal_(self.turn)
        self.cut = nn.Parameter(torch.empty(30, 40))
        nn.init.trunc_normal_(self.cut, std=0.5, a=-0.6, b=0.6)
        self.momentum = nn.Parameter(torch.empty(40, 40), requires_grad=False)
        self.weighted = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        self.register_buffer("table", torch.arange(6).float())
        self.apply(self.fill)
        for name, param in self.named_parameters():
            if name.endswith("plain.weight"):
                nn.init.normal_(param, std=0.02 / math.sqrt(4))
        self.momentum.data.copy_(self.plain.weight.data)
        with torch.no_grad():
            self.words.weight[3].zero_()

    def fill(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)


def built() -> Built:
    with empty():
        return Built()


def test_a_constructors_own_way_of_filling_is_kept() -> None:
    model = built()
    assert model.words.weight.is_meta
    assert model.head.weight is model.words.weight
    # What is no parameter, and small ones that were made with values, are there at once.
    assert model.table.tolist() == [0, 1, 2, 3, 4, 5]
    assert model.scale.tolist() == [0.5] * 3
    initialise(model)
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
    # The weight that a normalised layer was made with is the one that its parts make.
    parts = model.weighted.parametrizations.weight
    assert torch.allclose(parts.original0, parts.original1.norm(dim=1, keepdim=True))
    x = torch.randn(2, 1, 4)
    assert model.cells(x)[0].shape == (2, 1, 4)


def test_numbers_follow_from_the_seed_and_the_name_alone() -> None:
    one, two, other = initialise(built(), 1), initialise(built(), 1), initialise(built(), 2)
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name]), name
    assert not torch.equal(one.plain.weight, other.plain.weight)
    assert not torch.equal(one.plain.weight.flatten()[:30], one.cut.flatten()[:30])
    # One parameter by itself has the numbers that it has among all.
    model = built()
    values = TensorValues(model, 1)
    assert torch.equal(values.whole("cut"), one.cut)
    # And torch's own generator is left where it was.
    before = torch.get_rng_state()
    initialise(built(), 1)
    assert torch.equal(before, torch.get_rng_state())


def test_a_model_on_the_meta_device_asks_its_modules() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Embedding(3, 4))
    initialise(model, 3)
    assert model[1].running_var.tolist() == [1.0] * 4
    assert model[0].weight.abs().max().item() <= 0.5
    with empty():
        same = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Embedding(3, 4))
    assert torch.equal(initialise(same, 3)[0].weight, model[0].weight)


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.largest = float(self.up.weight.max())


class Copies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.register_buffer("first", torch.zeros(4, 4))
        self.first.copy_(self.up.weight.detach())


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(2100, 2100))


class Never(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.empty(4))
        with torch.no_grad():
            self.rows.mul_(2)


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Reads, "a number is read from a parameter"), (Copies, "reads the values of a parameter"), (Large, "Large.rows")],
)
def test_what_reads_values_that_are_not_there_is_told_so(kind: type[nn.Module], message: str) -> None:
    with pytest.raises(ParallelError, match=message), empty():
        kind()


def test_a_parameter_that_nobody_fills_is_refused_by_name() -> None:
    with empty():
        model = Never()
    with pytest.raises(ParallelError, match="rows has no values, and Never does not say"):
        initialise(model)
    with torch.device("meta"):
        bare = nn.Module()
        bare.weight = nn.Parameter(torch.zeros(3))
    with pytest.raises(ParallelError, match="weight has no values"):
        initialise(bare)
    # Converted outside of the block, the parameter is another one.
    with empty():
        model = nn.Linear(3, 3)
    model.double()
    with pytest.raises(ParallelError, match=r"weight was built under .* and converted"):
        initialise(model)
    with empty():
        model = nn.Linear(3, 3).double()
    assert initialise(model).weight.dtype is torch.float64


def test_a_large_constant_takes_no_memory() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.full((2100, 2100), 0.25))

    with empty():
        model = Table()
    assert model.rows.is_meta
    found: Tensor = initialise(model).rows
    assert found.min().item() == found.max().item() == 0.25


def test_outside_of_the_block_models_are_made_as_always() -> None:
    with empty():
        nn.Linear(2, 2)
    assert not nn.Linear(2, 2).weight.is_meta
    assert nn.init.orthogonal_(torch.empty(3, 3)).isfinite().all()
