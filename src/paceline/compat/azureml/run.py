"""A run with the SDK's spellings: other names for what `paceline.Run` has, its dict of details, and metrics of AutoML."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import IO, Any, ClassVar

from paceline.errors import MetricError
from paceline.runs import offline, run
from paceline.runs.run_metrics import LogsMetrics

#: Of each log `get_details_with_logs` gives at most this much, for a log of gigabytes would fill the memory.
_TAIL_BYTES = 1 << 20


class SdkSpellings(LogsMetrics):
    """What runs and those outside of one (`get_context` there) have in common. `status`, `tags` and `properties` are theirs."""

    status: Any
    tags: Any
    properties: Any

    def get_status(self) -> str:
        """`status`: one of `paceline.runs.states`, such as "Queued", "Running" or "Completed"."""
        return str(self.status)

    def get_tags(self) -> dict[str, str | None]:
        """`tags`."""
        return dict(self.tags)

    def get_properties(self) -> dict[str, str]:
        """`properties`."""
        return dict(self.properties)

    def flush(self, timeout_seconds: float = 300) -> None:
        """Does nothing: every value was written when its call returned."""

    def log_confusion_matrix(self, name: str, value: object, description: str = "") -> None:
        """Log a confusion matrix: a dict, or its JSON.

        Raises:
            MetricError: neither of these, here and in the three below.
        """
        # The SDK stores the description beside the chart. Here it is taken and kept nowhere, as in the three below.
        self._write_other("confusion_matrix", name, _json_value(name, value))

    def log_accuracy_table(self, name: str, value: object, description: str = "") -> None:
        """Log an accuracy table: a dict, or its JSON."""
        self._write_other("accuracy_table", name, _json_value(name, value))

    def log_residuals(self, name: str, value: object, description: str = "") -> None:
        """Log residuals: a dict, or its JSON."""
        self._write_other("residuals", name, _json_value(name, value))

    def log_predictions(self, name: str, value: object, description: str = "") -> None:
        """Log predictions: a dict, or its JSON."""
        self._write_other("predictions", name, _json_value(name, value))


class OfflineRun(SdkSpellings, offline.OfflineRun):
    """`Run.get_context()` outside a run."""


class Run(SdkSpellings, run.Run):
    """`paceline.Run` with the SDK's other names."""

    offline_class: ClassVar[type[offline.OfflineRun]] = OfflineRun

    @classmethod
    def list(
        cls,
        experiment: Any,
        type: str | None = None,
        tags: Mapping[str, str] | str | None = None,
        properties: Mapping[str, str] | None = None,
        status: str | None = None,
        include_children: bool = False,
    ) -> Iterator[Any]:
        """The runs of the experiment, newest first, that are of this type and status and carry these tags and properties."""
        found = experiment.get_runs(type, tags, properties, include_children, status=status)
        # Each is made anew as `cls`, so a subclass of Run lists runs of that subclass.
        return (cls(experiment, one.id) for one in found)

    def get_children(  # the SDK's names, `type` in place of `kind`
        self,
        recursive: bool = False,
        tags: Mapping[str, str] | str | None = None,
        properties: Mapping[str, str] | None = None,
        type: str | None = None,
        status: str | None = None,
    ) -> Iterator[Run]:
        """As `paceline.Run.get_children`."""
        return super().get_children(recursive, tags, properties, type, status)

    @property
    def type(self) -> str:
        """`kind`."""
        return self.kind

    def get_detailed_status(self) -> dict[str, Any]:
        """status, and in `details` what the run waits for or why it failed."""
        record = self.record()
        return {
            "status": record.status,
            "details": record.waiting_for or (record.failure.message if record.failure else ""),
        }

    def get_details(self) -> dict[str, Any]:
        """runId, target, status, startTimeUtc, endTimeUtc, properties, inputDatasets, outputDatasets, runDefinition, logFiles
        (name -> path), submittedBy; after a failure also error; then, or where there are any, warnings."""
        record = self.record()
        properties: dict[str, Any] = self.get_properties()
        if record.snapshot_id:
            properties["ContentSnapshotId"] = record.snapshot_id
        # The SDK files a run's source under these names among its properties.
        properties |= {f"azureml.git.{key}": value for key, value in record.git.items()}
        details: dict[str, Any] = {
            "runId": record.run_id,
            "target": record.target,
            "status": record.status,
            "startTimeUtc": record.started_utc,
            "endTimeUtc": record.ended_utc,
            "properties": properties,
            "inputDatasets": self._data("inputs"),
            "outputDatasets": self._data("outputs"),
            "runDefinition": record.job.shown() if record.job else {},
            "logFiles": {f"logs/{path.name}": str(path) for path in sorted(self.folder.logs.glob("*.log"))},
            "submittedBy": record.submitted_by,
        }
        if record.failure is not None:
            details["error"] = {"error": {"code": record.failure.cause, "message": str(record.failure)}}
        if record.failure is not None or record.warnings:
            details["warnings"] = [{"source": "paceline", "message": warning} for warning in record.warnings]
        return details

    def get_details_with_logs(self) -> dict[str, Any]:
        """`get_details`, with the logs' text (its last MiB each) in the place of their paths."""
        details = self.get_details()
        details["logFiles"] = {name: _tail_text(path) for name, path in details["logFiles"].items()}
        return details

    def get_portal_url(self) -> str:
        """Where to look at the run: its folder, as a URL."""
        return self.folder.path.absolute().as_uri()

    def get_snapshot_id(self) -> str | None:
        """The snapshot of the run's source; None where it has none."""
        return self.record().snapshot_id

    def wait_for_completion(  # type: ignore[override]  # the SDK's details in place of a record
        self, show_output: bool = False, wait_post_processing: bool = False, raise_on_error: bool = True
    ) -> dict[str, Any]:
        """As `paceline.Run.wait_for_completion`, but the run's details.

        wait_post_processing: accepted; a run has ended only when its outputs are in place.
        """
        super().wait_for_completion(show_output, raise_on_error)
        return self.get_details()


def _json_value(name: str, value: object) -> object:
    try:
        # A text is taken for JSON. Anything else goes through JSON and back, which refuses what could not be written down.
        plain = json.loads(value if isinstance(value, (str, bytes)) else json.dumps(value))
    except (TypeError, ValueError) as error:
        raise MetricError(f"metric {name!r}: a {type(value).__name__} that is no JSON: {error}.") from error
    if not isinstance(plain, dict):
        raise MetricError(f"metric {name!r}: a {type(plain).__name__} where a dict belongs.")
    return plain


def _tail_text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            _seek_back(file, _TAIL_BYTES)
            # The cut may fall into the middle of a character of several bytes, so what can't be decoded is replaced.
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        # A log that was removed meanwhile counts as an empty one, for the other details are still wanted.
        return ""


def _seek_back(file: IO[bytes], size: int) -> None:
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - size))
