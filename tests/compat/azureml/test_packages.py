from __future__ import annotations

import importlib.util
import sys

import pytest

from paceline.compat.azureml import packages
from paceline.compat.azureml.core.conda_dependencies import CondaDependencies
from paceline.compat.azureml.core.environment import Environment
from paceline.compat.azureml.exceptions import UserErrorException
from paceline.compat.azureml.packages import spec_of
from paceline.compat.azureml.policy import SubmissionNotes
from paceline.compat.azureml.train.estimator import TensorFlow


@pytest.fixture
def notes(monkeypatch):
    monkeypatch.delenv("PACELINE_AZUREML", raising=False)
    # The test must not depend on the packages that are installed on this machine.
    there = {"numpy": "2.1.0", "tensorflow": "2.19.0", "torch": "2.13.0", "scikit-learn": "1.5.0"}
    monkeypatch.setattr(packages, "version_of", there.get)
    return SubmissionNotes()


def made(*, conda=(), pip=(), **options):
    environment = Environment("mine")
    environment.python.conda_dependencies = CondaDependencies.create(
        conda_packages=list(conda), pip_packages=list(pip), **options
    )
    return environment


def test_environment_without_package_requirements_uses_the_current_interpreter(notes):
    spec = spec_of(Environment("mine"), notes)
    assert not spec.needs_build
    assert dict(spec.environment_variables) == {}
    assert notes.all() == ()


def test_common_conda_packages_are_installed_by_pip_with_a_note(notes):
    spec = spec_of(made(conda=["numpy", "pytorch", "scikit-learn=1.5.0"], pip=["einops==0.8.0"]), notes)
    assert (spec.layered, spec.conda_packages) == (True, ())
    assert spec.pip_packages == ("numpy", "torch", "scikit-learn==1.5.0.*", "einops==0.8.0")
    assert any("numpy, pytorch, scikit-learn" in text for text in notes.all())


@pytest.mark.parametrize(
    ("asked", "becomes", "said"),
    [
        ("tensorflow==1.10.0", "tensorflow", "tensorflow 2.19.0, which is installed here"),
        ("tensorflow-gpu==1.10", "tensorflow", "tensorflow 2.19.0"),
        ("torch<1.0", "torch", "torch 2.13.0"),
        ("torch==2.13.0", "torch==2.13.0", None),
        ("torch>=1.4", "torch>=1.4", None),
        ("einops==0.1", "einops==0.1", None),
    ],
)
def test_outdated_pin_of_an_installed_package_is_dropped_with_a_note(notes, asked, becomes, said):
    assert spec_of(made(pip=[asked]), notes).pip_packages == (becomes,)
    assert [said in text for text in notes.all()] == ([True] if said else [])


def test_packages_that_only_conda_has_need_a_conda_environment(notes, monkeypatch):
    environment = made(conda=["ffmpeg=7", "numpy", "cudatoolkit=9"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    spec = spec_of(environment, notes)
    assert spec.conda_packages[1:] == ("ffmpeg=7",)
    assert any("cudatoolkit" in text for text in notes.all())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    spec = spec_of(environment, again := SubmissionNotes())
    assert spec.conda_packages == ()
    assert any("ffmpeg=7 are left out" in text for text in again.all())


def test_request_for_another_python_version_is_ignored_with_a_note(notes):
    spec_of(made(python_version="3.6.2"), notes)
    assert notes.all() == (f"Python 3.{sys.version_info[1]} is used instead of the requested 3.6.2.",)


@pytest.mark.promise("can-t-had-replaced-sentence")
def test_strict_mode_keeps_conda_packages_and_refuses_pins_that_can_not_be_met(notes, monkeypatch):
    monkeypatch.setenv("PACELINE_AZUREML", "strict")
    spec = spec_of(made(conda=["numpy"], pip=["einops"]), SubmissionNotes())
    assert "numpy" in spec.conda_packages
    with pytest.raises(UserErrorException, match="strict"):
        spec_of(made(pip=["tensorflow==1.10"]), SubmissionNotes())
    monkeypatch.setenv("PACELINE_AZUREML", "loose")
    with pytest.raises(UserErrorException, match="'loose'"):
        spec_of(made(conda=["numpy"]), SubmissionNotes())


def test_interpreter_given_by_the_user_is_used_unchanged(notes):
    environment = Environment("mine")
    environment.python.user_managed_dependencies = True
    assert spec_of(environment, notes).python is None
    environment.python.interpreter_path = sys.executable + "x"
    with pytest.raises(UserErrorException, match="interpreter_path"):
        spec_of(environment, notes)


def test_curated_environment_uses_the_installed_packages(notes, ws, monkeypatch):
    spec = spec_of(Environment.get(ws, "AzureML-sklearn-1.5"), notes)
    assert not spec.needs_build
    assert "AzureML-sklearn-1.5" in notes.all()[0]
    # A curated environment needs a framework, here Chainer. Paceline installs this framework if it is missing, as for
    # an estimator.
    spec = spec_of(Environment.get(ws, "AzureML-Chainer-5.1.0-GPU"), notes)
    assert (spec.layered, spec.pip_packages) == (True, ("chainer",))
    estimator = TensorFlow("src", compute_target="local", entry_script="train.py", pip_packages=["einops"])
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "tensorflow" else find_spec(name))
    assert spec_of(estimator.run_config.environment, notes).pip_packages[-2:] == ("einops", "tensorflow")
    assert "tensorflow, which the estimator TensorFlow has, is not installed here" in notes.all()[-1]
    with pytest.raises(UserErrorException, match="there is no environment 'AzureML-nothing'"):
        Environment.get(ws, "AzureML-nothing")


def test_azure_images_and_dockerfiles_are_ignored_with_a_note(notes):
    environment = Environment("mine")
    environment.docker.enabled = True
    assert spec_of(environment, notes).docker_image is None
    environment.docker.base_dockerfile = "FROM ubuntu"
    assert (environment.docker.base_image, spec_of(environment, notes).docker_image) == (None, None)
    assert ["Azure's own image" in text or "base_dockerfile" in text for text in notes.all()] == [True, True]
