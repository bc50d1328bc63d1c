"""Define a run's input and output data, as frozen data with JSON forms.

Jobs contain these classes, and workers load them, so this module uses only the standard library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from paceline.errors import DataError

#: Prefixes of the variables `<prefix><name>` with the folder of an input or output, in the Azure SDK and in Paceline.
PATH_VARIABLES = ("AZUREML_DATAREFERENCE_", "PACELINE_INPUT_")

#: Name of the input that has the model from which a run continues, as in the Azure SDK.
MODEL_LOCATION = "MODEL_LOCATION"

MODES = ("mount", "download", "upload", "direct")
PARTITIONS = ("node", "rank")
# Pattern for names of inputs and outputs, which become parts of names of environment variables.
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}")


@dataclass(frozen=True, kw_only=True)
class Source:
    """Files at one location in a datastore, at a URL, or on this machine.

    Attributes:
        datastore: Name of the datastore, or None if `path` is a URL or an absolute path on this machine.
        path: A folder, a file, or a pattern with `*`, `?` or `**`. "" is the whole datastore.
    """

    datastore: str | None = None
    path: str = ""


@dataclass(frozen=True, kw_only=True)
class DataReference:
    """A run's input files, or a folder of output files to store.

    Args:
        name: Name of the reference: letters, digits and `_`.
        sources: Locations of the files; an upload has exactly one.
        mode: "download": a copy that the node's workers and later runs share. "mount": the original if the store is a folder
            of this machine, else a download. "upload": an empty folder whose files are stored at the end. "direct":
            downloaded files, which the script opens as a dataset by the name of the reference.
        partition: "node" or "rank": each node or rank gets a part of the files. None: each gets all files.
        overwrite: Whether an upload may replace existing files.
        path_on_compute: Another path of the folder, relative to the script's working directory.
        inside: For an upload, the name of a file or folder that the script creates in the upload's folder. The script then gets
            the path of this file or folder as the output's path, and a resumed run finds it under the same name.
        dataset: "name:version" of the dataset that the files belong to, or None.
        fingerprint: Fingerprint of the dataset's content when it was registered.
        frozen: Whether the files are the frozen copy of a dataset, so that a changed file fails the run.
        table: How to read the files as a table, in the dataset's JSON form; None for plain files.
        registered: For an upload, name, description and tags of the new dataset, as JSON.

    Raises:
        DataError: A value is invalid.

    Examples:
        >>> data = pl.Workspace("my_runs").get_default_datastore().path("digits").as_download("digits")
        >>> script = pl.Estimator(entry_script="train.py", script_params={"--data": data})
    """

    name: str
    sources: tuple[Source, ...]
    mode: str = "mount"
    partition: str | None = None
    overwrite: bool = False
    path_on_compute: str | None = None
    dataset: str | None = None
    fingerprint: str | None = None
    table: str | None = None
    registered: str | None = None
    inside: str | None = None
    frozen: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise DataError(
                f"the name {self.name!r} of an input: letters, digits and '_', not starting with a digit. "
                "Give one with as_named_input(...) or data_reference_name=."
            )
        if not isinstance(self.overwrite, bool):
            raise DataError(f"overwrite={self.overwrite!r} of {self.name!r} is not a bool. Write overwrite=True.")
        if self.mode not in MODES:
            raise DataError(f"mode={self.mode!r} of input {self.name!r} is not one of {', '.join(MODES)}.")
        if self.partition is not None and self.partition not in PARTITIONS:
            raise DataError(f"as_partition(by={self.partition!r}): give by='node' or by='rank'.")
        if self.inside is not None and not _NAME.fullmatch(str(self.inside)):
            raise DataError(f"inside={self.inside!r} of {self.name!r}: letters, digits and '_'.")
        # An upload needs exactly one destination, which is a folder.
        if self.mode == "upload" and (len(self.sources) != 1 or self.partition or "*" in self.sources[0].path):
            raise DataError(f"as_upload() of {self.name!r} takes one folder of one datastore, unpartitioned.")

    def __str__(self) -> str:
        """Return a placeholder for script arguments, which each worker replaces by the data's path."""
        return f"${PATH_VARIABLES[0]}{self.name}"

    @property
    def is_output(self) -> bool:
        """Whether the reference is an upload, to which the run stores files."""
        return self.mode == "upload"

    def as_mount(self) -> DataReference:
        """Return the data reference as a mount: the original folder if local."""
        return replace(self, mode="mount")

    def as_download(self, path_on_compute: str | None = None) -> DataReference:
        """Return the data reference as a download: a copy on each node.

        Args:
            path_on_compute: Path below the script's working directory at which the files appear too.
        """
        return replace(self, mode="download", path_on_compute=path_on_compute or self.path_on_compute)

    def as_upload(self, path_on_compute: str | None = None, *, overwrite: bool | None = None) -> DataReference:
        """Return the data reference as an upload: an empty folder, stored at the run's end.

        Args:
            path_on_compute: Path below the script's working directory at which the folder appears too.
            overwrite: Whether to replace existing files. False: existing files are an error. None: unchanged.
        """
        return replace(
            self,
            mode="upload",
            path_on_compute=path_on_compute or self.path_on_compute,
            overwrite=self.overwrite if overwrite is None else overwrite,
        )

    def register_on_complete(
        self, name: str, description: str | None = None, tags: Mapping[str, str] | None = None
    ) -> DataReference:
        """Return an upload that registers a dataset version once the run is Completed.

        Args:
            name: Name of the dataset.
            description: Text of the new version, for people.
            tags: Tags of the new version.

        Raises:
            DataError: The reference is not an upload.
        """
        if not self.is_output:
            raise DataError(f"register_on_complete({name!r}): {self.name!r} is not an output. Say as_upload() first.")
        text = json.dumps({"name": name, "description": description, "tags": dict(tags or {})})
        return replace(self, registered=text)

    def as_partition(self, by: Literal["node", "rank"] = "node") -> DataReference:
        """Return the data reference with files partitioned by node or rank, balanced by bytes.

        Each file is in exactly one part.
        """
        # Replace a mount, which shows the original folder and so cannot be split, by a download.
        return replace(self, partition=by, mode="download" if self.mode == "mount" else self.mode)

    def as_named_input(self, name: str) -> DataReference:
        """Return the data reference under another name."""
        return replace(self, name=name)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, without fields that have their defaults."""
        values = asdict(self) | {"sources": [asdict(source) for source in self.sources]}
        return {f.name: values[f.name] for f in fields(self) if values[f.name] not in (None, False)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DataReference:
        """Return the data reference that `to_json` wrote.

        Raises:
            DataError: A field is unknown to this version, or a value is invalid.
        """
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(data) - known):
            raise DataError(f"unknown fields of a data reference {unknown}; known are {sorted(known)}.")
        return cls(**{**data, "sources": tuple(Source(**source) for source in data["sources"])})
