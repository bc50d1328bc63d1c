"""Which places of the submitting machine are in which trees, as plain data: `carried.json` in a run's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.data.stores.names import clean_path
from paceline.data.stores.record import StoreRecord
from paceline.system.plain import known_fields

#: Below a workspace, or below `paceline/` of a datastore.
FOLDER = "carried"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """places: a path (or pattern) of the submitting machine -> (tree, name in it; "" for all of it).
    stores: datastore -> its record, of all that the job names.
    linked: a path relative to the source folder -> likewise, of what was not copied and is sent; "" for an empty folder's tree.
    programs: tree -> the names in it of files that can be executed, which a datastore forgets.
    contents: input -> fingerprint of its files, for those that are carried as a whole.
    home: the outputs that go to folders of the submitting machine, in order.
    store: the record of the datastore in which the trees lie; None where they lie in the workspace.
    """

    places: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    stores: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    linked: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    programs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    contents: Mapping[str, str] = field(default_factory=dict)
    home: Sequence[str] = ()
    store: Mapping[str, Any] | None = None

    @property
    def trees(self) -> list[str]:
        """The names of all trees, sorted."""
        return sorted({tree for tree, _ in (*self.places.values(), *self.linked.values()) if tree})

    def record(self, datastore: str) -> StoreRecord:
        """A datastore that the job names, as it is registered where the run was submitted."""
        return StoreRecord.from_json(datastore, self.stores[datastore])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        values = known_fields(cls, data)
        for part in ("places", "linked"):
            values[part] = {path: (tree, name) for path, (tree, name) in values.get(part, {}).items()}
        values["programs"] = {tree: tuple(names) for tree, names in values.get("programs", {}).items()}
        values["home"] = tuple(values.get("home", ()))
        return cls(**values)


def place_in(record: StoreRecord, path: str) -> str:
    """The name of a place of a local store among `Manifest.places`."""
    return f"{record.root.rstrip('/')}/{clean_path(path, record.title).strip('/')}"


def tree_files(workspace: Path, tree: str) -> dict[str, Path]:
    """Relative name -> file, of a tree that lies in a workspace."""
    top = workspace / FOLDER / tree
    return {str(path.relative_to(top)): path for path in sorted(top.rglob("*")) if path.is_file()}
