"""hvd.allreduce_ against torch.distributed's Gloo, on two processes.

python benchmarks/hvd_allreduce.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common import in_turn, median, report
from ranks import figures, is_rank, tell, timed, with_gloo

#: Bytes, calls in a block, rounds, how many times as fast as Gloo it has to be.
SIZES = ((4 << 10, 100, 20, 10.0), (1 << 20, 20, 15, 5.0), (16 << 20, 3, 12, 5.0), (64 << 20, 2, 8, 1.8))


def main() -> None:
    found = figures(2)
    for size, _, _, target in SIZES:
        gloo_s, ours_s = found[str(size)]
        name = f"{size >> 10} KiB" if size < 1 << 20 else f"{size >> 20} MiB"
        report(
            f"hvd_allreduce_{size >> 10}k",
            f"hvd.allreduce_ of {name}, 2 processes, against gloo",
            f"at least {target:g} times as fast",
            gloo_s / ours_s >= target,
            ours_ms=ours_s * 1e3,
            gloo_ms=gloo_s * 1e3,
            times=gloo_s / ours_s,
        )


def on_a_rank() -> None:
    import torch
    import torch.distributed as dist

    hvd = with_gloo()
    found = {}
    for size, calls, rounds, _ in SIZES:
        tensor = torch.ones(size // 4)

        def block(call: Callable[[Any], object], tensor: Any = tensor, calls: int = calls) -> Callable[[], float]:
            def run() -> float:
                tensor.fill_(1.0)
                return timed(hvd.barrier, lambda: call(tensor), calls)

            return run

        sides = block(dist.all_reduce), block(lambda tensor: hvd.allreduce_(tensor, name="t", op=hvd.Sum))
        found[str(size)] = [median(times) for times in in_turn(rounds, *sides)]
    if hvd.rank() == 0:
        tell(found)
    dist.destroy_process_group()


if __name__ == "__main__":
    on_a_rank() if is_rank() else main()
