"""The rules for an environment's values, and its record."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
from pathlib import Path

import pytest

from paceline.environments.environment import Environment
from paceline.errors import EnvironmentSpecError
from paceline.estimator import Estimator
from paceline.job.environment import EnvironmentSpec
from paceline.job.job import Job
from tests.helpers import make_job, run_python

EVERYTHING = Environment(
    name="all-1.0",
    version=3,
    python="/usr/bin/python3",
    python_version="3.11",
    pip_packages=["einops==0.8.0", "/wheels/x-1-py3-none-any.whl"],
    pip_requirements="numpy<3\n",
    pip_constraints=["scipy<2"],
    conda_packages=["ffmpeg=7"],
    conda_channels=["conda-forge", "file:///channel"],
    environment_variables={"A": "1 2"},
    shm_size="2g",
    locked_pip=["einops==0.8.0"],
    locked_conda=["file:///channel/noarch/x-1-0.conda#00"],
)


def test_environment_is_equal_after_conversion_to_json_and_back():
    assert Environment.from_json(json.loads(json.dumps(EVERYTHING.to_json()))) == EVERYTHING


def test_environment_in_a_job_is_equal_after_conversion_to_json_or_pickle_and_back():
    job = make_job(environment=EVERYTHING)
    read = Job.from_json(json.loads(json.dumps(job.to_json()))).environment
    assert (type(read), read, EVERYTHING) == (EnvironmentSpec, EVERYTHING, read)
    assert read != dataclasses.replace(EVERYTHING, version=4)
    assert Estimator(entry_script="train.py", environment_definition=read).environment_definition == EVERYTHING
    assert pickle.loads(pickle.dumps(EVERYTHING)) == EVERYTHING


def test_environment_copies_the_lists_and_dicts_given_by_the_caller():
    variables = {"A": "1"}
    environment = Environment(pip_packages=["a"], environment_variables=variables)
    variables["A"] = "2"
    assert environment.pip_packages == ("a",)
    assert environment.environment_variables == {"A": "1"}


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("./pkg", "{here}/pkg"),
        ("-e .", "-e {here}"),
        ("--editable=./pkg[extra]", "-e {here}/pkg[extra]"),
        ("../up", "{above}/up"),
        ("dist/pkg-1-py3-none-any.whl", "{here}/dist/pkg-1-py3-none-any.whl"),
        ("./pkg ; python_version > '3'", "{here}/pkg ; python_version > '3'"),
        ("~/pkg", "{home}/pkg"),
        ("pkg @ ./with blank", "pkg @ file://{here}/with%20blank"),
        ("pkg[a] @ file:///somewhere/pkg", "pkg[a] @ file:///somewhere/pkg"),
        ("git+https://host/x.git@v1", "git+https://host/x.git@v1"),
        ("name", "name"),
        ("name[extra]>=1,<2; python_version>'3'", "name[extra]>=1,<2; python_version>'3'"),
        ("  spaces  ", "spaces"),
    ],
)
def test_relative_package_paths_become_absolute_in_the_constructor(given, kept):
    here = Path.cwd()
    wanted = kept.format(here=here, above=here.parent, home=os.path.expanduser("~"))
    assert Environment(pip_packages=[given]).pip_packages == (wanted,)
    # An absolute path stays the same when another process reads it in another folder.
    assert Environment(pip_packages=[wanted]).pip_packages == (wanted,)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pip_packages": "einops"}, r"pip_packages='einops' is one string. Write pip_packages=\['einops'\]."),
        ({"conda_packages": "ffmpeg"}, r"Write conda_packages=\['ffmpeg'\]."),
        ({"conda_channels": {"a": 1}}, r"conda_channels=\{'a': 1\} is not a list of strings"),
        ({"pip_packages": [3]}, "pip_packages has 3, which is not a string"),
        ({"pip_packages": 3}, "pip_packages=3 is not a list"),
        ({"pip_packages": ["a", " "]}, "pip_packages has an empty name"),
        # pip treats each of these characters as a line break.
        *(
            ({"pip_packages": [f"a{mark}--index-url http://x"]}, "a line break or a control")
            for mark in "\n\r\v\f\x1c\x85\u2028"
        ),
        ({"conda_packages": ["a\n- b"]}, "a line break or a control"),
        ({"docker_image": "a\nRUN id"}, "a line break or a control"),
        ({"docker_image": "a", "shm_size": "1g\n"}, "a line break or a control"),
        ({"name": "a/b"}, "name='a/b' can't be an environment's name"),
        ({"name": ".."}, "can't be an environment's name"),
        ({"name": ""}, "can't be an environment's name"),
        ({"name": "a" * 129}, "can't be an environment's name"),
        ({"version": 0}, "version=0 is not a whole number"),
        ({"version": True}, "version=True is not a whole number"),
        ({"python": "python3"}, "python='python3' is not an absolute path"),
        ({"python": ""}, "python='' is not a text"),
        ({"python_version": "3"}, "python_version='3' is not a version"),
        ({"layered": 1}, "layered=1 is not a bool"),
        ({"environment_variables": ["A"]}, "is not a dict of strings"),
        ({"environment_variables": {"A": 1}}, "'A': 1"),
        ({"environment_variables": {"A=B": "1"}}, "'A=B'"),
        ({"user_managed": True, "pip_packages": ["a"]}, "user_managed=True with pip_packages"),
        ({"user_managed": True, "conda_packages": ["a"]}, "user_managed=True with conda_packages"),
        ({"docker_image": "x", "conda_packages": ["a"]}, "docker_image='x' with conda_packages"),
        ({"layered": True, "conda_packages": ["python=3.11", "a"]}, "layered=True with 'python=3.11' from conda"),
        ({"layered": True, "conda_packages": ["conda-forge::python"]}, "Write layered=False"),
        ({"layered": True, "conda_packages": ["a"], "python_version": "3.11"}, "python_version=.3.11"),
    ],
)
def test_environment_refuses_an_invalid_value_and_shows_the_valid_form(values, message):
    with pytest.raises(EnvironmentSpecError, match=message):
        Environment(**values)


def test_conda_packages_with_names_like_python_dateutil_do_not_provide_python():
    assert Environment(layered=True, conda_packages=["python-dateutil", "pythonnet"]).uses_conda


@pytest.mark.parametrize(
    "values",
    [
        {"pip_packages": ["x @ https://me:hunter2@host/x.whl"]},
        {"pip_packages": ["git+https://hunter2hunter2hunter2hunter2@host/x.git"]},
        {"pip_requirements": "a\n--index-url https://me:hunter2@host/simple\n"},
        {"pip_requirements": "--extra-index-url=https://:hunter2@host/simple"},
        {"pip_requirements": "--index-url https://me:hunter2/with/slash@host/simple"},
        {"pip_constraints": ["x @ https://me:hunter2@host/x.whl"]},
        {"conda_channels": ["https://me:hunter2@host/channel"]},
        {"conda_channels": ["https://conda.example.org/t/hunter2/channel"]},
        {"locked_pip": ["x @ https://me:hunter2@host/x.whl"]},
    ],
)
def test_password_or_token_in_a_url_is_refused_and_does_not_appear_in_the_error_message(values):
    with pytest.raises(EnvironmentSpecError, match="password or a token") as caught:
        Environment(**values)
    assert "hunter2" not in str(caught.value)
    assert ("RATTLER_AUTH_FILE" if "conda_channels" in values else "${NAME}") in str(caught.value)


@pytest.mark.parametrize(
    "package",
    [
        "x @ https://${USER}:${TOKEN}@host/x.whl",
        "x @ https://me:${TOKEN}@host/x.whl",
        "git+https://host:8080/x.git@v1.0",
        "git+ssh://git@host/x.git",
        "x @ https://host/a@b/x.whl",
    ],
)
def test_url_with_a_password_variable_a_port_or_a_user_is_accepted(package):
    assert Environment(pip_packages=[package]).pip_packages == (package,)


@pytest.mark.parametrize(
    ("values", "needs"),
    [
        ({}, False),
        ({"python": "/usr/bin/python3"}, False),
        ({"pip_requirements": " \n"}, False),
        ({"pip_constraints": ["a<2"]}, False),
        ({"pip_packages": ["a"]}, True),
        ({"conda_packages": ["a"]}, True),
        ({"locked_pip": ["a==1"]}, True),
    ],
)
def test_environment_with_packages_needs_a_build(values, needs):
    assert Environment(**values).needs_build is needs


def test_creating_an_environment_spec_imports_only_paceline_and_the_standard_library():
    loaded = run_python(
        "import sys; from paceline.job.environment import EnvironmentSpec; EnvironmentSpec(pip_packages=['a', './b']);"
        "assert 'paceline.environments' not in sys.modules;"
        "print(*sorted({n.partition('.')[0] for n in sys.modules} - set(sys.stdlib_module_names)))"
    ).split()
    assert set(loaded) <= {"paceline", "__main__", "_distutils_hack", "_virtualenv", "sitecustomize", "usercustomize"}
