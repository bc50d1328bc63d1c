"""`azureml.widgets`: a run's state, shown in a notebook."""

from __future__ import annotations

from typing import Any

__all__ = ["RunDetails"]


class RunDetails:
    """RunDetails(run).show(): in a notebook the run as it is now; elsewhere a line. Neither waits for the run."""

    def __init__(self, run_instance: Any) -> None:
        self._run = run_instance

    def show(self, render_lib: Any = None, widget_settings: Any = None) -> None:
        """Show it."""
        if _in_notebook():
            from IPython.display import HTML, display

            display(HTML(self._run._repr_html_()))
        else:
            print(f"Run {self._run.id}: {self._run.get_status()}. paceline logs -f {self._run.id}")

    def get_widget_data(self, widget_settings: Any = None) -> dict[str, Any]:
        """What is known of the run."""
        run = self._run
        return {
            "status": run.get_status(),
            "run_id": run.id,
            "run_metrics": run.get_metrics(),
            "run_properties": run.get_details(),
            "loading": False,
        }


def _in_notebook() -> bool:
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    shell = get_ipython()
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"
