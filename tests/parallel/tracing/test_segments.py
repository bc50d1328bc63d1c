"""Stages hold the parameters that they use, under original names; values that skip a stage are carried through it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from paceline.parallel import ParallelError
from tests.late import late

if TYPE_CHECKING:
    from torch import Tensor, nn
else:
    nn = late("torch.nn")

torch, models, parts = late("torch"), late("tests.parallel.models"), late("tests.parallel.tracing.parts")


@pytest.fixture(scope="module", autouse=True)
def with_torch() -> None:
    """Import the modules that load torch before the first test: collecting the tests loads none."""
    global Boundaries, Mark, joined, split, stage_module
    from paceline.parallel.tracing.boundaries import Boundaries, Mark
    from paceline.parallel.tracing.segments import joined, split, stage_module


def cut(model: nn.Module, names: list[str], *args: Tensor) -> tuple:  # type: ignore[type-arg]
    found = parts.traced(model, *args)
    boundaries = Boundaries(found)
    return split(boundaries, [boundaries.find(Mark(name=name)) for name in names])


def test_stages_have_the_same_parameter_objects_and_names_as_the_model() -> None:
    model = models.Transformer(tied=True)
    segments = cut(model, ["blocks.2"], torch.zeros(2, 8, dtype=torch.long))
    first, second = (stage_module(model, segment.uses, nn.Module) for segment in segments)
    whole = dict(model.named_parameters(remove_duplicate=False))
    for stage in (first, second):
        for name, param in stage.named_parameters(remove_duplicate=False):
            assert whole[name] is param
    names = [list(dict(stage.named_parameters(remove_duplicate=False))) for stage in (first, second)]
    assert {"tok.weight", "pos.weight", "blocks.1.q.weight"} <= set(names[0])
    assert {"blocks.2.q.weight", "norm.weight", "head.weight"} <= set(names[1])
    assert set(names[0]) | set(names[1]) == set(whole)
    # The names have the model's order, so that they are equal on every rank. A set of names has no fixed order.
    assert names[0] == [name for name in whole if name in names[0]]


def test_stage_parameters_keep_the_models_order() -> None:
    model = models.Transformer(tied=False)
    names = ["head", "blocks.3", "tok", "blocks.0", "norm"]
    orders = {
        tuple(dict(stage_module(model, own, nn.Module).named_parameters())) for own in (names, names[::-1], set(names))
    }
    assert len(orders) == 1


def test_joining_stages_that_share_a_weight_restores_the_module_to_which_the_weight_belongs() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
            self.head = nn.Linear(2, 5)

    model = Tied().eval()
    # The first stage looks up rows in the weight of the head, and the second stage calls the head.
    held = [frozenset({"head.weight", "blocks.0"}), frozenset({"blocks.1", "head"})]
    for names in (held, held[::-1]):
        both = joined(model, [(stage_module(model, own, nn.Module), own) for own in names])
        assert list(dict(both.named_parameters())) == list(dict(model.named_parameters()))
        assert both.head is model.head
        assert not any(part.training for part in both.modules())


def test_train_and_eval_reach_the_blocks_of_a_stage() -> None:
    model = models.CASES["cnn_batch"].make()
    images, _ = models.CASES["cnn_batch"].batch(2)
    stage = stage_module(model, cut(model, ["last"], images)[0].uses, nn.Module)
    stage.eval()
    assert not any(module.training for module in model.blocks.modules() if isinstance(module, nn.BatchNorm2d))
    stage.train()
    assert all(module.training for module in model.blocks.modules() if isinstance(module, nn.BatchNorm2d))


def test_state_dict_of_a_stage_excludes_non_persistent_buffers_of_the_model() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleDict({"a_b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
            self.register_buffer("kept", torch.ones(2))
            self.register_buffer("left", torch.ones(2), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner["c"](self.inner["a_b"](x) + self.kept * self.left)

    model = Model()
    stage = stage_module(model, cut(model, ["inner.c"], torch.ones(1, 2))[0].uses, nn.Module)
    assert set(stage.state_dict()) == {"inner.a_b.weight", "inner.a_b.bias", "kept"}
    assert set(dict(stage.named_buffers())) == {"kept", "left"}


def test_skip_connections_pass_through_intermediate_stages() -> None:
    segments = cut(models.LongSkip(), ["blocks.1", "blocks.2", "last"], torch.zeros(3, 12))
    # The output of tanh goes into the first block and, three stages later, into the last layer.
    sent = [[value.name for value in segment.sends] for segment in segments]
    received = [[value.name for value in segment.receives] for segment in segments]
    assert received[1:] == sent[:-1]
    assert [len(names) for names in sent] == [2, 2, 1, 0]
    assert sent[0][0] == sent[1][0] == "tanh"


def test_positions_and_masks_are_recomputed_in_each_stage_instead_of_sent() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok, self.pos = nn.Embedding(9, 4), nn.Embedding(9, 4)
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, tokens: Tensor) -> Tensor:
            mask = torch.tril(torch.ones(tokens.shape[1], tokens.shape[1], device=tokens.device))
            known = (tokens != 0).unsqueeze(-1)
            x = mask @ self.a(self.tok(tokens) + self.pos(torch.arange(tokens.shape[1])))
            return mask @ self.b(x) * known

    segments = cut(Model(), ["b"], torch.zeros(2, 5, dtype=torch.long))
    assert len(segments[1].receives) == 1
    assert segments[1].inputs == (0,)
    assert "torch.tril" in segments[1].source


def test_cut_at_an_uncalled_module_or_before_the_first_block_is_refused_with_the_reason() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    found = parts.traced(model, torch.ones(1, 2))
    boundaries = Boundaries(found)
    with pytest.raises(
        ParallelError, match=r"cut='3': the model's forward calls no module of that name. It calls '0', '1'\."
    ):
        boundaries.find(Mark(name="3"))
    with pytest.raises(ParallelError, match=r"cut='0'.*the stage before would be empty"):
        boundaries.find(Mark(name="0"))
    with pytest.raises(ParallelError, match=r"before call 2 of '1'.*calls it 1 times"):
        boundaries.find(Mark(name="1", nth=1))

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.a, self.b = nn.BatchNorm1d(2), nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.norm(self.a(self.norm(x))))

    boundaries = Boundaries(parts.traced(Shared(), torch.ones(3, 2)))
    with pytest.raises(ParallelError, match=r"cut='a'.*a buffer or an input that the forward pass changes.*in norm"):
        boundaries.find(Mark(name="a"))
    assert boundaries.find(Mark(name="b")) > 0
