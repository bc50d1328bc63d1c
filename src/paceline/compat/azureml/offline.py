"""The object that `Run.get_context` returns outside a run, and its SDK methods that class `Run` has too."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from paceline import runs
from paceline.errors import MetricError
from paceline.runs import LogsMetrics


def _logs_chart(kind: str) -> Callable[[SdkSpellings, str, object, str], None]:
    def log_chart(self: SdkSpellings, name: str, value: object, description: str = "") -> None:
        """Log a chart: a dict, or its JSON. `description` is ignored.

        Raises:
            MetricError: The value is neither a dict nor JSON.
        """
        self._write_other(kind, name, _json_value(name, value))

    return log_chart


class SdkSpellings(LogsMetrics):
    """A mixin of SDK methods that `Run` and `OfflineRun` share."""

    status: Any
    tags: Any
    properties: Any

    log_confusion_matrix = _logs_chart("confusion_matrix")
    log_accuracy_table = _logs_chart("accuracy_table")
    log_residuals = _logs_chart("residuals")
    log_predictions = _logs_chart("predictions")

    def get_status(self) -> str:
        return str(self.status)

    def get_tags(self) -> dict[str, str | None]:
        return dict(self.tags)

    def get_properties(self) -> dict[str, str]:
        return dict(self.properties)

    def flush(self, timeout_seconds: float = 300) -> None:
        """Do nothing: each call writes its value before it returns."""


class OfflineRun(SdkSpellings, runs.OfflineRun):
    """The result of `Run.get_context()` outside a run.

    Scripts test `hasattr(run, "experiment")` to see whether they are in a run.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        del self.experiment, self.input_datasets, self.output_datasets

    def child_run(self, name: str | None = None, run_id: str | None = None, outputs: str | None = None) -> OfflineRun:
        """Return another OfflineRun, whose id is this id plus the name."""
        made = super().child_run(name)
        if name or run_id:
            made.id = run_id or f"{self.id}.{name}"
        return made

    def upload_file(self, name: str, path_or_stream: object, datastore_name: str | None = None) -> str:
        return super().upload_file(name, path_or_stream)

    def get_environment(self) -> None:
        """Return None: an OfflineRun has no environment."""

    def get_file_names(self) -> list[str]:
        """Return an empty list: an OfflineRun stores no files."""
        return []


def _json_value(name: str, value: object) -> object:
    try:
        # Convert a value that is not a text to JSON and back, which raises an error if JSON can't represent the value.
        plain = json.loads(value if isinstance(value, (str, bytes)) else json.dumps(value))
    except (TypeError, ValueError) as error:
        raise MetricError(f"metric {name!r}: a {type(value).__name__} that is not JSON: {error}.") from error
    if not isinstance(plain, dict):
        raise MetricError(f"metric {name!r}: a {type(plain).__name__} must be a dict.")
    return plain
