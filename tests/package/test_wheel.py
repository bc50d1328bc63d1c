"""The published files: the wheel and the source archive are built, and installed as by a user on each Python of this machine."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

from tests.docs.conftest import lacking
from tests.docs.pages import LINK
from tests.engines.conftest import require_engine
from tests.ranks import clean_environment

ROOT = Path(__file__).parents[2]


def load(name: str) -> Any:
    """Return a program in .ci/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Register the module, because the program's dataclasses look for it in sys.modules.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


RELEASE = load("release")
#: Messages of uv when no package index can be reached.
_NO_INDEX = ("Failed to fetch", "error sending request", "Could not connect", "dns error")


def done(*command: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """What came of a command, outside of any environment of the tests."""
    environment = {**clean_environment(), "UV_PYTHON_DOWNLOADS": "never"}
    for name in ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE"):
        environment.pop(name, None)
    return subprocess.run(
        list(map(str, command)), env=environment, cwd=cwd, capture_output=True, text=True, check=False, timeout=600
    )


def uv(*words: object) -> subprocess.CompletedProcess[str]:
    return done(Path(sys.executable).with_name("uv"), *words)


@dataclass(frozen=True)
class Built:
    wheel: Path
    source: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(*RELEASE.archives(tmp_path_factory.mktemp("dist")))


def test_wheel_and_source_archive_pass_twine_and_check_wheel_contents(built: Built) -> None:
    lacking({"twine", "check_wheel_contents"})
    checked = done(sys.executable, "-m", "twine", "check", "--strict", built.wheel, built.source)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    contents = done(Path(sys.executable).with_name("check-wheel-contents"), built.wheel, cwd=ROOT)
    assert contents.returncode == 0, contents.stdout + contents.stderr


def test_links_and_pictures_of_the_package_page_lead_to_the_repository(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        metadata = Parser().parsestr(archive.read("paceline-0.1.0.dist-info/METADATA").decode())
    page = metadata.get_payload()
    (source,) = [url.split(", ")[1] for url in metadata.get_all("Project-URL") if url.startswith("Source, ")]
    found = LINK.findall(page)
    assert len(found) > 20
    assert [link for link in found if not link.startswith(f"{source}/")] == []
    assert f"![A run in the browser: its curves by rank, live]({source}/raw/v0.1.0/docs/pictures/ui-run.png)" in page
    assert f"({source}/blob/v0.1.0/docs/install.md)" in page


def test_wheel_contains_the_type_marker_man_page_and_shell_completions(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        names = set(wheel.namelist())
    assert {"paceline/py.typed", "paceline/ui/static/uplot.js"} <= names
    data = "paceline-0.1.0.data/data/share"
    assert {
        f"{data}/man/man1/paceline.1",
        f"{data}/bash-completion/completions/paceline",
        f"{data}/zsh/site-functions/_paceline",
        f"{data}/fish/vendor_completions.d/paceline.fish",
    } <= names
    assert {"paceline/docs/sweeps.md", "paceline/docs/tutorials/03-model-in-parts.md"} <= names
    assert {"paceline/examples/start/.gitignore", "paceline/examples/sweep/sweep.yaml"} <= names
    left_out = ("pictures/", "decisions/", "contributing/", "promises.md", ".ipynb", ".es.md", ".ru.md")
    assert not [name for name in names if name.startswith("paceline/docs/") and any(one in name for one in left_out)]
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "docs/")) or ".pyc" in name]
    assert {"LICENSE", "src/paceline/ui/static/uPlot-LICENSE.txt"} <= {
        name.partition("/licenses/")[2] for name in names if ".dist-info/" in name
    }
    with zipfile.ZipFile(built.wheel) as archive:
        metadata = archive.read("paceline-0.1.0.dist-info/METADATA").decode().splitlines()
    assert "License-Expression: Apache-2.0 AND MIT" in metadata
    # The source has 2.5 MB (docs/decisions/0017-docs.md), pages and examples have 0.2 MB, the archive's entries have 0.2 MB.
    assert built.wheel.stat().st_size < 3_240_000


def test_source_archive_of_a_tree_with_a_workspace_has_the_sources_but_not_the_workspace(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore", ".ci/package_page.py"):
        (tree / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    # Create a workspace with the link from which the supervisor of a run loads Paceline.
    (tree / ".paceline/lib/1").mkdir(parents=True)
    (tree / ".paceline/lib/1/paceline").symlink_to(tree / "src/paceline")
    with tarfile.open(RELEASE.pack("sdist", tree, tmp_path / "dist")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert "src/paceline/__init__.py" in names
    assert not [name for name in names if name.startswith(".paceline")]


def interpreters() -> dict[str, str]:
    """Version -> interpreter, of those that are here."""
    compat = load("compat")
    found = {version: compat.interpreter(version) for version in compat.PYTHON}
    return {version: path for version, path in found.items() if path is not None}


def number(version: str) -> tuple[int, ...]:
    """To be compared: 3.9 is older than 3.10."""
    return tuple(map(int, version.split(".")))


@pytest.mark.promise("wheel-installed-runs-script-without")
@pytest.mark.parametrize(
    "only_ends", [True, pytest.param(False, marks=pytest.mark.proof)], ids=["oldest and newest", "all"]
)
def test_wheel_installs_and_runs_a_script_on_each_python(built: Built, tmp_path: Path, only_ends: bool) -> None:
    found = interpreters()
    assert f"{sys.version_info[0]}.{sys.version_info[1]}" in found
    if only_ends:  # versions between the oldest and the newest behave like these two
        found = {version: found[version] for version in (min(found, key=number), max(found, key=number))}
    (tmp_path / "hello.py").write_text("import paceline\npaceline.Run.get_context().log('loss', 0.5)\nprint('hello')\n")
    for version, interpreter in found.items():
        place = tmp_path / version
        assert uv("venv", "--quiet", "--no-project", "--python", interpreter, place).returncode == 0
        installed = uv("pip", "install", "--quiet", "--python", place / "bin/python", built.wheel)
        require_engine("package index", not any(words in installed.stderr for words in _NO_INDEX))
        assert installed.returncode == 0, installed.stderr
        names = done(
            place / "bin/python", "-c", "import sys, paceline; print('torch' in sys.modules, paceline.__file__)"
        )
        assert names.stdout.split()[0] == "False", names.stderr
        assert str(place) in names.stdout
        ran = done(place / "bin/paceline", "run", tmp_path / "hello.py", cwd=place)
        assert (ran.returncode, "hello" in ran.stdout) == (0, True), ran.stdout + ran.stderr
        told = done(place / "bin/paceline", "metrics", cwd=place)
        assert "0.5" in told.stdout, told.stdout + told.stderr
        assert (place / "share/man/man1/paceline.1").is_file()
        paceline = place / "bin/paceline"
        assert done(paceline, "docs", "sweeps", cwd=place).stdout.startswith("# ")
        assert done(paceline, "init", "first", cwd=place).returncode == 0
        first = done(paceline, "run", "train.py", cwd=place / "first")
        assert (first.returncode, "loss 0.0" in first.stdout) == (0, True), first.stdout + first.stderr
        assert done(paceline, "examples", "sweep", cwd=place).returncode == 0
        assert (place / "sweep" / "sweep.yaml").is_file()


def test_committed_shell_completions_and_man_page_equal_the_generated_ones() -> None:
    made = done(sys.executable, ROOT / ".ci" / "shell_files.py", "--check")
    assert made.returncode == 0, made.stdout + made.stderr
