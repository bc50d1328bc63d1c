"""Training states that `par.save` also keeps in memory, in a process that outlives the workers (`paceline.checkpoint.neighbour`).

Each rank keeps the pieces that it would write to the disk, and a record of its own values. All ranks keep the same steps, and a
state counts only if each rank has kept it. A state has the same pieces as a checkpoint, so another layout can load it too.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.checkpoint import files
from paceline.checkpoint.api import DenseArray, header_of, unreadable
from paceline.checkpoint.neighbour import Neighbour
from paceline.checkpoint.saving import Checkpoint, attempt_token, latest
from paceline.parallel.checkpoint.folder import RECORD, steps_dir
from paceline.parallel.checkpoint.parts import SavedParts, Shapes, TensorPiece, encoded
from paceline.parallel.checkpoint.state import CheckpointRecord, merge_records
from paceline.parallel.errors import CheckpointError
from paceline.parallel.mesh import World
from paceline.system.kept_states import PARALLEL

if TYPE_CHECKING:
    from paceline.system.kept_states import State


def is_due(neighbour: Neighbour, step: int) -> bool:
    """Return whether this rank keeps the state of this step in memory."""
    return files.DIR_VARIABLE in os.environ and neighbour.is_due(step, _place())


def about(world: World, step: int, loads: int) -> State:
    """Return a label for this rank's state: folder, step, rank, world size and token.

    The token identifies the attempt and `loads` (calls of `load` so far), because a script that loads again repeats steps.
    """
    token = f"{attempt_token()}{loads:x}"
    return {"folder": str(_place()), "step": step, "rank": world.rank, "of": world.size, "token": token}


def encode(pieces: Sequence[TensorPiece], record: CheckpointRecord) -> tuple[bytes, list[DenseArray]]:
    """Encode this rank's part of a state as a header and arrays.

    record: All values of the state that are not tensors.

    Raises:
        OSError: The record can't be packed.
    """
    packed = io.BytesIO()
    try:
        torch.save(record, packed)
    except Exception as error:  # a value may be of any class, and training must continue
        raise OSError(0, f"the state has a value that can't be stored: {error}") from error
    boxes, arrays, metadata = encoded(pieces)
    arrays.append(DenseArray(RECORD, torch.frombuffer(bytearray(packed.getbuffer()), dtype=torch.uint8)))
    return header_of(boxes, arrays, metadata), arrays


def newest() -> Checkpoint | None:
    """Return the newest state that all ranks have kept, or None."""
    if files.DIR_VARIABLE not in os.environ:
        return None
    found = latest(_place())
    # On several machines, the states are in files after the loss of a worker. Remove the files of earlier losses.
    files.remove_old(_place(), 1, 0, 1)
    return found


def read(found: Checkpoint) -> tuple[CheckpointRecord, SavedParts, Shapes]:
    """Return a kept state's values (the record), its parts, and its tensors' shapes.

    Raises:
        CheckpointError: The state is damaged.
    """
    parts = SavedParts(_place(), found.paths)
    records: list[CheckpointRecord] = []
    for file in parts.files:
        try:
            packed = file.array(RECORD, "torch")
            assert isinstance(packed, Tensor)
            records.append(
                torch.load(io.BytesIO(DenseArray(RECORD, packed).data), weights_only=True, map_location="cpu")
            )
        except Exception as error:
            raise CheckpointError(unreadable(_place(), f"a record is no plain data: {error}")) from error
    return {**records[0], **merge_records([*records])}, parts, parts.about


def _place() -> Path:
    return files.folder_of(steps_dir() / PARALLEL)
