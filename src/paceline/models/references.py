"""The words that name a version -> its record."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import ModelNotFoundError
from paceline.models import aliases, registry
from paceline.models.names import ModelReference, parse
from paceline.models.record import ModelRecord


def resolve(workspace_dir: Path, reference: str | ModelReference) -> ModelRecord:
    """The record of the version that is meant by "digits" (the latest one), "digits:3" or "digits@production".

    Raises:
        ModelError: the words are no such reference.
        ModelNotFoundError: there is no such model, version or alias; those that there are, are named.
    """
    meant = reference if isinstance(reference, ModelReference) else parse(reference)
    if meant.alias is None:
        return registry.load(workspace_dir, meant.name, meant.version)
    versions = registry.versions_of(workspace_dir)
    there = aliases.current(versions, meant.name)
    if meant.alias not in there:
        registry.load(workspace_dir, meant.name)  # says where there is no such model at all
        raise ModelNotFoundError(
            f"model {meant.name!r} has no alias {meant.alias!r}. It has: {', '.join(there) or 'none'}. "
            f"`paceline model alias {meant.name} {meant.alias} VERSION` sets it."
        )
    return registry.load(workspace_dir, meant.name, there[meant.alias])
