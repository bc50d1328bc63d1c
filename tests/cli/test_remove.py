"""rm, prune, list --long: the disk space of runs, and how it is freed."""

from __future__ import annotations

import contextlib
import os

import pytest

from paceline.workspace import Experiment, Workspace
from tests.cli.conftest import Cli


@pytest.fixture
def runs(cli: Cli) -> list[str]:
    """Ids of two runs that have ended and of one below the second."""
    experiment = Experiment(Workspace(cli.folder / ".paceline"), "kept")
    ids = []
    for _ in range(2):
        with experiment.start_logging() as run:
            (run.folder.outputs / "model").write_bytes(b"x" * 5000)
            ids.append(run.id)
    child = run.child_run("fold")
    child.complete()
    return [*ids, child.id]


def answered(cli: Cli, answer: str, *words: object) -> tuple[int, str]:
    """Return the exit code and the output of a command on a terminal, on which a user gives this answer."""
    ours, theirs = os.openpty()
    process = cli.start(*words, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.write(ours, answer.encode() + b"\n")
    data = b""
    with contextlib.suppress(OSError):  # reading fails with EIO when the terminal ends
        while piece := os.read(ours, 1 << 16):
            data += piece
    os.close(ours)
    return process.wait(timeout=180), data.decode()


def test_rm_removes_a_run_after_confirmation(cli: Cli, runs: list[str]) -> None:
    assert "no terminal shows the question. Add --yes to answer: Move run" in cli("rm", runs[0], code=2).stderr
    code, said = answered(cli, "", "rm", runs[0])
    assert code == 1
    assert f"Move run {runs[0]}, " in said
    assert "Nothing was removed." in said
    assert sorted(runs) == cli.run_ids()
    code, said = answered(cli, "y", "rm", runs[0])
    assert code == 0
    assert f"{runs[0]}: in the trash, " in said
    assert sorted(runs[1:]) == cli.run_ids()
    assert "no run" in cli("rm", runs[0], "--yes", code=2).stderr


def test_rm_removes_child_runs_only_on_request(cli: Cli, runs: list[str]) -> None:
    assert f"there are runs below: {runs[2]}. --children" in cli("rm", "--yes", runs[1], code=2).stderr
    words = ("rm", "--yes", "--children", runs[1])
    assert [run["run_id"] for run in cli.json(*words, "--dry-run")] == [runs[2], runs[1]]
    removed = cli.json(*words)
    assert [run["run_id"] for run in removed] == [runs[2], runs[1]]
    assert removed[1]["size_bytes"] > 5000
    assert cli.run_ids() == runs[:1]


def test_restore_brings_back_runs_deleted_by_rm_and_rm_with_purge_deletes_them_permanently(
    cli: Cli, runs: list[str]
) -> None:
    cli("rm", "--yes", "--children", runs[1])
    assert [(run["run_id"], run["with_run"]) for run in cli.json("restore")] == [(runs[1], runs[1]), (runs[2], runs[1])]
    assert runs[1] in cli("restore").stdout
    assert cli.json("restore", runs[1]) == [runs[1], runs[2]]
    assert sorted(runs) == cli.run_ids()
    assert f"no run '{runs[1]}' is in the trash" in cli("restore", runs[1], code=2).stderr
    cli("rm", "--yes", runs[0])
    assert f"{runs[0]}: removed" in cli("rm", "--yes", "--purge", runs[0]).stdout
    assert cli.json("restore") == []
    cli("rm", "--yes", runs[2])
    assert [run["run_id"] for run in cli.json("rm", "--yes", "--purge", runs[2], runs[2])] == [runs[2]]
    assert "is empty" in cli("restore").stdout


def test_archived_runs_are_left_out_of_lists(cli: Cli, runs: list[str]) -> None:
    cli("archive", runs[0])
    assert runs[0] not in cli("list", "--trials").stdout
    assert [run["run_id"] for run in cli.json("list", "--archived")] == [runs[0]]
    experiment = Experiment(Workspace(cli.folder / ".paceline"), "kept")
    assert [run.id for run in experiment.get_runs()] == [runs[1]]
    assert [run.id for run in experiment.get_runs(archived=True)] == [runs[0]]
    cli("archive", "--undo", runs[0])
    assert runs[0] in cli("list").stdout


def test_note_and_tag_commands_change_the_output_of_show(cli: Cli, runs: list[str]) -> None:
    cli("note", runs[0], "Diverges with **fp16**.")
    assert cli("note", runs[0]).stdout == "Diverges with **fp16**.\n"
    assert cli("tag", runs[0], "best", "epochs=3").stdout == "best, epochs=3\n"
    assert cli("tag", runs[0], "--remove", "best").stdout == "epochs=3\n"
    shown = cli("show", runs[0]).stdout
    assert "Diverges with **fp16**." in shown
    assert "epochs=3" in shown
    assert "tag '=x' is not KEY or KEY=VALUE" in cli("tag", runs[0], "=x", code=2).stderr


def test_rm_with_a_running_run_among_its_arguments_fails_and_removes_none_of_them(cli: Cli, runs: list[str]) -> None:
    living = cli.submit("import time; time.sleep(600)")
    cli.wait(living, "Running")
    done = cli("rm", "--yes", runs[0], living, code=1)
    assert f"run {living} is Running" in done.stderr
    assert f"paceline cancel --wait {living}" in done.stderr
    assert len(cli.run_ids()) == 4
    assert cli.json("prune", "--older-than", "0s", "--runs", "--yes")["failed"] == []
    assert cli.run_ids() == [living]
    cli("cancel", "--wait", living)
    assert f"{living}: removed" in cli("rm", "--yes", "--purge", living).stdout


def test_interrupted_removal_is_completed_by_the_next_list(cli: Cli, runs: list[str]) -> None:
    top = cli.folder / ".paceline/runs"
    os.rename(top / runs[0], top / f".gone-{runs[0]}-00000000")
    assert runs[0] not in cli("list").stdout
    assert sorted(os.listdir(top)) == sorted(runs[1:])


def test_prune_lists_the_files_to_remove_and_asks_for_confirmation(cli: Cli, runs: list[str]) -> None:
    assert "There is nothing to remove" in cli("prune").stdout
    dry = cli("prune", "--keep-last", "1", "--runs", "--dry-run")
    assert runs[0] in dry.stdout
    assert "Would remove 1 run (" in dry.stdout
    assert "no terminal shows the question" in cli("prune", "--keep-last", "1", code=2).stderr
    code, said = answered(cli, "n", "prune", "--keep-last", "1")
    assert code == 1
    assert "Remove 1 run (" in said
    assert sorted(runs) == cli.run_ids()
    code, said = answered(cli, "yes", "prune", "--keep-last", "1")
    assert code == 0
    assert "Removed 1 run (" in said
    assert sorted(runs[1:]) == cli.run_ids()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--runs"], "which runs are to go"),
        (["--older-than", "old"], "'old' is not a duration"),
        (["--max-size", "big"], "'big' is not a size"),
        (["--keep-last", "-1"], "-1"),
        (["--status", "Done"], "--status 'Done' is not a state"),
    ],
)
def test_prune_with_invalid_options_is_refused_and_removes_no_run(
    cli: Cli, runs: list[str], words: list[str], complaint: str
) -> None:
    assert complaint in cli("prune", "--yes", *words, code=2).stderr
    assert sorted(runs) == cli.run_ids()


def test_list_long_has_sizes_and_tags(cli: Cli, runs: list[str]) -> None:
    lines = [line.split() for line in cli("list", "--long").stdout.splitlines()]
    assert lines[0][-2:] == ["DISK", "TAGS"]
    assert all(5 < float(size) < 8 and unit == "kB" for *_, size, unit in lines[2:])
    sizes = {run["run_id"]: run["size_bytes"] for run in cli.json("list", "--long")}
    assert 5000 < sizes[runs[0]] < 10_000
    assert "size_bytes" not in cli.json("list")[0]
    assert cli.json("show", runs[0])["size_bytes"] == sizes[runs[0]]


def test_prune_with_compute_refuses_other_prune_options_and_an_unknown_compute_target(
    cli: Cli, runs: list[str]
) -> None:
    assert "--compute takes no other criterion" in cli("prune", "--compute", "local", "--runs", code=2).stderr
    assert "'nowhere'" in cli("prune", "--compute", "nowhere", "--yes", code=2).stderr
