from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.compat.azureml.check.findings import MISSING, REPLACED, WORKS, missing, of_folder

#: What drivers and scripts of 2018 to 2022 take from the SDK, by style.
DRIVERS = Path(__file__).parent / "drivers"

DRIVER = """
import azureml
import azureml.core
import numpy as np
from azureml.core import Workspace, Experiment
from azureml.core.compute import AmlCompute as Cluster
from azureml.train.automl import AutoMLConfig
from sklearn.externals import joblib
print(azureml.core.VERSION)
ws = Workspace.from_config()
config = Cluster.provisioning_configuration(vm_size="STANDARD_NC6")
Workspace.sell()
x = np.float(3)
y = loss.data[0]
torch.distributed.init_process_group("nccl")
"""


def uses(folder):
    return {(one.line, one.name): one.becomes for one in of_folder(folder)}


def test_each_use_by_line(tmp_path):
    (tmp_path / "driver.py").write_text(DRIVER)
    found = uses(tmp_path)
    assert found[9, "azureml.core.VERSION"] == WORKS
    assert found[10, "azureml.core.Workspace.from_config"] == WORKS
    assert found[11, "azureml.core.compute.AmlCompute.provisioning_configuration"] == REPLACED
    assert found[7, "azureml.train.automl.AutoMLConfig"] == MISSING
    assert found[12, "azureml.core.Workspace.sell"] == MISSING
    assert found[8, "sklearn.externals"] == found[13, "np.float"] == found[14, "loss.data[0]"] == MISSING
    assert found[15, "torch.distributed.init_process_group"] == REPLACED


def test_names_that_a_star_brings_are_looked_at(tmp_path):
    text = "from azureml.core import *\nfrom azureml.no import *\nws = Workspace.from_config()\nRun.sell()\n"
    (tmp_path / "driver.py").write_text(text)
    found = uses(tmp_path)
    assert (found[3, "azureml.core.Workspace.from_config"], found[4, "azureml.core.Run.sell"]) == (WORKS, MISSING)
    assert (found[1, "azureml.core"], found[2, "azureml.no"]) == (WORKS, MISSING)


def test_nearly_all_that_drivers_of_each_era_take_from_the_sdk_is_here():
    """docs/from-azureml.md has the figure."""
    found = of_folder(DRIVERS)
    assert len({one.file for one in found}) == 26
    here = [one for one in found if one.becomes != MISSING]
    assert len(here) / len(found) >= 0.95, sorted({one.name for one in found if one.becomes == MISSING})


def test_notebooks_are_read_and_magics_passed_over(tmp_path):
    cells = [
        {"cell_type": "markdown", "source": ["from azureml.core import Nothing"]},
        {
            "cell_type": "code",
            "source": ["%matplotlib inline\n", "!pip install x\n", "from azureml.core import Workspace\n"],
        },
    ]
    (tmp_path / "book.ipynb").write_text(json.dumps({"cells": cells}))
    (tmp_path / "broken.ipynb").write_text("{")
    assert uses(tmp_path) == {(3, "azureml.core.Workspace"): WORKS}


def test_what_is_installed_below_the_folder_is_not_the_project_s(tmp_path):
    """`paceline azureml check .` beside an environment called `v` counted 261 edits to make, in NumPy, SciPy and scikit-learn."""
    for inner in ("v/lib/python3.12/site-packages/numpy", ".venv/lib", "src"):
        (tmp_path / inner).mkdir(parents=True)
        (tmp_path / inner / "one.py").write_text("import numpy as np\nnp.float\n")
    (tmp_path / "v" / "pyvenv.cfg").touch()
    assert [one.file for one in of_folder(tmp_path)] == ["src/one.py"]


def test_names_that_numpy_2_has_again_need_no_edit(tmp_path):
    (tmp_path / "one.py").write_text("import numpy as np\nprint(np.bool, np.long, np.object)\n")
    assert uses(tmp_path) == {(2, "np.object"): MISSING}


def test_a_file_of_python_2_is_said(tmp_path):
    (tmp_path / "old.py").write_text("print 'x'\n")
    (only,) = of_folder(tmp_path / "old.py")
    assert (only.becomes, "no Python 3" in only.text) == (MISSING, True)


@pytest.mark.parametrize(
    "name",
    [
        "azureml.core.Run.get_context",
        "azureml.core.run._OfflineRun",
        "azureml.train.hyperdrive",
        "azureml.exceptions.UserErrorException",
    ],
)
def test_what_is_here(name):
    assert missing(name) is None


@pytest.mark.parametrize(
    "name", ["azureml.core.Nothing", "azureml.core.Run.nothing", "azureml.nothing.at.all", "azureml.interpret.x"]
)
def test_what_is_not(name):
    assert missing(name)
