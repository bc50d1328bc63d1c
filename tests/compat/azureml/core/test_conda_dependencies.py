from __future__ import annotations

import json

import pytest

from paceline.compat.azureml.core.conda_dependencies import CondaDependencies
from paceline.compat.azureml.core.environment import Environment
from paceline.compat.azureml.exceptions import UserErrorException


def test_packages_are_added_replaced_and_removed(tmp_path):
    made = CondaDependencies.create(conda_packages=["scikit-learn"], pip_packages=["pandas==1.0"])
    made.add_pip_package("pandas==2.0")
    made.add_conda_package("scikit-learn=1.5")
    made.add_channel("pytorch")
    made.set_python_version("3.11")
    made.set_pip_option("--pre")
    assert [*made.conda_packages] == ["python=3.11", "scikit-learn=1.5"]
    assert [*made.pip_packages] == ["pandas==2.0"]
    assert made.get_python_version() == "3.11"
    (tmp_path / "myenv.yml").write_text(made.serialize_to_string())
    again = CondaDependencies(str(tmp_path / "myenv.yml"))
    assert again.as_dict() == made.as_dict()
    made.remove_pip_package("pandas")
    assert [*made.pip_packages] == []


def test_adding_several_pip_urls_and_wheels_keeps_all_of_them():
    """Of two repositories, or two wheels in one folder, only the second was left: both had the name `git`, or none."""
    given = ["git+https://host/a", "git+https://host/b", "./a.whl", "./b.whl", "torch[x]>=1", "numpy"]
    made = CondaDependencies.create(pip_packages=given)
    assert [*made.pip_packages] == given
    made.add_pip_package("Torch == 2")
    made.remove_pip_package("git+https://host/a")
    assert [*made.pip_packages] == [*given[1:4], "numpy", "Torch == 2"]


def test_conda_packages_with_a_leading_underscore_are_replaced_and_removed():
    """`conda env export` lists them; the one that was to go stayed."""
    made = CondaDependencies()
    for line in ("_libgcc_mutex=0.1=main", "conda-forge::_openmp_mutex=4.5", "_libgcc_mutex=0.2"):
        made.add_conda_package(line)
    made.remove_conda_package("_openmp_mutex")
    assert [line for line in made.conda_packages if "mutex" in line] == ["_libgcc_mutex=0.2"]


def test_repeated_options_and_packages_of_a_requirements_file_are_kept(tmp_path):
    """A second `--find-links` took the place of the first, and of a package with two markers only the last was left."""
    file = tmp_path / "requirements.txt"
    packages = ["pandas==1; python_version<'3.8'", "pandas==2; python_version>='3.8'", "einops"]
    file.write_text("\n".join(("# all", "--find-links a", "--find-links b", *packages[:2], "einops  # small", "")))
    made = Environment.from_pip_requirements("mine", str(file)).python.conda_dependencies
    assert made is not None
    assert [*made.pip_packages] == packages
    assert [*made.pip_options] == ["--find-links a", "--find-links b"]
    assert made.as_dict()["channels"] == CondaDependencies().as_dict()["channels"]


def test_default_conda_dependencies_equal_those_of_the_sdk():
    assert [*CondaDependencies().pip_packages] == ["azureml-defaults"]


def test_missing_conda_file_raises_user_error_exception_with_its_name(tmp_path):
    with pytest.raises(UserErrorException, match=r"nowhere\.yml"):
        CondaDependencies(str(tmp_path / "nowhere.yml"))


def test_changed_environment_gets_a_new_version_when_registered(ws, tmp_path):
    environment = Environment("mine")
    environment.python.conda_dependencies.add_pip_package("einops")
    environment.docker.base_image = None
    first = environment.register(workspace=ws)
    assert (first.version, environment.register(ws).version) == ("1", "1")
    environment.environment_variables["A"] = "1"
    assert environment.register(ws).version == "2"
    old, new = Environment.get(ws, "mine", version="1"), Environment.get(ws, "mine")
    assert ("A" in old.environment_variables, "A" in new.environment_variables) == (False, True)
    assert "einops" in [*new.python.conda_dependencies.pip_packages]
    assert "mine" in ws.environments
    assert any(name.startswith("AzureML") for name in Environment.list(ws))
    copy = new.clone("other")
    copy.python.conda_dependencies.add_pip_package("tqdm")
    assert "tqdm" not in [*new.python.conda_dependencies.pip_packages]
    new.save_to_directory(str(tmp_path / "saved"))
    assert Environment.load_from_directory(str(tmp_path / "saved")).environment_variables == new.environment_variables
    # The list of packages is saved in a separate file, which users may edit.
    file = tmp_path / "saved" / "conda_dependencies.yml"
    file.write_text(file.read_text().replace("einops", "tqdm"))
    packages = [*Environment.load_from_directory(str(tmp_path / "saved")).python.conda_dependencies.pip_packages]
    assert ("tqdm" in packages, "einops" in packages) == (True, False)
    with pytest.raises(UserErrorException, match="reserved"):
        Environment.get(ws, "AzureML-Minimal").register(ws)


def test_environment_file_saved_by_the_sdk_is_loaded(tmp_path):
    saved = {
        "name": "mine",
        "version": "3",
        "docker": {"baseImage": "team/image:1", "baseDockerfile": None, "sharedVolumes": True},
    }
    saved |= {
        "python": {"userManagedDependencies": True, "interpreterPath": "/opt/python", "baseCondaEnvironment": None}
    }
    saved |= {"environmentVariables": {"A": "1"}, "assetId": "x"}
    (tmp_path / "azureml_environment.json").write_text(json.dumps(saved))
    (tmp_path / "conda_dependencies.yml").write_text("dependencies:\n- pip:\n  - einops\n")
    found = Environment.load_from_directory(str(tmp_path))
    assert (found.name, found.docker.base_image, found.python.user_managed_dependencies) == (
        "mine",
        "team/image:1",
        True,
    )
    assert (found.python.interpreter_path, found.environment_variables) == ("/opt/python", {"A": "1"})
    assert [*found.python.conda_dependencies.pip_packages] == ["einops"]
