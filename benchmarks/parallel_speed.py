"""Training steps with paceline.parallelize against hand-written DDP and hand-written pipelining, on two processes.

    python benchmarks/parallel_speed.py

The same transformer, batch and optimizer on both sides, in the same two processes, in turn. Neither side loads its batch
in the time that is measured: ours is one of `par.epoch`, which is how a training loop has it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from common import in_turn, median, report
from ranks import figures, folder, is_rank, tell, timed

WIDTH, DEPTH, WORDS, LENGTH, ROWS, MICROBATCHES = 192, 8, 256, 64, 16, 4
STEPS, ROUNDS = 3, 12


def main() -> None:
    found = figures(2)
    for name, other, target in (
        ("data", "strategy Data against hand-written DDP, both on gloo", 0.98),
        ("pipeline", "strategy Pipeline against hand-written 1F1B of torch, both on gloo", 0.98),
        ("data_mpi", "strategy Data on mpi against hand-written DDP on gloo", 1.0),
    ):
        theirs_s, ours_s = found[name]
        report(
            f"parallel_{name}",
            f"training step of a transformer, 2 processes, {other}",
            f"at least {target:g} times as fast",
            theirs_s / ours_s >= target,
            ours_ms=ours_s * 1e3,
            theirs_ms=theirs_s * 1e3,
            times=theirs_s / ours_s,
        )


def on_a_rank() -> None:
    import torch

    from paceline.torch_mpi.backend import install

    install()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    x, y = torch.randint(0, WORDS, (ROWS, LENGTH)), torch.randint(0, WORDS, (ROWS, LENGTH))
    found = {}
    with _world("gloo"):
        for name, theirs in (("data", _ddp), ("pipeline", _pipeline)):
            sides = theirs(x, y), _ours(x, y, name)
            found[name] = [median(times) for times in in_turn(ROUNDS, *(partial(_block, side) for side in sides))]

    # A process has one default backend at a time.
    def on(backend: str, make: Callable[[Any, Any], Callable[[], Any]]) -> float:
        with _world(backend):
            side = make(x, y)
            _block(side)
            return _block(side)

    sides_of_two = (partial(on, "gloo", _ddp), partial(on, "mpi", partial(_ours, strategy="data")))
    found["data_mpi"] = [median(times) for times in in_turn(ROUNDS, *sides_of_two)]
    if int(os.environ["OMPI_COMM_WORLD_RANK"]) == 0:
        tell(found)


@contextmanager
def _world(backend: str) -> Iterator[None]:
    import torch.distributed as dist

    if backend == "gloo":
        meeting = f"file://{folder()}/meeting_{next(_MEETINGS)}"
        dist.init_process_group(
            backend,
            init_method=meeting,
            rank=int(os.environ["OMPI_COMM_WORLD_RANK"]),
            world_size=int(os.environ["OMPI_COMM_WORLD_SIZE"]),
        )
    else:
        dist.init_process_group(backend)
    yield
    dist.barrier()
    dist.destroy_process_group()


_MEETINGS = itertools.count()


def _block(step: Callable[[], Any]) -> float:
    import torch.distributed as dist

    return timed(dist.barrier, step, STEPS)


def _model() -> Any:
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
            self.wide = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

        def forward(self, x: Any) -> Any:
            h = self.before(x)
            x = x + self.attention(h, h, h, need_weights=False)[0]
            return x + self.wide(self.after(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(WORDS, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
            self.head = nn.Linear(WIDTH, WORDS)

        def forward(self, x: Any) -> Any:
            x = self.words(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    torch.manual_seed(0)
    return Model()


def _loss(output: Any, target: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def _adamw(model: Any) -> Any:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def _ours(x: Any, y: Any, strategy: str) -> Callable[[], Any]:
    from torch.utils.data import DataLoader, TensorDataset

    import paceline
    from paceline.parallel import DataParallel, PipelineParallel

    model = _model()
    loader = DataLoader(TensorDataset(x, y), batch_size=ROWS)
    chosen = {"data": DataParallel(), "pipeline": PipelineParallel(cut=(f"blocks.{DEPTH // 2}",))}[strategy]
    par = paceline.parallelize(
        model,
        _adamw(model),
        loader,
        loss=_loss,
        strategy=chosen,
        microbatches=MICROBATCHES if strategy == "pipeline" else 1,
    )
    batch = next(iter(par.epoch(0)))
    return lambda: par.step(batch)


def _ddp(x: Any, y: Any) -> Callable[[], Any]:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(_model())
    optimizer, size, rank = _adamw(model), dist.get_world_size(), dist.get_rank()
    mine = slice(rank * ROWS // size, (rank + 1) * ROWS // size)

    def step() -> Any:
        optimizer.zero_grad()
        loss = _loss(model(x[mine]), y[mine])
        loss.backward()
        optimizer.step()
        # What par.step returns: the same loss everywhere.
        mean = loss.detach() / size
        dist.all_reduce(mean)
        return mean

    return step


def _pipeline(x: Any, y: Any) -> Callable[[], Any]:
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    whole, rank, rows = _model(), dist.get_rank(), ROWS // MICROBATCHES

    class Part(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            half = DEPTH // 2
            self.blocks = whole.blocks[:half] if rank == 0 else whole.blocks[half:]
            self.words = whole.words if rank == 0 else None
            self.head = whole.head if rank == 1 else None

        def forward(self, x: Any) -> Any:
            if self.words is not None:
                x = self.words(x)
            for block in self.blocks:
                x = block(x)
            return x if self.head is None else self.head(x)

    between = torch.zeros(rows, LENGTH, WIDTH, requires_grad=True)
    tokens, words = torch.zeros(rows, LENGTH, dtype=torch.int64), torch.zeros(rows, LENGTH, WORDS)
    part = Part()
    stage = PipelineStage(
        part,
        rank,
        2,
        torch.device("cpu"),
        input_args=(tokens,) if rank == 0 else (between,),
        output_args=(between,) if rank == 0 else (words,),
    )
    schedule = Schedule1F1B(
        stage, MICROBATCHES, loss_fn=lambda output, target: _loss(output, target) / MICROBATCHES, scale_grads=False
    )
    optimizer = _adamw(part)

    def step() -> Any:
        optimizer.zero_grad()
        losses: list[Any] = []
        if rank == 0:
            schedule.step(x)
            mean = torch.zeros(())
        else:
            schedule.step(target=y, losses=losses)
            mean = torch.stack([loss.detach() for loss in losses]).sum()
        optimizer.step()
        dist.broadcast(mean, 1)
        return mean

    return step


if __name__ == "__main__":
    on_a_rank() if is_rank() else main()
