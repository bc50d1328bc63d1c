"""Whole training steps with hvd.DistributedOptimizer against DistributedDataParallel on Gloo, on two processes.

    python benchmarks/hvd_step.py

The models are those of torch_mpi.py, which measures DistributedDataParallel on "mpi" against the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from common import in_turn, median, report
from ranks import figures, is_rank, tell, then, timed, with_gloo
from torch_mpi import BATCHES, _cnn, _transformer

#: Model, steps in a block, rounds.
MODELS = {
    "transformer": (_transformer, 4, 8),
    **{f"transformer_{batch}": (functools.partial(_transformer, batch), 4, 8) for batch in BATCHES[1:]},
    "cnn": (_cnn, 50, 12),
}


def main() -> None:
    found = figures(2)
    for name in ("transformer", "cnn"):
        gloo_s, ours_s, alone_s, meeting_s = found[name]
        smaller = {}
        for batch in BATCHES[1:] if name == "transformer" else ():
            its_gloo_s, its_ours_s, *_ = found[f"{name}_{batch}"]
            smaller[f"times_with_{batch}_sequences"] = its_gloo_s / its_ours_s
        report(
            f"hvd_step_{name}",
            f"training step with hvd.DistributedOptimizer, {name}, 2 processes, against DDP on gloo",
            "at least 1.2 times as fast",
            gloo_s / ours_s >= 1.2,
            ours_ms=ours_s * 1e3,
            gloo_ms=gloo_s * 1e3,
            times=gloo_s / ours_s,
            without_exchange_ms=alone_s * 1e3,
            with_a_meeting_ms=meeting_s * 1e3,
            not_hidden=1 - alone_s / ours_s,
            not_hidden_gloo=1 - alone_s / gloo_s,
            # If the exchange itself took no time at all.
            times_at_most=gloo_s / meeting_s,
            **smaller,
        )


def on_a_rank() -> None:
    import torch.distributed as dist

    hvd = with_gloo()
    found = {}
    for name, (make, steps, rounds) in MODELS.items():
        sides = [_ddp(make), _hvd(hvd, make), _alone(make), then(_alone(make), hvd.barrier)]
        blocks = [lambda step=step, steps=steps: timed(hvd.barrier, step, steps) for step in sides]
        found[name] = [median(times) for times in in_turn(rounds, *blocks)]
    if hvd.rank() == 0:
        tell(found)
    dist.destroy_process_group()


def _ddp(make: Callable[[], Any]) -> Callable[[], None]:
    from torch.nn.parallel import DistributedDataParallel

    model, loss, optimizer = _parts(make)
    wrapped = DistributedDataParallel(model)
    return _step(wrapped, loss, optimizer)


def _hvd(hvd: Any, make: Callable[[], Any]) -> Callable[[], None]:
    model, loss, optimizer = _parts(make)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return _step(model, loss, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters()))


def _alone(make: Callable[[], Any]) -> Callable[[], None]:
    return _step(*_parts(make))


def _parts(make: Callable[[], Any]) -> tuple[Any, Any, Any]:
    import torch

    torch.manual_seed(0)
    model, loss = make()
    return model, loss, torch.optim.SGD(model.parameters(), lr=0.01)


def _step(model: Any, loss: Any, optimizer: Any) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    on_a_rank() if is_rank() else main()
