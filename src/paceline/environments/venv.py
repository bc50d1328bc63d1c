"""Create empty virtual environments, which may see the packages of their base interpreter."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.environments import program
from paceline.environments.base import Base
from paceline.environments.program import Say
from paceline.errors import EnvironmentBuildError
from paceline.job.secret_values import with_encoded_user

#: The .pth file that adds the base's folders. It sorts last, so the environment's editable packages have priority over the base.
LAYER_FILE = "zzz_paceline_base.pth"

#: Variables that a build does not get: they would add packages of the caller's shell, or change the build's destination.
_LEFT_OUT = frozenset(
    {
        *("VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "__PYVENV_LAUNCHER__"),
        *("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "PIP_PYTHON", "PIP_REQUIRE_VIRTUALENV", "PIP_DRY_RUN"),
        *("PIP_REQUIREMENT", "PIP_EDITABLE", "PIP_REPORT", "PIP_LOG", "PIP_QUIET"),
        *("UV_PYTHON", "UV_SYSTEM_PYTHON", "UV_BREAK_SYSTEM_PACKAGES", "UV_TARGET", "UV_PREFIX", "UV_VENV_SEED"),
        *("UV_WORKING_DIR", "UV_WORKING_DIRECTORY", "UV_PROJECT", "UV_PROJECT_ENVIRONMENT", "UV_OVERRIDE"),
        *("UV_EXCLUDE", "UV_MANAGED_PYTHON", "UV_PYTHON_PREFERENCE", "UV_VENV_CLEAR", "UV_RESOLUTION"),
    }
)


def build_environment() -> dict[str, str]:
    """Return the environment variables for the programs of a build."""
    # Percent-encode spaces: a space in a password would split the URL of an index or proxy.
    kept = {
        name: with_encoded_user(value) if name.upper().startswith("PIP_") or name.upper().endswith("_PROXY") else value
        for name, value in os.environ.items()
        if name not in _LEFT_OUT and not name.startswith("PYTHON")
    }
    return kept | {"NO_COLOR": "1", "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1", "PIP_NO_INPUT": "1"}


def find_uv() -> str | None:
    """Return the path of uv, or None if it is not installed."""
    import shutil

    # Prefer the uv that is installed with Paceline to a uv on PATH.
    try:
        import uv

        return os.fsdecode(uv.find_uv_bin())
    except (ImportError, FileNotFoundError):
        return shutil.which("uv")


def make(
    prefix: Path,
    base: Base,
    uv: str | None,
    environment: Mapping[str, str],
    say: Say,
    lock_fd: int,
    *,
    over: bool = False,
) -> None:
    """Create the virtual environment at `prefix`, without pip.

    over: Whether to keep files that are already in the folder `prefix`.

    Raises:
        EnvironmentBuildError: uv and the interpreter's venv module both failed.
    """
    lines: list[str] = []
    if uv is not None:
        more = ["--allow-existing"] if over else []
        command = [uv, "venv", "--quiet", "--no-project", "--no-config", *more, "--python", base.python, str(prefix)]
        code, lines = program.run(command, environment, say, lock_fd=lock_fd)
        if code == 0:
            return
    # uv may be missing, or refuse an interpreter that it does not know. The interpreter's venv module may still work.
    code, more_lines = program.run(
        [base.python, "-I", "-m", "venv", "--without-pip", str(prefix)], environment, say, lock_fd=lock_fd
    )
    if code != 0:
        output = [line.strip() for line in (*lines, *more_lines) if line.strip()]
        reason = output[-1] if output else f"exit code {code}"
        raise EnvironmentBuildError(f"no virtual environment could be made of {base.python!r}: {reason}.")


def site_packages(prefix: Path) -> Path:
    """Return the site-packages folder of the environment at `prefix`."""
    folders = sorted(prefix.glob("lib/*/site-packages"))
    if not folders:
        raise EnvironmentBuildError(
            f"{str(prefix)!r} has no site-packages: the interpreter makes environments of another kind."
        )
    return folders[0]


def show(folders: Sequence[Path], prefix: Path) -> None:
    """Make an environment see the packages in these folders, by a .pth file."""
    # `site` runs a line that begins with `import` at each start (https://docs.python.org/3/library/site.html).
    lines = [f"import site; site.addsitedir({os.fspath(folder)!r})" for folder in folders]
    (site_packages(prefix) / LAYER_FILE).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
