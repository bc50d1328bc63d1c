"""A packaged service: the content of its folder, and that it serves without Paceline."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from paceline.environments.environment import Environment
from paceline.errors import ServiceError
from paceline.models.model import Model
from paceline.services.package import versions, write
from paceline.workspace import Workspace
from tests.helpers import wait_until

#: Packages that the server needs, for an interpreter that has no packages.
_SERVER = ("starlette", "uvicorn", "anyio", "click", "h11", "idna", "typing_extensions", "httptools")


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """Return variables with which this Python's base has the packages of requirements.txt, and no Paceline."""
    folder = tmp_path / "installed"
    folder.mkdir()
    for name in _SERVER:
        found = importlib.util.find_spec(name)
        if found is not None and found.origin is not None:
            path = Path(found.origin)
            path = path.parent if path.name == "__init__.py" else path
            (folder / path.name).symlink_to(path)
    return {"PATH": os.environ["PATH"], "PYTHONPATH": str(folder), "PYTHONNOUSERSITE": "1"}


def base_python() -> str:
    """The interpreter that this environment was made from."""
    return os.path.join(sys.base_prefix, "bin", f"python{sys.version_info[0]}.{sys.version_info[1]}")


def asked(port: int, key: str | None = None) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/score", b'{"x": [1]}', {"Authorization": f"Bearer {key}"} if key else {}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, None


@pytest.mark.promise("packaged-service-built-serves-container")
def test_package_serves_without_an_installed_paceline(
    workspace: Workspace, source: Path, tmp_path: Path, short_path: Path, bare: dict[str, str], free_port: int
) -> None:
    Model.register(workspace, source / "two.txt", "factor")
    folder = workspace.package("factor:1", tmp_path / "away", entry_script=source / "score.py", workers=2)
    # The package works after its folder was moved.
    moved = folder.rename(tmp_path / "elsewhere")
    for path in moved.rglob("*"):
        if path.is_file():
            assert str(tmp_path).encode() not in path.read_bytes(), path
    own = subprocess.run(
        [base_python(), "-c", "import paceline"], env=bare, cwd="/", capture_output=True, text=True, check=False
    )
    assert "No module named 'paceline'" in own.stderr
    for path in moved.rglob("*"):
        path.chmod(path.stat().st_mode & ~0o222)
    words = [base_python(), str(moved / "start.py"), "--port", str(free_port), "--host", "0.0.0.0"]
    refused = subprocess.run(words, env=bare, cwd="/", capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "set PACELINE_KEY" in refused.stderr
    # A temporary folder of its own, because another test may serve a package at the same time.
    variables = {**bare, "PACELINE_KEY": "k" * 20, "TMPDIR": str(short_path)}
    server = subprocess.Popen(words, env=variables, cwd="/", stderr=subprocess.PIPE, text=True)
    try:
        check = [base_python(), str(moved / "start.py"), "--check", "--port", str(free_port)]
        wait_until(lambda: subprocess.run(check, env=bare, check=False, capture_output=True).returncode == 0, "ready")
        assert asked(free_port)[0] == 401
        status, answer = asked(free_port, "k" * 20)
        assert (status, answer["y"]) == (200, [2])
        [made] = short_path.glob("paceline-temp-service-*")
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
        assert b"k" * 20 not in Path(f"/proc/{answer['pid']}/environ").read_bytes()
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 0
        # The server has removed its folder, with its keys.
        assert not made.exists()
        # A package whose model files were changed is not served.
        [model] = (moved / "models").rglob("two.txt")
        model.chmod(0o644)
        model.write_text("3")
        changed = subprocess.run([*words, "--no-key"], env=bare, cwd="/", capture_output=True, text=True, check=False)
        assert changed.returncode == 1
        assert "two.txt" in changed.stderr
    finally:
        server.kill()
        server.communicate()


@pytest.mark.promise("packaged-service-sdk-s-names")
def test_scoring_script_that_imports_azureml_runs_in_a_service_package(
    workspace: Workspace, source: Path, tmp_path: Path, bare: dict[str, str], free_port: int
) -> None:
    (source / "score.py").write_text(
        "from azureml.core.model import Model\n"
        "from azureml.monitoring import ModelDataCollector\n\n"
        "def init():\n    global factor\n    factor = float(open(Model.get_model_path('factor')).read())\n\n"
        "def run(data):\n    return {'y': factor}\n"
    )
    Model.register(workspace, source / "two.txt", "factor")
    environment = Environment(pip_packages=["azureml-defaults==1.0.85"])  # type: ignore[arg-type]
    folder = workspace.package("factor:1", tmp_path / "away", entry_script=source / "score.py", environment=environment)
    # The Azure SDK is not installed, because it would log to a service that does not exist here.
    assert "azureml" not in (folder / "requirements.txt").read_text() + (folder / "constraints.txt").read_text()
    words = [base_python(), str(folder / "start.py"), "--port", str(free_port), "--no-key"]
    server = subprocess.Popen(words, env=bare, cwd="/", stderr=subprocess.PIPE, text=True)
    try:
        check = [base_python(), str(folder / "start.py"), "--check", "--port", str(free_port)]

        def is_ready() -> bool:
            assert server.poll() is None, server.communicate()[1]
            return subprocess.run(check, env=bare, check=False, capture_output=True).returncode == 0

        wait_until(is_ready, "ready")
        assert asked(free_port) == (200, {"y": 2.0})
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)


def test_service_package_pins_the_package_versions_of_its_environment(
    workspace: Workspace, source: Path, tmp_path: Path
) -> None:
    # A run that built its environment records its packages in this form.
    environment = Environment(locked_pip=["scikit-learn==1.4.2", "numpy==1.26.4"], pip_packages=["scikit-learn"])  # type: ignore[arg-type]
    folder = workspace.package(
        source / "two.txt", tmp_path / "away", entry_script=source / "score.py", environment=environment
    )
    lines = (folder / "requirements.txt").read_text().split()
    assert lines[:2] == ["scikit-learn==1.4.2", "numpy==1.26.4"]
    assert any(line.startswith("starlette==") for line in lines)
    assert "anyio==" in (folder / "constraints.txt").read_text()
    text = (folder / "Dockerfile").read_text()
    assert f"FROM python:{sys.version_info[0]}.{sys.version_info[1]}-slim\n" in text
    assert not any(path.name == "__pycache__" for path in folder.rglob("*"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"models": "none"}, "there is no model 'none'"),
        ({"entry_script": "none.py"}, "there is no such file in"),
        ({"directory": "src"}, "is there already. Name another folder, or say --overwrite"),
        ({"directory": "src", "overwrite": True}, "something else than a packaged service"),
        ({"workers": 0}, "whole number from 1 to"),
        ({"environment": Environment(conda_packages=["r-base"])}, "packages of conda's"),  # type: ignore[arg-type]
        ({"environment": Environment(locked_pip=["a @ file:///tmp/a.whl"])}, "only this machine has"),  # type: ignore[arg-type]
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_invalid_package_request_is_refused_and_writes_nothing(
    workspace: Workspace, source: Path, values: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {
        "models": source / "two.txt",
        "directory": "away",
        "entry_script": "src/score.py",
        **values,
    }
    before = sorted(path.name for path in Path.cwd().iterdir())
    with pytest.raises(ValueError, match=message):
        workspace.package(given.pop("models"), given.pop("directory"), **given)
    assert sorted(path.name for path in Path.cwd().iterdir()) == before


def test_package_can_overwrite_an_earlier_package(workspace: Workspace, source: Path) -> None:
    first = workspace.package(source / "two.txt", "away", entry_script="src/score.py")
    (first / "models" / "0" / "two.txt").unlink()
    workspace.package(source / "three.txt", "away", entry_script="src/score.py", overwrite=True)
    assert [path.name for path in (first / "models" / "0").iterdir()] == ["three.txt"]


@pytest.mark.promise("package-written-beside-script-does")
def test_model_package_written_beside_its_script_does_not_include_itself(workspace: Workspace, source: Path) -> None:
    """Regression: a package that was written into the script's folder contained a copy of itself, and so a second copy
    of the model."""
    for overwrite in (False, True):
        made = workspace.package(
            source / "two.txt", source / "away", entry_script=source / "score.py", overwrite=overwrite
        )
        assert sorted(path.name for path in (made / "source").rglob("*")) == ["score.py", "three.txt", "two.txt"]


@pytest.mark.parametrize("base", ["x\nRUN id", "x\r\nRUN id", "x\\", "x AS y", "", "-x", "x\u2028RUN id"])
def test_base_image_name_that_injects_a_dockerfile_line_is_refused(
    workspace: Workspace, source: Path, tmp_path: Path, base: str
) -> None:
    with pytest.raises(ServiceError, match="must be the name of an image"):
        workspace.package("factor:1", tmp_path / "out", entry_script=source / "score.py", base=base)
    assert not (tmp_path / "out").exists()


def test_package_requirement_with_a_line_break_is_refused() -> None:
    found = versions.PackageVersions(("a==1\n--index-url http://x",), ())
    with pytest.raises(ServiceError, match="more than one line"):
        write._check_lines(found)
