"""A package that makes `import azureml` load Paceline's package, if PYTHONPATH has its parent folder."""

import os
import sys

from paceline.compat.azureml.aliases import install

install()
# A run that was submitted without the SDK's names lacks the AZUREML_* variables. Set them from Paceline's variables.
for _name, _own_name in (("AZUREML_RUN_ID", "PACELINE_RUN_ID"), ("AZUREML_OUTPUT_DIRECTORY", "PACELINE_OUTPUT_DIR")):
    if _own_name in os.environ:
        os.environ.setdefault(_name, os.environ[_own_name])

import paceline.compat.azureml as _own  # noqa: E402

# Replace this module by Paceline's in sys.modules: the statement `import azureml` then returns Paceline's module.
sys.modules[__name__] = _own
