"""`paceline run X` does what `python X` does where the user stands: same output, exit code, files, folder and path."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cli.conftest import Cli
from tests.projects.layouts import LAYOUTS, Layout

#: Project layouts that `make test` also starts from another folder. `make proof` does that with all layouts.
ELSEWHERE = ("data that .gitignore names", "src and configs", "by the file's own place", "no repository")


#: Project layouts in which the script makes a folder, so the second of two processes would fail.
ALONE = ("changes into its outputs", "links among its results", "results beside the script", "removes what it made")


class Outcome(NamedTuple):
    """code: the exit code. lines: of standard output. files: path in the area -> text, of those that are new or changed."""

    code: int
    lines: list[str]
    files: dict[str, str]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    (tmp_path / "home").mkdir()
    return Cli(tmp_path / "home")


def made(layout: Layout, area: Path) -> Path:
    """Make the project below `area`; return its folder."""
    project = area / "project"
    for name, text in layout.files.items():
        path = Path(os.path.normpath(project / name))
        path.parent.mkdir(parents=True, exist_ok=True)
        if text.startswith("-> "):
            path.symlink_to(text[3:])
            continue
        path.write_text(text)
        if text.startswith("#!"):
            path.chmod(0o755)
    (area / "elsewhere").mkdir()
    if layout.is_git:
        git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run([*git, "init", "-q"], cwd=project, check=True)
        subprocess.run([*git, "add", "."], cwd=project, check=True)
        for name in layout.tracked:
            subprocess.run([*git, "add", "-f", name], cwd=project, check=True)
        subprocess.run([*git, "commit", "-q", "-m", "first"], cwd=project, check=True)
    return project


def texts(area: Path) -> dict[str, str]:
    found = {}
    for folder, folders, names in os.walk(area):
        folders[:] = [name for name in folders if name not in (".git", "__pycache__")]
        for name in names:
            path = Path(folder, name)
            found[str(path.relative_to(area))] = path.read_text()
    return found


def everything(area: Path) -> dict[str, tuple[int, int, str]]:
    """Return mode, time of change and content of everything below `area`, including git's own files and folders."""
    found = {}
    for folder, folders, names in os.walk(area):
        for path in (Path(folder, name) for name in (*folders, *names)):
            about = path.lstat()
            is_data = not (path.is_symlink() or path.is_dir() or about.st_size > 1 << 30)
            content = os.readlink(path) if path.is_symlink() else path.read_bytes() if is_data else ""
            text = content if isinstance(content, str) else hashlib.sha256(content).hexdigest()
            found[str(path.relative_to(area))] = (about.st_mode, about.st_mtime_ns, text)
    return found


def words_from(layout: Layout, cwd: str) -> tuple[str, ...]:
    """Return the command's words for the working directory `cwd`, which is relative to the project."""
    first, *others = layout.command
    if first == "-m" or cwd == layout.cwd or (layout.is_program and "/" not in first):
        return layout.command
    return (os.path.relpath(os.path.join("/project", layout.cwd, first), os.path.join("/project", cwd)), *others)


def plainly(layout: Layout, area: Path, cwd: str) -> Outcome:
    project = made(layout, area)
    before = texts(area)
    words = words_from(layout, cwd)
    environment = {
        **{"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(area), "PYTHONUNBUFFERED": "1"},
        **layout.env,
    }
    argv = words if layout.is_program else [sys.executable, *words]
    # Both streams go into one pipe, because a run's log has both of them.
    out, err = subprocess.PIPE, subprocess.STDOUT
    done = subprocess.run(argv, cwd=project / cwd, env=environment, stdout=out, stderr=err, text=True, check=False)
    after = {name: text for name, text in texts(area).items() if before.get(name) != text}
    return Outcome(done.returncode, done.stdout.replace(str(area), "").splitlines(), after)


def by_paceline(
    cli: Cli,
    layout: Layout,
    area: Path,
    cwd: str,
    *,
    options: Sequence[str] = (),
    workspace: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Outcome:
    """Run the layout's command by `paceline run`. Its lines are those of the first worker, and all have printed the same.

    options: further ones of `run`. workspace: one that is there; default: a new one. env: further variables of the command's.
    """
    project = made(layout, area)
    before = everything(area)
    workspace = workspace or cli.folder / "ws"
    words = words_from(layout, cwd)
    typed = ["--", *words] if layout.is_program else [*words[:2], "--", *words[2:]] if words[0] == "-m" else words
    if not layout.is_program and words[0] != "-m":
        typed = [words[0], "--", *words[1:]]
    environment = {**layout.env, "PACELINE_WORKSPACE": str(workspace), **(env or {})}
    done = subprocess.run(
        cli.argv("run", "-q", *options, *typed),
        cwd=project / cwd,
        env={**cli.environment, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert everything(area) == before, "the user's own folders are as they were"
    assert (workspace / "runs").exists(), done.stderr
    (run,) = [path for path in (workspace / "runs").iterdir() if path.name[0] != "."]
    files = {}
    # If the program is in another folder, Paceline copies the working directory. job.json names the copied folder.
    source = os.path.relpath(json.loads((run / "job.json").read_text())["source_directory"], area)
    for top, place in ((run / "outputs", os.path.join("project", cwd, "outputs")), (run / "work", source)):
        for name, text in texts(top).items() if top.is_dir() else ():
            own = name.removeprefix("above" + str(area))
            files[own.lstrip("/") if own != name else os.path.normpath(os.path.join(place, name))] = text
    logs = [path.read_text() for path in sorted((run / "logs").glob("rank_*.log"))]
    # If the copy is made of links, the path after `work` is a path of the user. Otherwise it is a path in the copied folder.
    work = re.compile(rf"/[^\s']*/runs/[^/\s]+/work({re.escape(str(area))})?")
    logs = [work.sub(lambda found: "" if found[1] else f"/{source}", log) for log in logs]
    assert logs
    assert {*logs} == {logs[0]}, "all workers print the same"
    return Outcome(done.returncode, logs[0].replace(str(area), "").splitlines(), files)


def check(cli: Cli, name: str, tmp_path: Path, cwd: str | None = None) -> None:
    layout = LAYOUTS[name]
    cwd = layout.cwd if cwd is None else cwd
    expected = plainly(layout, tmp_path / "plain", cwd)
    assert by_paceline(cli, layout, tmp_path / "paceline", cwd) == expected


@pytest.mark.promise("paceline-run-x-does-python", "run-writes-beside-outputs-other")
@pytest.mark.parametrize("name", LAYOUTS)
def test_paceline_run_of_a_project_has_the_same_output_files_and_exit_code_as_plain_python(
    cli: Cli, tmp_path: Path, name: str
) -> None:
    check(cli, name, tmp_path)


@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.proof) for one in LAYOUTS if one not in ALONE])
def test_paceline_run_of_a_project_with_two_processes_equals_one_plain_python_process(
    cli: Cli, tmp_path: Path, name: str
) -> None:
    layout = LAYOUTS[name]
    expected = plainly(layout, tmp_path / "plain", layout.cwd)
    found = by_paceline(
        cli, layout, tmp_path / "paceline", layout.cwd, options=("-j", "2", "--backend", "gloo", "--cores", "0")
    )
    assert found == expected


@pytest.mark.promise("paceline-run-x-does-python")
@pytest.mark.parametrize("cwd", ["data", "../elsewhere"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ELSEWHERE else [pytest.mark.proof])
        for name, layout in LAYOUTS.items()
        if "/" in layout.command[0] or layout.command[0].endswith(".py")
    ],
)
def test_paceline_run_from_another_working_directory_equals_plain_python_started_there(
    cli: Cli, tmp_path: Path, name: str, cwd: str
) -> None:
    layout = LAYOUTS[name]
    if cwd == "data" and not any(path.startswith("data/") for path in layout.files):
        cwd = "."
    check(cli, name, tmp_path, cwd)


#: A short form of the import finder that setuptools writes for `pip install -e`.
FINDER = """
import sys
from importlib.util import spec_from_file_location
MAPPING = {"mapped": %r}
class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return spec_from_file_location(name, MAPPING[name] + "/__init__.py") if name in MAPPING else None
sys.meta_path.append(Finder)
"""


@pytest.mark.promise("installed-place-project-imported-copy")
def test_packages_in_editable_installs_are_imported_from_the_snapshot(cli: Cli, tmp_path: Path) -> None:
    script = (
        "import mapped, on_path, subprocess, sys\nprint(mapped.__file__)\nprint(on_path.__file__)\n"
        "subprocess.run([sys.executable, '-c', 'import mapped, on_path; print(mapped.__file__); print(on_path.__file__)'])\n"
    )
    files = {"train.py": script, "src/on_path.py": "", "lib/mapped/__init__.py": ""}
    project = made(Layout(command=("train.py",), files=files), tmp_path)
    site = tmp_path / "site"
    site.mkdir()
    (site / "__editable___mapped_finder.py").write_text(FINDER % str(project / "lib/mapped"))
    (site / "sitecustomize.py").write_text("import __editable___mapped_finder")
    environment = {**cli.environment, "PYTHONPATH": f"{site}{os.pathsep}{project / 'src'}", "PYTHONUNBUFFERED": "1"}
    command = cli.argv("run", "-q", "train.py")
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    for line in lines:
        assert f"/work{project}/" in line
