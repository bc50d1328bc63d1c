"""The run as scripts and submitting programs use it, end to end: what a worker logs is what the submitter reads."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.compat import azureml
from paceline.runs import states
from tests.engines.lab import KEEP, Lab, log_text, seen
from tests.engines.parents import BELOW_MPIRUN


@BELOW_MPIRUN
def test_metrics_are_readable_per_rank_and_merged_over_ranks(lab: Lab, parent: dict[str, Any]) -> None:
    script = """
        import os, paceline
        from paceline.compat.azureml import Run
        run, rank = Run.get_context(), int(os.environ["PACELINE_RANK"])
        for epoch in range(3):
            run.log("loss", 10 * rank + epoch, step=epoch)
        if rank == 0:
            run.log("accuracy", 0.5)
            run.log("name", "the best")
            run.log("done", True)
            run.log("nan", float("nan"))
            run.log("infinite", -float("inf"))
            run.log_list("list", (x ** 2 for x in range(3)))
            run.log_row("row", x=1, y=2.5)
            run.log_row("rows", x=1)
            run.log_row("rows", x=2, y="b")
            run.log_table("table", {"a": [1, 2], "b": 3})
            run.log_confusion_matrix("matrix", '{"schema_type": "confusion_matrix", "data": {}}')
    """
    run = lab.complete(script, **parent)

    ranks = range(len(parent) or 1)
    for rank in ranks:
        assert run.get_metrics("loss", rank=rank) == {"loss": [10 * rank, 10 * rank + 1, 10 * rank + 2]}
    merged = run.get_metrics()
    assert sorted(merged["loss"]) == [10 * rank + epoch for rank in ranks for epoch in range(3)]
    assert math.isnan(merged.pop("nan"))
    merged.pop("loss")
    assert merged == {
        "accuracy": 0.5,
        "name": "the best",
        "done": True,
        "infinite": -math.inf,
        "list": [0, 1, 4],
        "row": {"x": 1, "y": 2.5},
        "rows": {"x": [1, 2], "y": [None, "b"]},
        "table": {"a": [1, 2], "b": 3},
        "matrix": {"schema_type": "confusion_matrix", "data": {}},
    }
    assert set(run.get_metrics(by_rank=True)) == {str(rank) for rank in ranks}


def test_worker_can_set_tags_and_properties_and_upload_files_and_images(lab: Lab) -> None:
    script = """
        import io, os, paceline
        run = paceline.Run.get_context()
        assert run.id == paceline.Run.get_context().id == os.environ["PACELINE_RUN_ID"]
        assert run.status in ("Starting", "Running"), run.status  # until the supervisor has seen every worker start
        run.tag("phase", 1)
        run.tag("phase", 2)
        run.tag("bare")
        run.add_properties({"size": 3})
        run.display_name = "a display name"
        run.description = "of many words"
        os.makedirs("made/deep")
        open("made/a.txt", "w").write("a")
        open("made/deep/b.txt", "w").write("b")
        open("plot.png", "wb").write(b"PNG")
        print(run.upload_file("notes/a.txt", "made/a.txt"))
        print(run.upload_file("notes/a.txt", "made/a.txt"))
        print(run.upload_folder("folder", "made"))
        print(run.upload_file("outputs/stream.bin", io.BytesIO(b"stream")))
        run.log_image("image", path="plot.png")
        try:
            run.upload_file("notes/a.txt", "made/deep/b.txt")
        except paceline.errors.RunStateError as error:
            print("refused")
    """
    run = lab.complete(script, tags={"from": "submit"})

    assert log_text(run).splitlines() == [
        "notes/a.txt",
        "notes/a.txt",
        "['folder/a.txt', 'folder/deep/b.txt']",
        "outputs/stream.bin",
        "refused",
    ]
    assert run.tags == {"from": "submit", "phase": "2", "bare": None}
    assert run.properties == {"size": "3"}
    assert (run.display_name, run.description) == ("a display name", "of many words")
    image = run.get_metrics("image")["image"]
    names = ["folder/a.txt", "folder/deep/b.txt", image, "logs/driver.log", "logs/rank_0.log", "notes/a.txt"]
    assert run.get_file_names() == [*names, "outputs/stream.bin"]
    assert Path(run.download_file(image, "copy.png")).read_bytes() == b"PNG"
    assert run.download_files("folder/", "here", append_prefix=False) == ["here/a.txt", "here/deep/b.txt"]
    assert Path("here/deep/b.txt").read_text() == "b"
    with pytest.raises(pl.errors.RunNotFoundError, match=r"has no file 'none'. Its files: folder/a.txt"):
        run.download_file("none")


def test_rank_that_uploads_a_second_file_of_the_same_name_gets_an_error(lab: Lab) -> None:
    script = KEEP + (
        "import paceline\n"
        "open(f'mine_{os.environ[\"PACELINE_RANK\"]}', 'w').write(os.environ['PACELINE_RANK'])\n"
        "try:\n"
        "    keep(paceline.Run.get_context().upload_file('shared', f'mine_{os.environ[\"PACELINE_RANK\"]}'))\n"
        "except paceline.errors.RunStateError as error:\n"
        "    keep(str(error))\n"
    )
    run = lab.complete(script, process_count_per_node=2, distributed_backend="gloo")

    told = sorted(seen(run, rank) for rank in range(2))
    assert told == [f"run {run.id} has another file 'shared' already. Upload under another name.", "shared"]


def test_child_runs_of_a_worker_have_their_own_records_and_metrics(lab: Lab) -> None:
    script = """
        import paceline
        run = paceline.Run.get_context()
        with run.child_run("good") as child:
            child.log("depth", 1)
            with child.child_run("inner") as inner:
                inner.log("depth", 2)
        try:
            with run.child_run("bad"):
                raise ValueError("wrong")
        except ValueError:
            pass
        left = run.child_run("left", run_id="given_by_hand")
        left.log("depth", 1)
        for number, child in enumerate(run.create_children(tag_key="alpha", tag_values=[1, 2])):
            child.start()
            child.complete()
        run.log("depth", 0)
    """
    run = lab.complete(script)

    children = {child.name: child for child in run.get_children(recursive=True)}
    by_name = {name: child.status for name, child in children.items() if not name.startswith("lab_")}
    # The program has not ended the child run "left". When the program succeeds, this child run is Completed too.
    assert by_name == {"good": "Completed", "inner": "Completed", "bad": "Failed", "left": "Completed"}
    assert children["left"].id == "given_by_hand"
    assert children["inner"].parent == children["good"]
    assert children["bad"].failure is not None
    assert children["bad"].failure.exception == "ValueError: wrong"
    assert run.get_metrics() == {"depth": 0}
    assert sorted(m["depth"] for m in run.get_metrics(recursive=True).values() if m) == [0, 1, 1, 2]
    assert [child.tags for child in run.get_children(tags={"alpha": "2"})] == [{"alpha": "2"}]
    # A list of runs has only the parent, not its children.
    assert [one.id for one in lab.experiment.get_runs()] == [run.id]


def test_child_run_of_a_killed_worker_has_failed(lab: Lab) -> None:
    script = """
        import os, paceline
        paceline.Run.get_context().child_run("lost")
        os.kill(os.getpid(), 9)
    """
    (child,) = lab.finish(script).get_children()

    assert child.status == states.FAILED
    assert child.failure is not None
    assert child.failure.cause == "not_completed"


def test_run_submitted_with_submit_child_in_a_worker_has_the_submitting_run_as_its_parent(lab: Lab) -> None:
    # The script submits itself, and waits for the second run. That run can start at the same time if a core is free.
    script = """
        import os, sys, paceline as pl
        run = pl.Run.get_context()
        if len(sys.argv) > 1:
            print(os.environ["PACELINE_RUN_ID"], os.environ["PACELINE_RANK"])
            sys.exit(0)
        child = run.submit_child(pl.Estimator(".", entry_script="train.py", script_params={"child": ""}))
        print(child.id)
    """
    run = lab.complete(script)
    child = pl.Run(lab.experiment, log_text(run).strip())
    child.wait_for_completion()

    assert log_text(child) == f"{child.id} 0\n"
    assert child.parent == run


@pytest.mark.promise("value-logged-survives-worker-s")
def test_logged_value_survives_sigkill_of_the_worker(lab: Lab) -> None:
    script = """
        import os, paceline
        run = paceline.Run.get_context()
        for value in range(1000):
            run.log("value", value)
        os.kill(os.getpid(), 9)
    """
    assert lab.finish(script).get_metrics() == {"value": list(range(1000))}


@pytest.mark.promise("there-silent-world-one")
def test_missing_rank_variable_raises_run_context_error(lab: Lab) -> None:
    script = "import os, paceline\ndel os.environ['PACELINE_RANK']\npaceline.Run.get_context()\n"
    report = lab.finish(script).failure

    assert report is not None
    assert (report.exception or "").startswith(
        "paceline.errors.RunContextError: PACELINE_RANK='' in a process of run lab_"
    )


def test_run_details_have_the_keys_of_the_azure_sdk(lab: Lab) -> None:
    ended = lab.complete("print('hello')\n")
    run = azureml.Run(ended.experiment, ended.id)
    details = run.get_details()

    assert sorted(details) == [
        "endTimeUtc",
        "inputDatasets",
        "logFiles",
        "outputDatasets",
        "properties",
        "runDefinition",
        "runId",
        "startTimeUtc",
        "status",
        "submittedBy",
        "target",
    ]
    assert (details["runId"], details["status"], details["target"]) == (run.id, "Completed", "local")
    assert details["startTimeUtc"] <= details["endTimeUtc"]
    assert details["properties"]["ContentSnapshotId"] == run.get_snapshot_id()
    assert details["logFiles"]["logs/rank_0.log"] == str(run.folder.live_log(0))
    assert run.get_details_with_logs()["logFiles"]["logs/rank_0.log"] == "hello\n"
    assert run.wait_for_completion() == details
    failed = lab.finish("raise ValueError\n")
    assert sorted(set(azureml.Run(failed.experiment, failed.id).get_details()) - set(details)) == ["error", "warnings"]


def test_restored_snapshot_equals_the_submitted_source(lab: Lab) -> None:
    run = lab.complete("print('old')\n", {"sub/data.txt": "old"})
    lab.write("print('new')\n", {"sub/data.txt": "new"})
    again = lab.complete("print('new')\n")

    assert run.record().snapshot_id != again.record().snapshot_id
    restored = Path(run.restore_snapshot("restored"))
    assert (restored / "train.py").read_text() == "print('old')\n"
    assert (restored / "sub" / "data.txt").read_text() == "old"


def test_wait_for_completion_on_a_new_run_object_waits_for_the_existing_run(lab: Lab) -> None:
    runs = [lab.submit("print('x')\n", tags={"number": number}) for number in range(3)]
    for run in runs:
        pl.Run(lab.experiment, run.id).wait_for_completion()

    assert [run.id for run in lab.experiment.get_runs()] == [run.id for run in reversed(runs)]
    assert [run.number for run in runs] == [1, 2, 3]
    assert [run.id for run in lab.experiment.get_runs(tags={"number": "1"}, status="Completed")] == [runs[1].id]
    assert pl.Workspace(lab.workspace_dir).get_run(runs[0].id[:-4]) == runs[0]
    assert os.listdir(lab.workspace_dir / "snapshots") != []
