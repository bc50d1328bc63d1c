"""The layout for strategy="auto": the fastest predicted layout that fits in memory.

    1  With one worker the layout is DataParallel().
    2  Rank 0 measures the model's blocks on one microbatch, and all ranks measure the network.
    3  `forecast.predict` computes memory and time of each layout from these numbers.
    4  Layouts that need more than 0.8 of the memory are dropped. The fastest remaining layout wins. If several are nearly as
       fast, the first in this order wins: DataParallel, FullyShard, PipelineParallel, their combinations.
    5  If no layout fits, an error says how much memory each would need.

TensorParallel() is never chosen, because only a trial shows which layers it can cut.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.parallel import mesh
from paceline.parallel.batches.microbatches import sole, split
from paceline.parallel.batches.rows import Rows
from paceline.parallel.errors import ParallelError
from paceline.parallel.exchange import gather
from paceline.parallel.forecast.measure import bandwidth, measured
from paceline.parallel.forecast.predict import Forecast, Measured, all_forecasts
from paceline.parallel.mesh import WorldPlace
from paceline.parallel.pipeline.cut import Block
from paceline.parallel.strategy import DataParallel, Joinable
from paceline.parallel.task import Task
from paceline.system.memory import memory

#: The fraction of the memory that a plan may use. The rest is for gradient buckets, fragmentation and the loader.
USABLE = 0.8


#: Accuracy of forecasts: layouts whose times differ by less than this factor count as equally fast. The first one is chosen.
NEARLY = 1.05


@dataclass(frozen=True, kw_only=True)
class LayoutChoice:
    """The layout that "auto" chose, with the reason and the measurements.

    `measured` is None with one worker. `limit_bytes` is the memory that a worker may use, None if unknown.
    """

    strategy: Joinable
    reason: str
    measured: Measured | None = None
    limit_bytes: int | None = None


def choose(
    task: Task, optimizer: torch.optim.Optimizer | None, sample: object, place: WorldPlace, memory_bytes: int | None
) -> LayoutChoice:
    """Choose the fastest strategy that fits in memory, or raise ParallelError.

    Every rank must call this. `sample` is a global batch; None counts activations and computing times as 0.
    """
    if place.size == 1:
        return LayoutChoice(strategy=DataParallel(), reason="DataParallel(): there is one worker.")
    # The forecast includes the parameters, which are allocated already, so count their memory as available.
    held = sum(param.nbytes for param in task.model.parameters() if not param.is_meta)
    # Each worker needs the same amount of memory, so the worker with the least memory limits all workers.
    least = int(min(gather(memory_bytes or available_bytes(place.device) + held)))
    line = bandwidth(torch.distributed.group.WORLD, place.device)
    measurement = mesh.decide(
        place,
        lambda: measure(task, optimizer, sample, place, line),
        kinds=(Measured, Block),
        what="strategy='auto': the pass over one batch",
    )
    return decide(measurement, place.size, least, task.microbatches, task.at_once)


def decide(measured: Measured, workers: int, memory_bytes: int, microbatches: int, at_once: int) -> LayoutChoice:
    """Choose the fastest predicted strategy that fits in memory, or raise ParallelError.

    `at_once` is the number of microbatches that go through a pipeline together.
    """
    limit = int(USABLE * memory_bytes)
    every = all_forecasts(measured, workers, microbatches, at_once)
    possible = {name: one for name, one in every.items() if not one[1].reason and "TensorParallel" not in name}
    fits = {name: one for name, one in possible.items() if one[1].memory_bytes <= limit}
    room = f"{_text(limit)} of the {_text(memory_bytes)} that each of the {workers} workers has may be planned with"
    if not fits:
        needs = ", ".join(f"{name} {_text(int(one.memory_bytes))}" for name, (_, one) in possible.items())
        more = "" if at_once >= workers else f", or microbatches={workers} or more for a pipeline"
        raise ParallelError(
            f"strategy='auto': on each worker {needs} would be needed, but {room}. Give more workers, smaller batches, "
            f"recompute='blocks'{more}."
        )
    fastest = min(one.step_s for _, one in fits.values())
    name = next(name for name, (_, one) in fits.items() if one.step_s <= NEARLY * fastest)
    strategy, taken = fits[name]
    others = [
        f"{other} {_ms(one)}" + ("" if other in fits else f" but {_text(int(one.memory_bytes))}")
        for other, (_, one) in possible.items()
        if other != name
    ]
    unmeasured = (
        "" if measured.blocks[0].forward_s else " No batch was there to measure: only messages and the optimizer count."
    )
    return LayoutChoice(
        strategy=strategy,
        reason=f"{name}: {_text(int(taken.memory_bytes))} on each worker, and {room}. A step is forecast to take {_ms(taken)} "
        f"({'; '.join(others)}).{unmeasured}",
        measured=measured,
        limit_bytes=limit,
    )


def _ms(one: Forecast) -> str:
    return f"{1e3 * one.step_s:.3g} ms"


def measure(
    task: Task, optimizer: torch.optim.Optimizer | None, sample: object, place: WorldPlace, bandwidth_bytes_s: float
) -> Measured:
    """Measure the model's blocks on a microbatch and on one worker's share.

    `sample` is a global batch; None measures only sizes of parameters. The model is left unchanged.
    """
    micros = []
    if sample is not None:
        rows = Rows(split(sample, task))
        of_micro = max(rows.count // task.microbatches, 1)
        counts = dict.fromkeys((of_micro, max(of_micro // place.size, 1)))
        micros = [sole(rows, count, place.device, of_micro) for count in counts]
    return measured(task.model, task, micros, place.device, optimizer, bandwidth_bytes_s=bandwidth_bytes_s)


def available_bytes(device: torch.device) -> int:
    """Return how many bytes this process may still allocate.

    On a CPU the workers of a machine share its free memory equally. `ulimit -d` may reduce the result.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    # The workers of this machine share its memory, while `ulimit -d` limits each process alone.
    return min(memory().available // max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1), _left_of_limit())


def _left_of_limit() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if limit == resource.RLIM_INFINITY:
        return 2**63
    try:
        status = Path("/proc/self/status").read_text()
        used = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData:"))
    except (OSError, StopIteration):
        return limit
    return max(limit - used, 0)


def _text(count: int) -> str:
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}"
