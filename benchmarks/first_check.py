"""What the comparison with the plain model before the first step costs, and what following the outer forward's reads does.

    python benchmarks/first_check.py

The transformer of `parallel_speed.py`, on two processes. A first step with the comparison is held against one without it; the
difference is counted in steps of the same training, for it is paid once. Then steps of a pipeline whose outer forward reads a
number that the loop sets anew before each: each such step is traced again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from common import median, report
from parallel_speed import DEPTH, LENGTH, MICROBATCHES, ROWS, WORDS, _adamw, _loss, _model
from ranks import figures, folder, is_rank, tell

ROUNDS, STEPS = 4, 8


def main() -> None:
    found = figures(2)
    for name in ("data", "shard", "pipeline"):
        step_s, off_s, on_s = found[name]
        report(
            f"first_check_{name}",
            f"comparison with the plain model before the first step, 2 processes, {name}",
            "at most 12 steps, once",
            (on_s - off_s) / step_s <= 12,
            steps=(on_s - off_s) / step_s,
            cost_ms=(on_s - off_s) * 1e3,
            step_ms=step_s * 1e3,
        )
    kept_s, changed_s = found["reads"]
    report(
        "reads_changed",
        "step of a pipeline whose outer forward reads a number that the loop changes before each step, 2 processes",
        "at most 1.25 times a step where it stays",
        changed_s <= 1.25 * kept_s,
        changed_ms=changed_s * 1e3,
        kept_ms=kept_s * 1e3,
        times=changed_s / kept_s,
    )
    report(
        "reads_compared",
        "looking before a step whether what the outer forward of a pipeline reads has changed, 2 processes",
        "at most 2 % of the step",
        found["look"] <= 0.02 * kept_s,
        look_us=found["look"] * 1e6,
        step_ms=kept_s * 1e3,
        percent=100 * found["look"] / kept_s,
    )


def on_a_rank() -> None:
    import os

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder()}/meeting", rank=rank, world_size=2)
    torch.manual_seed(1)
    batch = torch.randint(0, WORDS, (ROWS, LENGTH)), torch.randint(0, WORDS, (ROWS, LENGTH))
    found: dict[str, Any] = {}
    for name in ("data", "shard", "pipeline"):
        firsts: dict[str, list[float]] = {"off": [], "first": []}
        steps: list[float] = []
        for _ in range(ROUNDS):
            for check, times in firsts.items():
                par, _model_of = _made(name, batch, check)
                times.append(_timed(lambda par=par: par.step(batch)))
                steps += [_timed(lambda par=par: par.step(batch)) for _ in range(3)]
        found[name] = [median(steps), median(firsts["off"]), median(firsts["first"])]
    par, model = _made("pipeline", batch, "off")
    kept: list[float] = []
    changed: list[float] = []
    for number in range(2 * STEPS * ROUNDS):
        # In turn, so that both are measured on the same machine.
        is_changed = number % 2 == 1
        if is_changed:
            model.scale = 1.0 + number / 1000
        (changed if is_changed else kept).append(_timed(lambda: par.step(batch)))
    found["reads"] = [median(kept[1:]), median(changed)]
    found["look"] = median([_alone(par.executor._programs.refresh) for _ in range(100)])
    if rank == 0:
        tell(found)


def _made(name: str, batch: Any, check: str) -> tuple[Any, Any]:
    import paceline
    from paceline.parallel import DataParallel, FullyShard, PipelineParallel

    model = _scaled(_model())
    strategy = {
        "data": DataParallel(),
        "shard": FullyShard(),
        "pipeline": PipelineParallel(cut=(f"blocks.{DEPTH // 2}",)),
    }[name]
    par = paceline.parallelize(
        *(model, _adamw(model), [batch]),
        loss=_loss,
        strategy=strategy,
        microbatches=MICROBATCHES if name == "pipeline" else 1,
        check=check,
    )
    return par, model


def _scaled(model: Any) -> Any:
    """The same model, whose outer forward reads a number that may be set anew."""

    class Scaled(type(model)):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return super().forward(x) * self.scale

    model.__class__ = Scaled
    model.scale = 1.0
    return model


def _alone(run: Callable[[], Any]) -> float:
    begin_s = time.perf_counter()
    run()
    return time.perf_counter() - begin_s


def _timed(run: Callable[[], Any]) -> float:
    import torch.distributed as dist

    dist.barrier()
    begin_s = time.perf_counter()
    run()
    dist.barrier()
    return time.perf_counter() - begin_s


if __name__ == "__main__":
    on_a_rank() if is_rank() else main()
