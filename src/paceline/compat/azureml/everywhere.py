"""Installation of the SDK's names for every program of a Python environment.

`install` adds two files to the environment's packages: a module, and a .pth file that loads the module at each start.

A separate distribution with `azureml/__init__.py` would not work: each SDK package, such as azureml-mlflow, overwrites
that file. https://docs.python.org/3/library/site.html
"""

from __future__ import annotations

import os
import shutil
import site
import sysconfig
from pathlib import Path

from paceline.errors import UserError

MODULE = "paceline_azureml_names"
_SOURCE = Path(__file__).parents[1] / "shim" / "azureml_everywhere" / f"{MODULE}.py"


def install() -> Path:
    """Make `import azureml` find Paceline in this interpreter. Return the changed folder.

    Raises:
        UserError: The folder is not writable.
    """
    folder = next((one for one in _folders() if os.access(one, os.W_OK)), _folders()[-1])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(_SOURCE, folder / f"{MODULE}.py")
        # Write the .pth file last, because Python imports the module that it names at each start.
        beside = folder / f".{MODULE}.{os.getpid()}"
        beside.write_text(f"import {MODULE}\n")
        beside.replace(folder / f"{MODULE}.pth")
    except OSError as error:
        raise UserError(
            f"{str(folder)!r} can't be written: {error.strerror}. Write `import paceline.azureml` above a driver's imports, "
            "or run it by `python -m paceline.azureml driver.py`."
        ) from error
    return folder


def uninstall() -> list[Path]:
    """Undo `install` for this interpreter. Return the changed folders.

    Raises:
        UserError: A folder is not writable.
    """
    found = [folder for folder in _folders() if (folder / f"{MODULE}.pth").exists()]
    for folder in found:
        try:
            # Remove the .pth file first, because it must never name a missing module.
            (folder / f"{MODULE}.pth").unlink()
            for file in (folder / f"{MODULE}.py", *folder.glob(f"__pycache__/{MODULE}.*.pyc")):
                file.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"{str(folder)!r} can't be written: {error.strerror}.") from error
    return found


def _folders() -> list[Path]:
    own = [sysconfig.get_path("purelib")]
    return [Path(folder) for folder in (*own, *([site.getusersitepackages()] if site.ENABLE_USER_SITE else []))]
