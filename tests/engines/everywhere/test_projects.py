"""Layouts of public repositories on other machines: as without Paceline, also where these do not see the project."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.engines.places import EACH, Place, place
from tests.projects.layouts import LAYOUTS, Layout, script
from tests.projects.test_projects import by_paceline, everything, made, plainly

#: Projects whose scripts read nothing above the project folder, because other machines don't have that.
TEN = (
    "by the file's own place",
    "changes into its outputs",
    "data above, from a folder",
    "link to data elsewhere",
    "links among its results",
    "looks for its files",
    "module of a package",
    "results beside the script",
    "results in out, settings by exec",
    "shell script",
)


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    (tmp_path / "home").mkdir()
    return Cli(tmp_path / "home")


@pytest.fixture(params=EACH)
def there(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with place(request.param, request, tmp_path, monkeypatch) as found:
        yield found


def environment() -> dict[str, str]:
    """The variables by which an engine's commands find it."""
    return {name: value for name, value in os.environ.items() if name.startswith(("SLURM_", "RAY_", "PACELINE_"))}


@pytest.mark.promise("machines-do-see-project-data")
@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.proof) for one in TEN])
def test_project_gives_the_same_result_on_another_machine_as_without_paceline(
    there: Place, cli: Cli, tmp_path: Path, name: str
) -> None:
    layout = LAYOUTS[name]
    # On Ray, the supervisor runs on the cluster. Without a datastore, it needs the project in a folder that the cluster
    # shares.
    area = there.folder if there.name == "ray, shared folder" else tmp_path
    found = by_paceline(
        cli,
        layout,
        area / "paceline",
        layout.cwd,
        options=("--compute", "there"),
        workspace=there.lab.workspace_dir,
        env=environment(),
    )
    assert found == plainly(layout, tmp_path / "plain", layout.cwd)


#: This script reads files that were not copied, with each kind of path. Then it writes beside them and over them.
READS = """
def below(top):
    return sorted(os.path.join(folder, name) for folder, _, names in os.walk(top) for name in names)
print(below("data"), below("src/data"), below("linked"), os.path.exists("big"), os.path.exists("wandb"), os.path.isdir("empty"))
print(open("data/x.txt").read(), open("./src/data/y.txt").read(), open("linked/z.txt").read(), os.path.islink("data"))
open("data/x.txt", "w").write("changed")
open("data/cache.bin", "w").write("new")
open("model.pt", "w").write("weights")
"""
DATA = {
    ".gitignore": "/data\nsrc/data\n/big\n.env\n*.pem\n/wandb\nlinked\n/empty\n",
    "train.py": script(READS),
    "data/x.txt": "one",
    "data/.env": "KEY=1",
    "src/data/y.txt": "two",
    "linked": "-> ../mnt",
    "../mnt/z.txt": "three",
    "wandb/run.txt": "old",
    ".env": "KEY=1",
    "server.pem": "KEY",
}


@pytest.mark.promise("machines-do-see-project-data", "run-writes-beside-outputs-other")
@pytest.mark.parametrize("there", ["ssh", "slurm, login host", "ray"], indirect=True)
def test_gitignored_project_data_is_sent_to_nodes_except_secrets_and_large_files(
    there: Place, cli: Cli, tmp_path: Path
) -> None:
    project = made(Layout(command=("train.py",), files=DATA), tmp_path)
    (project / "empty").mkdir()
    (project / "big").mkdir()
    with open(project / "big/x.bin", "wb") as file:
        file.truncate(2 * 10**9)  # the file has a hole and takes no disk space
    before = everything(project)
    cli.environment |= {**environment(), "PACELINE_WORKSPACE": str(there.lab.workspace_dir)}

    listed = cli("run", "--dry-run", "--compute", "there", "train.py", cwd=project).stdout
    assert (
        "linked in place: data/ (2 files, 8 B; ignored by '/data' in .gitignore); sent where it is not seen" in listed
    )
    assert "server.pem (3 B; ignored by '*.pem' in .gitignore); not sent: its name is that of a secret" in listed

    done = [cli("run", "--compute", "there", "train.py", cwd=project) for _ in range(2)]

    for one in done:
        assert "sent to others: data/ (2 files, 8 B; ignored by '/data' in .gitignore)" in one.stderr
        assert (
            "Not sent to machines that do not see it (more than 1 GB or 10,000 files in all): big/ (1 file, 2.0 GB"
            in one.stderr
        )
        seen, read = one.stdout.splitlines()[1:3]
        assert seen == "['data/x.txt'] ['src/data/y.txt'] ['linked/z.txt'] False False True"
        assert read == "one two three False"
    assert everything(project) == before
    for found in cli.json("list"):
        files = cli.json("files", found["run_id"])
        left = {one["name"] for one in files if one["name"].startswith("work/")}
        assert left == {"work/data/cache.bin", "work/data/x.txt", "work/model.pt"}
        shown = cli("show", found["run_id"]).stdout
        assert "src/data/ (1 file, 3 B; ignored by 'src/data' in .gitignore); sent where it is not seen" in shown
