"""Files behind links in a run, the same for all targets; and what readers see of a running run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import paceline as pl
from paceline.runs import states
from paceline.runs import store as store_of
from paceline.system.files import read_json
from tests.engines.lab import Lab, wait_for_end
from tests.engines.places import EACH, Place, place
from tests.helpers import wait_until

#: This script creates links of each kind in its output and in the run's folders. Then it logs and waits.
LEAVE = """
import os, sys, time
from paceline import Run
only_there, gate, out = sys.argv[2], sys.argv[4], os.environ["PACELINE_INPUT_o"]
checkpoints, outputs = os.environ["PACELINE_CHECKPOINT_DIR"], os.environ["PACELINE_OUTPUT_DIR"]
def write(path, text):
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)
write(f"{checkpoints}/9.pt", "nine")
write("left.txt", "left")
for top in (out, outputs):
    write(f"{top}/step/model.pt", "model")
    os.symlink(f"{top}/step", f"{top}/latest")
    os.symlink("step/model.pt", f"{top}/model.pt")
    os.symlink(f"{checkpoints}/9.pt", f"{top}/best.pt")
    os.symlink(os.path.abspath("left.txt"), f"{top}/left.txt")
    os.symlink(os.path.abspath("train.py"), f"{top}/train.py")
    os.symlink(os.path.abspath("outputs/step/model.pt"), f"{top}/newest.pt")
    os.symlink(only_there, f"{top}/stolen")
    os.symlink("/etc", f"{top}/etc")
    os.symlink("gone", f"{top}/dangling")
    os.mkfifo(f"{top}/pipe")
run = Run.get_context()
run.log("loss", 0.5)
run.tag("phase", "late")
run.upload_file("plots/a.txt", "left.txt")
print("has left it all", flush=True)
while not os.path.exists(gate):
    time.sleep(0.05)
"""
#: Expected files with their content, in the output and in the run's `outputs/`. The script itself is not in this list.
STAYS = {
    "step/model.pt": "model",
    "latest/model.pt": "model",
    "model.pt": "model",
    "best.pt": "nine",
    "left.txt": "left",
    "newest.pt": "model",
}
LEFT = {"stolen": "out of the run", "etc": "out of the run, to '/etc'", "dangling": "nothing", "pipe": "a pipe"}


@pytest.fixture(params=["local", *EACH])
def there(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with contextlib.ExitStack() as stack:
        if request.param == "local":
            lab = Lab(tmp_path)
            yield Place(lab=lab, name="local", hosts=(), folder=tmp_path, address="", environments=1, reached="own")
        else:
            yield stack.enter_context(place(request.param, request, tmp_path, monkeypatch))


@pytest.mark.promise("link-counts-leads-none-leads")
def test_symlinks_in_outputs_are_resolved_on_the_node_and_links_to_outside_files_are_left_out(there: Place) -> None:
    lab, gate = there.lab, there.folder / "gate"
    # This file is on the submitting machine. Nodes that don't share its folders have no file of this name.
    (lab.folder / "only-here.txt").write_text("secret")
    workspace = pl.Workspace(lab.workspace_dir)
    pl.Datastore.register(workspace, "own", lab.folder / "store")
    store = pl.Datastore.get(workspace, there.reached)
    params = {"--only-there": str(lab.folder / "only-here.txt"), "--gate": str(gate)}
    target = "local" if there.name == "local" else "there"
    inputs = [store.path("up", "o").as_upload()]

    run = lab.submit(LEAVE, script_params=params, inputs=inputs, compute_target=target)

    def until(condition: Callable[[], bool], what: str) -> None:
        wait_until(lambda: condition() or store_of.stored(run.folder).is_terminal, what, 40)
        assert condition(), store_of.stored(run.folder).failure

    # Don't read the run's state here: readers must find metrics and files without that.
    until(lambda: run.get_metrics() == {"loss": 0.5}, "the metric")
    if there.name != "slurm, login host":  # with a login host, only logs arrive before the end
        until(lambda: "plots/a.txt" in run.get_file_names(), "the file")
    until(lambda: run.tags == {"phase": "late"}, "the tag")
    top = lab.folder / "copied"
    until(lambda: "has left it all\n" in "".join(Path(path).read_text() for path in run.get_all_logs(top)), "the log")
    gate.touch()
    wait_for_end(run)

    record = run.record()
    assert record.failure is not None
    assert (record.status, record.exit_code, record.failure.cause) == (states.FAILED, 1, "data")
    assert "Output 'o' is not complete" in record.failure.message
    found = {one["name"]: one["why"] for one in record.left_out}
    assert set(found) == {f"{folder}/{name}" for folder in ("outputs", "uploads/o") for name in LEFT}
    for folder in ("outputs", "uploads/o"):
        for name, why in LEFT.items():
            assert why in found[f"{folder}/{name}"]
            assert f"'{folder}/{name}' is {found[f'{folder}/{name}']}" in run.folder.driver_log.read_text()
    assert all(repr(name) in record.failure.message for name in LEFT)
    stays = STAYS | {"train.py": (lab.source / "train.py").read_text()}
    stored = Path(store.url) / "up"
    assert {str(path.relative_to(stored)): path.read_text() for path in stored.rglob("*") if path.is_file()} == stays
    assert read_json(run.folder.data)["outputs"][0]["files"] == len(stays)
    assert not list(run.folder.uploads.iterdir())
    names = [name for name in run.get_file_names() if not name.startswith("logs/")]
    assert names == sorted(["plots/a.txt", *(f"outputs/{name}" for name in stays)])
    run.download_files("outputs/", str(top))
    assert {name: (top / "outputs" / name).read_text() for name in stays} == stays
    with pytest.raises(pl.errors.RunNotFoundError, match=r"no file of the run's|no file 'outputs/stolen'"):
        run.download_file("outputs/stolen", top / "stolen")
