"""`import azureml` in separate programs: an import stays for a process's life."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline.compat import shim_dir

SHIM = shim_dir().parent / "azureml_names"


def python(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    source = Path(paceline.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*paths, source)))}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=180, check=False
    )


@pytest.fixture
def real(tmp_path):
    """A stand-in for site-packages with the real SDK, and with a distribution beside it."""
    # Don't use the test's working directory, because it is first on sys.path.
    top = tmp_path / "site"
    for package in ("core", "mlflow", "mlflow/store"):
        (top / "azureml" / package).mkdir(parents=True, exist_ok=True)
        (top / "azureml" / package / "__init__.py").write_text(f"IS_REAL = {package!r}\n")
    (top / "azureml" / "__init__.py").write_text("__path__ = __import__('pkgutil').extend_path(__path__, __name__)\n")
    (top / "azureml" / "core" / "only_there.py").write_text("")
    # The real package also imports a module of its own by its full name while it is being loaded.
    with (top / "azureml" / "mlflow" / "__init__.py").open("a") as file:
        file.write("import azureml.mlflow.store as store\n")
    return top


SAME = """
import azureml, azureml.core
from azureml.core import Run, Workspace
from azureml.core.run import Run as Again
from azureml.exceptions import ComputeTargetException
from azureml.core.compute_target import ComputeTargetException as Other
assert Run is Again and ComputeTargetException is Other
assert Run.__module__ == "paceline.compat.azureml.core.run", Run.__module__
assert azureml.core.VERSION
"""


def test_importing_paceline_azureml_provides_the_azureml_modules():
    done = python(f"import paceline.azureml\n{SAME}")
    assert (done.returncode, done.stderr) == (0, "")


def test_paceline_modules_are_imported_as_azureml_if_the_alias_folder_is_on_pythonpath(real):
    done = python(SAME, SHIM, real)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.promise("paceline-s-names-come-before")
@pytest.mark.parametrize("first", ["import paceline.azureml", "import azureml"], ids=["driver", "worker"])
def test_azureml_core_is_imported_from_the_alias_package_even_if_the_real_sdk_is_on_the_path(real, first):
    done = python(
        f"{first}\nimport azureml.core, azureml.mlflow.store\n"
        "assert azureml.mlflow.IS_REAL == 'mlflow' and azureml.mlflow.store.IS_REAL == 'mlflow/store'\n"
        "assert not hasattr(azureml.core, 'IS_REAL')\n"
        "try:\n    import azureml.core.only_there\nexcept ModuleNotFoundError:\n    print('never half of each')\n",
        SHIM,
        real,
    )
    assert (done.returncode, done.stdout) == (0, "never half of each\n"), done.stderr


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("azureml.train.automl", "sweep"),
        ("azureml.interpret", "shap"),
        ("azureml.contrib.brainwave", "contrib.services"),
        ("azureml.contrib.pipeline.steps", "azureml.pipeline.steps"),
    ],
)
def test_importing_an_unsupported_azureml_module_raises_an_error_that_names_the_alternative(name, instead):
    done = python(f"import paceline.azureml, importlib\nimportlib.import_module({name!r})")
    last = done.stderr.strip().splitlines()[-1]
    assert "ModuleNotFoundError: No module named 'azureml." in last
    assert instead in last
    assert "docs/from-azureml.md" in last


def test_unchanged_azureml_program_runs_under_python_m_paceline_azureml(tmp_path):
    (tmp_path / "beside.py").write_text("VALUE = 5\n")
    (tmp_path / "driver.py").write_text(
        "import sys, beside\nfrom azureml.core import Workspace\nprint(sys.argv[1:], beside.VALUE)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "paceline.azureml", str(tmp_path / "driver.py"), "--x", "1"],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.stdout == "['--x', '1'] 5\n", done.stderr
    missing = subprocess.run(
        [sys.executable, "-m", "paceline.azureml", "nowhere.py"],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    "first", ["import azureml.core", "from azureml.core.run import Run", "from azureml.train.dnn import PyTorch"]
)
@pytest.mark.parametrize("place", ["driver", "worker"])
def test_standard_submodules_are_available_after_importing_the_sdk(place, first):
    """30 public files write `import urllib` and then `urllib.request.urlretrieve`, which the SDK's imports make work."""
    code = f"""
import sys
{"import paceline.azureml" if place == "driver" else ""}
import urllib, importlib, http, xml, concurrent, email, logging
{first}
before = set(sys.modules)
urllib.request.Request, urllib.parse.quote, urllib.error.URLError, urllib.response.addinfourl, xml.etree.ElementTree.parse
concurrent.futures.ThreadPoolExecutor, importlib.util.find_spec, importlib.metadata.version, importlib.machinery.ModuleSpec
http.client.HTTPException, http.cookiejar.CookieJar, email.message.Message, email.utils.formatdate, logging.handlers.QueueHandler
assert not hasattr(urllib, "robotparser") and not hasattr(urllib, "nothing")
assert "xml.etree.ElementTree" in set(sys.modules) - before, "loaded before it was asked for"
"""
    done = python(code, *([SHIM] if place == "worker" else []))
    assert (done.returncode, done.stderr) == (0, "")


def test_submodules_are_not_loaded_for_programs_without_azureml():
    done = python("import urllib, paceline; print(vars(urllib).get('__getattr__'))")
    assert done.stdout == "None\n"


def test_python_m_paceline_azureml_with_m_runs_a_module_from_the_working_directory(tmp_path):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "__init__.py").touch()
    (tmp_path / "jobs" / "helper.py").write_text("import azureml.core\nX = azureml.core.__name__\n")
    (tmp_path / "jobs" / "train.py").write_text(
        "import sys, jobs.helper\nfrom . import helper\nprint(__name__, __spec__.name, sys.argv[1:], helper.X)\n"
    )

    def run(*words):
        return subprocess.run(
            [sys.executable, "-m", "paceline.azureml", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    done = run("-m", "jobs.train", "-x", "1")
    assert (done.stdout, done.stderr) == ("__main__ jobs.train ['-x', '1'] paceline.compat.azureml.core\n", "")
    for words, said in (
        (["-m", "jobs.nothing"], "no module 'jobs.nothing'"),
        (["-m", "no.such"], "'no.such'"),
        (["-m"], "-m without"),
    ):
        refused = run(*words)
        assert (refused.returncode, said in refused.stderr, "Traceback" in refused.stderr) == (2, True, False), refused


def test_dunder_file_of_a_script_run_by_python_m_paceline_azureml_is_an_absolute_path(tmp_path):
    """`Path(__file__).parent.parent` was the working directory, not the folder above the driver's."""
    (tmp_path / "driver.py").write_text("print(__file__)\n")
    words = [sys.executable, "-m", "paceline.azureml", "driver.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == (str(tmp_path / "driver.py"), "")
