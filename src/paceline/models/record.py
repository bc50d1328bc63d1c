"""The frozen record of a version: what `model.json` holds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.system.serialization import known_fields

RECORD_VERSION = 1
#: The name of the file in a version's folder, and of the folder beside it.
DOCUMENT, FILES = "model.json", "files"


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """One file. name: relative to the version's folder of files, with forward slashes. format: a name of `formats`, or ""."""

    name: str
    size_bytes: int
    sha256: str
    format: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelRecord:
    """A registered version: all that is known of it, none of which ever changes. Tags, properties and the description, which
    people change, lie beside it.

    top: the registered file's or folder's own name, which is the first part of each file's name. is_folder: which it is.
    digest: of the names and contents of all files: equal for equal models.
    framework, framework_version: "pytorch", "sklearn", "tensorflow", "onnx" and so on, where it is known.
    run: where it comes from (`lineage.of_run`); empty for files that no run is named for.
    datasets: {"purpose", "dataset", "fingerprint"} of what it was trained on, where the run's inputs do not say it.
    """

    name: str
    version: int = 0
    top: str
    is_folder: bool
    files: tuple[ModelFile, ...]
    digest: str = ""
    framework: str | None = None
    framework_version: str | None = None
    run: Mapping[str, Any] = field(default_factory=dict)
    datasets: tuple[Mapping[str, Any], ...] = ()
    created_utc: str = ""
    registered_by: str = ""

    @property
    def id(self) -> str:
        """ "digits:3"."""
        return f"{self.name}:{self.version}"

    @property
    def run_id(self) -> str | None:
        """The run that made it; None where none is named."""
        return self.run.get("run_id")

    @property
    def size_bytes(self) -> int:
        """All files together."""
        return sum(file.size_bytes for file in self.files)

    def to_json(self) -> dict[str, Any]:
        return {"record_version": RECORD_VERSION, **asdict(self), "size_bytes": self.size_bytes}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelRecord:
        """The record that `to_json` wrote; fields of a newer version are left out.

        Raises:
            KeyError, TypeError: it is none.
        """
        files = tuple(ModelFile(**known_fields(ModelFile, file)) for file in data["files"])
        datasets = tuple(data.get("datasets") or ())
        return cls(**{**known_fields(cls, data), "files": files, "datasets": datasets})


def digest_of(files: Sequence[ModelFile]) -> str:
    """SHA-256 over the hashes and names of all files, in order of name, written as `sha256sum` writes them."""
    lines = (f"{file.sha256}  {file.name}\n" for file in sorted(files, key=lambda file: file.name))
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()
