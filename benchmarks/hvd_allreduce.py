"""hvd.allreduce_ against torch.distributed's Gloo, on two processes.

Beside both, the least that two processes on one machine have to do for a sum, `Bare`: what it takes bounds the ratio.

python benchmarks/hvd_allreduce.py
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import in_turn, median, report
from ranks import figures, folder, is_rank, tell, timed, with_gloo

#: Bytes, calls in a block, rounds, how many times as fast as Gloo it has to be.
SIZES = ((4 << 10, 100, 20, 10.0), (1 << 20, 20, 15, 5.0), (16 << 20, 3, 12, 5.0), (64 << 20, 2, 8, 1.8))


def main() -> None:
    found = figures(2)
    for size, _, _, target in SIZES:
        gloo_s, ours_s, bare_s = found[str(size)]
        name = f"{size >> 10} KiB" if size < 1 << 20 else f"{size >> 20} MiB"
        report(
            f"hvd_allreduce_{size >> 10}k",
            f"hvd.allreduce_ of {name}, 2 processes, against gloo",
            f"at least {target:g} times as fast",
            gloo_s / ours_s >= target,
            ours_ms=ours_s * 1e3,
            gloo_ms=gloo_s * 1e3,
            bare_ms=bare_s * 1e3,
            times=gloo_s / ours_s,
            times_at_most=gloo_s / bare_s,
        )


class Bare:
    """A sum over two processes in place: each copies its array into memory that the other sees, a piece of 1 MiB at a time,
    and adds the other's to its own. Nothing is agreed upon, and who waits spins.

    A piece stays in the processor's cache until it is added up. Stores are seen in their order, as on x86.
    """

    _PIECE = (1 << 20) // 4

    def __init__(self, rank: int, path: Path) -> None:
        import numpy

        bytes_each = mmap.PAGESIZE + 2 * 4 * self._PIECE
        with path.open("ab+") as file:
            file.truncate(2 * bytes_each)
            whole = mmap.mmap(file.fileno(), 2 * bytes_each)
        starts = (rank * bytes_each, (1 - rank) * bytes_each)
        self._done, self._others = (numpy.frombuffer(whole, "int64", 1, start) for start in starts)
        self._mine, self._theirs = (
            numpy.frombuffer(whole, "float32", 2 * self._PIECE, start + mmap.PAGESIZE).reshape(2, -1)
            for start in starts
        )
        self._turn = 0

    def __call__(self, tensor: Any) -> None:
        array = tensor.numpy()
        for start in range(0, array.size, self._PIECE):
            piece = array[start : start + self._PIECE]
            self._mine[self._turn, : piece.size] = piece
            self._done[0] += 1
            while self._others[0] < self._done[0]:
                pass
            piece += self._theirs[self._turn, : piece.size]
            self._turn ^= 1


def on_a_rank() -> None:
    import torch
    import torch.distributed as dist

    hvd = with_gloo()
    bare = Bare(hvd.rank(), folder() / "segments")
    hvd.barrier()
    found = {}
    for size, calls, rounds, _ in SIZES:
        tensor = torch.ones(size // 4)

        def block(call: Callable[[Any], object], tensor: Any = tensor, calls: int = calls) -> Callable[[], float]:
            def run() -> float:
                tensor.fill_(1.0)
                return timed(hvd.barrier, lambda: call(tensor), calls)

            return run

        ours = block(lambda tensor: hvd.allreduce_(tensor, name="t", op=hvd.Sum))
        sides = block(dist.all_reduce), ours, block(bare)
        found[str(size)] = [median(times) for times in in_turn(rounds, *sides)]
    if hvd.rank() == 0:
        tell(found)
    dist.destroy_process_group()


if __name__ == "__main__":
    on_a_rank() if is_rank() else main()
