"""`import azureml` in a process that has the folder above this one on its path: Paceline's own takes the name."""

import sys

from paceline.compat.azureml.aliases import install

install()

import paceline.compat.azureml as _own  # noqa: E402

# Whoever imports `azureml` is given this entry, not the module that is being executed here.
sys.modules[__name__] = _own
