"""Start a new sweep with the source, job and limits of an earlier sweep."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import SweepError
from paceline.runs import read
from paceline.runs.folder import RunFolder
from paceline.submit import SourceCopy
from paceline.sweeps.expressions import Choice, parse
from paceline.sweeps.samplers.samplers import check_sampler
from paceline.sweeps.space import Space, argument
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.start import submit_sweep
from paceline.system.names import did_you_mean


def submit_again(
    before: RunFolder,
    workspace_dir: Path,
    *,
    space: Space | None = None,
    trials: int | None = None,
    concurrent: int | None = None,
    sampler: str | None = None,
    learn: bool = False,
    display_name: str | None = None,
) -> RunFolder:
    """Start a new sweep based on an earlier sweep, and return its folder.

    The new sweep has the source, job and limits of the earlier sweep.

    Args:
        before: The earlier sweep, which may still run.
        workspace_dir: The workspace of both sweeps.
        space: The search space. Default: the earlier sweep's space.
        trials: Number of trials. Default: the earlier sweep's number.
        concurrent: Maximum number of trials at a time. Default: the earlier sweep's maximum.
        sampler: A sampler's name. Default: the earlier sweep's sampler.
        learn: Whether to give the sampler the results of the earlier sweep.
        display_name: Name of the new sweep; None for a generated name.

    Raises:
        UserError: The run is no sweep, or checks show that the new sweep would fail.
        TargetError: The controller could not be started.
    """
    record = read.record(before)
    if record.sweep is None:
        raise SweepError(f"run {record.run_id} is not a sweep; its kind is {record.kind}.")
    if record.job is None or record.snapshot_id is None:
        raise SweepError(f"sweep {record.run_id} has no source any more. Submit it again as you did.")
    old = SweepSpec.from_json(record.sweep)
    space = space or old.space
    spec = dataclasses.replace(
        old,
        space=space,
        trials=trials if trials is not None else old.trials,
        concurrent=concurrent if concurrent is not None else old.concurrent,
        sampler=sampler or old.sampler,
        # Draw a new seed, because with the old seed an unchanged space would give the same points.
        seed=secrets.randbelow(1 << 31),
        points=tuple(point for point in old.points if _has(space, point)),
        switches=tuple(one for one in old.switches if one.partition("/")[0] in map(argument, space.names)),
        warm_start=(record.run_id,) if learn else (),
        resumed=(),
        counted_from=0,
        counted_utc=None,
    )
    check_sampler(spec.sampler, spec.space, spec.goals)
    return submit_sweep(
        record.job,
        spec,
        # The new sweep runs the earlier sweep's snapshot. The source folder, which may be gone, is only recorded.
        SourceCopy(directory=Path(record.source_directory or "."), snapshot_id=record.snapshot_id, git=record.git),
        workspace_dir,
        record.experiment,
        tags={"sweep_of": record.run_id},
        display_name=display_name,
    )


def changed(space: Space, changes: Mapping[str, object], without: Collection[str] = ()) -> Space:
    """Return a copy of a search space with hyperparameters changed, added or removed.

    Leading dashes of names are ignored.

    Raises:
        SweepError: A name to remove is unknown, or no hyperparameter is left.
    """
    parts = space.parts()
    known = {name.lstrip("-"): name for name in parts}
    for name in without:
        if name.lstrip("-") not in known:
            raise SweepError(f"the space has no {name!r}.{did_you_mean(name, parts)} It has {', '.join(parts)}.")
        parts.pop(known[name.lstrip("-")], None)
    for name, expression in changes.items():
        parts[known.get(name.lstrip("-"), name)] = expression
    return Space(parts)


def space_text(space: Space) -> str:
    """Return a space as editable lines, such as `lr = uniform(0, 1)`."""
    return "\n".join(f"{name} = {_text(part)}" for name, part in space.to_json().items())


def read_space(text: str, before: Space) -> Space:
    """Return the search space in a text of `space_text` that a user has edited.

    before: The space before the edit. Unchanged lines keep its expressions, even if these have no text form.

    Raises:
        SweepError: A line is not `name = expression`, or two lines have the same name.
    """
    known = dict(zip(space_text(before).split("\n"), before.parts().items(), strict=True))
    parts: dict[str, object] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        name, equals, expression = (part.strip() for part in line.partition("="))
        if not equals or not expression:
            raise SweepError(
                f"{line!r} is not a hyperparameter. Write one per line, such as --lr = loguniform(1e-4, 1)."
            )
        part = known[line][1] if line in known else parse(expression)
        if line not in known and isinstance(part, Choice) and part.is_of_spaces:
            raise SweepError(f"{name}: a choice of spaces can't be changed here. Submit it from Python or from a file.")
        if name in parts:
            raise SweepError(f"{name!r} is there twice. Remove a line.")
        parts[name] = part
    return Space(parts)


def _text(part: Any) -> str:
    name, arguments = part
    options = arguments[0] if name == "choice" else arguments
    listed = ", ".join(json.dumps(value, ensure_ascii=False) for value in options)
    return listed if name == "fixed" else f"{name}({listed})"


def _has(space: Space, point: Mapping[str, object]) -> bool:
    try:
        space.chosen(point)
    except SweepError:
        return False
    return True
