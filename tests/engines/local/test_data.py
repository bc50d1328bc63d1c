"""Runs that take data from datastores and store outputs there, with stores that are folders of this machine.

Real servers are in `tests/data`; here it is the run's side: paths that the script gets, and the run's record.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.runs import states
from tests.engines.lab import KEEP, Lab, processes_below, seen, wait_for_end, wait_for_file
from tests.helpers import wait_until

LOOK = KEEP + (
    "def tree(top):\n"
    "    paths = [os.path.join(folder, name) for folder, _, names in os.walk(top) for name in names]\n"
    "    return {os.path.relpath(path, top): open(path).read() for path in paths}\n"
    "keep({'argv': sys.argv[1:], 'files': tree(sys.argv[2]), 'env': dict(os.environ)})\n"
)


@pytest.fixture
def store(lab: Lab, tmp_path: Path) -> pl.Datastore:
    """A registered folder with a few files."""
    for number in range(8):
        path = tmp_path / "store" / "mnist" / f"part {number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(number) * 10 * (number + 1))
    return pl.Datastore.register(pl.Workspace(lab.workspace_dir), "lab", tmp_path / "store")


ALL = {f"part {number}.txt": str(number) * 10 * (number + 1) for number in range(8)}


@pytest.mark.promise("files-store-there-before-workers")
@pytest.mark.parametrize("how", ["as_mount", "as_download"])
def test_datastore_input_reaches_the_script_as_a_folder_with_all_files(
    lab: Lab, store: pl.Datastore, way: dict[str, Any], how: str
) -> None:
    reference = getattr(store.path("mnist"), how)()
    run = lab.complete(LOOK, script_params={"--data": reference}, **way)

    ranks = range(way.get("node_count", 1) * way.get("process_count_per_node", 1))
    for rank in ranks:
        found = seen(run, rank)
        assert found["files"] == ALL
        assert found["argv"][1] == found["env"][f"AZUREML_DATAREFERENCE_{reference.name}"]
        assert found["argv"][1] == found["env"][f"PACELINE_INPUT_{reference.name}"]
    told = run.input_datasets[reference.name]
    assert (told["files"], told["bytes"]) == (8, sum(map(len, ALL.values())))
    assert told["sources"] == [{"datastore": "lab", "path": "mnist"}]
    assert not list(Path(os.environ["PACELINE_DATA_CACHE"]).glob("views/[!.]*")), "nothing of the run is left"


def test_script_finds_an_input_by_its_name(lab: Lab, store: pl.Datastore) -> None:
    script = KEEP + (
        "import paceline\nfound = paceline.Run.get_context().input_datasets\n"
        "keep([sorted(found), sorted(os.listdir(found['mnist']))])\n"
    )
    run = lab.complete(script, inputs=[store.path("mnist").as_named_input("mnist").as_download()])
    assert seen(run) == [["mnist"], sorted(ALL)]


def test_single_file_input_is_a_path_to_the_file(lab: Lab, store: pl.Datastore) -> None:
    script = KEEP + "keep(open(sys.argv[2]).read())\n"
    run = lab.complete(script, script_params={"--file": store.path("mnist/part 3.txt").as_download()})
    assert seen(run) == ALL["part 3.txt"]


@pytest.mark.parametrize("by", ["node", "rank"])
@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_partitioned_input_gives_each_node_or_rank_its_own_files(
    lab: Lab, store: pl.Datastore, request: pytest.FixtureRequest, by: str, backend: str
) -> None:
    if backend == "mpi":
        request.getfixturevalue("any_mpirun")
    shape = {"node_count": 2, "process_count_per_node": 2} if by == "node" else {"process_count_per_node": 3}
    reference = store.path("mnist").as_partition(by=by)
    run = lab.complete(LOOK, script_params={"--data": reference}, distributed_backend=backend, **shape)

    found = [seen(run, rank)["files"] for rank in range(4 if by == "node" else 3)]
    if by == "node":
        assert (found[0], found[2]) == (found[1], found[3])
        found = found[::2]
    assert sorted(name for part in found for name in part) == sorted(ALL)
    sizes = [sum(map(len, part.values())) for part in found]
    assert max(sizes) - min(sizes) <= max(map(len, ALL.values()))


def test_input_appears_at_its_path_in_the_working_directory(lab: Lab, store: pl.Datastore) -> None:
    script = KEEP + "keep(sorted(os.listdir('data/mnist')))\n"
    run = lab.complete(script, inputs=[store.path("mnist").as_download("data/mnist")])
    assert seen(run) == sorted(ALL)
    assert not run.folder.work.exists()


def test_input_path_that_exists_in_the_source_is_refused(lab: Lab, store: pl.Datastore) -> None:
    reference = store.path("mnist").as_download("data")
    run = lab.finish("print('ran')\n", {"data/mine.txt": "mine"}, inputs=[reference])
    assert run.failure is not None
    assert "path_on_compute='data'" in run.failure.message
    assert run.record().attempts == ()


@pytest.mark.promise("outputs-stored-run-ends-also")
def test_outputs_are_stored_when_the_run_ends(
    lab: Lab, store: pl.Datastore, tmp_path: Path, way: dict[str, Any]
) -> None:
    script = (
        "import os, sys\n"
        "os.makedirs(sys.argv[2] + '/deep', exist_ok=True)\n"
        "open(f'{sys.argv[2]}/deep/{os.environ[\"PACELINE_RANK\"]}.txt', 'w').write('model')\n"
    )
    run = lab.complete(script, script_params={"--out": store.path("models/1", "model").as_upload()}, **way)

    ranks = range(way.get("node_count", 1) * way.get("process_count_per_node", 1))
    stored = sorted(path.name for path in (tmp_path / "store/models/1/deep").iterdir())
    assert stored == [f"{rank}.txt" for rank in ranks]
    assert run.output_datasets["model"]["files"] == len(ranks)
    assert not (run.folder.uploads / "model").exists()


@pytest.mark.promise("outputs-stored-run-ends-also")
def test_outputs_of_a_failed_run_are_stored(lab: Lab, store: pl.Datastore, tmp_path: Path) -> None:
    script = "import sys\nopen(sys.argv[2] + '/half.txt', 'w').write('x')\nraise ValueError('no more')\n"
    run = lab.finish(script, script_params={"--out": store.path("models").as_upload()})
    assert run.failure is not None
    assert run.failure.exception == "ValueError: no more"
    assert (tmp_path / "store/models/half.txt").read_text() == "x"


def test_outputs_of_a_canceled_run_stay_in_its_folder(lab: Lab, store: pl.Datastore, tmp_path: Path) -> None:
    script = "import sys, time\nopen(sys.argv[2] + '/half.txt', 'w').write('x')\n"
    script += "with open('outputs/go', 'w') as file:\n    file.write('1')\ntime.sleep(600)\n"
    run = lab.submit(script, script_params={"--out": store.path("models", "model").as_upload()})
    wait_for_file(run.folder.outputs / "go")
    run.cancel()
    assert wait_for_end(run) == states.CANCELED
    assert (run.folder.uploads / "model" / "half.txt").read_text() == "x"
    assert not (tmp_path / "store/models/half.txt").exists()


def test_existing_files_are_replaced_only_with_overwrite(lab: Lab, store: pl.Datastore, tmp_path: Path) -> None:
    script = "import sys\nopen(sys.argv[2] + '/part 0.txt', 'w').write('new')\n"
    reference = store.path("mnist").as_upload()
    run = lab.finish(script, script_params={"--out": reference})
    assert run.failure is not None
    assert (run.failure.cause, run.record().attempts) == ("data", ())
    assert "overwrite" in run.failure.message

    lab.complete(script, script_params={"--out": store.path("mnist").as_upload(overwrite=True)})
    assert (tmp_path / "store/mnist/part 0.txt").read_text() == "new"


def test_unstorable_output_fails_the_run_and_stays_in_its_folder(lab: Lab, store: pl.Datastore, tmp_path: Path) -> None:
    target = tmp_path / "store" / "models"
    script = (
        "import shutil, sys\n"
        "open(sys.argv[2] + '/a.txt', 'w').write('x')\n"
        f"shutil.rmtree({str(target)!r}, ignore_errors=True)\n"
        f"open({str(target)!r}, 'w').write('in the way')\n"
    )
    run = lab.finish(script, script_params={"--out": store.path("models", "model").as_upload()})
    assert run.failure is not None
    assert run.failure.cause == "data"
    assert "lab" in run.failure.message
    assert run.record().attempts[0].exit_codes == {"0": 0}
    assert (run.folder.uploads / "model" / "a.txt").read_text() == "x"


@pytest.mark.parametrize(("path", "said"), [("nothing", "nothing"), ("mnist/part 9.txt", "part 9.txt")])
def test_missing_input_data_is_named_before_the_workers_start(
    lab: Lab, store: pl.Datastore, path: str, said: str
) -> None:
    run = lab.finish("print('ran')\n", inputs=[store.path(path).as_download()])
    assert run.failure is not None
    assert (run.failure.cause, run.record().attempts) == ("data", ())
    assert said in run.failure.message
    assert "lab" in run.failure.message


def test_input_from_a_store_that_the_workspace_does_not_know_is_refused_at_submission(lab: Lab) -> None:
    reference = pl.DataReference(name="x", sources=(source("nowhere"),))
    lab.write("print()\n")
    with pytest.raises(pl.errors.DataError, match="'nowhere'"):
        lab.experiment.submit(pl.Estimator(str(lab.source), entry_script="train.py", inputs=[reference]))


def source(datastore: str) -> Any:
    from paceline.job.data_reference import Source

    return Source(datastore=datastore, path="x")


def test_input_from_a_memory_store_is_refused_at_submission(lab: Lab) -> None:
    store = pl.Datastore.register(pl.Workspace(lab.workspace_dir), "ram", "memory://test")
    lab.write("print()\n")
    with pytest.raises(pl.errors.DataError, match="memory of this process"):
        lab.experiment.submit(pl.Estimator(str(lab.source), entry_script="train.py", inputs=[store.path("x")]))


def test_a_dataset_is_recorded_with_the_run_that_used_it(lab: Lab, store: pl.Datastore, tmp_path: Path) -> None:
    workspace = pl.Workspace(lab.workspace_dir)
    dataset = pl.Dataset.File.from_files((store, "mnist")).register(workspace, "mnist")
    run = lab.complete(LOOK, script_params={"--data": dataset.as_named_input("train").as_download()})
    told = run.input_datasets["train"]
    assert (told["dataset"], told["fingerprint"], told["content"]) == (
        "mnist:1",
        dataset.fingerprint,
        dataset.fingerprint,
    )
    assert seen(run)["files"] == ALL

    (tmp_path / "store/mnist/part 0.txt").write_text("changed since")
    run = lab.complete(LOOK, script_params={"--data": dataset.as_named_input("train").as_download()})
    told = run.input_datasets["train"]
    assert told["content"] != told["fingerprint"]
    assert "no longer those that were there" in run.folder.prepare_log(0).read_text()


def test_script_reads_a_tabular_input_by_its_name(lab: Lab, store: pl.Datastore, tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    (tmp_path / "store/table.csv").write_text("a,b\n1,2\n3,4\n")
    table = pl.Dataset.Tabular.from_delimited_files((store, "table.csv"))
    script = KEEP + (
        "import paceline\n"
        "frame = paceline.Run.get_context().input_datasets['table'].to_pandas_dataframe()\n"
        "keep(frame.to_dict('list'))\n"
    )
    run = lab.complete(script, inputs=[table.as_named_input("table")])
    assert seen(run) == {"a": [1, 3], "b": [2, 4]}


def test_rerun_reads_the_same_input_files(lab: Lab, store: pl.Datastore) -> None:
    run = lab.complete(LOOK, script_params={"--data": store.path("mnist").as_partition(by="rank")})
    job = run.record().job
    assert job is not None
    again = lab.experiment.submit(job, source_directory=lab.source)
    assert wait_for_end(again) == states.COMPLETED
    assert seen(again)["files"] == ALL


def test_data_folders_of_a_run_with_a_killed_supervisor_are_removed_by_the_next_run(
    lab: Lab, store: pl.Datastore
) -> None:
    reference = store.path("mnist").as_download()
    run = lab.submit(KEEP + "import time\nkeep(1)\ntime.sleep(600)\n", inputs=[reference])
    wait_for_file(run.folder.outputs / "seen_0.json")
    views = Path(os.environ["PACELINE_DATA_CACHE"]) / "views"
    assert (views / run.id).is_dir()
    os.kill(run.record().owner["pid"], signal.SIGKILL)
    assert wait_for_end(run) == states.FAILED
    wait_until(lambda: not processes_below(lab.folder), "no process of the run is left")

    lab.complete("print()\n", inputs=[reference])
    assert not (views / run.id).exists()


def test_input_and_output_options_of_the_command_line_transfer_data(
    lab: Lab, store: pl.Datastore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import subprocess

    from tests.engines.local.test_environments import paceline

    monkeypatch.setenv("PACELINE_WORKSPACE", str(lab.workspace_dir))
    lab.write("import os, sys\nprint(sorted(os.listdir(sys.argv[1])))\nopen(sys.argv[2] + '/x', 'w').write('1')\n")
    command = [paceline(), "run", "-q", "--input", "train=lab:mnist,download", "--output", "out=lab:left"]
    command += [str(lab.source / "train.py"), "--", "$PACELINE_INPUT_train", "$PACELINE_INPUT_out"]
    assert subprocess.check_output(command, text=True) == f"{sorted(ALL)}\n"
    assert (tmp_path / "store/left/x").read_text() == "1"
    shown = json.loads(subprocess.check_output([paceline(), "show", "--json"], text=True))
    assert [shown["data"]["inputs"][0]["name"], shown["data"]["outputs"][0]["name"]] == ["train", "out"]


def test_run_fails_with_failure_cause_data_if_its_data_cache_folder_cannot_be_created(
    lab: Lab, store: pl.Datastore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACELINE_DATA_CACHE", str(tmp_path / "file" / "cache"))
    run = lab.finish("print('ran')\n", inputs=[store.path("mnist").as_download()])
    assert run.failure is not None
    assert run.failure.cause == "data"
    assert "PACELINE_DATA_CACHE" in run.failure.message


def test_recorded_file_count_of_a_partitioned_input_covers_all_nodes(lab: Lab, store: pl.Datastore) -> None:
    reference = store.path("mnist", "mnist").as_partition(by="node")
    run = lab.complete("print()\n", inputs=[reference], distributed_backend="gloo", node_count=2)
    assert run.input_datasets["mnist"]["files"] == 8
