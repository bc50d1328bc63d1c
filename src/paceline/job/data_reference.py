"""The data that a run takes from a datastore or leaves there, as frozen data that goes to JSON and back.

A job carries these; the worker's side reads them: standard library alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from paceline.errors import DataError

#: Under `<this><name>` a worker finds an input's or output's folder. The SDK's name, and ours.
PATH_VARIABLES = ("AZUREML_DATAREFERENCE_", "PACELINE_INPUT_")

#: The input by which a run finds the model that it goes on from; the SDK's name.
MODEL_LOCATION = "MODEL_LOCATION"

MODES = ("mount", "download", "upload", "direct")
PARTITIONS = ("node", "rank")
# It ends the name of an environment variable, so it is made of what a shell takes in one.
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}")


@dataclass(frozen=True, kw_only=True)
class Source:
    """Files of one place. datastore: its name, or None where `path` is a URL or an absolute path on this machine.
    path: a folder, a file, or a pattern with `*`, `?` or `**`; "" is the whole store.
    """

    datastore: str | None = None
    path: str = ""


@dataclass(frozen=True, kw_only=True)
class DataReference:
    """Files that a run finds in a folder of its own, or a folder whose files are stored when the run ends.

    name: what the run knows it by: letters, digits and `_`. sources: where the files lie; one for an upload.
    mode: "download" (a copy, shared by the node's workers and by later runs), "mount" (the place itself where the
        store is a folder of this machine, else a download), "upload" (an empty folder whose files are stored in the
        end), "direct" (a dataset that the script asks for by name; its files are downloaded).
    partition: "node" or "rank": each gets its own part of the files; None: everybody gets all.
    overwrite: an upload may replace files that are there.
    path_on_compute: a path, relative to the script's working directory, at which the folder appears as well.
    inside: of an upload, a name in the folder that scripts are given in place of the folder itself: they make a file or a folder
        of that name. What such a run has left is found under the same name.
    dataset: "name:version" of the dataset whose files these are. fingerprint: of their content, when it was registered.
    table: how a table is read from the files, as the dataset's own JSON text; None for plain files.
    registered: of an upload, the name, description and tags of the dataset that its files become, as JSON text.

    Raises:
        DataError: a value is wrong.
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

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise DataError(
                f"the name {self.name!r} of an input: letters, digits and '_', not starting with a digit. "
                "Give one with as_named_input(...) or data_reference_name=."
            )
        if not isinstance(self.overwrite, bool):
            raise DataError(f"overwrite={self.overwrite!r} of {self.name!r} is not a bool. Write overwrite=True.")
        if self.mode not in MODES:
            raise DataError(f"mode={self.mode!r} of input {self.name!r} is none of {', '.join(MODES)}.")
        if self.partition is not None and self.partition not in PARTITIONS:
            raise DataError(f"as_partition(by={self.partition!r}): give by='node' or by='rank'.")
        if self.inside is not None and not _NAME.fullmatch(str(self.inside)):
            raise DataError(f"inside={self.inside!r} of {self.name!r}: letters, digits and '_'.")
        # What is stored has to have one place to go to.
        if self.mode == "upload" and (len(self.sources) != 1 or self.partition or "*" in self.sources[0].path):
            raise DataError(f"as_upload() of {self.name!r} takes one folder of one datastore, unpartitioned.")

    def __str__(self) -> str:
        """The word that stands for the folder in a script's arguments; each worker puts its own path there."""
        return f"${PATH_VARIABLES[0]}{self.name}"

    @property
    def is_output(self) -> bool:
        """Whether files are stored there when the run ends, and none are fetched."""
        return self.mode == "upload"

    def as_mount(self) -> DataReference:
        """The place itself where the store is a folder of this machine, else a download."""
        return replace(self, mode="mount")

    def as_download(self, path_on_compute: str | None = None) -> DataReference:
        """A copy on each node, fetched before the workers start.

        Args:
            path_on_compute: Path below the script's working directory at which the files appear too.
        """
        return replace(self, mode="download", path_on_compute=path_on_compute or self.path_on_compute)

    def as_upload(self, path_on_compute: str | None = None, *, overwrite: bool | None = None) -> DataReference:
        """An empty folder for the script; what is in it when the run ends is stored.

        overwrite: whether files that are already there may be replaced; else a run is refused where there are some.

        Args:
            path_on_compute: Path below the script's working directory at which the folder appears too.
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
        """The same output, whose files are registered as a new version of the dataset `name` once the run is Completed.

        Args:
            description: Text of the new version, for people.
            tags: Tags of the new version.

        Raises:
            DataError: it is no upload.
        """
        if not self.is_output:
            raise DataError(f"register_on_complete({name!r}): {self.name!r} is no output. Say as_upload() first.")
        text = json.dumps({"name": name, "description": description, "tags": dict(tags or {})})
        return replace(self, registered=text)

    def as_partition(self, by: Literal["node", "rank"] = "node") -> DataReference:
        """A part of the files for each node (or each rank): as many parts as there are nodes (ranks), every file in
        exactly one, balanced by bytes.
        """
        # A mount is the whole place, of which no part can be taken away.
        return replace(self, partition=by, mode="download" if self.mode == "mount" else self.mode)

    def as_named_input(self, name: str) -> DataReference:
        """The same under another name."""
        return replace(self, name=name)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, defaults left out."""
        values = asdict(self) | {"sources": [asdict(source) for source in self.sources]}
        return {f.name: values[f.name] for f in fields(self) if values[f.name] not in (None, False)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DataReference:
        """The reference that `to_json` wrote.

        Raises:
            DataError: a field that this version does not know, or a wrong value.
        """
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(data) - known):
            raise DataError(f"unknown fields of a data reference {unknown}; known are {sorted(known)}.")
        return cls(**{**data, "sources": tuple(Source(**source) for source in data["sources"])})
