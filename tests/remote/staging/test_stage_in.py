"""A job on a machine that does not see the submitting one's files."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

import paceline as pl
from paceline.data.stores.record import read_record
from paceline.data.transfer.fetch import list_files
from paceline.environments.environment import Environment
from paceline.errors import TransferError
from paceline.job.data_reference import DataReference, Source
from paceline.remote.staging.packing import Manifest, pack
from paceline.remote.staging.stage_in import Arrived, as_here
from paceline.runs.folder import RunFolder
from paceline.system.files import write_json
from tests.environments.wheels import make_wheel
from tests.helpers import make_job, make_run, write_tree


@pytest.fixture
def store(tmp_path: Path) -> pl.Datastore:
    write_tree(tmp_path / "store", {"a/1.txt": "one", "a/2.txt": "two"})
    return pl.Datastore.register(pl.Workspace(tmp_path / "ws"), "lab", tmp_path / "store")


def bring(
    tmp_path: Path, *inputs: DataReference, between: str | None = None, packages: tuple[str, ...] = ()
) -> Arrived:
    """Make a run in another workspace, with the files of its job; or with them in the folder of a datastore."""
    here, fd = make_run(tmp_path / "ws" / "runs")
    os.close(fd)
    there = RunFolder(tmp_path / "there" / "runs" / here.run_id)
    there.path.mkdir(parents=True)
    packed = pack(make_job(inputs=inputs, environment=Environment(pip_packages=packages)), here)
    manifest: Manifest = packed.manifest
    top = tmp_path / "there" / "carried"
    if between is not None:
        manifest, top = replace(manifest, store={"url": between}), Path(between) / "paceline" / "carried"
    for tree, files in packed.files.items():
        write_tree(top / tree, {name: path.read_bytes() for name, path in files.items()})
    write_json(there.carried, manifest.to_json())
    return as_here(there)


def test_references_of_a_run_without_packed_files_are_left_unchanged(tmp_path: Path) -> None:
    folder, fd = make_run(tmp_path / "ws" / "runs")
    os.close(fd)
    here, reference = as_here(folder), DataReference(name="x", sources=(Source(datastore="lab", path="a"),))
    output = DataReference(name="out", sources=(Source(datastore="lab", path="a"),), mode="upload")
    environment = Environment(pip_packages=("einops",))
    assert (here.reference(reference), here.environment(environment)) == (reference, environment)
    assert not here.is_carried(reference)
    assert not here.goes_home(output)
    assert here.as_submitted({"pip": ["einops"]}) == {"pip": ["einops"]}
    assert here.stores_dir == tmp_path / "ws"


@pytest.mark.parametrize(("between", "mode"), [(False, "mount"), (True, "download")])
def test_input_points_to_its_transferred_files(tmp_path: Path, store: pl.Datastore, between: bool, mode: str) -> None:
    reference = store.path("a").as_mount()
    came = bring(tmp_path, reference, between=str(tmp_path / "between") if between else None)

    here = came.reference(reference)

    assert here.mode == mode
    assert came.is_carried(reference)
    assert [info.relative for info in list_files(here.sources, came.stores_dir)] == ["1.txt", "2.txt"]
    assert came.manifest.contents.keys() == {reference.name}


def test_input_of_a_single_file_gets_the_path_of_its_staged_copy(tmp_path: Path, store: pl.Datastore) -> None:
    reference = DataReference(name="x", sources=(Source(path=f"{tmp_path}/store/a/2.txt"),))
    (source,) = bring(tmp_path, reference).reference(reference).sources
    assert source.path == "2.txt"


def test_datastore_record_is_transferred_and_outputs_are_unchanged(tmp_path: Path) -> None:
    far = pl.Datastore.register(pl.Workspace(tmp_path / "ws"), "far", "s3://bucket/x", credentials={"key": "env:KEY"})
    reference, output = far.path("train"), far.path("out", "out").as_upload()
    came = bring(tmp_path, reference, output)
    assert came.reference(reference) == reference
    assert not came.is_carried(reference)
    assert came.reference(output) == output
    assert not came.goes_home(output)
    record = read_record(came.stores_dir, "far")
    assert (record.url, record.credentials) == ("s3://bucket/x", {"key": "env:KEY"})


def test_output_to_a_folder_of_the_submitting_machine_is_stored_there(tmp_path: Path, store: pl.Datastore) -> None:
    output = store.path("out", "model").as_upload()
    assert bring(tmp_path, output).goes_home(output)


@pytest.mark.parametrize("between", [False, True])
def test_packages_are_installed_from_their_copies_and_recorded_by_their_original_paths(
    tmp_path: Path, between: bool
) -> None:
    wheel = make_wheel(tmp_path / "my wheels", "spam", "1.0")
    came = bring(tmp_path, packages=(str(wheel), "einops"), between=str(tmp_path / "between") if between else None)

    environment = came.environment(Environment(pip_packages=(str(wheel), "einops")))

    there, other = environment.pip_packages
    assert Path(there).parent.parent == tmp_path / "there" / "carried"
    assert Path(there).is_file()
    assert other == "einops"
    assert came.as_submitted({"pip": [f"spam @ file://{there}"]}) == {"pip": [f"spam @ file://{wheel}"]}


@pytest.mark.promise("list-linked-names-somebody-else")
@pytest.mark.parametrize("forge", [None, "other text", "one file more", "one file less"])
def test_transferred_package_with_changed_added_or_removed_files_is_refused(tmp_path: Path, forge: str | None) -> None:
    """Its files are imported, installed or unpickled by the submitter's run."""
    source = write_tree(tmp_path / "pkg", {"setup.py": "", "spam.py": "x = 1", "tool.sh": "#!/bin/sh"})
    (source / "tool.sh").chmod(0o755)
    came = bring(tmp_path, packages=(str(source),), between=str(tmp_path / "between"))
    (tree,) = (tmp_path / "between/paceline/carried").iterdir()
    if forge == "other text":
        (tree / "spam.py").write_text("x = 2")
    elif forge == "one file more":
        (tree / "sitecustomize.py").write_text("x = 2")
    elif forge == "one file less":
        (tree / "spam.py").unlink()
    environment = Environment(pip_packages=(str(source),))
    if forge is None:
        (there,) = came.environment(environment).pip_packages
        assert os.access(f"{there}/tool.sh", os.X_OK)
        return
    with pytest.raises(TransferError, match="has other files than were sent"):
        came.environment(environment)
    assert not list((tmp_path / "there/carried").glob("*"))
