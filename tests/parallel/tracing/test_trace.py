"""What an outer forward may do, and what it may not: the parts of a model have the output of the whole."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from paceline.parallel import ParallelError
from tests.late import late
from tests.parallel.world import CASES

if TYPE_CHECKING:
    from torch import Tensor, nn
else:
    nn = late("torch.nn")

torch, F, models = late("torch"), late("torch.nn.functional"), late("tests.parallel.models")
own, parts = late("tests.parallel.tracing.models"), late("tests.parallel.tracing.parts")


@pytest.fixture(scope="module", autouse=True)
def with_torch() -> None:
    """Import the modules that load torch before the first test: collecting the tests loads none."""
    global Tracer, key_of
    from paceline.parallel.tracing.trace import Tracer, key_of


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(3, 6)


@pytest.mark.parametrize("name", CASES)
def test_stages_of_each_traced_model_compute_the_same_as_the_whole_model(name: str) -> None:
    torch.manual_seed(0)
    inputs, _ = models.CASES[name].batch(4)
    parts.assert_parts_equal_whole(models.CASES[name].make(), inputs)


def test_model_with_several_inputs_keywords_and_defaults_is_traced(x: Tensor) -> None:
    class Model(own.Blocks):
        def forward(
            self, x: Tensor, y: Tensor | None = None, *, mask: Tensor, flip: bool = False, **rest: Any
        ) -> Tensor:
            h = self.a(x) * mask
            h = self.b(h)
            if y is not None:
                h = h + self.c(y)
            h = -h if flip else h
            return self.d(h) * mask + rest.get("extra", 0)

    mask = torch.tensor([[True], [False], [True]])
    parts.assert_parts_equal_whole(Model(), x, x + 1, mask=mask)
    parts.assert_parts_equal_whole(Model(), x, mask=mask, flip=True, extra=torch.ones(6))


def test_model_with_inputs_in_containers_is_traced(x: Tensor) -> None:
    class Model(own.Blocks):
        def forward(self, batch: dict[str, Any]) -> Tensor:
            h = self.a(batch["x"])
            for other in batch["others"]:
                h = self.b(h) + other
            return self.c(h) if "flag" in batch else h

    parts.assert_parts_equal_whole(Model(), {"x": x, "others": [x + 1, x + 2], "flag": None})


@dataclass
class Result:
    logits: Tensor
    hidden: tuple[Tensor, ...]
    name: str = "result"


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def test_model_with_outputs_of_any_type_is_traced(x: Tensor) -> None:
    class Model(own.Blocks):
        def __init__(self, make: Any) -> None:
            super().__init__()
            self.make = make

        def forward(self, x: Tensor) -> Any:
            h = self.a(x)
            k = self.b(h)
            return self.make(self.c(k), (h, k))

    for make in (
        Result,
        lambda y, hidden: Pair(y, hidden[0]),
        lambda y, hidden: {"y": y, "hidden": hidden, "none": None, "three": 3},
        lambda y, hidden: OrderedDict(y=y, h=hidden[1]),
        lambda y, hidden: [y, *hidden],
        lambda y, hidden: (y, {"deep": [hidden]}),
    ):
        parts.assert_parts_equal_whole(Model(make), x)


def test_blocks_with_containers_as_inputs_and_outputs_are_traced(x: Tensor) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, state: Result) -> Result:
            h = self.inner(state.logits)
            return Result(h, (*state.hidden, h))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Two() for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            state = Result(x, ())
            for block in self.blocks:
                state = block(state)
            return state.logits + sum(state.hidden)

    parts.assert_parts_equal_whole(Model(), x)


def test_tensor_sizes_are_plain_ints_during_tracing(x: Tensor) -> None:
    class Model(own.Blocks):
        def forward(self, x: Tensor) -> Tensor:
            rows, width = x.shape
            assert rows <= 100
            h = self.a(x)
            positions = torch.arange(rows, device=x.device, dtype=h.dtype)
            h = self.b(h.view(-1, h.size(1)))
            if h.dim() == 2 and len(h) == rows:
                h = h + positions[:, None] / max(h.shape)
            return self.c(h.reshape(rows, width)) * h.new_ones(width)

    parts.assert_parts_equal_whole(Model(), x)


def test_split_model_using_parameters_and_buffers_outside_its_blocks_computes_the_same_as_the_whole(x: Tensor) -> None:
    class Model(own.Blocks):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x) * self.scale
            h = self.b(h) @ self.mask
            h = F.linear(self.c(h) + self.shift, self.a.weight * 2, self.a.bias)
            return self.d(h) * self.scale

    parts.assert_parts_equal_whole(Model(), x)


def test_split_model_with_in_place_changes_outside_its_blocks_computes_the_same_as_the_whole(x: Tensor) -> None:
    class Model(own.Blocks):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            h += 1
            k = self.b(h)
            k[:, 0] = 0.5
            torch.relu_(k)
            k = self.c(k)
            k.mul_(2.0)
            return self.d(k) + h

    parts.assert_parts_equal_whole(Model(), x)


def test_blocks_that_change_their_input_in_place_are_traced(x: Tensor) -> None:
    model = nn.Sequential(
        nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.Hardtanh(inplace=True), nn.Linear(6, 6)
    )
    parts.assert_parts_equal_whole(model, x)


def test_model_is_not_cut_between_a_view_and_a_later_change_of_its_tensor(x: Tensor) -> None:
    class Model(own.Blocks):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            left = h[:, :3]
            k = self.b(x)
            h.mul_(2.0)
            return self.c(h + k) + left.sum()

    assert "b" not in parts.assert_parts_equal_whole(Model(), x)


def test_split_model_with_no_grad_around_some_blocks_computes_the_same_as_the_whole(x: Tensor) -> None:
    class Model(own.Blocks):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                h = self.a(x)
                h = self.b(h) * self.scale
            k = self.c(h)
            return self.d(k) + self.b(h.detach())

    parts.assert_parts_equal_whole(Model(), x)


def test_cut_model_draws_the_same_random_numbers_as_the_whole_model(x: Tensor) -> None:
    class Model(own.Blocks):
        def forward(self, x: Tensor) -> Tensor:
            noise = torch.rand(x.shape)
            h = F.dropout(self.a(x) + noise, 0.5, self.training)
            h = self.b(h) + torch.randn_like(x)
            return self.c(h) * noise

    parts.assert_parts_equal_whole(Model(), x)


def test_integer_and_boolean_tensors_are_passed_between_model_parts() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Embedding(9, 6), nn.Embedding(9, 6)
            self.a, self.b = nn.Linear(6, 9), nn.Linear(6, 6)

        def forward(self, tokens: Tensor) -> Tensor:
            h = self.a(self.first(tokens))
            best = h.argmax(-1)
            k = self.b(self.second(best))
            return k * (best > 3)[..., None]

    parts.assert_parts_equal_whole(Model(), torch.randint(0, 9, (2, 5)))


def test_model_can_be_cut_at_the_second_call_of_a_block(x: Tensor) -> None:
    class Model(own.Blocks):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(self.b(self.a(x))))

    assert "a (call 2)" in parts.assert_parts_equal_whole(Model(), x)


def test_model_is_not_cut_between_two_calls_of_one_batch_norm(x: Tensor) -> None:
    class Model(own.Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(self.a(x))
            h = self.norm(self.b(h))
            return self.d(self.c(h))

    found = parts.assert_parts_equal_whole(Model(), x)
    assert "b" not in found
    assert "norm (call 2)" not in found
    assert "c" in found


def test_buffer_changed_in_place_between_blocks_is_traced(x: Tensor) -> None:
    class Model(own.Blocks):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            self.shift.add_(1)
            h = self.b(h)
            return self.c(h)

    parts.assert_parts_equal_whole(Model(), x)


def test_block_that_reads_tensor_values_runs_with_real_values(x: Tensor) -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.inner(x)) if x.sum() > -1e9 else x

    model = nn.Sequential(nn.Linear(6, 6), Looks(), nn.Linear(6, 6))
    parts.assert_parts_equal_whole(model, x)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state = torch.get_rng_state()
    parts.traced(model, x)
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
    assert torch.equal(state, torch.get_rng_state())


def test_block_that_reads_tensor_values_is_refused_when_a_second_input_shape_is_traced(x: Tensor) -> None:
    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum() > 0 else x

    model = nn.Sequential(nn.Linear(6, 6), Looks(), nn.Linear(6, 6))
    tracer = Tracer(model, lambda name: False)
    tracer.trace((x,), {})
    tracer.forget()
    with pytest.raises(ParallelError, match=r"1 can't run on shapes alone \(.*`return x \* 2 if x.sum\(\) > 0 else x`"):
        tracer.trace((x[:2],), {})


def test_tracing_leaves_the_model_unchanged(x: Tensor) -> None:
    model = models.CASES["cnn_batch"].make()
    images, _ = models.CASES["cnn_batch"].batch(4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = set(vars(model))
    call = nn.Module.__call__
    state = torch.get_rng_state()
    parts.traced(model, images)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert set(vars(model)) == attributes
    assert nn.Module.__call__ is call
    assert torch.equal(state, torch.get_rng_state())
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("h = h if h.sum() > 0 else -h", "`bool` asks for a tensor's values"),
        ("h = h * h.max().item()", "`item` asks for a tensor's values"),
        ("h = h[h > 0]", "depends on a tensor's values"),
        ("h = h + torch.tensor(h.tolist())", "a tensor's values"),
        ("h.data = h * 2", "sets `data` of a tensor"),
        ("h = h.detach().requires_grad_()", "`requires_grad_` begins a graph of its own there"),
        ("h = torch.func.vmap(torch.sin)(h)", "In one process it can be computed, but not be noted call by call"),
    ],
)
def test_code_line_that_prevents_splitting_a_model_is_named(line: str, reason: str, x: Tensor, tmp_path: Any) -> None:
    path = tmp_path / "my model.py"
    path.write_text(
        f"""import torch
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
    def forward(self, x):
        h = self.a(x)
        {line}
        return self.b(h)
"""
    )
    names: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    with pytest.raises(ParallelError) as caught:
        parts.traced(names["Model"](), x)
    text = str(caught.value)
    assert f"{path}:9: `" in text
    assert reason in text
    assert "Model can't be cut into stages" in text


def test_model_that_uses_python_random_numbers_is_refused(x: Tensor) -> None:
    class Model(own.Blocks):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)) if random.random() < 2 else x

    state = random.getstate()
    with pytest.raises(ParallelError, match="Python's `random`"):
        parts.traced(Model(), x)
    assert random.getstate() == state


def test_model_that_replaces_a_buffer_in_forward_is_refused(x: Tensor) -> None:
    class Model(own.Blocks):
        def forward(self, x: Tensor) -> Tensor:
            self.shift = self.shift + 1
            return self.b(self.a(x)) + self.shift

    with pytest.raises(ParallelError, match=r"something new in the place of 'shift'.*copy_"):
        parts.traced(Model(), x)


def test_forward_is_traced_once_for_a_new_row_count_if_it_makes_the_same_calls_as_before(x: Tensor) -> None:
    """Regression: for each new number of rows, the tracer called the forward twice and compared the calls, even if the
    first call made the same calls as an earlier graph. So tracing took twice as long as necessary."""
    # The tracer does not notice that this iterator moves on, so the model can change its calls unnoticed.
    runs = itertools.count(1)

    class Model(own.Blocks):
        def forward(self, x: Tensor) -> Tensor:
            run, h = next(runs), self.a(x)
            # With one row, the forward calls another layer than in its previous call.
            return self.c(h) if len(x) == 1 and run % 2 else self.b(h)

    tracer = Tracer(Model(), {""}.__contains__)
    first = tracer.trace((x,), {})
    assert next(runs) == 3
    assert tracer.trace((x[:2],), {}).calls() == first.calls()
    assert next(runs) == 5
    next(runs)
    # For a new graph, the tracer still calls the forward twice and compares the calls.
    with pytest.raises(ParallelError, match="a second call with the same shapes does something else"):
        tracer.trace((x[:1],), {})


def test_forward_that_changes_a_counter_attribute_of_the_model_itself_is_refused_by_tracing(x: Tensor) -> None:
    class Counts(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.calls = Counts(6, 6), Counts(6, 6), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.b(self.a(x)) * self.calls

    with pytest.raises(ParallelError, match="something new in the place of 'calls'"):
        parts.traced(Model(), x)
    parts.assert_parts_equal_whole(nn.Sequential(Counts(6, 6), Counts(6, 6)), x, stages=(2,))


def test_autocast_inside_a_model_is_refused(x: Tensor) -> None:
    class Model(own.Blocks):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            with torch.autocast("cpu", torch.bfloat16):
                h = self.b(h)
            return self.c(h)

    with pytest.raises(ParallelError, match="changes autocast; give precision='bf16'"):
        parts.traced(Model(), x)


def test_exception_raised_by_the_models_forward_passes_unchanged_through_tracing(x: Tensor) -> None:
    class Model(own.Blocks):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        parts.traced(Model(), x)
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)mat1|shape|size"):
        parts.traced(Blocks_of(nn.Linear(6, 6), nn.Linear(5, 6)), x)


def Blocks_of(*blocks: nn.Module) -> nn.Module:  # noqa: N802
    return nn.Sequential(*blocks)


def test_module_that_can_not_be_traced_becomes_one_block(x: Tensor) -> None:
    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x) if x.sum() > 0 else x
            return x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.mid, self.head = Chooses(), nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.mid(self.body(x)))

    assert parts.marks(Model(), x) == ["mid", "head"]


def test_model_can_be_cut_at_entries_of_module_lists_and_sequential_containers(x: Tensor) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(Block(), Block())
            self.list = nn.ModuleList([Block(), Block()])
            self.head = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            x = self.body(x)
            for block in self.list:
                x = block(x)
            return self.head(x)

    assert parts.marks(Model(), x) == ["body.1", "list.0", "list.1", "head"]
    assert "list.0.two" in parts.marks(Model(), x, level=1)
    assert "list.1.two" in parts.marks(Model(), x, cut=("list.1.two",))
    parts.assert_parts_equal_whole(Model(), x, level=1)


def test_cache_key_of_a_traced_call_depends_on_shapes_dtypes_and_numbers(x: Tensor) -> None:
    assert key_of((x,), {}, True) == key_of((x + 1,), {}, True)
    others = [
        ((x[:2],), {}, True),
        ((x.double(),), {}, True),
        ((x,), {}, False),
        ((x,), {"n": 1}, True),
        ((x, x), {}, True),
    ]
    keys = [key_of(*other) for other in [((x,), {}, True), *others]]
    assert len(set(keys)) == len(keys)
    assert key_of((x,), {"n": 1}, True) != key_of((x,), {"n": 1.0}, True)


def test_a_model_that_can_not_be_copied_is_refused() -> None:
    class Model(own.Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.file = open(__file__)  # noqa: SIM115

    model = Model()
    with model.file, pytest.raises(ParallelError, match=r"can't be copied.*Keep files"):
        parts.traced(model, torch.zeros(1, 6))


def test_model_can_be_cut_between_layers_of_a_torch_transformer_encoder() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Linear(8, 8))
    assert parts.assert_parts_equal_whole(model, torch.randn(2, 5, 8)) == [
        "1.layers.0",
        "1.layers.1",
        "1.layers.2",
        "2",
    ]


def test_activation_checkpointed_blocks_are_traced(x: Tensor) -> None:
    class Model(own.Blocks):
        def forward(self, x: Tensor) -> Tensor:
            for block in (self.a, self.b, self.c):
                x = F.dropout(torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False), 0.5)
            return x

    parts.assert_parts_equal_whole(Model(), x)


def test_lstm_and_gru_blocks_are_traced() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LSTM(6, 6, batch_first=True), nn.GRU(6, 6, batch_first=True)
            self.head = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))

        def forward(self, x: Tensor) -> Tensor:
            h, (last, _) = self.first(x)
            h, _ = self.second(h, last)
            return self.head(h[:, -1])

    parts.assert_parts_equal_whole(Model(), torch.randn(2, 5, 6))


def test_blocks_inside_nested_wrappers_are_found(x: Tensor) -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    model = Wrapper(Wrapper(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))))
    assert parts.assert_parts_equal_whole(model, x, stages=(2,)) == ["inner.inner.1"]


def test_forward_hook_on_a_block_is_run_and_forward_hook_on_the_whole_model_is_refused(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].register_forward_hook(lambda module, args, output: output * 2)
    parts.assert_parts_equal_whole(model, x)
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(ParallelError, match=r"Sequential has the hook .*lambda.* on itself"):
        parts.traced(model, x)


def test_model_that_reads_hidden_states_of_its_layers_is_refused_and_the_error_names_hidden_states() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=8,
        num_labels=3,
    )
    model = transformers.SegformerForSemanticSegmentation(config)
    with pytest.raises(ParallelError, match=r"it reads hidden_states of its own layers \(output_hidden_states=True\)"):
        parts.traced(model, torch.randn(2, 3, 16, 16))
