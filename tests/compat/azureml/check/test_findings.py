from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.compat.azureml.check.findings import MISSING, REPLACED, WORKS, missing, of_folder

#: Programs that use names of the SDK as drivers and scripts of 2018 to 2022 do, one program for each style.
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


@pytest.mark.promise("paceline-azureml-check-says-name")
def test_each_use_of_the_sdk_is_found_with_its_line(tmp_path):
    (tmp_path / "driver.py").write_text(DRIVER)
    found = uses(tmp_path)
    assert found[9, "azureml.core.VERSION"] == WORKS
    assert found[10, "azureml.core.Workspace.from_config"] == WORKS
    assert found[11, "azureml.core.compute.AmlCompute.provisioning_configuration"] == REPLACED
    assert found[7, "azureml.train.automl.AutoMLConfig"] == MISSING
    assert found[12, "azureml.core.Workspace.sell"] == MISSING
    assert found[8, "sklearn.externals"] == found[13, "np.float"] == found[14, "loss.data[0]"] == MISSING
    assert found[15, "torch.distributed.init_process_group"] == REPLACED


def test_report_on_an_automl_method_names_automl(tmp_path):
    """Regression: the error "Run has no get_output" did not mention AutoML, so its users searched for a mistake in
    their own code."""
    (tmp_path / "driver.py").write_text(
        "from azureml.core import Experiment, Workspace\n"
        "run = Experiment(Workspace.from_config(), 'x').submit(config)\n"
        "best, model = run.get_output()\nrun.sell()\n"
    )
    found = {one.line: one.text for one in of_folder(tmp_path) if one.becomes == MISSING}
    assert found[3].startswith("get_output is a method of AutoML's runs.")
    assert "sweep" in found[3]
    assert found[4] == "azureml.core.run.Run has no sell here."


def test_names_from_star_imports_are_checked(tmp_path):
    text = "from azureml.core import *\nfrom azureml.no import *\nws = Workspace.from_config()\nRun.sell()\n"
    (tmp_path / "driver.py").write_text(text)
    found = uses(tmp_path)
    assert (found[3, "azureml.core.Workspace.from_config"], found[4, "azureml.core.Run.sell"]) == (WORKS, MISSING)
    assert (found[1, "azureml.core"], found[2, "azureml.no"]) == (WORKS, MISSING)


@pytest.mark.promise("parameters-members-sdk-s-drivers")
def test_95_percent_of_the_azureml_names_in_26_collected_submission_scripts_are_supported():
    """docs/from-azureml.md has the figure."""
    found = of_folder(DRIVERS)
    assert len({one.file for one in found}) == 26
    here = [one for one in found if one.becomes != MISSING]
    assert len(here) / len(found) >= 0.95, sorted({one.name for one in found if one.becomes == MISSING})


def test_notebook_cells_are_checked_without_their_magics(tmp_path):
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


def test_call_of_a_class_that_the_scoring_script_defines_is_accepted(tmp_path):
    text = "from azureml.contrib.services.aml_response import AMLResponse\ndef run(data):\n    return AMLResponse(data, 200)\n"
    (tmp_path / "score.py").write_text(text)
    assert set(uses(tmp_path).values()) == {WORKS}


@pytest.mark.promise("paceline-azureml-check-says-name")
def test_virtual_environments_inside_the_checked_folder_are_skipped(tmp_path):
    """`paceline azureml check .` beside an environment called `v` counted 261 edits to make, in NumPy, SciPy and scikit-learn."""
    for inner in ("v/lib/python3.12/site-packages/numpy", ".venv/lib", "src"):
        (tmp_path / inner).mkdir(parents=True)
        (tmp_path / inner / "one.py").write_text("import numpy as np\nnp.float\n")
    (tmp_path / "v" / "pyvenv.cfg").touch()
    assert [one.file for one in of_folder(tmp_path)] == ["src/one.py"]


def test_removed_numpy_names_are_reported_except_those_that_numpy_2_added_again(tmp_path):
    (tmp_path / "one.py").write_text("import numpy as np\nprint(np.bool, np.long, np.object)\n")
    assert uses(tmp_path) == {(2, "np.object"): MISSING}


def test_python_2_file_is_reported(tmp_path):
    (tmp_path / "old.py").write_text("print 'x'\n")
    (only,) = of_folder(tmp_path / "old.py")
    assert (only.becomes, "not Python 3" in only.text) == (MISSING, True)


@pytest.mark.parametrize(
    "name",
    [
        "azureml.core.Run.get_context",
        "azureml.core.run._OfflineRun",
        "azureml.train.hyperdrive",
        "azureml.exceptions.UserErrorException",
    ],
)
def test_supported_sdk_name_is_not_reported_as_missing(name):
    assert missing(name) is None


@pytest.mark.parametrize(
    "name", ["azureml.core.Nothing", "azureml.core.Run.nothing", "azureml.nothing.at.all", "azureml.interpret.x"]
)
def test_unknown_sdk_names_are_reported_as_missing(name):
    assert missing(name)


HELD = """
from azureml.core import Dataset, Experiment, Run, ScriptRunConfig, Workspace
from azureml.core.compute import AmlCompute, ComputeTarget
from azureml.core.model import Model
from azureml.pipeline.core import Pipeline
from azureml.data.data_reference import DataReference
ws = Workspace.from_config()
print(ws.name, ws._workspace_name)
pipeline = Pipeline(ws, [])
pipeline.publish("name")
run = Experiment(ws, "e").submit(ScriptRunConfig(".", "t.py", compute_target="cpus"))
run._client
run.get_best_run_by_primary_metric(), run.wait_for_completion(), run.publish_pipeline()
with Experiment(ws, "e").start_logging() as logged:
    logged.sell()
target = ws.compute_targets["cpus"]
target = ComputeTarget(ws, "cpus")
try:
    target = AmlCompute(workspace=ws, name="gpus")
except Exception:
    target = ComputeTarget.create(ws, "gpus", AmlCompute.provisioning_configuration())
other = Workspace.get("corp")
def train(run: Run, ws):
    ws._anything, run.sell()
DataReference(ws.get_default_datastore()).to_config()
model = Model(ws, "m")
def init():
    global model
    model = load()
model.predict()
ws = load()
ws._sell()
Model.profile(ws)
ws.get_mlflow_tracking_uri()
"""


def test_unsupported_methods_called_on_variables_that_hold_sdk_objects_are_reported(tmp_path):
    """`check` said "works" of Pipeline.publish, private attributes and clusters that the driver only names."""
    (tmp_path / "driver.py").write_text(HELD)
    found = {(one.line, one.name): one for one in of_folder(tmp_path) if one.becomes != WORKS}
    place = "azureml.core.workspace.Workspace"
    run, pipeline = "azureml.core.run.Run", "azureml.pipeline.core.pipeline.Pipeline"
    assert {key: one.becomes for key, one in found.items()} == {
        (8, f"{place}._workspace_name"): MISSING,
        (10, f"{pipeline}.publish"): MISSING,
        (11, "azureml.core.ScriptRunConfig"): REPLACED,
        (12, f"{run}._client"): MISSING,
        (13, f"{run}.publish_pipeline"): MISSING,
        (15, f"{run}.sell"): MISSING,
        (16, f"{place}.compute_targets"): REPLACED,
        (17, "azureml.core.compute.ComputeTarget"): MISSING,
        (21, "azureml.core.compute.AmlCompute.provisioning_configuration"): REPLACED,
        (22, "azureml.core.Workspace.get"): REPLACED,
        (24, f"{run}.sell"): MISSING,
        (33, "azureml.core.model.Model.profile"): MISSING,
    }
    assert "Submit the pipeline directly" in found[10, f"{pipeline}.publish"].text
    assert "Submit the pipeline directly" in found[13, f"{run}.publish_pipeline"].text
    assert "paceline compute add cpus" in found[17, "azureml.core.compute.ComputeTarget"].text
    assert "paceline service bench NAME" in found[33, "azureml.core.model.Model.profile"].text


USE = "from azureml.core import Nothing\n"


@pytest.mark.parametrize(
    ("cell", "line"),
    [
        ("%%time\n" + USE, 2),
        ("x = !ls\n" + USE, 2),
        ("x, y = %time f()\n" + USE, 2),
        ("Run?\nazureml.core.Run??\n?Run\n" + USE, 4),
        ("if True:\n    !pip install x\n" + USE, 3),
        ("!pip install \\\n   --quiet x\n" + USE, 3),
        ("  " + USE, 1),
        (" import os\n" + USE, 2),
        ("await f()\n" + USE, 2),
        ("x = (5\n % 3)\n" + USE, 3),
        ("%%writefile train.py\nimport os\n" + USE, 3),
    ],
    ids=[
        *("time", "command's lines", "magic's value", "help", "command alone in an if", "command of two lines"),
        *("indented", "first line indented", "await", "modulo", "script"),
    ],
)
def test_notebook_cell_with_ipython_syntax_is_parsed(tmp_path, cell, line):
    """One such cell dropped its whole notebook: 31 of 389."""
    cells = [{"cell_type": "code", "source": text} for text in ("import azureml.core\n", cell)]
    (tmp_path / "book.ipynb").write_text(json.dumps({"cells": cells}))
    assert uses(tmp_path) == {(1, "azureml.core"): WORKS, (1 + line, "azureml.core.Nothing"): MISSING}


@pytest.mark.parametrize(
    "cell", ["%%html\n<b>", "%%writefile x.yml\na: 1", "%%bash\nls &&", "%%R\nx <- 1", "%%sql\nselect", ""]
)
def test_cell_of_another_language_is_skipped_and_other_cells_are_checked(tmp_path, cell):
    cells = [{"cell_type": "code", "source": text.splitlines(True)} for text in (cell, USE)]
    (tmp_path / "book.ipynb").write_text(json.dumps({"cells": cells}))
    assert uses(tmp_path) == {(len(cell.splitlines()) + 1, "azureml.core.Nothing"): MISSING}


def test_unparsable_cell_is_reported_and_other_cells_are_checked(tmp_path):
    cells = [{"cell_type": "code", "source": text} for text in (USE, "x = 1\nprint 'x'\n", USE)]
    (tmp_path / "book.ipynb").write_text(json.dumps({"cells": cells}))
    assert uses(tmp_path) == {
        (1, "azureml.core.Nothing"): MISSING,
        (3, "(the cell)"): MISSING,
        (4, "azureml.core.Nothing"): MISSING,
    }


def test_writefile_cell_does_not_see_the_notebooks_variables(tmp_path):
    script = "%%writefile score.py\ndef run(data):\n    return model.predict(data)\n"
    driver = "from azureml.core import Model, Workspace\nmodel = Model(Workspace.from_config(), 'm')\n"
    cells = [{"cell_type": "code", "source": text} for text in (driver, script)]
    (tmp_path / "book.ipynb").write_text(json.dumps({"cells": cells}))
    assert MISSING not in uses(tmp_path).values()


def test_notebook_in_another_language_is_skipped(tmp_path):
    book = {
        "metadata": {"kernelspec": {"name": "ir", "language": "R"}},
        "cells": [{"cell_type": "code", "source": "x <- 1"}],
    }
    (tmp_path / "book.ipynb").write_text(json.dumps(book))
    assert uses(tmp_path) == {}
