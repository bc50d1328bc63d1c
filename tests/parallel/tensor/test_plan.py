"""Which layers are found to belong together, in one process; models that only look as if they could be cut."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from paceline.parallel import ParallelError
from tests.engines.conftest import require_engine
from tests.late import late

if TYPE_CHECKING:
    from torch import Tensor, nn
else:
    nn = late("torch.nn")

torch, F, models = late("torch"), late("torch.nn.functional"), late("tests.parallel.models")
own = late("tests.parallel.tensor.models")


@pytest.fixture(scope="module", autouse=True)
def with_torch() -> None:
    """Import the modules that load torch before the first test: collecting the tests loads none."""
    require_engine("torch", find_spec("torch"))
    global tied_parameters, TensorPlan, find_plan, fold, plan_from_table
    from paceline.parallel import tied_parameters
    from paceline.parallel.tensor.plan import TensorPlan, find_plan, fold, plan_from_table


WIDTH, WORDS = 16, 11


def plan_of(model: nn.Module, sample: Tensor | None = None, parts: int = 2) -> TensorPlan:
    x = torch.randint(0, WORDS, (3, 8)) if sample is None else sample
    return find_plan(model, lambda: model(x), parts, tied_parameters.find(model))


def inner(plan: TensorPlan) -> dict[str, str]:
    return {name[6:]: placement for name, placement in plan.placements.items() if name.startswith("inner.")}


ATTENTION = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}


@pytest.mark.parametrize(
    ("split", "divided"),
    [("width", ()), ("heads", ("heads",)), ("both", ("heads", "width"))],
)
def test_attention_is_split_by_heads_independently_of_module_names(split: str, divided: tuple[str, ...]) -> None:
    plan = plan_of(own.Tokens(own.Attention(split)))
    assert inner(plan) == ATTENTION
    # If only `heads` were divided, each head's keys would serve several queries. The planner tries that, and the output differs.
    assert {name for _, name in plan.divided} >= set(divided)
    assert all(module == "inner" for module, _ in plan.divided)


def test_grouped_query_attention_with_two_key_value_heads_is_split_like_other_attention() -> None:
    assert inner(plan_of(own.Tokens(own.Attention("width", kv_heads=2)))) == ATTENTION


@pytest.mark.parametrize(
    ("attention", "parts"),
    [(("width",), 3), (("width",), 8), (("width", 2), 4), (("shape",), 2)],
    ids=["3 parts", "more parts than heads", "more parts than heads of keys", "heads named by the input's shape"],
)
def test_attention_with_indivisible_heads_stays_whole_with_a_note(attention: tuple[Any, ...], parts: int) -> None:
    plan = plan_of(own.Tokens(own.Attention(*attention)), parts=parts)
    assert inner(plan) == {}
    assert "stay whole" in plan.notes[0]


@pytest.mark.promise("gpt-2-s-own-conv1d")
def test_fused_qkv_projection_is_split_by_heads_in_each_of_its_parts() -> None:
    plan = plan_of(own.Tokens(own.Fused()))
    assert inner(plan) == {"qkv": "colwise", "o": "rowwise"}
    assert plan.groups[0].pieces == 3
    assert plan.divided == (("inner", "heads"),)
    assert inner(plan_of(own.Tokens(own.Fused()), parts=3)) == {}


def test_gpt2_conv1d_layers_are_split_like_linear_ones() -> None:
    require_engine("transformers", find_spec("transformers"))
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": WIDTH, "n_layer": 1, "n_head": 4, "n_positions": 8, "bos_token_id": 1, "eos_token_id": 2}
    plan = plan_of(GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, **sizes)))
    found = {name.removeprefix("transformer.h.0."): placement for name, placement in plan.placements.items()}
    cut = {"attn.c_attn": "colwise", "attn.c_proj": "rowwise", "mlp.c_fc": "colwise", "mlp.c_proj": "rowwise"}
    assert {name: placement for name, placement in found.items() if placement != "vocab"} == cut
    assert {group.row.rpartition(".h.0.")[2]: group.pieces for group in plan.groups} == {
        "attn.c_proj": 3,
        "mlp.c_proj": 1,
    }


@pytest.mark.parametrize("between", ["ReLU()", "ReLU(inplace=True)", "Dropout(0.5)", "Identity()"])
def test_linear_pair_with_an_elementwise_function_between_is_split(between: str) -> None:
    assert inner(plan_of(own.Tokens(own.Pair(eval(f"nn.{between}"))))) == {"up": "colwise", "down": "rowwise"}


def test_gated_mlp_is_split_by_columns_then_by_rows() -> None:
    assert inner(plan_of(own.Tokens(own.Gated()))) == {"gate": "colwise", "up": "colwise", "down": "rowwise"}


@pytest.mark.parametrize(
    "between",
    ["LayerNorm(32)", "LayerNorm(32, elementwise_affine=False)", "Softmax(-1)", "PReLU()"],
)
def test_linear_pair_is_not_split_around_a_layer_norm_softmax_or_prelu(between: str) -> None:
    """A number that learns would get a part of its gradient on each rank, without a word."""
    hidden = 32
    plan = plan_of(own.Tokens(own.Pair(eval(f"nn.{between}"), hidden)))
    assert "inner.down" not in {group.row for group in plan.groups}


def test_linear_layer_before_a_glu_is_split_into_equal_parts_of_gate_and_value() -> None:
    pair = own.Pair(nn.GLU())
    pair.down = nn.Linear(16, WIDTH)
    plan = plan_of(own.Tokens(pair))
    assert inner(plan) == {"up": "colwise", "down": "rowwise"}
    assert plan.groups[0].pieces == 2


def test_zero_initialized_weights_do_not_hide_a_wrong_split() -> None:
    """A block that begins as nothing has outputs of 0 however it is cut: the trial has numbers of its own."""
    pair = own.Pair(nn.Softmax(-1))
    for param in pair.parameters():
        nn.init.zeros_(param)
    assert not plan_of(own.Tokens(pair)).groups


def test_linear_pair_is_not_split_if_its_intermediate_output_is_used_elsewhere() -> None:
    class Leaking(own.Pair):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(x)
            return self.down(hidden) + hidden.mean()

    plan = plan_of(own.Tokens(Leaking(nn.Identity())))
    assert inner(plan) == {}


def test_lora_adapter_beside_a_layer_prevents_its_split() -> None:
    """Regression: with LoRA on GPT-2's c_proj, the first step failed with "a and b must have same reduction dim"."""

    class Adapted(own.Pair):
        def __init__(self) -> None:
            super().__init__(nn.ReLU())
            self.narrow = nn.Linear(self.down.in_features, 4)
            self.wide = nn.Linear(4, self.down.out_features)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.relu(self.up(x))
            return self.down(hidden) + self.wide(self.narrow(hidden))

    plan = plan_of(own.Tokens(Adapted()))
    assert inner(plan) == {"narrow": "colwise", "wide": "rowwise"}


def test_layer_whose_weight_is_used_elsewhere_is_not_split() -> None:
    class Borrowing(own.Pair):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + F.linear(x, self.up.weight).mean()

    plan = plan_of(own.Tokens(Borrowing(nn.ReLU())))
    assert inner(plan) == {}


def test_layer_called_twice_is_not_split() -> None:
    class Twice(own.Pair):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(super().forward(x))

    assert inner(plan_of(own.Tokens(Twice(nn.ReLU())))) == {}


def test_consecutive_linear_layers_are_split_in_pairs() -> None:
    plan = plan_of(models.Mlp(), torch.randn(4, 12))
    assert plan.placements == {
        "first": "colwise",
        "blocks.0": "rowwise",
        "blocks.1": "colwise",
        "blocks.2": "rowwise",
        "blocks.3": "colwise",
        "last": "rowwise",
    }


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_head_are_split_by_vocabulary(tied: bool) -> None:
    plan = plan_of(models.Transformer(tied=tied), torch.randint(0, WORDS, (3, 8)))
    assert {name for name, placement in plan.placements.items() if placement == "vocab"} == {"tok", "head"}


@pytest.mark.parametrize("option", [{"padding_idx": 0}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}])
@pytest.mark.parametrize("tied", [True, False])
def test_embedding_with_padding_or_norm_options_is_not_split(option: dict[str, Any], tied: bool) -> None:
    plan = plan_of(own.Tokens(own.Pair(nn.ReLU()), tied=tied, **option))
    assert "tok" not in plan.placements
    assert "head" not in plan.placements


def test_embedding_weight_used_by_a_functional_head_is_not_split() -> None:
    class Borrowing(own.Tokens):
        def forward(self, tokens: Tensor) -> Tensor:
            return F.linear(self.inner(self.tok(tokens)), self.tok.weight) + self.head(self.tok(tokens))

    assert "tok" not in plan_of(Borrowing(own.Pair(nn.ReLU()))).placements


def test_single_linear_layer_is_split_by_columns() -> None:
    assert plan_of(models.Cnn("batch"), torch.randn(2, 1, 6, 6)).placements == {"last": "colwise"}


def test_planning_leaves_the_model_unchanged() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8), nn.ReLU())
    model[0].weight.requires_grad_(False)
    model[3].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    plan_of(model, torch.ones(4, WIDTH))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not model[0].weight.requires_grad
    assert model[1].training
    assert not model[3].training
    assert not any("forward" in vars(module) or module._forward_hooks for module in model.modules())
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"blocks.*.upp": "colwise"},
            r"'blocks\.\*\.upp' is the name of no module of Transformer\. Names like it: blocks",
        ),
        ({"blocks.0.norm1": "colwise"}, r"'blocks\.0\.norm1' 'colwise', but that is a LayerNorm"),
        ({"blocks": "rowwise"}, r"matches only modules without weights of their own"),
    ],
)
def test_plan_table_with_an_unknown_or_unsplittable_module_is_refused_and_the_error_names_it(
    table: dict[str, str], message: str
) -> None:
    with pytest.raises(ParallelError, match=message):
        plan_from_table(models.Transformer(tied=False), table, None, 2)


def test_plan_table_that_names_a_convolution_is_refused_and_the_error_names_the_module() -> None:
    with pytest.raises(ParallelError, match=r"'first' 'colwise', but that is a Conv2d"):
        plan_from_table(models.Cnn("group"), {"first": "colwise"}, None, 2)


def test_first_matching_pattern_of_a_plan_table_is_used() -> None:
    table = {"blocks.0.up": "replicate", "blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    model = models.Transformer(tied=False, depth=2)
    x = torch.randint(0, WORDS, (3, 8))
    plan = plan_from_table(model, table, lambda: model(x), 2)
    assert plan.placements == {"blocks.1.up": "colwise", "blocks.0.down": "rowwise", "blocks.1.down": "rowwise"}
    assert [group.row for group in plan.groups] == ["blocks.1.down"]


def test_names_of_consecutive_model_blocks_are_abbreviated_to_a_range() -> None:
    names = ["tok", *(f"blocks.{index}.{part}" for index in range(12) for part in ("up.0", "down")), "head", "4"]
    assert fold(names) == ["tok", "blocks.{0..11}.up.0", "blocks.{0..11}.down", "head", "4"]


def test_abbreviated_block_names_show_gaps() -> None:
    assert fold(["h.0.q", "h.2.q", "h.3.q"]) == ["h.{0,2,3}.q"]
    assert fold(["norm1.weight", "norm2.weight"]) == ["norm1.weight", "norm2.weight"]
    assert fold([]) == []
