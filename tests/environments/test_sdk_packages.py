from __future__ import annotations

import pytest

from paceline.environments.sdk_packages import without_sdk_packages
from paceline.job.environment import EnvironmentSpec


@pytest.mark.promise("packages-called-azureml-installed-nowhere")
@pytest.mark.parametrize(
    "name",
    [
        "azureml-defaults",
        "azureml_core==1.2",
        "AzureML-SDK[notebooks] >= 1.0",
        "azureml.widgets",
        "azureml-train;python_version>'3'",
    ],
)
def test_azureml_packages_are_removed_from_pip_lists_and_requirements(name):
    given = EnvironmentSpec(
        pip_packages=(name, "einops"), pip_requirements=f"--pre\n{name}\ntqdm\n", conda_packages=("python=3.11",)
    )
    kept, said = without_sdk_packages(given)
    assert kept.pip_packages == ("einops",)
    assert kept.pip_requirements == "--pre\ntqdm\n"
    assert kept.conda_packages == ("python=3.11",)
    assert len(said) == 1
    assert name.strip() in said[0]


def test_azureml_packages_are_removed_from_conda_packages():
    kept, said = without_sdk_packages(
        EnvironmentSpec(conda_packages=("python=3.11", "conda-forge::azureml-sdk=1.2", "pip"))
    )
    assert kept.conda_packages == ("python=3.11", "pip")
    assert len(said) == 1


def test_dependencies_of_removed_azureml_packages_are_installed_in_their_place():
    kept, said = without_sdk_packages(
        EnvironmentSpec(pip_packages=("azureml-mlflow", "azureml-dataset-runtime[pandas,fuse]==1.0"))
    )
    assert kept.pip_packages == ("mlflow-skinny", "pandas")
    assert "mlflow-skinny is installed" in said[0]


@pytest.mark.parametrize("name", ["inference-schema[numpy-support]", "my-azureml-tools", "azuremlx", "./azureml-core"])
def test_packages_with_names_similar_to_azureml_packages_are_kept(name):
    given = EnvironmentSpec(pip_packages=(name,))
    kept, said = without_sdk_packages(given)
    assert kept is given
    assert said == []
