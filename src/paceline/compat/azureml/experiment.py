"""An experiment whose runs have the SDK's spellings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from paceline import workspace
from paceline.compat.azureml.run import Run
from paceline.workspace import Workspace

__all__ = ["Experiment", "Run"]


class Experiment(workspace.Experiment):
    """`paceline.Experiment`; what it submits or starts to log is a `Run` of this package."""

    run_class: ClassVar[type[Run]] = Run

    def get_runs(  # type: ignore[override]  # the SDK's names, `type` in place of `kind`
        self,
        type: str | None = None,
        tags: Mapping[str, str] | str | None = None,
        properties: Mapping[str, str] | None = None,
        include_children: bool = False,
        **others: Any,
    ) -> Iterator[Any]:
        """As `paceline.Experiment.get_runs`."""
        return super().get_runs(type, tags, properties, include_children, **others)


def _make_experiment(runs_dir: Path, name: str) -> Experiment:
    return Experiment(Workspace(runs_dir.parent), name)


# Set here, not in `run`: this module imports that one, so the other way round would be a cycle. Without it a run that is
# found by its id would belong to a plain experiment.
Run.make_experiment = staticmethod(_make_experiment)
