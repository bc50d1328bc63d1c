"""The filter of runs: the SDK's rules for type, tags, properties and status."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.runs import tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord


def matches(
    record: RunRecord,
    folder: RunFolder,
    *,
    kind: str | None = None,
    tags: Mapping[str, str] | str | None = None,
    properties: Mapping[str, str] | None = None,
    status: str | None = None,
    children: bool = False,
) -> bool:
    """True if the run passes every filter that is given.

    tags: a dict of tag -> value, or one tag's name, whatever its value. children: let runs with a parent through.
    """
    if record.parent_run_id and not children:
        return False
    if kind is not None and record.kind != kind:
        return False
    if status is not None and record.status != status:
        return False
    # Notes are a file more to be read for each run, so they come last.
    if not tags and not properties:
        return True
    noted = tags_and_properties.read(folder.notes)
    wanted = {tags: None} if isinstance(tags, str) else dict(tags or {})
    for key, value in wanted.items():
        if key not in noted.tags or (value is not None and noted.tags[key] != str(value)):
            return False
    return all(noted.properties.get(key) == str(value) for key, value in (properties or {}).items())
