"""A scoring script: the module, loaded once, and which of the two contracts it keeps.

init(), run(data)      the Azure SDK's                     (`paceline.serving.model.sdk`)
predict(x: ...) -> ... a function with type hints          (`paceline.serving.model.typed`)
"""

from __future__ import annotations

import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

from paceline.errors import ServingError
from paceline.serving.model import aml_names
from paceline.serving.wire import Servable


def load_script(setup: dict[str, Any]) -> Servable:
    """The servable of the script, after its `init()`.

    Raises:
        ServingError: there is no such file, or it has neither `run` nor `predict`, or a signature that can't be called.
        BaseException: whatever the script raises.
    """
    source = os.path.abspath(setup["source_dir"])
    path = os.path.join(source, setup["entry_script"])
    if not os.path.isfile(path):
        raise ServingError(f"entry_script={setup['entry_script']!r}: there is no such file in {source!r}.")
    for folder in (source, os.path.dirname(path)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    if setup["working_dir"]:
        sys.path.append(os.path.abspath(setup["working_dir"]))
    aml_names.install()
    module = _imported(path)
    has_init = callable(getattr(module, "init", None))
    if callable(getattr(module, "run", None)):
        if not has_init:
            raise ServingError(
                f"{path}: there is run() and no init(). Write one, an empty one if nothing is to be done."
            )
        from paceline.serving.model.sdk import SdkScript

        module.init()
        return SdkScript(module, setup)
    if callable(getattr(module, "predict", None)):
        from paceline.serving.model.typed import TypedScript

        # A signature that can't be served is told before the model is loaded.
        script = TypedScript(module, setup)
        if has_init:
            module.init()
        return script
    raise ServingError(
        f"{path}: there is neither run(data), as the Azure SDK has it, nor predict(...) with type hints. Write one of them."
    )


def _imported(path: str) -> ModuleType:
    # The name that Azure's server gives it; a script that looks for "__main__" is not run as a program.
    spec = importlib.util.spec_from_file_location("entry_module", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Before it runs: pickles and dataclasses look their module up.
    sys.modules["entry_module"] = module
    spec.loader.exec_module(module)
    # A script that Azure's designer has made wraps another.
    driver = getattr(module, "driver_module", None)
    if isinstance(driver, ModuleType) and hasattr(driver, "run"):
        module.run = driver.run  # type: ignore[attr-defined]
    return module


def load(setup: dict[str, Any]) -> Servable:
    """Load the script or the model.

    setup: "name", "models" (as in the configuration), "entry_script", "source_dir", "working_dir", "max_batch", "shared": a
        folder for what the model processes of this machine share.

    Raises:
        PacelineError: it can't be served, and the message says why.
        BaseException: whatever the user's code raises.
    """
    folder = setup["working_dir"] or setup["source_dir"]
    if folder is not None:
        os.chdir(folder)
    # `python -m` has put the folder first from which the server was started: its files are none of the script's.
    sys.path[:] = [entry for entry in sys.path if entry not in ("", setup["started_in"])]
    if setup["entry_script"] is not None:
        return load_script(setup)
    from paceline.serving.model.builtin import load_builtin

    return load_builtin(setup)
