"""Read the values of a job's secrets, and put a run's id into the paths of its outputs."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping

from paceline.errors import DataError, JobError
from paceline.job.data_reference import Source
from paceline.job.job import Job
from paceline.job.notify import check_address, key_of, place_of
from paceline.job.secret_values import looks_secret

_log = logging.getLogger(__name__)

#: Linux's MAX_ARG_STRLEN (32 pages): maximum number of bytes of one argument or one NAME=VALUE, with the closing NUL.
_MOST_BYTES = 131_072


def values_of(job: Job, given: Mapping[str, str]) -> dict[str, str]:
    """Return {name: value} of the job's secrets, from `given` or the secrets' sources.

    Raises:
        JobError: Values are missing (the message names all of them), or too long for a process's environment.
    """
    for number, word in enumerate(job.arguments, start=1):
        _check_length(f"arguments: number {number}", word)
    for name, value in job.environment_variables.items():
        _check_length(f"environment_variables: {name}", f"{name}={value}")
    places = places_of(job)
    if not places:
        return {}
    from paceline.data.stores.credentials import read_place

    # Search all values first, so that one message names every value that has to be set.
    values, missing = {name: given[name] for name in places if name in given}, []
    for name, place in places.items():
        if name not in values:
            try:
                values[name] = read_place(place)
            except DataError as error:
                missing.append(f"{name}: {error}")
    if missing:
        raise JobError(
            f"{'the values of secrets are' if len(missing) > 1 else 'the value of a secret is'} missing; nothing was started. "
            + " ".join(missing)
        )
    for one in job.notify:
        check_address(one, values.get(key_of(one), "https://"))
    for name in job.secrets:
        _check_length(f"the secret {name}", f"{name}={values[name]}")
    if bad := [name for name, value in values.items() if "\0" in value]:
        raise JobError(f"the value of the secret {bad[0]} has a NUL character: no environment can carry one.")
    return values


def places_of(job: Job) -> dict[str, str]:
    """Return the sources of the job's secrets and webhook addresses, by name."""
    return {**job.secrets, **{key_of(one): where for one in job.notify if (where := place_of(one)) is not None}}


def _check_length(what: str, text: str) -> None:
    """Raise JobError if a text exceeds Linux's limit for arguments and variables."""
    size = len(text.encode("utf-8", "surrogateescape"))
    if size >= _MOST_BYTES:
        raise JobError(
            f"{what} has {size:,} bytes, and Linux hands at most {_MOST_BYTES - 1:,} in one to a process. Put it into a file "
            "of the source folder, or into a datastore, and give the script its name."
        )


def unrecorded(job: Job, values: Mapping[str, str]) -> tuple[Job, dict[str, str]]:
    """Turn variables that look secret into job secrets. Return the job and all secrets' values.

    The record does not hold values of secrets. A rerun reads each value from the shell's variable of the same name.
    """
    # Variables that Slurm itself sets can't be secrets (`paceline.job.job`).
    found = {
        name: value
        for name, value in job.environment_variables.items()
        if looks_secret(name, value) and not name.startswith(("SLURM_", "SRUN_"))
    }
    # The estimator has already merged the environment's variables into those of the job.
    own = {name: v for name, v in job.environment.environment_variables.items() if not looks_secret(name, v)}
    if not found and len(own) == len(job.environment.environment_variables):
        return job, dict(values)
    for name in found:
        _log.warning(
            "%s looks like a secret: its value is not recorded. A rerun takes it from your shell: `export %s=...` before it.",
            *(name,) * 2,
        )
    job = dataclasses.replace(
        job,
        environment_variables={name: v for name, v in job.environment_variables.items() if name not in found},
        secrets={**job.secrets, **{name: f"env:{name}" for name in found}},
        environment=dataclasses.replace(job.environment, environment_variables=own),
    )
    return job, {**values, **found}


def in_places_of(job: Job, run_id: str, former: str) -> Job:
    """Replace the run id `former` by `run_id` in the paths of a job's outputs."""

    def own(source: Source) -> Source:
        return dataclasses.replace(source, path=source.path.replace(former, run_id))

    inputs = [
        dataclasses.replace(one, sources=tuple(map(own, one.sources))) if one.is_output else one for one in job.inputs
    ]
    return dataclasses.replace(job, inputs=tuple(inputs))
