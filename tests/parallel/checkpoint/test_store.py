"""What all ranks try together, in one process."""

from __future__ import annotations

import gc
import weakref

import pytest

from paceline.errors import CheckpointError


def test_tensors_of_a_failed_checkpoint_read_are_freed_without_garbage_collection() -> None:
    # Import this module here, because it loads torch, and collecting tests must not load torch.
    from paceline.parallel.checkpoint.store import on_all

    class Read:
        """Stands for the tensors of a checkpoint."""

    seen: list[weakref.ref[Read]] = []

    def fail() -> None:
        read = Read()
        seen.append(weakref.ref(read))
        raise ValueError("the file ends")

    gc.disable()
    try:
        with pytest.raises(CheckpointError, match="the file ends") as raised:
            on_all(fail)
        assert type(raised.value.__cause__) is ValueError
        del raised
        assert seen[0]() is None
    finally:
        gc.enable()
