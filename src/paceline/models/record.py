"""The unchangeable record of a model version, stored in `model.json`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypedDict

from paceline.runs.run_data import InputData
from paceline.system.serialization import known_fields

RECORD_VERSION = 1
#: In a version's folder: the file with the record, and the folder of the registered files.
DOCUMENT, FILES = "model.json", "files"


class MetricSummary(TypedDict):
    """A summary of a metric's values when a model was registered."""

    last: float | str | None
    min: float | None
    max: float | None
    last_step: int | None
    count: int


class RunEnvironment(TypedDict, total=False):
    """The environment of the run that made a model.

    asked: The requested environment. locked: The same environment with exact versions. python, python_version,
    packages: The run's interpreter and its packages. seen: When packages were read: "in the run" or "at registration".
    """

    asked: dict[str, object]
    locked: dict[str, object]
    key: str
    pip: list[str]
    conda: list[str]
    base_python: str
    is_layered: bool
    image: str
    python: str
    python_version: str
    packages: list[str]
    seen: str


class Lineage(TypedDict, total=False):
    """Facts about the run that made a model, at the registration."""

    run_id: str
    experiment: str
    parent_run_id: str | None
    kind: str
    status: str
    submitted_by: str
    created_utc: str
    snapshot_id: str | None
    git: dict[str, object]
    source_directory: str | None
    entry: list[str]
    arguments: list[str]
    framework: str | None
    topology: dict[str, object]
    environment: RunEnvironment
    datasets: list[InputData]
    metrics: dict[str, MetricSummary]


class TrainingData(TypedDict):
    """A training dataset that the caller of `register` named, with its purpose."""

    purpose: str
    dataset: str
    fingerprint: str | None


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """A file of a model version.

    Attributes:
        name: Path relative to the folder of the version's files, with `/`.
        format: The file's format, as `formats.format_of` returns it, or "" if unknown.
    """

    name: str
    size_bytes: int
    sha256: str
    format: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelRecord:
    """The unchangeable data of a model version, without tags, properties and description.

    Attributes:
        top: Name of the registered file or folder, the first part of each file's name.
        is_folder: Whether `top` is a folder.
        digest: Hash of names and contents of all files, equal for equal models.
        framework, framework_version: Framework, such as "pytorch", and its version; None if unknown.
        run: Facts about the run that made the model (`lineage.of_run`), or {} without a run.
        datasets: Training data that is not among the run's inputs.
    """

    name: str
    version: int = 0
    top: str
    is_folder: bool
    files: tuple[ModelFile, ...]
    digest: str = ""
    framework: str | None = None
    framework_version: str | None = None
    run: Lineage = field(default_factory=Lineage)
    datasets: tuple[TrainingData, ...] = ()
    created_utc: str = ""
    registered_by: str = ""

    @property
    def id(self) -> str:
        """The version's reference, such as "digits:3"."""
        return f"{self.name}:{self.version}"

    @property
    def run_id(self) -> str | None:
        """The id of the run that made the model, or None."""
        return self.run.get("run_id")

    @property
    def size_bytes(self) -> int:
        """The total size of the version's files."""
        return sum(file.size_bytes for file in self.files)

    def to_json(self) -> dict[str, object]:
        return {"record_version": RECORD_VERSION, **asdict(self), "size_bytes": self.size_bytes}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelRecord:
        """Create a version's record from its JSON form, ignoring fields of newer releases.

        Raises:
            KeyError, TypeError: The data is not a record.
        """
        if not isinstance(data.get("run", {}), Mapping):
            raise TypeError(f"run must be an object, got {type(data['run']).__name__}")
        files = tuple(ModelFile(**known_fields(ModelFile, file)) for file in data["files"])
        datasets = tuple(data.get("datasets") or ())
        return cls(**{**known_fields(cls, data), "files": files, "datasets": datasets})


def digest_of(files: Sequence[ModelFile]) -> str:
    """Return the SHA-256 over the sorted hashes and names of all files."""
    lines = (f"{file.sha256}  {file.name}\n" for file in sorted(files, key=lambda file: file.name))
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()
