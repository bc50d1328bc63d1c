"""`paceline run` loads the supervisor while it imports what a submission needs."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import click
import pytest

from paceline.cli.parser import app
from paceline.system.detached_process import library_dir
from paceline.targets import supervisors
from paceline.workspace import Workspace
from tests.cli.conftest import Cli
from tests.cli.test_verbs import modules_after

SLOW = {"rich", "yaml", "asyncio", "importlib.metadata"}


@pytest.fixture
def ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders of runs whose supervisors would have been started ahead, in a working directory with a script."""
    started: list[Path] = []
    monkeypatch.setattr(supervisors, "load", lambda run_dir, library, python, modules: started.append(run_dir))
    monkeypatch.setattr("paceline.cli.run.begin", lambda *_, **__: 0)
    monkeypatch.delenv("PACELINE_WORKSPACE", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    library_dir(Workspace(".paceline").path)
    return started


def call(words: str) -> None:
    app.main(["run", *words.split()], standalone_mode=False)


def test_paceline_run_imports_no_slow_library(cli: Cli) -> None:
    words = ("run", "-q", "-e", "e", "--env", "A=1", cli.script("print('first')"), "--", "--epochs", "5")
    assert not modules_after(cli, *words) & SLOW
    assert len(cli.run_ids()) == 1


def test_paceline_run_uses_the_supervisor_process_started_while_arguments_are_parsed(cli: Cli) -> None:
    if not Path("/proc/self/cmdline").exists():
        pytest.skip("needs /proc")
    cli("run", "-q", cli.script(""))  # this run creates the workspace
    seen = cli.folder / "seen"
    script = cli.script(f"""
        import os
        open({str(seen)!r}, "wb").write(open(f"/proc/{{os.getppid()}}/cmdline", "rb").read())
    """)
    run_id = cli("submit", "-e", "mine", script).stdout.strip()
    assert cli.wait(run_id) == "Completed"

    words = seen.read_text().split("\0")
    assert words[1:4] == ["-m", "paceline.supervisor", str(cli.run_folder(run_id))]
    # The command line has a socket and a list of modules to load. That shows that the supervisor was started before the
    # run existed.
    assert words[5:-1] == [*supervisors.FOR_THIS_MACHINE]


@pytest.mark.parametrize(
    ("words", "experiment"),
    [("train.py", None), ("-e digits train.py", "digits"), ("--compute local -m json.tool", None)],
)
def test_supervisor_process_is_started_early_for_a_run_on_this_machine(
    ahead: list[Path], words: str, experiment: str | None
) -> None:
    call(words)
    here = Path.cwd()
    assert [path.parent for path in ahead] == [here / ".paceline" / "runs"]
    assert ahead[0].name.rsplit("_", 2)[0] == (experiment or here.name.strip("-_"))
    assert not ahead[0].exists()


@pytest.mark.parametrize(
    "words",
    ["--compute lab train.py", "--dry-run train.py", "-e ../x train.py", "job.yaml", "--help", "--nmae train.py"],
)
def test_supervisor_is_not_started_early_for_a_call_that_starts_no_local_run(ahead: list[Path], words: str) -> None:
    Path("job.yaml").touch()
    with contextlib.suppress(click.UsageError):
        call(words)
    assert ahead == []


def test_supervisor_process_is_not_started_early_if_the_workspace_is_missing_or_invalid(
    ahead: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_WORKSPACE", "elsewhere")
    call("train.py")
    assert (ahead, os.path.exists("elsewhere")) == ([], False)
    monkeypatch.delenv("PACELINE_WORKSPACE")
    Path("paceline.toml").write_text("not [ toml")
    call("train.py")
    assert ahead == []


def test_refused_run_leaves_no_run_folder_and_no_supervisor_process(cli: Cli) -> None:
    """No run is left, and no process: the fixture looks for processes."""
    cli("run", "-q", cli.script(""))
    before = cli.run_ids()
    for words in (["--backend", "smoke"], ["--python", "nopython"], ["--restart-on-exception"]):
        cli("run", "src/train.py", *words, code=2)
    assert cli.run_ids() == before
