"""Build an environment at its final path, because venvs and conda prefixes can't be moved."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from paceline.environments import conda, venv
from paceline.environments.base import Base
from paceline.environments.built import Built, utc
from paceline.environments.pip_install import Installer
from paceline.environments.program import Say
from paceline.errors import EnvironmentBuildError, EnvironmentSpecError
from paceline.job.environment import EnvironmentSpec
from paceline.system.files import gone_is_fine


def check(environment: EnvironmentSpec, base: Base) -> None:
    """Raise EnvironmentSpecError if this base interpreter can't be used for the environment."""
    if environment.user_managed:
        raise EnvironmentSpecError("a user-managed environment is never built: its interpreter has its packages.")
    if environment.uses_conda:
        conda.check(environment)
    elif environment.python_version and not f"{base.version}.".startswith(f"{environment.python_version}."):
        raise EnvironmentSpecError(
            f"python_version={environment.python_version!r}, but {base.python!r} is {base.version}, and pip packages are "
            f"installed for that. Give python= the path of a Python {environment.python_version}, or add "
            f"conda_packages=['python={environment.python_version}']."
        )


def build(key: str, environment: EnvironmentSpec, base: Base, prefix: Path, say: Say, lock_fd: int) -> Built:
    """Build the environment in the new folder `prefix`.

    lock_fd: The descriptor of the environment's lock, which the build's programs inherit.

    Raises:
        EnvironmentBuildError: The build failed. The incomplete environment stays, but is never used.
    """
    started = time.monotonic()
    variables = venv.build_environment()
    uv = venv.find_uv()
    packages: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()
    own_python = False
    if environment.uses_conda:
        packages, urls = conda.install(environment, prefix, variables, say, lock_fd)
        own_python = any(each.startswith("python=") for each in packages)
        if own_python and environment.layered:
            raise EnvironmentBuildError(
                f"layered=True, but the conda packages bring a Python of their own ({_python_of(packages)}), which does not see "
                "the submitting interpreter's packages. Write layered=False and name all packages of the script, or "
                "take the packages that need Python from pip."
            )
        if not own_python:
            say(f"no Python is among the conda packages: the environment takes that of {base.python}")
    if not own_python:
        # Create a venv, because no conda package brings a Python. If there are conda packages, use their folder.
        venv.make(prefix, base, uv, variables, say, lock_fd, over=environment.uses_conda)
    seen = base.folders if environment.layered else ()
    if seen:
        venv.show(seen, prefix)
    python = prefix / "bin" / "python"
    if own_python:
        # Install pip packages for the conda Python: its version determines which wheels fit.
        base = replace(base, python=str(python), version=_python_of(packages).partition(" ")[2])
    installer = Installer(prefix=prefix, python=python, base=base, seen=seen, uv=uv, say=say, lock_fd=lock_fd)
    # List conda's packages before pip runs, to distinguish them from the packages that pip adds.
    before = installer.own().versions() if own_python else set()
    installer.install(environment)
    own = installer.own()
    added = sorted(own.versions() - before)
    created = utc(time.time())
    return Built(
        key=key,
        prefix=prefix,
        python=python,
        bin_dir=prefix / "bin",
        variables=_variables(environment, prefix),
        base_python=base.python,
        is_layered=environment.layered,
        environment=environment,
        locked=replace(environment, locked_pip=installer.locks(own, added), locked_conda=urls),
        pip=tuple(added),
        conda=packages,
        created_utc=created,
        build_s=round(time.monotonic() - started, 3),
        size_bytes=_size(prefix),
        last_used_utc=created,
    )


def _variables(environment: EnvironmentSpec, prefix: Path) -> dict[str, str]:
    if not environment.uses_conda:
        return {"VIRTUAL_ENV": str(prefix)}
    # Stop the conda Python from searching the user's site-packages, as a venv's Python does not search them either.
    return {"CONDA_PREFIX": str(prefix), "CONDA_DEFAULT_ENV": str(prefix), "CONDA_SHLVL": "1", "PYTHONNOUSERSITE": "1"}


def _python_of(packages: tuple[str, ...]) -> str:
    return next(each for each in packages if each.startswith("python=")).replace("=", " ", 1).partition("=")[0]


def _size(folder: Path) -> int:
    blocks: dict[int, int] = {}
    for top, _, names in os.walk(folder):
        for name in names:
            with gone_is_fine():
                status = os.lstat(os.path.join(top, name))
                # uv and conda hard-link files, so count the disk blocks of each file once.
                blocks[status.st_ino] = status.st_blocks
    return 512 * sum(blocks.values())
