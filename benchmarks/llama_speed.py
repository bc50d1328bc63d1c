"""Training steps of a Llama-like model with `paceline.parallelize` against torchtitan's way, written by hand for that model.

    python benchmarks/llama_speed.py                             # 100 million parameters; 2 and 4 workers, four strategies
    python benchmarks/llama_speed.py --size small --workers 2 --strategies data tensor --rounds 2    # to try it

torchtitan's way is that of its `parallelize_llama` and `pipeline_llama`: DistributedDataParallel; `fully_shard` of each block
and of the rest; `parallelize_module` with sequences in parts between the layers that are cut, and a loss of parts of the words;
stages of equal numbers of blocks under torch's own 1F1B. Both sides have the same model, batch and optimizer in the same
processes, in turn, on Gloo; neither loads its batch in the time that is measured. On the way the start is measured: how long
`parallelize` takes (tracing, costs, plan), the slowest of all strategies. Memory: up to 16 GiB with 4 workers.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from common import in_turn, median, report
from ranks import figures, folder, is_rank, tell, timed


class Size(NamedTuple):
    width: int
    wide: int
    depth: int
    heads: int
    words: int
    length: int
    rows: int


SIZES = {
    "100m": Size(width=640, wide=1728, depth=12, heads=8, words=32000, length=64, rows=8),
    "small": Size(width=128, wide=344, depth=4, heads=4, words=512, length=32, rows=8),
}
STRATEGIES = ("data", "shard", "pipeline", "tensor")
MICROBATCHES = 8
TARGET, START_S = 0.98, 5.0


def main() -> None:
    asked = _asked()
    starts = {}
    for workers in asked.workers:
        for name in asked.strategies:
            options = ("--size", asked.size, "--strategies", name, "--rounds", str(asked.rounds))
            found = figures(workers, *options)
            starts[f"{name}_{workers}"] = found["start_s"]
            tokens = SIZES[asked.size].rows * SIZES[asked.size].length
            print(f"{name}, {workers} workers: losses apart by {found['apart']:.1e}")
            _tell(asked, workers, name, tokens, found)
    if asked.size == "100m":
        slowest = max(starts.values())
        report(
            "llama_start",
            "start of parallelize (tracing, costs, plan) on a Llama-like model of 100 million parameters, the slowest strategy",
            f"at most {START_S:g} s",
            slowest <= START_S,
            slowest_s=slowest,
            **{f"{name}_s": value for name, value in starts.items()},
        )
    else:
        print({name: round(value, 2) for name, value in starts.items()})


def _tell(asked: Any, workers: int, name: str, tokens: int, found: Any) -> None:
    theirs_s, ours_s = found["steps_s"]
    if asked.size != "100m":
        print(
            f"  {tokens / ours_s:.0f} tokens a second, by hand {tokens / theirs_s:.0f}, times {theirs_s / ours_s:.3f}"
        )
        return
    report(
        f"llama_{name}_{workers}",
        f"tokens a second of a Llama-like model of {found['parameters'] / 1e6:.0f} million parameters, {workers} workers, "
        f"strategy {name}, against torchtitan's way by hand",
        f"at least {TARGET:g}",
        theirs_s / ours_s >= TARGET,
        ours_per_s=tokens / ours_s,
        theirs_per_s=tokens / theirs_s,
        ratio=theirs_s / ours_s,
    )


def _asked() -> Any:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="100m")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--strategies", choices=STRATEGIES, nargs="+", default=list(STRATEGIES))
    parser.add_argument("--rounds", type=int, default=6)
    # What `figures` adds for its ranks.
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    return parser.parse_args()


def on_a_rank() -> None:
    import torch
    import torch.distributed as dist

    asked, rank, workers = _asked(), int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder()}/meeting", rank=rank, world_size=workers)
    size, name = SIZES[asked.size], asked.strategies[0]
    torch.manual_seed(1)
    drawn = torch.randint(0, size.words, (size.rows, size.length + 1))
    x, y = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
    parameters = sum(param.numel() for param in _model(size).parameters())
    theirs = {"data": _ddp, "shard": _fully_shard, "pipeline": _pipeline, "tensor": _tensor}[name](size, x, y)
    ours, start_s = _ours(size, x, y, name)
    # The first step of each side begins with the same values.
    apart = abs(float(theirs()) - float(ours()))
    sides = (partial(timed, dist.barrier, side, 1) for side in (theirs, ours))
    steps_s = [median(times) for times in in_turn(asked.rounds, *sides)]
    if rank == 0:
        tell({"steps_s": steps_s, "start_s": start_s, "apart": apart, "parameters": parameters})
    dist.barrier()
    dist.destroy_process_group()


def _model(size: Size) -> Any:
    import torch
    import torch.nn.functional as F  # noqa: N812
    from torch import nn

    head = size.width // size.heads

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wq, self.wk, self.wv, self.wo = (nn.Linear(size.width, size.width, bias=False) for _ in range(4))

        def forward(self, x: Any, turn: Any) -> Any:
            rows, length, _ = x.shape
            q, k, v = (one(x).view(rows, length, -1, head).transpose(1, 2) for one in (self.wq, self.wk, self.wv))
            y = F.scaled_dot_product_attention(_turned(q, turn), _turned(k, turn), v, is_causal=True)
            return self.wo(y.transpose(1, 2).reshape(rows, length, -1))

    class FeedForward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1, self.w3 = (nn.Linear(size.width, size.wide, bias=False) for _ in range(2))
            self.w2 = nn.Linear(size.wide, size.width, bias=False)

        def forward(self, x: Any) -> Any:
            return self.w2(F.silu(self.w1(x)) * self.w3(x))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.feed_forward = Attention(), FeedForward()
            self.attention_norm, self.ffn_norm = nn.RMSNorm(size.width), nn.RMSNorm(size.width)

        def forward(self, x: Any, turn: Any) -> Any:
            x = x + self.attention(self.attention_norm(x), turn)
            return x + self.feed_forward(self.ffn_norm(x))

    class Llama(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok_embeddings = nn.Embedding(size.words, size.width)
            self.layers = nn.ModuleList(Block() for _ in range(size.depth))
            self.norm, self.output = nn.RMSNorm(size.width), nn.Linear(size.width, size.words, bias=False)
            turns = torch.outer(torch.arange(size.length), 1 / 10000 ** (torch.arange(0, head, 2) / head))
            self.register_buffer("turn", torch.stack((turns.cos(), turns.sin())), persistent=False)

        def forward(self, x: Any) -> Any:
            # A stage of the pipeline by hand has some of these alone.
            x = x if self.tok_embeddings is None else self.tok_embeddings(x)
            for layer in self.layers:
                x = layer(x, self.turn)
            return x if self.output is None else self.output(self.norm(x))

    torch.manual_seed(0)
    model = Llama()
    for param in model.parameters():
        if param.dim() > 1:
            torch.nn.init.normal_(param, std=0.02)
    return model


def _turned(x: Any, turn: Any) -> Any:
    """Rotary positions."""
    import torch

    cos, sin = turn
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _loss(output: Any, target: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def _adamw(model: Any) -> Any:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def _ours(size: Size, x: Any, y: Any, name: str) -> tuple[Callable[[], Any], float]:
    import torch.distributed as dist
    from torch.utils.data import DataLoader, TensorDataset

    import paceline
    from paceline.parallel import DataParallel, FullyShard, PipelineParallel, TensorParallel

    strategy: Any = {
        "data": DataParallel(),
        "shard": FullyShard(),
        "pipeline": PipelineParallel(),
        "tensor": TensorParallel(),
    }[name]
    model, loader = _model(size), DataLoader(TensorDataset(x, y), batch_size=size.rows)
    optimizer = _adamw(model)
    # What torch loads on first use is not the model's.
    dist.barrier()
    begin = time.perf_counter()
    par = paceline.parallelize(
        model,
        optimizer,
        loader,
        loss=_loss,
        strategy=strategy,
        microbatches=MICROBATCHES if name == "pipeline" else 1,
    )
    dist.barrier()
    start_s = time.perf_counter() - begin
    batch = next(iter(par.epoch(0)))
    return lambda: par.step(batch), start_s


def _own_rows(size: Size) -> slice:
    import torch.distributed as dist

    workers, rank = dist.get_world_size(), dist.get_rank()
    return slice(rank * size.rows // workers, (rank + 1) * size.rows // workers)


def _replicated(model: Any, size: Size, x: Any, y: Any) -> Callable[[], Any]:
    import torch.distributed as dist

    optimizer, mine, workers = _adamw(model), _own_rows(size), dist.get_world_size()

    def step() -> Any:
        optimizer.zero_grad()
        loss = _loss(model(x[mine]), y[mine])
        loss.backward()
        optimizer.step()
        # What par.step returns: the same loss everywhere.
        mean = loss.detach() / workers
        dist.all_reduce(mean)
        return mean

    return step


def _ddp(size: Size, x: Any, y: Any) -> Callable[[], Any]:
    from torch.nn.parallel import DistributedDataParallel

    return _replicated(DistributedDataParallel(_model(size)), size, x, y)


def _fully_shard(size: Size, x: Any, y: Any) -> Callable[[], Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = _model(size), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _replicated(model, size, x, y)


def _tensor(size: Size, x: Any, y: Any) -> Callable[[], Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )

    model, mesh = _model(size), init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )
    for layer in model.layers:
        plan: dict[str, Any] = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
            **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w3": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, mesh, plan)
    optimizer = _adamw(model)

    def step() -> Any:
        optimizer.zero_grad()
        with loss_parallel():
            loss = _loss(model(x), y)
            loss.backward()
        optimizer.step()
        return loss.detach().full_tensor() if hasattr(loss, "full_tensor") else loss.detach()

    return step


def _pipeline(size: Size, x: Any, y: Any) -> Callable[[], Any]:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, workers = dist.get_rank(), dist.get_world_size()
    first, last = rank == 0, rank == workers - 1
    part = _model(size)
    part.layers = nn.ModuleList(part.layers[rank * size.depth // workers : (rank + 1) * size.depth // workers])
    if not first:
        part.tok_embeddings = None
    if not last:
        part.norm = part.output = None
    rows = size.rows // MICROBATCHES
    between = torch.zeros(rows, size.length, size.width, requires_grad=True)
    words = torch.zeros(rows, size.length, size.words)
    stage = PipelineStage(
        part,
        rank,
        workers,
        torch.device("cpu"),
        input_args=(x[:rows],) if first else (between,),
        output_args=(words,) if last else (between,),
    )
    schedule = Schedule1F1B(
        stage, MICROBATCHES, loss_fn=lambda output, target: _loss(output, target) / MICROBATCHES, scale_grads=False
    )
    optimizer = _adamw(part)

    def step() -> Any:
        optimizer.zero_grad()
        losses: list[Any] = []
        mean = torch.zeros(())
        if first:
            schedule.step(x)
        elif last:
            schedule.step(target=y, losses=losses)
            mean = torch.stack([loss.detach() for loss in losses]).sum()
        else:
            schedule.step()
        optimizer.step()
        dist.broadcast(mean, workers - 1)
        return mean

    return step


if __name__ == "__main__":
    on_a_rank() if is_rank() else main()
