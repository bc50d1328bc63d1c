"""The names for every program of a Python environment, without a line in any of them: a module among its packages, and a .pth
file that loads it at each start.

A distribution of its own that had `azureml/__init__.py` would be overwritten by the next package of the SDK's that is installed,
such as azureml-mlflow: each of them has a file of that name. https://docs.python.org/3/library/site.html
"""

from __future__ import annotations

import os
import shutil
import site
import sysconfig
from pathlib import Path

from paceline.errors import UserError
from paceline.system.files import write_whole

MODULE = "paceline_azureml_names"
_SOURCE = Path(__file__).parents[1] / "shim" / "azureml_everywhere" / f"{MODULE}.py"


def install() -> Path:
    """Let every program of this interpreter's environment find the names; the folder of packages that now has them.

    Raises:
        UserError: that folder can't be written.
    """
    folder = _folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(_SOURCE, folder / f"{MODULE}.py")
        # Last: a program that starts meanwhile finds what the line names.
        write_whole(folder / f"{MODULE}.pth", f"import {MODULE}\n")
    except OSError as error:
        raise UserError(
            f"{str(folder)!r} can't be written: {error.strerror}. Write `import paceline.azureml` above a driver's imports, "
            "or run it by `python -m paceline.azureml driver.py`."
        ) from error
    return folder


def uninstall() -> list[Path]:
    """Take the names away again; the folders of packages that had them.

    Raises:
        UserError: one of them can't be written.
    """
    found = [folder for folder in _folders() if (folder / f"{MODULE}.pth").exists()]
    for folder in found:
        try:
            # The line first: it must never name what is not there.
            (folder / f"{MODULE}.pth").unlink()
            for file in (folder / f"{MODULE}.py", *folder.glob(f"__pycache__/{MODULE}.*.pyc")):
                file.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"{str(folder)!r} can't be written: {error.strerror}.") from error
    return found


def _folders() -> list[Path]:
    own = [sysconfig.get_path("purelib")]
    return [Path(folder) for folder in (*own, *([site.getusersitepackages()] if site.ENABLE_USER_SITE else []))]


def _folder() -> Path:
    return next((folder for folder in _folders() if os.access(folder, os.W_OK)), _folders()[-1])
