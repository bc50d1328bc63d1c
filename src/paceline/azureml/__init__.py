"""The one line for a driver that was written for the Azure ML SDK v1: `import paceline.azureml`, before its own imports.

From there on `import azureml...` finds Paceline's names in this process, also where the real SDK is installed. Training scripts
need no such line. `python -m paceline.azureml driver.py` runs a driver as it is. See docs/from-azureml.md.
"""

from paceline.compat.azureml.aliases import install

install()
