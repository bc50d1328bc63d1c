"""What a layout might compute otherwise without a word: followed, or told, and never called equal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import paceline
from paceline.parallel import DataParallel, FullyShard, ParallelError, Parts, PipelineParallel, TensorParallel
from paceline.parallel.replicas import shard
from tests.parallel.models import Mlp
from tests.parallel.world import Ranks

SIZES = (2,)
REPLICAS = (DataParallel(), FullyShard())


def _batches(count: int = 2, rows: int = 8) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(4)
    return [(torch.randn(rows, 12, dtype=torch.float64), torch.randint(0, 5, (rows,))) for _ in range(count)]


def _made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind().double()


def _alone(model: nn.Module, batches: Any, microbatches: int = 1, loss: Any = F.cross_entropy) -> None:
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        for x_part, y_part in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
            (loss(model(x_part), y_part) / microbatches).backward()
        optimizer.step()


def _together(model: nn.Module, batches: Any, strategy: Any, *, loss: Any = F.cross_entropy, **options: Any) -> Any:
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    par = paceline.parallelize(model, optimizer, batches, loss=loss, strategy=strategy, **options)
    for batch in batches:
        par.step(batch)
    return par


def _assert_same(one: nn.Module, par: Any, what: str) -> None:
    many = par.full_state_dict()
    for name, value in one.state_dict().items():
        apart = float((value.cpu() - many[name].cpu()).abs().max())
        assert apart < 1e-10, f"{what} on {par.world.layout}: {name} differs by {apart:g}"


def _quarter(param: Any) -> None:
    param.grad.mul_(0.25)


def _hooked(model: Mlp, how: str) -> Any:
    handles = []
    for name, param in model.named_parameters():
        if name in ("first.weight", "blocks.1.weight"):
            if how == "before":
                handles.append(param.register_hook(lambda grad: grad * 0.25))
            else:
                handles.append(param.register_post_accumulate_grad_hook(_quarter))
    return handles


def check_gradient_hooks_are_called_as_in_one_process(ranks: Ranks) -> None:
    batches = _batches()
    for how, microbatches in (("before", 2), ("after", 1)):
        one = _made(Mlp)
        _hooked(one, how)
        _alone(one, batches, microbatches)
        for strategy in (*REPLICAS, *([PipelineParallel()] if how == "before" else [])):
            model = _made(Mlp)
            _hooked(model, how)
            par = _together(model, batches, strategy, microbatches=microbatches)
            _assert_same(one, par, f"a hook {how} accumulation")
            assert "equal" in str(par.check(batches[0]))
            assert "equal to the plain model" in par.compared


def check_gradient_hooks_removed_or_added_later_take_effect(ranks: Ranks) -> None:
    batches = _batches(4)
    one = _made(Mlp)
    handles = _hooked(one, "before")
    _alone(one, batches[:1])
    for handle in handles:
        handle.remove()
    _alone(one, batches[1:2])
    one.last.weight.register_hook(lambda grad: -grad)
    _alone(one, batches[2:])
    for strategy in REPLICAS:
        model = _made(Mlp)
        handles = _hooked(model, "before")
        par = _together(model, batches[:1], strategy)
        for handle in handles:
            handle.remove()
        par.step(batches[1])
        par.module.get_parameter("last.weight").register_hook(lambda grad: -grad)
        for batch in batches[2:]:
            par.step(batch)
        _assert_same(one, par, "a hook that comes and goes")


def check_gradient_hooks_that_a_layout_cannot_call_are_refused(ranks: Ranks) -> None:
    batches = _batches(1)
    model = _made(Mlp)
    _hooked(model, "after")
    with pytest.raises(ParallelError, match=r"first\.weight has a hook of register_post_accumulate.*microbatches=1"):
        _together(model, batches, FullyShard(), microbatches=2)
    model = _made(Mlp)
    for param in model.parameters():
        param.register_hook(lambda grad: grad * 2)
    with pytest.raises(ParallelError, match=r"has a hook on its gradient.*TensorParallel\(\) cuts it"):
        _together(model, batches, TensorParallel())


def check_nonlinear_gradient_hook_is_refused_before_the_first_step(ranks: Ranks) -> None:
    for strategy in REPLICAS:
        model = _made(Mlp)
        for param in model.parameters():
            param.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        with pytest.raises(ParallelError, match=r"before the first step.*gradients are not those.*check='off'"):
            _together(model, _batches(), strategy)


class Momentum(nn.Module):
    """A second encoder that follows the first one, as in MoCo and BYOL."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.query, self.key = Mlp(depth=depth), Mlp(depth=depth)
        self.key.load_state_dict(self.query.state_dict())
        self.start, self.start_key = nn.Linear(12, 12), nn.Linear(12, 12)
        self.start_key.load_state_dict(self.start.state_dict())
        for param in (*self.key.parameters(), *self.start_key.parameters()):
            param.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            pairs = zip((*self.query.parameters(), *self.start.parameters()), self._keys(), strict=True)
            for param, key in pairs:
                key.mul_(0.9).add_(param, alpha=0.1)
            other = self.key(self.start_key(x))
        return self.query(self.start(x)) + other

    def _keys(self) -> Any:
        return (*self.key.parameters(), *self.start_key.parameters())


class Inside(nn.Module):
    """A block with its own momentum copy."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(12, 12), _Followed(), _Followed()])
        self.last = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x)


class _Followed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(12, 12)
        self.slow = nn.Linear(12, 12).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, own in zip(self.slow.parameters(), self.own.parameters(), strict=True):
                slow.lerp_(own, 0.1)
        return self.own(x) + self.slow(x)


def check_parameters_changed_in_forward_equal_one_process(ranks: Ranks) -> None:
    for kind in (Momentum, Inside):
        batches = _batches()
        one = _made(kind)
        _alone(one, batches, 2)
        # A pipeline runs the next forward pass before a microbatch's backward pass, and autograd refuses blocks that changed in
        # between.
        for strategy in (*REPLICAS, *([PipelineParallel()] if kind is Momentum else [])):
            par = _together(_made(kind), batches, strategy, microbatches=2)
            _assert_same(one, par, kind.__name__)
            par.check(batches[0])


class Instances(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 4, 3, padding=1)
        self.norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
        self.last = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x[:, None]))).mean(-1))


def check_instance_norm_statistics_equal_one_process(ranks: Ranks) -> None:
    # The last batch has 3 rows, so one replica gets an extra row in place of a missing one.
    batches = [*_batches(2), *_batches(1, rows=3)]
    one = _made(Instances)
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        for x_part, y_part in zip(x.tensor_split(2), y.tensor_split(2), strict=True):
            (F.cross_entropy(one(x_part), y_part) * len(x_part) / len(x)).backward()
        optimizer.step()
    for strategy in REPLICAS:
        par = _together(_made(Instances), batches, strategy, microbatches=2)
        _assert_same(one, par, "InstanceNorm")
        par.check(batches[0])


class Mean(Mlp):
    """Keeps the mean of its rows by hand, as each replica sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        with torch.no_grad():
            self.mean.lerp_(y.mean(0), 0.1)
        return y


def _contrastive(output: Tensor, target: Tensor) -> Tensor:
    """Each row against all others."""
    return F.cross_entropy(output @ output.T, torch.arange(len(output)))


def check_loss_that_compares_rows_is_refused(ranks: Ranks) -> None:
    batches = _batches()
    one = _made(Mlp)
    _alone(one, batches, loss=_contrastive)
    for strategy in REPLICAS:
        with pytest.raises(
            ParallelError,
            match=r"(?s)before the first step.*compares the rows of a batch with one another.*check='off'",
        ):
            _together(_made(Mlp), batches, strategy, loss=_contrastive)
        par = _together(_made(Mlp), batches, strategy, loss=_contrastive, check="off")
        with pytest.raises(ParallelError, match="compares the rows of a batch with one another"):
            par.check(batches[0])
    for strategy in (TensorParallel(), PipelineParallel()):
        microbatches = 1 if strategy == TensorParallel() else 2
        one = _made(Mlp)
        _alone(one, batches, microbatches, loss=_contrastive)
        if microbatches > 1:
            with pytest.raises(ParallelError, match=r"is not a mean over rows.*check='off'"):
                _together(_made(Mlp), batches, strategy, loss=_contrastive, microbatches=microbatches)
        check = "first" if microbatches == 1 else "off"
        par = _together(_made(Mlp), batches, strategy, loss=_contrastive, microbatches=microbatches, check=check)
        _assert_same(one, par, "rows")


def check_buffer_that_differs_from_one_process_is_refused(ranks: Ranks) -> None:
    batches = _batches()
    for strategy in REPLICAS:
        with pytest.raises(ParallelError, match=r"buffers are not those of the plain model after one step: mean"):
            _together(_made(Mean), batches, strategy)
        par = _together(_made(Mean), batches, strategy, check="off")
        with pytest.raises(ParallelError, match=r"buffers are not those of the plain model after one step: mean"):
            par.check(batches[0])


class Random(Mlp):
    """Dropout, noise and layers that are left out at random, with batch normalisation and a buffer that others replace."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(12)
        self.register_buffer("turn", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.turn = self.turn + 1
        x = F.dropout(self.norm(x), 0.5, self.training)
        return super().forward(x + torch.randn_like(x) * 0.1) * torch.rand(len(x), 1).add(0.9).floor()


class Counted(Mlp):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(len(x))
        return super().forward(x)


def check_first_step_comparison_does_not_change_the_training(ranks: Ranks) -> None:
    batches = _batches()
    for strategy in (*REPLICAS, TensorParallel(), PipelineParallel()):
        ends = []
        for check in ("off", "first"):
            model = _made(Mlp if isinstance(strategy, type(PipelineParallel())) else Random)
            par = _together(model, batches, strategy, check=check, microbatches=2)
            ends.append(par.full_state_dict())
            assert ("not compared" in par.compared) == (check == "off"), par.compared
        # The comparison changes neither random numbers, nor buffers, nor the set of used parameters.
        assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items()), strategy
    model = _made(Counted)
    _together(model, batches, DataParallel())
    assert model.calls == len(batches)
    assert model.seen == [4] * len(batches)


def check_wrong_gradient_is_refused_before_the_first_step(ranks: Ranks) -> None:
    class Wrong(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y + self.last.bias if dist.get_rank() == 1 else y

    for strategy in REPLICAS:
        model = _made(Wrong)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ParallelError, match=r"before the first step.*last\.bias.*check='off'"):
            _together(model, _batches(), strategy)
        if isinstance(strategy, type(DataParallel())):
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def check_explain_gives_the_reason_why_a_model_is_not_compared(ranks: Ranks) -> None:
    class Rows(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) < 4:
                raise ValueError("four rows at least")
            return super().forward(x)

    par = _together(_made(Rows), _batches(rows=16), DataParallel(), microbatches=2)
    assert "four rows at least" in par.explain()
    model = _made(Mlp)
    with pytest.raises(ParallelError, match="check='never': 'first' or 'off'"):
        _together(model, _batches(), DataParallel(), check="never")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(1, 6, batch_first=True)
        self.gru = nn.GRU(6, 6, batch_first=True)
        self.last = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.gru(self.rnn(x[..., None])[0])[0][:, -1])


def check_sharded_recurrent_layers_equal_one_process(ranks: Ranks) -> None:
    batches = _batches()
    one = _made(Recurrent)
    _alone(one, batches)

    def in_one_piece(layer: Any) -> None:
        """As on a GPU: each weight gets other memory, with the same values."""
        for weight in layer._flat_weights:
            weight.data = weight.data.clone()

    before = nn.RNNBase.flatten_parameters
    for flatten in (before, in_one_piece):
        nn.RNNBase.flatten_parameters = flatten  # type: ignore[method-assign]
        try:
            par = _together(_made(Recurrent), batches, FullyShard(units=["rnn", "gru"]))
            _assert_same(one, par, "LSTM and GRU")
        finally:
            nn.RNNBase.flatten_parameters = before  # type: ignore[method-assign]


def check_gpu_is_synchronized_if_forward_changes_sharded_parameters(ranks: Ranks) -> None:
    for kind, is_waited_for in ((Momentum, True), (Inside, True), (Mlp, False)):
        model = _made(kind)
        par = _together(model, _batches(), FullyShard())
        waited: list[int] = []
        shard.wait_for_changes(model, [*shard.find_units(model), ""], lambda waited=waited: waited.append(1))
        for batch in _batches():
            waited.clear()
            par.step(batch)
            assert bool(waited) == is_waited_for, kind


def check_unpacking_a_batch_of_par_epoch_raises(ranks: Ranks) -> None:
    model = _made(Mlp)
    par = paceline.parallelize(
        model, torch.optim.SGD(model.parameters()), _batches(), loss=F.cross_entropy, strategy=DataParallel()
    )
    batch: Any = next(iter(par.epoch(0)))
    with pytest.raises(ParallelError, match=r"give it to par\.step\(batch\) as it is"):
        _x, _y = batch


class Frozen(Mlp):
    """Has a normalisation that is in another mode than the model."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5).eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


def check_layer_in_evaluation_mode_on_another_stage_equals_one_process(ranks: Ranks) -> None:
    """Regression: a layer was in evaluation mode. But the copies for the comparison on the other stages' ranks had it
    in training mode, so the pipeline was refused."""
    batches = _batches()
    one = _made(Frozen)
    _alone(one, batches, 2)
    for strategy in (*REPLICAS, PipelineParallel()):
        par = _together(_made(Frozen), batches, strategy, microbatches=2)
        assert "equal to the plain model" in par.compared, par.compared
        _assert_same(one, par, "a frozen normalisation")


class Padded(torch.utils.data.Dataset[Any]):
    """Rows of different lengths."""

    def __init__(self, count: int = 16) -> None:
        torch.manual_seed(6)
        self.rows = [torch.randint(1, 32, (2 + 3 * index % 11,)) for index in range(count)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index], index % 5


def _padded(rows: Any) -> dict[str, Tensor]:
    """Each batch is as long as its longest row, as a DataCollatorWithPadding makes it."""
    ids = nn.utils.rnn.pad_sequence([row for row, _ in rows], batch_first=True)
    return {"ids": ids, "mask": (ids != 0).double(), "labels": torch.tensor([label for _, label in rows])}


class Mean32(nn.Module):
    """Classifies a row by the mean of its tokens, without the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.last = nn.Embedding(32, 12), nn.Linear(12, 5)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.last((self.tokens(ids) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


class _WrongOnLongRows(Mean32):
    """Computes another thing on one rank, of rows that are longer than those of the others."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        found = super().forward(ids, mask)
        return found * 2 if ids.shape[1] > 6 and WRONG[0] and torch.distributed.get_rank() == 1 else found


WRONG = [False]


def check_rows_padded_by_each_worker_are_all_compared(ranks: Ranks) -> None:
    """Regression: `par.check` compared only the rows of one worker, so it missed errors in the rows of other workers."""
    for long in (0, 1):
        loader = torch.utils.data.DataLoader(_LongHalf(long), batch_size=8, collate_fn=_padded)
        model = _made(_WrongOnLongRows)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        par = paceline.parallelize(model, optimizer, loader, loss=F.cross_entropy, strategy=DataParallel())
        for batch in par.epoch(0):
            WRONG[0] = False
            assert "equal" in str(par.check(batch))
            WRONG[0] = True
            with pytest.raises(ParallelError, match="the gradients are not those of the plain model"):
                par.check(batch)
            WRONG[0] = False
            par.step(batch)


class _LongHalf(torch.utils.data.Dataset[Any]):
    """Eight rows, of which one worker's are long."""

    def __init__(self, long: int) -> None:
        self.long = long

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        torch.manual_seed(index)
        return torch.randint(1, 32, (9 if index // 4 == self.long else 4,)), index % 5


def check_batches_padded_to_their_longest_row_equal_one_process(ranks: Ranks) -> None:
    """Regression: the first step failed with "Sizes of tensors must match except in dimension 0"."""
    for strategy in (*REPLICAS, "auto"):
        for microbatches in (1, 2):
            loader = torch.utils.data.DataLoader(Padded(), batch_size=8, collate_fn=_padded)
            one, model = _made(Mean32), _made(Mean32)
            optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
            par = paceline.parallelize(
                model,
                torch.optim.SGD(model.parameters(), lr=0.1),
                loader,
                loss=F.cross_entropy,
                strategy=strategy,
                microbatches=microbatches,
            )
            for batch in loader:
                optimizer.zero_grad()
                F.cross_entropy(one(batch["ids"], batch["mask"]), batch["labels"]).backward()
                optimizer.step()
            batch = None
            for batch in par.epoch(0):
                par.step(batch)
            assert "equal to the plain model" in par.compared, par.compared
            _assert_same(one, par, "padded rows")
            assert "equal" in str(par.check(batch))


class _Sequences(torch.utils.data.Dataset[Any]):
    """Rows of numbers, of different lengths in the two halves of a batch."""

    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        shape = ((3, 3, 4, 4, 9, 8, 9, 7)[index % 8], 4)
        return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))


def _sequences(rows: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, y = (nn.utils.rnn.pad_sequence(list(values), batch_first=True) for values in zip(*rows, strict=True))
    return x, y, nn.utils.rnn.pad_sequence([torch.ones(len(row)) for row, _ in rows], batch_first=True)


def _spoken(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    return F.ctc_loss(
        output.log_softmax(2).transpose(0, 1),
        torch.ones(len(output), 2, dtype=torch.long),
        target[1].sum(1).long(),
        torch.full((len(output),), 2),
    )


def _rows_of(output: Tensor, target: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
    lengths = target[1].sum(1).long().tolist()
    return [(x[:count], y[:count]) for x, y, count in zip(output, target[0], lengths, strict=True)]


#: Losses of a padded output and a target (numbers and a mask), and whether they depend on the padding.
OF_PADDED: dict[str, tuple[Any, bool]] = {
    "masked, over all": (lambda o, t: ((o - t[0]) ** 2 * t[1][..., None]).mean(), True),
    "over all": (lambda o, t: F.mse_loss(o, t[0]), True),
    "masked, over a row": (lambda o, t: ((o - t[0]).square().mean(2) * t[1]).mean(1).mean(), True),
    "and another": (lambda o, t: OF_PADDED["per row"][0](o, t) + 0.1 * o.square().mean(), True),
    "per row": (lambda o, t: (((o - t[0]).square().mean(2) * t[1]).sum(1) / t[1].sum(1)).mean(), False),
    "summed": (lambda o, t: ((o - t[0]).square() * t[1][..., None]).sum((1, 2)).mean(), False),
    "counted": (lambda o, t: ((o - t[0]).square().mean(2) * t[1]).sum() / t[1].sum(), False),
    "chosen": (lambda o, t: F.mse_loss(o[t[1] > 0], t[0][t[1] > 0]), False),
    "row by row": (lambda o, t: sum(F.mse_loss(*row) for row in _rows_of(o, t)) / len(o), False),
    "stack of rows": (lambda o, t: torch.stack([F.mse_loss(*row) for row in _rows_of(o, t)]).mean(), False),
    "ctc": (_spoken, False),
}


_OF_PADDING = r"(includes padding.*in place of the DataLoader|or other padding)"


def check_loss_over_padding_is_refused_and_a_loss_without_padding_equals_one_process(ranks: Ranks) -> None:
    loader = torch.utils.data.DataLoader(_Sequences(), batch_size=8, collate_fn=_sequences)

    def started(loss: Any, given: Any, strategy: Any) -> Any:
        model = _made(lambda: nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return paceline.parallelize(
            *(model, optimizer, given),
            loss=loss,
            strategy=strategy,
            split=lambda batch: Parts(batch[:1], {}, batch[1:]),
        )

    for name, (loss, is_refused) in OF_PADDED.items():
        one = _made(lambda: nn.Linear(4, 4))
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for batch in loader:
            optimizer.zero_grad()
            loss(one(batch[0]), batch[1:]).backward()
            optimizer.step()
        for strategy in REPLICAS:
            if is_refused:
                for call in (lambda par: par.check(next(par.epoch(0))), lambda par: par.evaluate(loader), _steps):
                    with pytest.raises(ParallelError, match=_OF_PADDING):
                        call(started(loss, loader, strategy))
            # Whole batches have the padding of one process.
            given = list(loader) if is_refused else loader
            par = started(loss, given, strategy)
            assert "equal" in str(par.check(next(par.epoch(0))))
            _steps(par)
            _assert_same(one, par, f"padded rows, {name}")
            par.evaluate(given)


def _steps(par: Any) -> None:
    for batch in par.epoch(0):
        par.step(batch)


class _Renormalised(nn.Module):
    """A model with an embedding whose rows are scaled at each lookup."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.table = kind(20, 12, max_norm=1)
        self.last = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        found = self.table((x.abs() * 7).long() % 20)
        return self.last(found.mean(1) if found.dim() == 3 else found)


class _Noting(nn.Module):
    """A model whose forward keeps the last row of the batch, or a scale, in a parameter."""

    def __init__(self, of_batch: bool) -> None:
        super().__init__()
        self.last = nn.Linear(12, 5)
        self.note = nn.Parameter(torch.ones(12), requires_grad=False)
        self._of_batch = of_batch

    def forward(self, x: Tensor) -> Tensor:
        self.note.data.mul_(0.9)
        with torch.no_grad():
            self.note.copy_(x[-1] if self._of_batch else self.note + 1)
        return self.last(x)


def check_embedding_with_max_norm_equals_one_process_or_is_refused(ranks: Ranks) -> None:
    batches = _batches(3)
    for kind in (nn.Embedding, nn.EmbeddingBag):
        for strategy in REPLICAS:
            with pytest.raises(ParallelError, match=rf"table \({kind.__name__}\) with max_norm=1.*TensorParallel"):
                _together(_made(lambda kind=kind: _Renormalised(kind)), batches, strategy)
        one = _made(lambda kind=kind: _Renormalised(kind))
        _alone(one, batches)
        strategy = TensorParallel(plan={"last": "rowwise"})
        par = _together(_made(lambda kind=kind: _Renormalised(kind)), batches, strategy)
        _assert_same(one, par, f"{kind.__name__} with max_norm")
        one = _made(lambda kind=kind: _Renormalised(kind))
        _alone(one, batches, 2)
        par = _together(
            _made(lambda kind=kind: _Renormalised(kind)), batches, PipelineParallel(cut=["last"]), microbatches=2
        )
        _assert_same(one, par, f"{kind.__name__} with max_norm")


def check_forward_that_writes_its_batch_to_a_parameter_is_refused_on_replicas(ranks: Ranks) -> None:
    batches = _batches(3)
    for strategy in REPLICAS:
        model = _made(lambda: _Noting(True))
        before = model.last.weight.detach().clone()
        with pytest.raises(ParallelError, match="forward changes note in place by values of its batch"):
            _together(model, batches, strategy)
        if isinstance(strategy, DataParallel):
            assert torch.equal(model.last.weight, before), "refused before anything is trained"
        one = _made(lambda: _Noting(False))
        _alone(one, batches)
        _assert_same(one, _together(_made(lambda: _Noting(False)), batches, strategy), "a scale that no row changes")
