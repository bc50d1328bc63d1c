from __future__ import annotations

import pytest

from paceline.compat.azureml.core.environment import Environment
from paceline.compat.azureml.exceptions import UserErrorException
from paceline.compat.azureml.packages import spec_of
from paceline.compat.azureml.policy import SubmissionNotes


def test_package_added_to_a_cloned_curated_environment_keeps_the_installed_packages(ws):
    mine = Environment.get(ws, "AzureML-Minimal").clone("mine")
    mine.python.conda_dependencies.add_pip_package("tqdm")
    found = spec_of(mine, SubmissionNotes())
    # tqdm is added to the installed packages, which a curated environment uses.
    assert (found.pip_packages, found.layered) == (("tqdm",), True)


def test_environment_version_is_found_by_its_label(ws):
    mine = Environment("mine")
    mine.environment_variables = {"A": "1"}
    mine.register(ws)
    mine.environment_variables = {"A": "2"}
    mine.register(ws)
    Environment.label(ws, "mine", "1", ["good"])
    assert Environment.get(ws, "mine", label="good").environment_variables == {"A": "1"}
    assert Environment.get(ws, "mine", label="latest").environment_variables == {"A": "2"}
    with pytest.raises(UserErrorException, match="label 'bad'"):
        Environment.get(ws, "mine", label="bad")
    with pytest.raises(UserErrorException, match="build context"):
        Environment.from_docker_build_context("x", None)


def test_hashes_on_continuation_lines_of_a_requirements_file_are_ignored(tmp_path):
    """Regression: poetry and pip-compile write hashes on continuation lines. Each hash counted as a separate
    requirement, so the run failed."""
    text = (
        'attrs==22.2.0 ; python_version >= "3.8" \\\n    --hash=sha256:29e9 \\\n    --hash=sha256:c973\neinops  # why\n'
    )
    (tmp_path / "requirements.txt").write_text(text)
    found = Environment.from_pip_requirements("e", str(tmp_path / "requirements.txt"))
    assert [*found.python.conda_dependencies.pip_packages] == ['attrs==22.2.0 ; python_version >= "3.8"', "einops"]
