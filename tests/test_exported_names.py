from __future__ import annotations

import sys

import pytest

import paceline
from paceline import errors, parallel
from paceline.compat import azureml
from tests.helpers import run_python


def test_dunder_all_is_sorted():
    assert paceline.__all__ == sorted(paceline.__all__)


@pytest.mark.promise("public-name-two-classes-one")
def test_dunder_all_has_every_exported_name():
    homes = {name for names in paceline._HOMES.values() for name in names}
    assert set(paceline.__all__) == homes | {"__version__", "errors"}


def test_exceptions_are_exported_by_errors_only():
    assert paceline.errors is errors
    assert [name for name in paceline.__all__ if name.endswith("Error")] == []


def test_every_parallel_strategy_is_exported_by_the_paceline_package():
    combined = {name for name in parallel.__all__ if hasattr(getattr(parallel, name), "__matmul__")}
    strategies = combined - {"Strategy"}
    assert len(strategies) == 6
    assert strategies <= set(paceline.__all__)


@pytest.mark.parametrize("name", azureml.__all__)
def test_each_azureml_class_is_a_subclass_of_the_paceline_class_with_the_same_name(name):
    assert issubclass(getattr(azureml, name), getattr(paceline, name))


@pytest.mark.parametrize("name", paceline.__all__)
def test_every_public_name_exists(name):
    assert getattr(paceline, name) is not None
    assert name in dir(paceline)


def test_unknown_name_in_the_package_raises_attribute_error():
    with pytest.raises(AttributeError, match="'Horovod'"):
        paceline.Horovod  # noqa: B018


def loaded_by(statement: str) -> set[str]:
    """The modules that a fresh interpreter loads for `statement`, beside those it starts with."""
    code = f"import sys; before = set(sys.modules); {statement}; print(*sorted(set(sys.modules) - before))"
    return set(run_python(code).split())


def third_party(modules: set[str]) -> set[str]:
    tops = {module.partition(".")[0] for module in modules}
    return tops - {"paceline", *sys.stdlib_module_names}


@pytest.mark.promise("importing-paceline-loads-third-party")
def test_importing_paceline_loads_no_third_party_modules_and_few_modules_of_paceline():
    loaded = loaded_by("import paceline")
    assert third_party(loaded) == set()
    assert not loaded & {"json", "dataclasses", "inspect", "subprocess", "tempfile", "asyncio", "importlib.metadata"}
    assert {module for module in loaded if module.startswith("paceline")} == {
        *("paceline", "paceline.errors", "paceline.system", "paceline.system.lazy_import")
    }


@pytest.mark.promise("importing-paceline-loads-third-party")
@pytest.mark.parametrize(
    "statement",
    [
        "import paceline; paceline.Run",
        "import paceline; paceline.PyTorch",
        "import paceline; paceline.Workspace",
        "import paceline; paceline.Model",
        "import paceline; paceline.DataParallel",
        "from paceline.compat.azureml import Experiment, Run",
        "import paceline.worker.script, paceline.worker.monitor, paceline.worker.ranks",
        "import paceline.supervisor.supervise",
    ],
)
def test_worker_side_imports_only_the_standard_library(statement):
    assert third_party(loaded_by(statement)) == set()


@pytest.mark.promise("process-paceline-itself-loads-framework")
def test_processes_other_than_workers_import_no_machine_learning_framework():
    # A CUDA build of torch takes 750 MB of memory once it is imported.
    statement = """
import paceline.cli.main, paceline.ui.app, paceline.remote.agent.agent, paceline.supervisor.supervise
import paceline.sweeps.controller, paceline.pipelines.controller, paceline.services.supervise, paceline.serving.front.process
from paceline.cli.parser import app
from paceline.cli.verbs import VERBS
for name in VERBS: app.load(name)
import optuna, optuna.importance, matplotlib.pyplot
from optuna.samplers import CmaEsSampler, TPESampler
for sampler in (TPESampler(), CmaEsSampler(warn_independent_sampling=False)):
    study = optuna.create_study(sampler=sampler)
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1) + trial.suggest_float("y", 0, 1), n_trials=12)
optuna.importance.get_param_importances(study)
""".strip().replace('"', "'")
    loaded = loaded_by(f'exec("""{statement}""")')
    assert not {"torch", "triton", "tensorflow", "keras", "jax"} & loaded


def test_check_of_loaded_modules_detects_a_third_party_module():
    assert "pathspec" in third_party(loaded_by("import pathspec"))
