"""Names that break command lines, shells, JSON and terminals arrive unchanged."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.job.job import Job
from tests.engines.lab import Lab

NASTY = [
    "two words",
    " ",
    'a "quoted" name',
    "it's",
    "new\nline",
    "tab\tand return\r",
    "ünï ☃ 漢字",
    "; rm -rf ~",
    "$(touch owned) `touch owned` $NOWHERE",
    "&& touch owned | cat > owned < owned",
    "-x",
    "--set",
    "--",
    "=",
    "A=B",
    ":",
    "a:b",
    "*?[!a]{b,c}~",
    "back\\slash\\",
    "%s %d {} {0}",
    "\x1b[31mred",
    "caf\udce9",  # a file name in Latin-1, as Python represents it
]
#: Words that mpirun would treat as its own options at any position.
MPIRUN_WORDS = ["-n", "3", "--bind-to", "core", "--bind-to", "none", "--mca", "a", "b", "--am", "no", "-h", "--version"]
ARGUMENTS = [*NASTY, *MPIRUN_WORDS, "", "x" * 100_000]

SCRIPT = textwrap.dedent(
    """\
    import json, os, sys
    print("ran", flush=True)
    with open(f"outputs/seen_{os.environ['PACELINE_RANK']}.json", "w") as file:
        json.dump({"argv": sys.argv, "file": __file__, "path": sys.path[0], "cwd": os.getcwd()}, file)
    """
)


def submit_there(lab: Lab, folder: Path, script: str, **values: Any) -> pl.Run:
    """A run of a script of this name in this folder, with all the arguments and tags."""
    folder.mkdir(parents=True)
    (folder / script).write_text(SCRIPT)
    job = Job(entry_script=script, arguments=tuple(ARGUMENTS), **values)
    return lab.experiment.submit(job, tags={name: name for name in NASTY}, source_directory=folder)


def check(run: pl.Run, script: str, size: int) -> None:
    """The run ends well, and all of it has arrived."""
    run.wait_for_completion()
    work = str(run.folder.work)
    for rank in range(size):
        found = json.loads((run.folder.outputs / f"seen_{rank}.json").read_text())
        assert found["argv"] == [script, *ARGUMENTS]
        assert (found["file"], found["path"], found["cwd"]) == (f"{work}/{script}", work, work)
        assert run.folder.live_log(rank).read_text() == "ran\n"
    assert run.tags == {name: name for name in NASTY}


#: The strange names in pairs, for example for a folder and a script in this folder.
PAIRS = list(zip(NASTY[::2], NASTY[1::2], strict=True))


@pytest.mark.promise("script-runs-main-module-own")
def test_a_source_folder_and_a_script_of_any_name_run_with_any_arguments(lab: Lab) -> None:
    runs = {names: submit_there(lab, lab.folder / names[0], f"{names[1]}.py") for names in PAIRS}
    runs |= {(b, a): submit_there(lab, lab.folder / b, f"{a}.py") for a, b in PAIRS[::2]}

    for (folder, script), run in runs.items():
        check(run, f"{script}.py", 1)
        record = run.record()
        assert record.source_directory == str(lab.folder / folder)
        assert record.job is not None
        assert record.job.arguments == tuple(ARGUMENTS)
    assert not list(lab.folder.rglob("owned"))


@pytest.mark.promise("names-characters-reach-everything-they")
def test_script_of_any_name_runs_with_every_launcher(lab: Lab, way: dict[str, Any]) -> None:
    script = "; rm -rf ~ 'it\"s' --set A=B \n ünï ☃ : caf\udce9.py"
    run = submit_there(lab, lab.folder / " -x \n ☃", script, **way)

    check(run, script, len(way) or 1)


@pytest.mark.parametrize("script", ["--.py", "sub folder/-y.py"])
def test_a_script_whose_name_looks_like_an_option_runs_under_mpirun(lab: Lab, mpirun: str, script: str) -> None:
    (lab.source / script).parent.mkdir(parents=True)
    (lab.source / script).write_text("import sys; print(sys.argv[0])\n")
    job = Job(entry_script=script, distributed_backend="mpi")
    run = lab.experiment.submit(job, source_directory=lab.source)
    run.wait_for_completion()

    assert run.folder.live_log(0).read_text() == f"{script}\n"


def test_workspace_path_may_contain_spaces_quotes_and_newlines(lab: Lab) -> None:
    runs = {}
    for outer, inner in PAIRS:
        if ":" not in outer + inner:
            lab.workspace_dir = lab.folder / outer / inner
            script = "import paceline; paceline.Run.get_context().log('a', 1); print('ran')\n"
            runs[lab.workspace_dir] = lab.submit(script)

    assert len(runs) > 5
    for folder, run in runs.items():
        run.wait_for_completion()
        assert run.get_metrics() == {"a": 1}
        assert os.listdir(folder / "runs") == [run.id]


def test_workspace_path_with_a_colon_is_refused(lab: Lab) -> None:
    with pytest.raises(pl.errors.WorkspaceError, match="has a ':' in its path"):
        pl.Workspace(lab.folder / "a:b" / "ws")
    assert not (lab.folder / "a:b").exists()


def test_workspace_path_may_contain_special_characters_under_every_launcher(lab: Lab, parent: dict[str, Any]) -> None:
    lab.workspace_dir = lab.folder / "two 'words' \"; $HOME \n ☃ =" / "ws"
    script = "import paceline; run = paceline.Run.get_context(); run.log('a', 1)\n"
    run = lab.complete(script, **parent)

    assert run.get_metrics(rank=0) == {"a": 1}


@pytest.mark.parametrize("name", ["", "-x", "a b", "../x", "a/b", ".hidden", "x" * 201, "ünï", "a\n"])
def test_experiment_name_that_is_empty_too_long_or_has_a_slash_or_special_character_is_refused(
    lab: Lab, name: str
) -> None:
    with pytest.raises(pl.errors.WorkspaceError, match="experiment name"):
        pl.Experiment(pl.Workspace(lab.workspace_dir), name)


@pytest.mark.parametrize("run_id", ["../lab", "..", ".", "a/b", "/etc", "-x", "", "a\n", "a\0"])
def test_run_id_that_points_outside_the_runs_folder_is_refused(lab: Lab, run_id: str) -> None:
    parent = lab.experiment.start_logging()
    calls = [
        lambda: pl.Run(lab.experiment, run_id),
        lambda: pl.Run.get(pl.Workspace(lab.workspace_dir), run_id),
        # child_run accepts None and "", because Paceline then chooses the id. So replace "" here.
        lambda: parent.child_run(run_id=run_id or ".."),
    ]
    for call in calls:
        with pytest.raises(pl.errors.FileNameError, match="run id"):
            call()
    parent.complete()
    assert os.listdir(lab.workspace_dir / "runs") == [parent.id]


@pytest.mark.parametrize("name", ["../x", "outputs/../../x", "/etc/passwd", "..", "", ".", "a\0b", "outputs/.."])
def test_file_name_that_points_outside_the_run_folder_is_refused(lab: Lab, name: str) -> None:
    run = lab.experiment.start_logging()
    (lab.folder / "file").write_text("x")
    calls = [
        lambda: run.upload_file(name, lab.folder / "file"),
        lambda: run.upload_folder(name, lab.folder),
        lambda: run.download_file(name),
    ]
    for call in calls:
        with pytest.raises(pl.errors.FileNameError, match="file name"):
            call()
    run.complete()
    assert run.get_file_names() == []
