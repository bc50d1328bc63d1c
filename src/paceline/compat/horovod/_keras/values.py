"""Operations on plain values: what a script calls between two epochs, or in a callback of its own."""

from __future__ import annotations

from typing import Any, NoReturn

from paceline.compat.horovod._keras.libraries import KERAS_3, backend_of
from paceline.compat.horovod._keras.reducing import side_of
from paceline.compat.horovod.common.ops import Average
from paceline.compat.horovod.common.process_sets import ProcessSet, global_process_set


class Values:
    """The operations for one Keras. Each takes a number, an array, a tensor or a variable, and gives a tensor."""

    def __init__(self, library: Any) -> None:
        self._library = library.__name__ if library is not None else KERAS_3

    def allreduce(
        self,
        value: Any,
        name: str | None = None,
        average: bool | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        op: int | None = None,
        compression: Any = None,
        process_set: ProcessSet = global_process_set,
    ) -> Any:
        """The ranks' values, reduced by `op`; Average where nothing is said. average: its old name.

        Raises:
            ValueError: both `average` and `op` are given.
            HorovodInternalError: shapes, types or operations differ between ranks; on every rank.
        """
        side = self._side()
        return side.allreduce(
            side.tensor(value),
            average=average,
            name=name,
            compression=compression or side.Compression.none,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
        )

    def allgather(self, value: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
        """The ranks' values, one below the other; the first dimension may differ between ranks."""
        side = self._side()
        return side.allgather(side.tensor(value), name=name, process_set=process_set)

    def broadcast(
        self, value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Any:
        """The value of `root_rank`."""
        side = self._side()
        return side.broadcast(side.tensor(value), root_rank, name=name, process_set=process_set)

    def reducescatter(
        self, value: Any, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set
    ) -> Any:
        """This rank's rows of the ranks' reduced values."""
        side = self._side()
        return side.reducescatter(side.tensor(value), name=name, op=op, process_set=process_set)

    def broadcast_global_variables(self, root_rank: int) -> NoReturn:
        """Raise: there are no global variables where TensorFlow runs eagerly.

        Raises:
            RuntimeError: always; it says what to use.
        """
        raise RuntimeError(
            f"broadcast_global_variables({root_rank}) is for graphs of TensorFlow 1. Give model.fit the callback "
            f"hvd.callbacks.BroadcastGlobalVariablesCallback({root_rank})."
        )

    def _side(self) -> Any:
        return side_of(backend_of(self._library))
