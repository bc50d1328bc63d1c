"""`import azureml` in a process that has the folder above this one on its path: Paceline's own takes the name."""

import os
import sys

from paceline.compat.azureml.aliases import install

install()
# A script that was submitted by the Azure names has these already.
for _name, _own_name in (("AZUREML_RUN_ID", "PACELINE_RUN_ID"), ("AZUREML_OUTPUT_DIRECTORY", "PACELINE_OUTPUT_DIR")):
    if _own_name in os.environ:
        os.environ.setdefault(_name, os.environ[_own_name])

import paceline.compat.azureml as _own  # noqa: E402

# Whoever imports `azureml` is given this entry, not the module that is being executed here.
sys.modules[__name__] = _own
