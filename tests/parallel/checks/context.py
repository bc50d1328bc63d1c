"""Sequences in parts: equal to one process; models that mix positions other than by attention are refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import paceline
from paceline.parallel import ContextParallel, DataParallel, FullyShard, ParallelError
from paceline.parallel.context import Places, attending_to_all
from tests.parallel.equality import adamw, alone, assert_equal, batches, made, sgd, together
from tests.parallel.models import CASES, SHALLOW, VOCABULARY, Case, plain_tokens, token_loss
from tests.parallel.world import Ranks

SIZES = (2,)

FLOAT64 = 1e-10


def check_context_parallel_steps_equal_one_process(ranks: Ranks, sizes: Any = (2, 4)) -> None:
    case = SHALLOW["transformer_tied"]
    options: dict[str, Any] = {"rows": (7, 5), "clip_norm": 0.5, "microbatches": 2}
    one = alone(case, **options)
    layouts: list[Any] = [ContextParallel()]
    if ranks.size == 4:
        more = [DataParallel(2) @ ContextParallel(2), FullyShard(2) @ ContextParallel(2)]
        # `make test` leaves out some layouts: two workers test ContextParallel alone, and the checks of transformers
        # test DataParallel with ContextParallel.
        layouts = ranks.cells(more[1:], [*layouts, *more])
    for layout in layouts:
        many = together(case, layout, check="first", recompute="blocks" if layout is layouts[-1] else None, **options)
        assert_equal(one, many, loss=FLOAT64, gradient=FLOAT64, parameter=FLOAT64, buffer=FLOAT64)


class Encoded(nn.Module):
    """torch's own encoder, with the sequence in the first dimension."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0)
        self.tok, self.pos = nn.Embedding(VOCABULARY, 16), nn.Embedding(8, 16)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        count = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(count, dtype=self.head.weight.dtype)
        x = (self.tok(tokens) + self.pos(torch.arange(count))).transpose(0, 1)
        return self.head(self.encoder(x, mask=mask, is_causal=True).transpose(0, 1))


def seven_tokens(rows: int) -> tuple[Tensor, Tensor]:
    x, y = plain_tokens(rows)
    return x[:, :7], y[:, :7]


ENCODED = Case(name="encoded", make=Encoded, batch=seven_tokens, loss=token_loss)


def check_uneven_sequence_parts_equal_one_process(ranks: Ranks) -> None:
    """Seven places on two workers are four and three."""
    options: dict[str, Any] = {"rows": (6, 6)}
    one, many = alone(ENCODED, **options), together(ENCODED, ContextParallel(dim=0), check="first", **options)
    assert_equal(one, many, loss=FLOAT64, gradient=FLOAT64, parameter=FLOAT64)


def check_context_parallel_evaluation_and_state_equal_one_process(ranks: Ranks) -> None:
    """Evaluated in evaluation mode, in which torch's encoder has kernels that know nothing of other workers."""
    model, given = made(ENCODED, torch.float64), batches(ENCODED, torch.float64, (6,))
    par = paceline.parallelize(
        model, adamw(model), given, loss=token_loss, strategy=ContextParallel(dim=0), check="off"
    )
    par.step(given[0])
    found = par.evaluate(given, token_loss)
    plain = made(ENCODED, torch.float64, seed=9)
    plain.load_state_dict(par.full_state_dict())
    with torch.no_grad():
        assert abs(found - float(token_loss(plain.eval()(given[0][0]), given[0][1]))) < FLOAT64
    text = par.explain()
    assert "sequences are cut between the first and the last block of encoder.layers" in text, text
    assert "context 2: each worker is sent the keys and values of all others" in text, text
    assert "*  ContextParallel(2)" in text, text
    assert (
        text.forecasts["ContextParallel(2)"].activation_bytes
        < text.forecasts["DataParallel(2)"].activation_bytes * 1.01
    )
    par.save(ranks.folder / "saved")
    other = made(ENCODED, torch.float64, seed=4)
    again = paceline.parallelize(other, adamw(other), given, loss=token_loss, strategy=FullyShard(), check="off")
    again.load(ranks.folder / "saved")
    assert abs(float(again.step(given[0])) - float(par.step(given[0]))) < FLOAT64


def check_attention_masks_of_every_shape_are_applied(ranks: Ranks) -> None:
    """Attention of this worker's queries to all keys, with what torch takes for a mask."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, 4, 10, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    places = Places(10, torch.distributed.group.WORLD, torch.device("cpu"))
    rows = places.take(torch.arange(10), 0)
    padding = torch.ones(2, 1, 1, 10, dtype=torch.bool)
    padding[1, ..., 7:] = False
    bias = torch.randn(4, 10, 10, dtype=torch.float64)
    cases: list[tuple[Any, Any, bool]] = [
        (None, None, False),
        (None, None, True),
        (padding, padding, False),
        (padding, padding[..., rows], False),
        (bias, bias[:, rows], False),
    ]
    for mask, own, causal in cases:
        whole = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
        wanted = torch.autograd.grad(whole.square().sum(), (q, k, v))
        mine = [places.take(one, 2) for one in (q, k, v)]
        with attending_to_all(places):
            part = F.scaled_dot_product_attention(*mine, own, is_causal=causal)
            # A script that has imported the function by its name must get the same result.
            named = scaled_dot_product_attention(*mine, own, is_causal=causal)
        assert torch.equal(part, named)
        assert torch.allclose(part, whole[:, :, rows], atol=1e-12)
        for grad, full in zip(torch.autograd.grad(part.square().sum(), (q, k, v)), wanted, strict=True):
            torch.distributed.all_reduce(grad)
            assert torch.allclose(grad, full, atol=1e-11)
    half = [places.take(one, 2) for one in (q, k, v)]
    with attending_to_all(places), pytest.raises(ParallelError, match=r"mask of the shape .* before the first block"):
        F.scaled_dot_product_attention(*half, torch.ones(5, 5, dtype=torch.bool))


class Mean(nn.Module):
    """Mixes places by hand."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(1, keepdim=True)


def check_model_whose_sequences_cannot_be_split_is_refused(ranks: Ranks) -> None:
    given = batches(CASES["transformer_untied"], torch.float64, (4,))

    def stepped(model: nn.Module, strategy: Any) -> None:
        optimizer = sgd(model.double())
        paceline.parallelize(model, optimizer, given, loss=token_loss, strategy=strategy).step(given[0])

    def refused(model: nn.Module, words: str, strategy: Any = None) -> None:
        with pytest.raises(ParallelError, match=words):
            stepped(model, strategy or ContextParallel())

    def tokens(*blocks: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Embedding(VOCABULARY, 16), *blocks, nn.Linear(16, VOCABULARY))

    refused(tokens(Mean()), r"before the first step.* let attention alone mix places")
    plain = partial(made, CASES["transformer_untied"], torch.float64)
    lists = ContextParallel(lists=["layers"])
    refused(plain(), r"lists=\['layers'\]\) is not a list of blocks of Transformer\. It has: blocks", lists)
    # Regression: the error suggested check='off', but with this setting the model failed with the same error.
    refused(
        plain(),
        r"^ContextParallel\(2\): a sequence of 2 places can't be cut.*\(dim=\.\.\.\)\.$",
        ContextParallel(dim=0),
    )
    refused(plain(), r"blocks\.0 is given \[\d+, 8, 16\], and dimension 3", ContextParallel(dim=3))
    twice = plain()
    stepped(twice, ContextParallel())
    refused(twice, r"parallelize has already cut Transformer for context 2")
    only = nn.Embedding(VOCABULARY, VOCABULARY)
    refused(only, r"Embedding has no list of blocks")
    skips = plain()
    skips.blocks[1].forward = skips.blocks[1].forward
    refused(skips, r"blocks\.1 has its own forward on the object")
