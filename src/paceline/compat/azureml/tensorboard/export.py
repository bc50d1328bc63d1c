"""`azureml.tensorboard.export`: a run's metrics as TensorBoard's files."""

from __future__ import annotations

import os
from typing import Any

from paceline.compat.azureml.tensorboard import _writer

__all__ = ["export_to_tensorboard"]


def export_to_tensorboard(run_data: Any, logsdir: str, logger: Any = None, recursive: bool = True) -> None:
    """Write the numbers that runs have logged, a folder for each run. recursive: those of their children, too.

    Raises:
        UserErrorException: what writes these files is not installed.
    """
    for run in run_data if isinstance(run_data, (list, tuple)) else [run_data]:
        for one in [run, *(run.get_children(recursive=True) if recursive else ())]:
            writer = _writer(os.path.join(logsdir, one.id))
            for name, series in one.metrics().items():
                for number, (step, value) in enumerate(zip(series.steps, series.values, strict=True)):
                    if isinstance(value, (int, float)):
                        writer.add_scalar(name, value, number if step is None else step)
            writer.close()
