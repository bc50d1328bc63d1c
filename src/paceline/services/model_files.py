"""A model that is to be served: where its files lie, and what is known of it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import ServiceError
from paceline.job.environment import EnvironmentSpec
from paceline.system.files import copy_whole


@dataclass(frozen=True, kw_only=True)
class FoundModel:
    """Files of a model. id: in the registry ("digits:3"); None for files that are in none.

    environment: of the run that made it, in the exact versions that it had; None where it is not known.
    digests: SHA-256 of each file, by its name below `path`; empty for files that are in no registry.
    known_environment: all that is known of that environment (`paceline.models.lineage`).
    """

    id: str | None
    name: str
    version: str
    path: Path
    framework: str | None = None
    environment: EnvironmentSpec | None = None
    digests: Mapping[str, str] = field(default_factory=dict)
    known_environment: dict[str, Any] = field(default_factory=dict)

    def copy_into(self, folder: Path) -> None:
        """Copy the file, or the folder, under its own name into a folder, which is made."""
        target = folder / self.path.name
        if self.path.is_dir():
            shutil.copytree(self.path, target)
        else:
            copy_whole(self.path, target)

    def hash_lines(self) -> str:
        """The digests as sha256sum writes and checks them."""
        return "".join(f"{digest}  {name}\n" for name, digest in sorted(self.digests.items()))


def find(workspace_dir: Path, given: Any) -> FoundModel:
    """The model that is meant: a registered one, a reference to one ("digits:3"), or the path of a file or folder.

    A text with a `/` in it is a path, and so is one that begins with a dot.

    Raises:
        UserError: there is no such model, or its files were changed since it was registered.
    """
    if isinstance(given, (str, os.PathLike)):
        text = os.fspath(given)
        if isinstance(given, os.PathLike) or "/" in text or text.startswith("."):
            return _at(Path(text).expanduser())
        return _registered(workspace_dir, text)
    if hasattr(given, "name") and hasattr(given, "version"):
        return _registered(workspace_dir, f"{given.name}:{given.version}")
    raise ServiceError(
        f"{given!r} is no model. Give a registered one, 'NAME:VERSION', or the path of a file or folder."
    )


def _at(path: Path) -> FoundModel:
    path = path.absolute()
    if not path.exists():
        raise ServiceError(
            f"model {str(path)!r}: there is no such file or folder. A registered model is named without a slash, such as "
            "'digits:3'."
        )
    name = re.sub(r"[^A-Za-z0-9._-]", "-", path.name).lstrip("._-") or "model"
    return FoundModel(id=None, name=name[:255], version="1", path=path)


def _registered(workspace_dir: Path, reference: str) -> FoundModel:
    from paceline import models
    from paceline.models import registry

    record = models.resolve(workspace_dir, reference)
    known = record.run.get("environment") or {}
    spec = known.get("locked") or known.get("asked")
    return FoundModel(
        id=record.id,
        name=record.name,
        version=str(record.version),
        path=registry.files_dir(workspace_dir, record),
        framework=record.framework,
        environment=EnvironmentSpec.from_json(spec) if spec else None,
        known_environment=dict(known),
        digests={file.name: file.sha256 for file in record.files},
    )
