"""`par.save_safetensors`: write the model in Hugging Face's layout, one file per worker.

The workers gather one tensor at a time. The worker that has written the fewest bytes so far writes the tensor. So a
worker needs memory for one whole tensor besides its own part of the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from paceline.parallel.checkpoint.state import HeldState
from paceline.parallel.checkpoint.store import begin, hold, on_all, on_rank_0
from paceline.parallel.errors import CheckpointError
from paceline.parallel.exchange import gather
from paceline.parallel.full_tensor import axes_of, whole
from paceline.parallel.large.safetensors import INDEX, SINGLE, Writer, type_name
from paceline.system.files import sync_file

if TYPE_CHECKING:
    from paceline.parallel.executor import ParallelHandle
    from paceline.parallel.mesh import World


def save_safetensors(par: ParallelHandle, path: str | Path) -> Path:
    """Write parameters and persistent buffers. Return the folder.

    Every rank must call this. `path` is a new or empty folder, on a file system that all ranks share. The folder gets
    its name once it is complete. It has a file `model-0000k-of-0000n.safetensors` of each worker and an index, or
    `model.safetensors` alone. A Hugging Face model also gets `config.json`, so that `from_pretrained(path)` loads it.
    Tied tensors are stored once. The optimizer's state is not stored.

    Raises:
        ParallelError: The path exists and is not an empty folder, or safetensors cannot hold a dtype.
        CheckpointError: The write failed.
    """
    world = par.world
    par.settle_buffers()
    held = hold(par)
    tensors, roots = held.model_tensors(), _roots(par, held)
    names = {name: tensor for name, tensor in tensors.items() if name in roots}
    target = Path(path)
    for name, tensor in names.items():
        type_name(name, tensor.dtype)
    saving, folder = begin(world, target, repr(str(target)))
    mine = [name for name, root in roots.items() if root == world.rank]
    writers = sorted(set().union(*(set(own.values()) for own in gather(roots))))
    file = SINGLE
    if len(writers) > 1 and world.rank in writers:
        file = f"model-{writers.index(world.rank) + 1:05}-of-{len(writers):05}.safetensors"
    on_all(lambda: _write(folder / file, names, mine))
    everyone = gather((file, {name: names[name].nbytes for name in mine}))

    def finish() -> None:
        assert saving is not None
        if len(writers) > 1:
            index = {
                "metadata": {"total_size": sum(sum(own.values()) for _, own in everyone)},
                "weight_map": {name: of for of, own in everyone for name in own},
            }
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
            sync_file(folder / INDEX)
        save_config = getattr(getattr(par.task.model, "config", None), "save_pretrained", None)
        if callable(save_config):
            save_config(folder)
        saving.commit()

    try:
        on_rank_0(world, finish, f"{str(target)!r} can't be written")
    except BaseException:
        if saving is not None:
            saving.abandon()
        raise
    return target


def _write(path: Path, names: dict[str, Tensor], mine: list[str]) -> None:
    # All ranks visit all tensors, because gathering a tensor is a collective of the ranks that hold its parts.
    # Raise an error only after the loop: an earlier exit would leave the other ranks waiting.
    own, failed = set(mine), None
    writer = None
    try:
        if mine:
            writer = Writer(
                path, [(name, tuple(names[name].shape), names[name].dtype) for name in names if name in own]
            )
    except OSError as error:
        failed = error
    for name, tensor in names.items():
        full = whole(tensor.detach())
        if writer is not None and name in own and failed is None:
            failed = _failed(lambda full=full: writer.write(full.to("cpu")))  # type: ignore[misc]
    if writer is not None:
        failed = _failed(writer.close) or failed
    if failed is not None:
        raise CheckpointError(f"{str(path)!r} can't be written: {failed.strerror or failed}.")


def _failed(action: Callable[[], None]) -> OSError | None:
    try:
        action()
    except OSError as error:
        return error
    return None


def _roots(par: ParallelHandle, held: HeldState) -> dict[str, int]:
    """Return tensor's name -> rank that writes it, for tensors that this rank gathers.

    If several stages have copies of a tied tensor, only the first of these stages writes the tensor.
    """
    world: World = par.world
    about = {name: tensor.nbytes for name, tensor in held.model_tensors().items()}
    stages = gather((world.coordinate(world.holder_axis), about))
    writer: dict[str, int] = {}
    done: dict[int, int] = dict.fromkeys(range(world.size), 0)
    stage_of: dict[str, int] = {}
    for stage, own in stages:
        for name in own:
            stage_of[name] = min(stage_of.get(name, stage), stage)
    for name, stage in sorted(stage_of.items(), key=lambda item: item[1]):
        ranks = [rank for rank, (other, _) in enumerate(stages) if other == stage]
        size = stages[ranks[0]][1][name]
        least = min(ranks, key=lambda rank: done[rank])
        writer[name] = least
        done[least] += size
    here = world.coordinate(world.holder_axis)
    # All ranks along the mesh axis `holder_axis` must take part in gathering a tensor that is split along this axis.
    parted = {name for name, tensor in held.model_tensors().items() if world.holder_axis in axes_of(tensor)}
    return {name: writer[name] for name in about if stage_of[name] == here or name in parted}
