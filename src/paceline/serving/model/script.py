"""Load a model process's scoring script, by one of two contracts, or a model without a script.

init(), run(data)      Azure SDK                           (`paceline.serving.model.sdk`)
predict(x: ...) -> ... function with type hints            (`paceline.serving.model.typed`)
"""

from __future__ import annotations

import importlib.util
import os
import sys
from types import ModuleType

from paceline.errors import ServingError
from paceline.serving.model import aml_names
from paceline.serving.wire import STARTED_IN, ModelSetup, Servable


def load_script(setup: ModelSetup) -> Servable:
    """Import the script and run its `init()`. Return the object that answers requests.

    Raises:
        ServingError: The file is missing, has neither `run` nor `predict`, or the signature is not supported.
        BaseException: Any exception of the script.
    """
    config = setup.config
    source = os.path.abspath(str(config.source_dir))
    path = os.path.join(source, str(config.entry_script))
    if not os.path.isfile(path):
        raise ServingError(f"entry_script={config.entry_script!r}: there is no such file in {source!r}.")
    for folder in (source, os.path.dirname(path)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    if config.working_dir:
        sys.path.append(os.path.abspath(config.working_dir))
    aml_names.install()
    module = _imported(path)
    has_init = callable(getattr(module, "init", None))
    if callable(getattr(module, "run", None)):
        if not has_init:
            raise ServingError(f"{path}: there is run() and no init(). Write one; it may be empty.")
        from paceline.serving.model.sdk import SdkScript

        module.init()
        return SdkScript(module, config)
    if callable(getattr(module, "predict", None)):
        from paceline.serving.model.typed import TypedScript

        # Check the signature of the function before `init()` loads the model, which may take long.
        script = TypedScript(module, config)
        if has_init:
            module.init()
        return script
    raise ServingError(
        f"{path}: there is neither run(data), as the Azure SDK has it, nor predict(...) with type hints. Write one of them."
    )


def _imported(path: str) -> ModuleType:
    # Azure's server uses this module name, so `if __name__ == "__main__"` blocks do not run.
    spec = importlib.util.spec_from_file_location("entry_module", path)
    if spec is None or spec.loader is None:
        raise ServingError(f"{path} is not a Python file. Name a .py file.")
    module = importlib.util.module_from_spec(spec)
    # Register the module before its code runs: pickles and dataclasses look up their module.
    sys.modules["entry_module"] = module
    spec.loader.exec_module(module)
    # A script from Azure's designer wraps another script, which has the function `run`.
    driver = getattr(module, "driver_module", None)
    if isinstance(driver, ModuleType) and hasattr(driver, "run"):
        module.run = driver.run  # type: ignore[attr-defined]
    return module


def load(setup: ModelSetup) -> Servable:
    """Load the script or the model. Return the object that answers requests.

    Raises:
        PacelineError: The script or model can't be served. The message has the reason.
        BaseException: Any exception of user code.
    """
    folder = setup.config.working_dir or setup.config.source_dir
    if folder is not None:
        os.chdir(folder)
    # Remove the folder that `python -m` has put first in `sys.path`, because its files do not belong to the script.
    sys.path[:] = [entry for entry in sys.path if entry not in ("", STARTED_IN)]
    if setup.config.entry_script is not None:
        return load_script(setup)
    from paceline.serving.model.builtin import load_builtin

    return load_builtin(setup)
