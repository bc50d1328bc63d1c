"""The names for every program of an environment."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paceline.cli import azureml
from paceline.compat.azureml import everywhere
from paceline.errors import UserError

SAME = """
import site, sys
site.addsitedir(sys.argv[1])
assert not any(name.startswith("paceline.") for name in sys.modules), "nothing is loaded before it is asked for"
from azureml.core.run import Run
import azureml.core
assert Run.__module__ == "paceline.compat.azureml.core.run" and azureml.core.VERSION and azureml.core.Run is Run
import azureml.mlflow
assert azureml.mlflow.IS_REAL
"""


def python(code, folder):
    return subprocess.run(
        [sys.executable, "-c", code, folder], capture_output=True, text=True, timeout=180, check=False
    )


@pytest.mark.promise("one-command-gives-them-program")
def test_azureml_install_adds_alias_modules_to_site_packages_and_uninstall_removes_them(tmp_path, monkeypatch, capsys):
    site = tmp_path / "site-packages"
    monkeypatch.setattr(everywhere, "_folders", lambda: [site])
    for package in ("core", "mlflow"):
        (site / "azureml" / package).mkdir(parents=True)
        (site / "azureml" / package / "__init__.py").write_text("IS_REAL = True\n")
    (site / "azureml" / "__init__.py").write_text("")
    for _ in range(2):
        azureml.install()
    assert str(site) in capsys.readouterr().out
    done = python(SAME, str(site))
    assert (done.returncode, done.stderr) == (0, "")
    # Simulate that Paceline was uninstalled but these files were left behind.
    done = python(
        "import site, sys; site.addsitedir(sys.argv[1]); sys.modules['paceline'] = None; from azureml.core import IS_REAL",
        str(site),
    )
    assert (done.returncode, done.stderr) == (0, "")
    for _ in range(2):
        azureml.uninstall()
    assert capsys.readouterr().out == f"Removed from {site}\nNothing was installed there.\n"
    left = [path for path in site.rglob("*") if "azureml" not in path.relative_to(site).parts and path.is_file()]
    assert left == []


def test_unwritable_environment_folder_raises_an_error_with_alternatives(tmp_path, monkeypatch):
    (tmp_path / "site").write_text("")
    monkeypatch.setattr(everywhere, "_folders", lambda: [tmp_path / "site"])
    with pytest.raises(UserError, match=r"can't be written: .*Write `import paceline\.azureml`"):
        everywhere.install()
