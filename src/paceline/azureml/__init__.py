"""Support for drivers (programs that submit runs) of the Azure ML SDK v1, activated by an import.

Write `import paceline.azureml` before the driver's own imports. In this process, `import azureml...` then loads
Paceline's modules, even if the real SDK is installed. Training scripts need no change. `python -m paceline.azureml
driver.py` runs an unchanged driver. See docs/from-azureml.md.
"""

from paceline.compat.azureml.aliases import install

install()
