"""torch.distributed over "mpi" against Gloo, on two processes: all-reduce, and whole training steps with DDP.

    python benchmarks/torch_mpi.py

Both backends live in the same two processes and are used in turn, in blocks, since a thread of Gloo's is still at work
right after its call has returned.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from common import in_turn, median, report
from ranks import figures, folder, is_rank, tell, then, timed

RANKS = 2
#: Bytes, calls in a block, rounds, how many times as fast as Gloo it has to be.
SIZES = ((4 << 10, 100, 20, 10.0), (1 << 20, 20, 15, 5.0), (16 << 20, 3, 12, 5.0), (64 << 20, 2, 8, 1.8))
STEPS, ROUNDS = 5, 8
#: Sequences of 64 tokens on each process. Fewer make the exchange a larger part of the step; the target is for the most.
BATCHES = (8, 4, 2)


def main() -> None:
    found = figures(RANKS)
    for size, _, _, target in SIZES:
        gloo, ours = found[f"all_reduce_{size}"]
        name = f"{size >> 10} KiB" if size < 1 << 20 else f"{size >> 20} MiB"
        _report(
            f"torch_mpi_all_reduce_{size >> 10}k",
            f"all_reduce of {name}, 2 processes, mpi against gloo",
            target,
            gloo,
            ours,
        )
    for model in ("transformer", "cnn"):
        gloo, ours = found[model]
        alone, meeting = found[f"{model}_no_sync"]
        measure = f"training step with DDP, {model}, 2 processes, mpi against gloo"
        smaller = {}
        for batch in BATCHES[1:] if model == "transformer" else ():
            its_gloo, its_ours = found[f"{model}_{batch}"]
            smaller[f"times_with_{batch}_sequences"] = its_gloo / its_ours
        _report(
            f"torch_mpi_step_{model}",
            measure,
            1.2,
            gloo,
            ours,
            without_exchange_ms=alone * 1e3,
            with_a_meeting_ms=meeting * 1e3,
            not_hidden=1 - alone / ours,
            # If the exchange itself took no time at all.
            times_at_most=gloo / meeting,
            **smaller,
        )


def _report(name: str, measure: str, target: float, gloo_s: float, ours_s: float, **more: float) -> None:
    times = gloo_s / ours_s
    text = f"at least {target:g} times as fast"
    report(name, measure, text, times >= target, ours_ms=ours_s * 1e3, gloo_ms=gloo_s * 1e3, times=times, **more)


def on_a_rank() -> None:
    from paceline.torch_mpi import backend

    backend.install()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder()}/meeting", rank=rank, world_size=RANKS)
    groups = [dist.group.WORLD, dist.new_group(backend="mpi")]
    barrier = functools.partial(dist.barrier, groups[1])
    found: dict[str, list[float]] = {}
    for size, calls, rounds, _ in SIZES:
        tensor = torch.ones(size // 4)

        def block(group: Any, tensor: Any = tensor, calls: int = calls) -> Callable[[], float]:
            def run() -> float:
                tensor.fill_(1.0)
                return timed(barrier, lambda: dist.all_reduce(tensor, group=group), calls)

            return run

        found[f"all_reduce_{size}"] = [median(times) for times in in_turn(rounds, *map(block, groups))]
    for batch in BATCHES:
        name = "transformer" if batch == BATCHES[0] else f"transformer_{batch}"
        found |= _train(name, functools.partial(_transformer, batch), groups)
    found |= _train("cnn", _cnn, groups)
    if rank == 0:
        tell(found)
    dist.destroy_process_group()


def _train(name: str, make: Callable[[], Any], groups: list[Any]) -> dict[str, list[float]]:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    barrier = functools.partial(dist.barrier, groups[1])
    sides: list[Callable[[], float]] = []
    quiet: list[Callable[[], float]] = []
    for group in groups:
        torch.manual_seed(0)
        model, loss = make()
        wrapped = DistributedDataParallel(model, process_group=group)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)

        def step(model: Any = wrapped, loss: Any = loss, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()

        sides.append(lambda step=step: timed(barrier, step, STEPS))
        if not quiet:

            def alone(step: Any = step, model: Any = wrapped) -> None:
                with model.no_sync():
                    step()

            quiet = [lambda: timed(barrier, alone, STEPS), lambda: timed(barrier, then(alone, barrier), STEPS)]
    gloo, ours, *without = in_turn(ROUNDS, *sides, *quiet)
    return {name: [median(gloo), median(ours)], f"{name}_no_sync": [median(times) for times in without]}


def _transformer(sequences: int = BATCHES[0]) -> tuple[Any, Callable[[Any], Any]]:
    """About 4 million parameters; a batch of so many sequences of 64 tokens."""
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(1000, 256)
            layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
            self.layers = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
            self.head = torch.nn.Linear(256, 1000)

        def forward(self, x: Any) -> Any:
            return self.head(self.layers(self.embed(x)))

    tokens = torch.randint(0, 1000, (sequences, 64))
    return Model(), lambda model: torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def _cnn() -> tuple[Any, Callable[[Any], Any]]:
    """For images of 8 x 8 pixels, as in examples/digits; a batch of 32."""
    import torch
    from torch import nn

    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 4, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    images, labels = torch.randn(32, 1, 8, 8), torch.randint(0, 10, (32,))
    return model, lambda model: torch.nn.functional.cross_entropy(model(images), labels)


if __name__ == "__main__":
    on_a_rank() if is_rank() else main()
