from __future__ import annotations

from pathlib import Path

from paceline.job.environment import EnvironmentSpec
from paceline.services.package.versions import PackageVersions, merged, of_environment
from tests.helpers import write_tree


def test_package_without_an_environment_requires_the_packages_that_its_scripts_import(tmp_path: Path) -> None:
    source = write_tree(
        tmp_path,
        {"score.py": "import json, numpy\nfrom sklearn import svm\nfrom . import own\n", "no.py": "not Python"},
    )
    packages = ["numpy==2.1.0", "scikit-learn==1.5.0", "scipy==1.14.0", "black==24.1", "torch==2.5.0+cpu"]
    found = of_environment(EnvironmentSpec(), packages, "pytorch", source)
    assert found.requirements == ("numpy==2.1.0", "scikit-learn==1.5.0", "torch==2.5.0")
    # Packages on which these packages depend get the versions of the run, as constraints.
    assert found.constraints == (*packages[:-1], "torch==2.5.0")


def test_package_versions_of_the_model_override_those_of_the_server() -> None:
    model = PackageVersions(("torch==2.5.0", "anyio==3.0"), ("typing_extensions==4.9",))
    server = PackageVersions(
        ("starlette==1.0", "uvicorn==0.40"), ("anyio==4.1", "typing-extensions==4.16", "idna==3.2")
    )
    both = merged(model, server)
    assert both.requirements == ("torch==2.5.0", "anyio==3.0", "starlette==1.0", "uvicorn==0.40")
    assert both.constraints == ("idna==3.2", "typing_extensions==4.9")
