"""The run that `Run.get_context()` returns to a script that runs without Paceline."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.runs.metrics import check_name, plain_scalar
from paceline.runs.run_metrics import LogsMetrics

if TYPE_CHECKING:
    from typing_extensions import Self

    from paceline.runs.media import Source


class OfflineRun(LogsMetrics):
    """A run that prints metrics and keeps nothing, with an id "OfflineRun_..."."""

    def __init__(self, name: str | None = None) -> None:
        self.id = f"OfflineRun_{uuid.uuid4()}"
        self.name = name or self.id
        self.status = "Running"
        self.tags: dict[str, str | None] = {}
        self.properties: dict[str, str] = {}
        self.input_datasets: dict[str, Any] = {}
        self.output_datasets: dict[str, Any] = {}
        self.experiment = None
        self.parent: OfflineRun | None = None

    def __repr__(self) -> str:
        return f"OfflineRun(id={self.id!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def tag(self, key: str, value: object = None) -> None:
        self.tags[key] = None if value is None else str(value)

    def set_tags(self, tags: Mapping[str, object]) -> None:
        for key, value in tags.items():
            self.tag(key, value)

    def add_properties(self, properties: Mapping[str, object]) -> None:
        self.properties.update({key: str(value) for key, value in properties.items()})

    def upload_file(self, name: str, path_or_stream: object) -> str:
        print(f"Attempted to upload file {name}")
        return name

    def upload_files(self, names: list[str], paths: list[str]) -> list[str]:
        return [self.upload_file(name, path) for name, path in zip(names, paths, strict=True)]

    def upload_folder(self, name: str, path: object) -> list[str]:
        print(f"Attempted to upload folder {name}")
        return []

    def register_model(self, model_name: str, model_path: object = None, *more: object, **others: object) -> None:
        print(f"Attempted to register model {model_name}")

    def child_run(self, name: str | None = None, run_id: str | None = None, outputs: str | None = None) -> Self:
        child = type(self)(name)
        child.parent = self
        return child

    def start(self) -> None:
        return None

    def complete(self) -> None:
        self.status = "Completed"

    def fail(self, error_details: object = None, error_code: str | None = None) -> None:
        self.status = "Failed"

    def cancel(self) -> None:
        self.status = "Canceled"

    def _write_scalar(self, name: str, value: object, step: int | None) -> None:
        # Print as the Azure SDK does. Check the value already here: in a submitted run the error would come after the queue time.
        print(
            f"Attempted to log scalar metric {check_name(name)}:\n{value if value is None else plain_scalar(name, value)}"
        )

    def _write_other(self, kind: str, name: str, value: object, step: int | None = None) -> None:
        print(f"Attempted to log {kind} metric {name}:\n{value}")

    def _write_file(self, kind: str, name: str, file_name: str, source: Source, step: int | None = None) -> None:
        print(f"Attempted to log {kind} metric {name}:\n{source if isinstance(source, str) else file_name}")
