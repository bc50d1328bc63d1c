"""200 tensors of 1 kB to 1 MB, as a transformer's gradients, through hvd.allreduce_async_ against buckets like DDP's on Gloo.

    python benchmarks/hvd_tensors.py

DDP's side is what its reducer does with gradients in buckets of 25 MiB: copy them in, all-reduce, divide, copy them out.
"""

from __future__ import annotations

from typing import Any

from common import in_turn, median, report
from ranks import figures, is_rank, tell, timed, with_gloo

#: Elements of float32.
SIZES = [int(1e3 * 10 ** (3 * index / 199)) // 4 for index in range(200)]
BUCKET_BYTES = 25 << 20
STEPS, ROUNDS = 3, 15


def main() -> None:
    gloo_s, ours_s = figures(2)["tensors"]
    report(
        "hvd_tensors",
        "200 tensors of 1 kB to 1 MB submitted asynchronously, 2 processes, hvd against buckets on gloo",
        "at least 3 times as fast",
        gloo_s / ours_s >= 3,
        ours_ms=ours_s * 1e3,
        gloo_ms=gloo_s * 1e3,
        times=gloo_s / ours_s,
    )


def on_a_rank() -> None:
    import torch
    import torch.distributed as dist

    hvd = with_gloo()
    tensors = [torch.ones(size) for size in SIZES]
    buckets = _buckets(tensors)

    def ours() -> None:
        handles = [hvd.allreduce_async_(tensor, name=f"t.{index}") for index, tensor in enumerate(tensors)]
        for handle in handles:
            hvd.synchronize(handle)

    def gloo() -> None:
        flat = [torch.cat(bucket) for bucket in buckets]
        for work in [dist.all_reduce(whole, async_op=True) for whole in flat]:
            work.wait()
        for bucket, whole in zip(buckets, flat, strict=True):
            for tensor, mean in zip(bucket, whole.div_(2).split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(mean)

    found = in_turn(ROUNDS, lambda: timed(hvd.barrier, gloo, STEPS), lambda: timed(hvd.barrier, ours, STEPS))
    if hvd.rank() == 0:
        tell({"tensors": [median(times) for times in found]})
    dist.destroy_process_group()


def _buckets(tensors: list[Any]) -> list[list[Any]]:
    buckets: list[list[Any]] = [[]]
    for tensor in tensors:
        if buckets[-1] and sum(t.nbytes for t in buckets[-1]) + tensor.nbytes > BUCKET_BYTES:
            buckets.append([])
        buckets[-1].append(tensor)
    return buckets


if __name__ == "__main__":
    on_a_rank() if is_rank() else main()
