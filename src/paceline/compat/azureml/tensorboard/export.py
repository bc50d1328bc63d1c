"""`azureml.tensorboard.export`: a run's metrics as TensorBoard files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.compat.azureml.exceptions import sdk_errors

if TYPE_CHECKING:
    from paceline.compat.azureml.core.run import Run

__all__ = ["export_to_tensorboard"]


@sdk_errors
def export_to_tensorboard(
    run_data: Run | list[Run] | tuple[Run, ...], logsdir: str, logger: object = None, recursive: bool = True
) -> None:
    """Write the numbers that runs have logged, in a folder for each run.

    `recursive` includes the runs' children.

    Raises:
        UserErrorException: The writer of these files is not installed.
    """
    from paceline.trackers.export import to_tensorboard

    for run in run_data if isinstance(run_data, (list, tuple)) else [run_data]:
        for one in [run, *(run.get_children(recursive=True) if recursive else ())]:
            one.record()  # updates the folder of a remote run
            to_tensorboard([one.folder], Path(logsdir))
