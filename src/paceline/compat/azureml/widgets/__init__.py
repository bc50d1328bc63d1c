"""`azureml.widgets`: a run's state, shown in a notebook."""

from __future__ import annotations

from typing import Any

__all__ = ["RunDetails"]


class RunDetails:
    """A run's state, shown by `RunDetails(run).show()`.

    A notebook shows updates; elsewhere it prints a line. Neither waits for the run.
    """

    def __init__(self, run_instance: Any) -> None:
        self._run = run_instance

    def show(self, render_lib: Any = None, widget_settings: Any = None) -> None:
        """Show the run; a notebook shows updates."""
        self._run.show()

    def get_widget_data(self, widget_settings: Any = None) -> dict[str, Any]:
        """Return the run's data."""
        run = self._run
        return {
            "status": run.get_status(),
            "run_id": run.id,
            "run_metrics": run.get_metrics(),
            "run_properties": run.get_details(),
            "loading": False,
        }
