"""`azureml.widgets`: a run's state, shown in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.compat.azureml.core.run import Run

__all__ = ["RunDetails"]


class RunDetails:
    """A run's state, shown by `RunDetails(run).show()`.

    In a notebook, `show` displays and updates the state. Otherwise it prints a line. It never waits for the run's end.
    """

    def __init__(self, run_instance: Run) -> None:
        self._run = run_instance

    def show(self, render_lib: object = None, widget_settings: object = None) -> None:
        self._run.show()

    def get_widget_data(self, widget_settings: object = None) -> dict[str, object]:
        run = self._run
        return {
            "status": run.get_status(),
            "run_id": run.id,
            "run_metrics": run.get_metrics(),
            "run_properties": run.get_details(),
            "loading": False,
        }
