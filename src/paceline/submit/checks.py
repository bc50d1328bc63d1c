"""Check a job before its submission, by facts of this machine and the workspace."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from paceline.errors import DataError, EnvironmentSpecError, JobError
from paceline.job.data_reference import DataReference
from paceline.job.environment import EnvironmentSpec
from paceline.job.job import Job
from paceline.job.notify import check_programs, is_condition
from paceline.job.sizes import range_text
from paceline.launchers import get_launcher
from paceline.system import processes
from paceline.targets import Target, configured

#: Kinds of compute target without a scheduler: Paceline queues their runs itself.
_OWN_QUEUES = (configured.LOCAL, "ssh")


def check(job: Job, workspace_dir: Path) -> None:
    """Raise an error if the job would certainly fail.

    Raises:
        UserError: A target or datastore is unknown, a launcher, container engine or interpreter is missing, or there
            are too few GPUs.
    """
    described = configured.read(workspace_dir, job.compute_target)
    check_on(job, workspace_dir, described, described.make())


def check_on(job: Job, workspace_dir: Path, described: configured.Configured, target: Target) -> None:
    """Raise an error if the job would certainly fail on `target`, which `described` describes."""
    is_here = described.kind == configured.LOCAL
    # Only targets of these kinds can divide a GPU, because Paceline keeps their queues itself.
    if described.kind not in _OWN_QUEUES and job.gpu_share != 1:
        raise JobError(
            f"gpu_share={job.gpu_share:g}: compute target {job.compute_target!r} is of kind {described.kind}, and runs share "
            f"GPUs on targets of kind {' and '.join(_OWN_QUEUES)} alone. Leave it out there."
        )
    if described.kind not in _OWN_QUEUES and job.priority != "normal":
        raise JobError(
            f"priority={job.priority!r}: compute target {job.compute_target!r} is of kind {described.kind}, whose engine has "
            f"priorities of its own. Leave it out there, or choose a target of kind {' or '.join(_OWN_QUEUES)}."
        )
    if job.cores != 1 and not is_here:
        raise JobError(
            f"cores={job.cores}: compute target {job.compute_target!r} is of kind {described.kind}; runs reserve cores on this "
            "machine, target 'local', alone. Leave it out there."
        )
    if job.node_range is not None:
        from paceline.targets.base import Elastic

        if not isinstance(target, Elastic):
            raise JobError(
                f"node_count={range_text(*job.node_range)}: compute target {job.compute_target!r} is of kind {described.kind}, "
                "whose runs keep their size. Write one number, or choose another target."
            )
    check_programs(job.notify, is_here=is_here)
    for condition in filter(is_condition, job.notify_on):
        from paceline.runs.messenger import parsed_alert

        parsed_alert(condition)
    target.check(job)
    get_launcher(job.launcher).check(job)
    environment = job.environment
    if environment.docker_image is not None:
        from paceline.containers import check_image_name, check_shm_size, find_engine

        check_image_name(environment.docker_image)
        if environment.shm_size is not None:
            check_shm_size(environment.shm_size)
        if is_here:
            find_engine(to_start=False)
    # On other machines only the nodes know whether the interpreter exists.
    elif is_here and environment.python is not None:
        _check_python(environment.python)
    # sys.executable is empty in a program that embeds Python.
    elif is_here and not sys.executable:
        raise JobError("this program does not know its own interpreter (sys.executable is empty). Set python= to one.")
    if environment.needs_build:
        _check_conda(environment)
    for reference in job.inputs:
        _check_datastores(reference, workspace_dir)


def _check_conda(environment: EnvironmentSpec) -> None:
    # Only search for the package and don't import it, because only the process that builds the environment uses it.
    if environment.uses_conda and importlib.util.find_spec("rattler") is None:
        raise EnvironmentSpecError(
            f"conda_packages {list(environment.conda_packages)} need the conda extra, which is not installed here. "
            "Install it, no conda needed: pip install 'paceline[conda]'."
        )


def _check_datastores(reference: DataReference, workspace_dir: Path) -> None:
    """Raise an error if the run can't use a datastore of an input or output."""
    from paceline.data.datasets.dataset import check_registration
    from paceline.data.stores.credentials import check_no_secrets
    from paceline.data.stores.datastore import Datastore
    from paceline.data.stores.names import clean_path

    check_registration(reference)
    for source in reference.sources:
        if source.datastore is None:
            # Refuse URLs with a secret: the run's record holds the URL unchanged.
            check_no_secrets(source.path, {})
        else:
            clean_path(source.path, f"datastore {source.datastore!r}")
            here: Any = SimpleNamespace(path=workspace_dir)
            store = Datastore.get(here, source.datastore)
            if store.kind == "memory":
                raise DataError(
                    f"input {reference.name!r} is stored in datastore {source.datastore!r}, which is the memory of this process: "
                    "a run's own processes can't see it. Upload the files to a store that they can reach."
                )
            if store.kind == "http" and reference.is_output:
                raise DataError(
                    f"output {reference.name!r} goes to datastore {source.datastore!r}, which can only be read (http). "
                    "Name another datastore."
                )


def _check_python(python: str) -> None:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        # -S skips the site module: a broken .pth file says nothing about the interpreter. The timeout is for a hanging network
        # file system.
        done = processes.said_by([python, "-S", "-c", code], timeout_s=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JobError(f"python={python!r} can't be run: {error}. Give the path of a Python interpreter.") from error
    # The user may have named any program: /bin/true succeeds, but prints no version.
    version = re.fullmatch(r"(\d+)\.(\d+)", done.stdout.strip())
    if done.returncode != 0 or version is None or (int(version[1]), int(version[2])) < (3, 10):
        what = f"Python {version[0]}" if version else "not a Python"
        raise JobError(f"python={python!r} is {what}; workers need Python 3.10 or later.")
