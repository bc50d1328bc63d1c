"""Compare model versions by their records, which outlive the runs that made them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.data.transfer.progress import size_text
from paceline.errors import ModelError
from paceline.models import described, registry
from paceline.models.record import Lineage, ModelRecord
from paceline.runs.search.params import arguments_by_name
from paceline.system.units import value_text

#: Name of the file in which MLflow describes a model, and the maximum number of bytes to read of it.
_FILE, _MOST_BYTES = "MLmodel", 1 << 16


@dataclass(frozen=True, kw_only=True)
class VersionFact:
    """A fact about model versions, such as a metric, as text for each version.

    Attributes:
        part: "metrics", "origin", "parameters", "signature", "files", "code", "data", "environment" or "topology".
        values: The text of the fact in each version; "" if a version does not have the fact.
    """

    part: str
    name: str
    values: tuple[str, ...]

    @property
    def is_different(self) -> bool:
        """Whether the model versions differ in this fact."""
        return len(set(self.values)) > 1

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "is_different": self.is_different}


def compare(workspace_dir: Path, records: Sequence[ModelRecord]) -> list[VersionFact]:
    """Return all facts of several model versions, whether equal or different.

    Raises:
        ModelError: The lineage of a version can't be read.
    """
    columns = [facts(workspace_dir, record) for record in records]
    rows: list[VersionFact] = []
    for part in columns[0] if columns else ():
        names = dict.fromkeys(name for column in columns for name in column[part])
        rows += [
            VersionFact(part=part, name=name, values=tuple(column[part].get(name, "") for column in columns))
            for name in names
        ]
    return rows


def facts(workspace_dir: Path, record: ModelRecord) -> dict[str, dict[str, str]]:
    """Return a model version's facts as {part, such as "metrics": {name: text}}.

    Raises:
        ModelError: The lineage can't be read.
    """
    run = record.run
    try:
        return {
            "metrics": metrics(record),
            "origin": _texts(
                {
                    "Experiment": run.get("experiment"),
                    "Submitted by": run.get("submitted_by"),
                    "State at registration": run.get("status"),
                }
            ),
            "parameters": _texts(
                {"script": " ".join(run.get("entry") or ()), **arguments_by_name(list(run.get("arguments") or ()))}
            ),
            "signature": signature(registry.files_dir(workspace_dir, record), record),
            "files": {
                "framework": " ".join(filter(None, (record.framework, record.framework_version))),
                **{file.name: f"{size_text(file.size_bytes)}, SHA-256 {file.sha256[:12]}" for file in record.files},
            },
            "code": _texts({"snapshot": (run.get("snapshot_id") or "")[:16], **(run.get("git") or {})}),
            "data": dict(text.partition(": ")[::2] for text in described.data_texts(record)),
            "environment": _environment(run),
            "topology": _texts(run.get("topology") or {}),
        }
    # Other programs and users may write into a shared workspace, so the file may have any content.
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"the record of {record.id} has a lineage that can't be read ({type(error).__name__}: {error}). Register the "
            f"files again: paceline model register {record.name} PATH."
        ) from error


def metrics(record: ModelRecord) -> dict[str, str]:
    """Return the last value, as text, of each metric of a model's run."""
    found: object = record.run.get("metrics") if isinstance(record.run, dict) else None
    values = found if isinstance(found, dict) else {}
    return {str(name): value_text(one.get("last")) for name, one in values.items() if isinstance(one, dict)}


def _environment(run: Lineage) -> dict[str, str]:
    environment = run.get("environment") or {}
    versions = [text.partition("==") for text in environment.get("packages") or environment.get("pip") or ()]
    named = {"Python": environment.get("python_version"), "image": environment.get("image")}
    return _texts(named) | {name: version or name for name, _, version in versions}


def _texts(values: Mapping[str, object]) -> dict[str, str]:
    shown = {
        name: ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
        for name, value in values.items()
    }
    return {name: value_text(value) for name, value in shown.items() if value not in (None, "", {})}


def signature(folder: Path, record: ModelRecord) -> dict[str, str]:
    """Return a model's input and output types, such as {"input x": "double"}, or {}.

    Args:
        folder: The folder of the version's files.
        record: The version.
    """
    names = [file.name for file in record.files if file.name in (_FILE, f"{record.top}/{_FILE}")]
    found = _read(folder / names[0]) if names else None
    both = found.get("signature") if isinstance(found, dict) else None
    types: dict[str, str] = {}
    for side in ("input", "output"):
        listed = _parsed(both.get(f"{side}s")) if isinstance(both, dict) else None
        for number, one in enumerate(listed if isinstance(listed, list) else ()):
            if isinstance(one, dict):
                types[f"{side} {one.get('name') or number}"] = _type(one)
    return types


def _read(path: Path) -> object:
    import yaml

    try:
        with open(path, "rb") as file:
            found: object = yaml.safe_load(file.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None
    return found


def _parsed(text: object) -> object:
    try:
        return json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None


def _type(one: dict[str, object]) -> str:
    spec = one.get("tensor-spec")
    if isinstance(spec, dict):
        return f"{spec.get('dtype')} {spec.get('shape')}"
    return str(one.get("type"))
