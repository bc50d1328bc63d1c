"""A short comparison with the plain model before the first step, which refuses layouts with wrong results.

A few rows of the first batch go through the model in its layout and through a plain copy. Then losses, gradients and buffers are
compared (`check`). The comparison needs memory for the plain model and its gradients: twice the parameters' size on each device,
and once this size on the host. If memory is too small, the comparison is skipped, and `explain` reports that. The rows are:

    pipeline            as many whole microbatches as the pipeline has stages: other shapes would need a new trace
    any other layout    two rows (with batch normalisation four) of each replica, from each of two microbatches
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from paceline.parallel.auto import available_bytes
from paceline.parallel.batches.batch import Microbatch, Parts, consecutive, own_rows
from paceline.parallel.batches.microbatches import OwnBatch, cut_parts, split
from paceline.parallel.batches.rows import Rows, can_join, gather_parts, join_rows, most_rows, move, unwrap
from paceline.parallel.check import CannotComputeError, compare
from paceline.parallel.errors import ParallelError
from paceline.parallel.exchange import NotPlainError
from paceline.parallel.plain_run import CannotCompareError, DiffersError, warn_of_parts
from paceline.parallel.reduce import anywhere
from paceline.torch_private import BatchNorm

if TYPE_CHECKING:
    from paceline.parallel.executor import ParallelHandle

_log = logging.getLogger(__name__)

#: How many rows per replica and microbatch the check uses without a pipeline: 2 for most models, 4 with batch normalisation.
ROWS, ROWS_NORMALISED = 2, 4
MICROBATCHES = 2
#: The fraction of the free memory that the comparison may use.
SHARE = 0.5


def first_check(par: ParallelHandle, batch: object, micros: Sequence[Microbatch]) -> str:
    """Compare the layout's results for a few rows with the plain model's.

    Every rank must call this. `batch` is the argument of `step`, and `micros` are this rank's microbatches of it. Return a
    sentence about the result, or "" in a single process.

    Raises:
        ParallelError: On every rank: the layout has other results than the plain model, or cannot be trained.
    """
    if par.world.size == 1:
        # A single process computes the plain model itself, so check only the effect of cutting a batch into microbatches.
        warn_of_parts(par, _short(par, batch, micros, min(MICROBATCHES, len(micros))), min(MICROBATCHES, len(micros)))
        return ""
    try:
        return f"the first step's first rows: {_compared(par, batch, micros)}"
    except CannotCompareError as error:
        # Don't warn with batch_norm="local": the script has chosen to differ from the plain model by this setting.
        if par.world.rank == 0 and par.world.layout.batch_norm != "local":
            _log.warning("%s on %s is trained without the comparison: %s", par.skeleton.name, par.world.layout, error)
        return f"not compared with the plain model: {error}"
    except CannotComputeError as error:
        raise ParallelError(str(error)) from error.__cause__
    except DiffersError as error:
        raise ParallelError(
            f"before the first step, on the first rows of its batch: {error} "
            "If the difference is intended, parallelize(check='off') trains without this comparison."
        ) from None


def _compared(par: ParallelHandle, batch: object, micros: Sequence[Microbatch]) -> object:
    if par.world.layout.batch_norm == "local" and par.world.replicas > 1:
        raise CannotCompareError("with batch_norm='local' it is another one")
    # Skip the comparison on all ranks or on none. Otherwise the ranks that compare would wait for the ranks that skip it.
    if anywhere(bool(par.skeleton.reason), par.world):
        raise CannotCompareError(par.skeleton.reason or "another rank can't copy it")
    _refuse_large(par)
    count = min(par.world.layout.pipe if par.world.layout.pipe > 1 else MICROBATCHES, len(micros))
    short = _short(par, batch, micros, count)
    if par.task.loss_weight is not None and not float(par.task.loss_weight(unwrap(short.target))) > 0:
        raise CannotCompareError("nothing counts in the first rows of the first batch")
    task = dataclasses.replace(par.task, microbatches=count)
    return compare(par, short, cut_parts(short, task, par.world), is_short=True)


def _refuse_large(par: ParallelHandle) -> None:
    """Raise CannotCompareError if any rank lacks memory for the plain model."""
    size, device = par.skeleton.bytes, par.device
    # Bytes of memory that the comparison needs. The host holds the whole state. A GPU also holds the model and its gradients.
    on_host, on_device = (3 * size, 0) if device.type == "cpu" else (size, 2 * size)
    lacks = on_host > SHARE * available_bytes(torch.device("cpu"))
    lacks = lacks or on_device > SHARE * available_bytes(device)
    if anywhere(lacks, par.world):
        raise CannotCompareError(
            f"it would take {(on_host + on_device) / 2**30:.1f} GiB on each worker, and at least one has not twice that free"
        )


def _short(par: ParallelHandle, batch: object, micros: Sequence[Microbatch], count: int) -> Parts:
    """Return the first rows of the first `count` microbatches, from all replicas."""
    world = par.world
    parts = split(batch, par.task)
    rows = Rows(parts)
    ranges = own_rows(rows.count, len(micros), world.replicas, world.replica)
    if isinstance(batch, OwnBatch):
        ranges = consecutive(micro.rows for micro in micros)
    most = ROWS_NORMALISED if any(isinstance(part, BatchNorm) for part in par.module.modules()) else ROWS
    own: list[Parts | None] = []
    for span in ranges[:count]:
        few = len(span) if world.layout.pipe > 1 else min(len(span), most)
        own.append(move(rows.take(span.start, span.start + few), torch.device("cpu")) if few else None)
    everyone: list[list[Parts | None]] = [own]
    if world.replica_group is not None:
        try:
            everyone = gather_parts(own, parts, world.replica_group)
        except NotPlainError as error:
            raise CannotCompareError(
                f"the batch holds a {error.kind} for each row, which cannot be sent to other ranks"
            ) from error
    pieces = [piece for of_all in zip(*everyone, strict=True) for piece in of_all if piece is not None]
    if not can_join(pieces):
        # The replicas' rows are padded to different lengths, so they can't be joined. Split the rows of one replica instead.
        most = min(sum(Rows(piece).count for piece in pieces), rows.count)
        return most_rows(move(rows.take(0, most), torch.device("cpu")), parts, world.replica_group)
    short: Parts = join_rows(pieces)
    return short
