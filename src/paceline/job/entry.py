"""Find the file that a job runs in its source folder, before anything starts."""

from __future__ import annotations

import difflib
import os
import shutil
from pathlib import Path

from paceline.errors import JobError
from paceline.job.job import Job

#: First bytes of files that the kernel executes: a script with its interpreter, or a binary (ELF).
_BEGINNINGS = (b"#!", b"\x7fELF")


def entry_file(job: Job, directory: Path, *, is_here: bool = False) -> str | None:
    """Return the file that a job runs, as a path relative to `directory`.

    The path has forward slashes. The result is None for an installed module, for a program on the nodes' PATH, and
    without the folder `directory`. `is_here`: whether the job runs on this machine, so that PATH can be checked.

    Raises:
        JobError: The file is missing, or cannot be executed.
    """
    if not directory.is_dir():
        return None  # the code that copies the folder reports that it is missing
    if job.entry_module is not None:
        # `python -m` searches for modules from the working directory.
        found = _of_module(job.entry_module, directory / (job.working_directory or ""))
        name = found and os.path.normpath(os.path.join(job.working_directory or "", found))
        return name if name and name.split(os.sep)[0] != ".." else None
    # Use a normalized path like those in the source's copy: `./train.py` is `train.py`.
    script = os.path.normpath(job.entry_script).replace(os.sep, "/")
    path = directory / script
    if not path.is_file():
        # Files of the source take precedence over programs on PATH, so check PATH only if there is no such file.
        if job.may_be_on_path:
            if is_here:
                _check_on_path(job, directory)
            return None
        raise JobError(f"entry_script {job.entry_script!r} is not in {str(directory)!r}{_scripts_there(directory)}")
    if not job.is_python:
        _check_program(job.entry_script, path)
    return script


def _of_module(module: str, directory: Path) -> str | None:
    top, path = module.partition(".")[0], module.replace(".", "/")
    for candidate in (f"{path}.py", f"{path}/__main__.py"):
        if (directory / candidate).is_file():
            return candidate
    if (directory / path).is_dir():
        raise JobError(f"entry_module {module!r} is a package without a __main__.py. Name a module in it, or add it.")
    # The source has no module of this name, so the module is an installed one, such as torch.distributed.run.
    if not (directory / top).is_dir() and not (directory / f"{top}.py").is_file():
        return None
    # Take at most a thousand names, because difflib compares the module's name with each.
    known = [_name(found, directory) for found in sorted((directory / top).rglob("*.py"))[:1000]]
    close = difflib.get_close_matches(module, known, n=1) or known[:1]
    hint = f" Did you mean {close[0]}?" if close else ""
    raise JobError(f"entry_module {module!r} is not in {str(directory)!r}, which has {top!r}.{hint}")


def _name(path: Path, directory: Path) -> str:
    parts = path.relative_to(directory).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] in ("__init__", "__main__") else parts)


def _check_on_path(job: Job, directory: Path) -> None:
    """Raise JobError if this machine's PATH lacks a program that no environment can install."""
    if job.environment.docker_image is not None or job.environment.needs_build:
        return
    # If the job sets PATH for its workers, search that PATH instead of this process's.
    path = job.environment_variables.get("PATH", os.environ.get("PATH"))
    if shutil.which(job.entry_script, path=path) is None:
        raise JobError(
            f"{job.entry_script!r} is neither a program on the PATH of this machine nor a file in "
            f"{str(directory)!r}{_scripts_there(directory)}"
        )


def _check_program(name: str, path: Path) -> None:
    """Raise JobError unless a file is an executable binary or script with #!."""
    with open(path, "rb") as file:
        begins = file.read(4)
    if not begins.startswith(_BEGINNINGS):
        raise JobError(
            f"entry_script {name!r} must be a Python file (.py), a script that begins with #!, or a binary. Name one of them, or "
            "write its interpreter into its first line, such as #!/bin/bash."
        )
    # Check only the owner's permission: the submitting user will own the copy.
    if not path.stat().st_mode & 0o100:
        raise JobError(f"entry_script {name!r} is not executable. Make it so: chmod +x {path}")


def _scripts_there(directory: Path) -> str:
    try:
        names = sorted(path.name for path in directory.glob("*.py"))[:8]
    except OSError:
        names = []
    return f", which has {', '.join(names)}." if names else ", which has no Python file. Check source_directory."
