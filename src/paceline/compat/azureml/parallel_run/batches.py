"""The mini-batches of a step's inputs. The first rank makes them; every rank finds what they name in its own place."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.compat.azureml.parallel_run.settings import Settings


@dataclass(frozen=True)
class Batch:
    """number: from 0, over all inputs. input: its name. files: their paths in the input; or first, last: rows of the table."""

    number: int
    input: str
    files: tuple[str, ...] = ()
    first: int = 0
    last: int = 0

    def __len__(self) -> int:
        return len(self.files) or self.last - self.first


def all_of(settings: Settings) -> list[Batch]:
    """All mini-batches, input by input.

    Raises:
        DataError: an input is no table.
    """
    found: list[Batch] = []
    for name in settings.files:
        files = _files(folder_of(name))
        for start in range(0, len(files), settings.batch_size):
            found.append(Batch(len(found), name, tuple(files[start : start + settings.batch_size])))
    for name in settings.tables:
        frame = table_of(name)
        size = max(1, int(frame.memory_usage(index=False, deep=True).sum()))
        rows = max(1, len(frame) * settings.batch_size // size)
        for start in range(0, len(frame), rows):
            found.append(Batch(len(found), name, first=start, last=min(start + rows, len(frame))))
    return found


def content(batch: Batch, tables: dict[str, Any]) -> Any:
    """What `run` is given: a list of paths, or a frame. tables: those that were read before."""
    if batch.files:
        top = folder_of(batch.input)
        return [str(top / name) if name else str(top) for name in batch.files]
    if batch.input not in tables:
        tables[batch.input] = table_of(batch.input)
    return tables[batch.input].iloc[batch.first : batch.last].reset_index(drop=True)


def folder_of(name: str) -> Path:
    """Where this worker finds an input or an output."""
    return Path(os.environ[f"AZUREML_DATAREFERENCE_{name}"])


def table_of(name: str) -> Any:
    """All rows of an input."""
    from paceline.compat.azureml.core.run import Run

    return Run.get_context().input_datasets[name].to_pandas_dataframe()


def _files(top: Path) -> list[str]:
    if top.is_file():
        return [""]
    found = (Path(folder, name) for folder, _, names in os.walk(top, followlinks=True) for name in names)
    return sorted(str(path.relative_to(top)) for path in found)
