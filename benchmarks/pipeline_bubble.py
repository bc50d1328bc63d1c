"""The time that workers of a pipeline wait, against the formula (p - 1) / (v M + p - 1), with stages that sleep.

    python benchmarks/pipeline_bubble.py

A schedule test, no claim of speed: a sleeping stage needs no core, so that four stages fit on any machine.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import median, report, scratch

FORWARD_S = 0.08
BACKWARD_S = 0.16
STEPS = 2
CASES = [
    (workers, microbatches, schedule)
    for workers in (2, 4)
    for microbatches in (2, 4, 8, 16)
    for schedule in ("1f1b", "gpipe", "interleaved")
    # With fewer microbatches than stages there is no schedule but GPipe's.
    if microbatches >= workers
]


def main() -> None:
    found = [figures(workers) for workers in (2, 4)]
    steps = {name: value for part in found for name, value in part.items()}
    off = {}
    for workers, microbatches, schedule in CASES:
        name = f"{schedule}_{workers}x{microbatches}"
        chunks = 2 if schedule == "interleaved" else 1
        bubble = (workers - 1) / (chunks * microbatches + workers - 1)
        # Each stage sleeps for its part of the time, so that a worker is as busy with two as with one.
        expected_s = microbatches * (FORWARD_S + BACKWARD_S) / (1 - bubble)
        off[f"{name}_off"] = steps[name] / expected_s - 1
    worst = max(off.values(), key=abs)
    report(
        "pipeline_bubble",
        "a pipeline's step with sleeping stages, p = 2 and 4, M = 2 to 16, against the bubble formula",
        "within 5%",
        abs(worst) <= 0.05,
        worst_off=worst,
        steps={name: round(value, 4) for name, value in steps.items()},
        off={name: round(value, 4) for name, value in off.items()},
    )


def figures(workers: int) -> dict[str, float]:
    """Case -> median seconds of a step on so many processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with scratch() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(folder)],
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(workers),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "PYTHONPATH": str(Path(__file__).parents[1] / "src"),
                },
            )
            for rank in range(workers)
        ]
        codes = [process.wait() for process in ranks]
        assert not any(codes), f"ranks ended with {codes}"
        found = json.loads((folder / "figures.json").read_text())
        assert isinstance(found, dict)
        return found


def measure(folder: Path) -> None:
    """One rank: every case of its world's size."""
    import torch
    from torch import Tensor, nn

    import paceline
    from paceline.parallel import PipelineParallel

    torch.set_num_threads(1)

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
            ctx.backward_s = backward_s
            time.sleep(forward_s)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
            time.sleep(ctx.backward_s)
            return grad, None, None

    class Stage(nn.Module):
        def __init__(self, share: float) -> None:
            super().__init__()
            self.share, self.scale = share, nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return Sleep.apply(x * self.scale, self.share * FORWARD_S, self.share * BACKWARD_S)

    workers = int(os.environ["WORLD_SIZE"])
    found = {}
    for _, microbatches, schedule in (case for case in CASES if case[0] == workers):
        chunks = 2 if schedule == "interleaved" else 1
        count = workers * chunks
        model = nn.Sequential(*[Stage(1 / chunks) for _ in range(count)])
        batch = (torch.ones(microbatches, 4), torch.ones(microbatches, 4))
        par = paceline.parallelize(
            model,
            torch.optim.SGD(model.parameters(), lr=1e-3),
            loss=nn.functional.mse_loss,
            strategy=PipelineParallel(schedule=schedule, cut=tuple(str(index) for index in range(1, count))),
            microbatches=microbatches,
            sample=batch,
        )
        times = []
        for _ in range(STEPS + 1):
            torch.distributed.barrier()
            start = time.perf_counter()
            par.step(batch)
            times.append(time.perf_counter() - start)
        found[f"{schedule}_{workers}x{microbatches}"] = median(times[1:])
    if torch.distributed.get_rank() == 0:
        (folder / "figures.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if "--rank" in sys.argv:
        measure(Path(sys.argv[-1]))
    else:
        main()
