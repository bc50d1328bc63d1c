"""`latest`: the newest checkpoint that is whole, and what can be taken from it."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.checkpoint import files, saving
from paceline.checkpoint.values import is_tensor, put_together
from paceline.data.sampling.world import own_rank
from paceline.errors import CheckpointError, UserError


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is whole. step: as save() was told. paths: its files, one for each rank that has saved a part."""

    step: int
    paths: tuple[Path, ...]

    @cached_property
    def state(self) -> Any:
        """The state as it was given to save(), with `state_dict()` in place of what has one; tensors on the CPU. Of one in
        parts it is the own rank's.

        Raises:
            CheckpointError: it can't be read; or it is in parts, and the ranks were not as many as they are now.
        """
        if len(self.paths) == 1:
            return self.parts[0]
        rank, size = own_rank()
        if size != len(self.paths):
            raise CheckpointError(
                f"the checkpoint of step {self.step} has a part for each of {len(self.paths)} ranks, and there are {size} now. "
                "Put together what this rank needs of `.parts`, the states of all of them."
            )
        return self.parts[rank]

    @cached_property
    def parts(self) -> Sequence[Any]:
        """The state of each rank that has saved a part, by rank; read when it is asked for.

        Raises:
            CheckpointError: as for `state`.
        """
        return _Parts(self.paths)

    def load_into(self, objects: Any) -> None:
        """Give everything its saved state back. objects: what save() was given: an object with `load_state_dict`, or a dict of
        them; tensors in the dict are overwritten, other values replaced.

        Raises:
            UserError: the checkpoint has nothing under one of the names, or there is no way to give it back.
        """
        state = self.state
        if callable(getattr(objects, "load_state_dict", None)):
            objects.load_state_dict(state)
            return
        if not isinstance(objects, MutableMapping) or not isinstance(state, Mapping):
            raise UserError(
                f"a {type(objects).__name__} can't take the state of step {self.step}, a {type(state).__name__}. Give the dict "
                "that save() was given, or take the values from `.state`."
            )
        # Before anything is changed.
        if missing := [name for name in objects if name not in state]:
            raise UserError(
                f"the checkpoint of step {self.step} has no {missing[0]!r}; it has {', '.join(map(repr, state))}. Leave it out, "
                "or start in another folder."
            )
        for name, one in objects.items():
            # A smaller one would be spread over the larger in silence.
            if is_tensor(one) and not (is_tensor(state[name]) and one.shape == state[name].shape):
                raise UserError(
                    f"{name!r} is a tensor of shape {list(one.shape)}, and the checkpoint of step {self.step} has "
                    f"{_described(state[name])} there. Give one of that shape, or take it from `.state`."
                )
        for name, one in objects.items():
            if callable(getattr(one, "load_state_dict", None)):
                one.load_state_dict(state[name])
            elif is_tensor(one):
                one.detach().copy_(state[name])
            else:
                objects[name] = state[name]


def _described(value: Any) -> str:
    return f"one of shape {list(value.shape)}" if is_tensor(value) else f"a {type(value).__name__}"


class _Parts(Sequence[Any]):
    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        reader = files.CheckpointFile(self._paths[index])
        try:
            return put_together(reader.told, reader.array)
        except CheckpointError as error:
            text = str(error)
            if str(reader.path) in text:
                raise
            raise CheckpointError(files.unreadable(reader.path, text)) from error


def latest(folder: str | os.PathLike[str] | None = None) -> Checkpoint | None:
    """The newest checkpoint that is whole; None where there is none yet. To be called before training, on every rank.

    folder: as for `save`. No file of it can run code, whoever has written it.

    Raises:
        UserError: an address or a file in place of a folder.
    """
    # One that this process still writes is the newest in a moment.
    saving.wait()
    place = files.folder_of(folder)
    found = files.whole(files.parts_in(place))
    if not found:
        return None
    step = max(found)
    return Checkpoint(step, tuple(place / part.name for part in found[step]))
