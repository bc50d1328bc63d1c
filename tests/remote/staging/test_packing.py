"""What a job names on this machine, as trees for others."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.environments.environment import Environment
from paceline.errors import DataError, EnvironmentSpecError
from paceline.job.data_reference import DataReference, Source
from paceline.remote.staging.packing import Manifest, Packed, pack, pack_run
from paceline.runs.folder import RunFolder
from paceline.system import linked
from paceline.system.files import write_json
from paceline.system.linked import NotCopied
from tests.environments.wheels import make_wheel
from tests.helpers import make_job, make_run, write_tree


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    found, fd = make_run(tmp_path / "ws" / "runs")
    os.close(fd)
    return found


@pytest.fixture
def store(tmp_path: Path) -> pl.Datastore:
    write_tree(tmp_path / "store", {"a/1.txt": "one", "a/deep/2.csv": "two", "b.txt": "three"})
    (tmp_path / "store" / "a" / "link.txt").symlink_to("../b.txt")
    return pl.Datastore.register(pl.Workspace(tmp_path / "ws"), "lab", tmp_path / "store")


def packed(folder: RunFolder, *inputs: DataReference, **values: Any) -> Packed:
    found = pack(make_job(inputs=inputs, **values), folder)
    assert Manifest.from_json(json.loads(json.dumps(found.manifest.to_json()))) == found.manifest
    return found


def names(found: Packed, place: str) -> list[str]:
    tree, _ = found.manifest.places[place]
    return sorted(found.files[tree])


def test_job_without_local_files_packs_nothing(folder: RunFolder) -> None:
    assert pack_run(folder) is None


def test_folder_file_and_pattern_inputs_are_packed_with_their_files(
    folder: RunFolder, store: pl.Datastore, tmp_path: Path
) -> None:
    top = str(tmp_path / "store")
    found = packed(folder, store.path("a"), store.path("b.txt"), store.path("a/**/*.csv"))

    assert names(found, f"{top}/a") == ["1.txt", "deep/2.csv", "link.txt"]
    assert found.manifest.places[f"{top}/a"][1] == ""
    assert (names(found, f"{top}/b.txt"), found.manifest.places[f"{top}/b.txt"][1]) == (["b.txt"], "b.txt")
    assert names(found, f"{top}/a/**/*.csv") == ["deep/2.csv"]


def test_inputs_with_equal_file_names_and_content_are_packed_once(
    folder: RunFolder, store: pl.Datastore, tmp_path: Path
) -> None:
    write_tree(tmp_path / "copy", {"1.txt": "one", "deep/2.csv": "two", "link.txt": "three"})
    other = DataReference(name="other", sources=(Source(path=str(tmp_path / "copy")),))
    found = packed(folder, store.path("a"), other)
    assert len(found.manifest.trees) == 1

    (tmp_path / "copy" / "1.txt").write_text("ONE")
    assert len(packed(folder, store.path("a"), other).manifest.trees) == 2


def test_datastores_are_sent_as_records_with_secret_references(folder: RunFolder, tmp_path: Path) -> None:
    far = pl.Datastore.register(
        pl.Workspace(tmp_path / "ws"), "far", "s3://bucket/x", credentials={"secret": "env:LAB_SECRET"}
    )
    found = packed(folder, far.path("train"), far.path("out", "out").as_upload())
    assert found.files == {}
    assert found.manifest.stores == {
        "far": {"url": "s3://bucket/x", "options": {}, "credentials": {"secret": "env:LAB_SECRET"}}
    }


def test_packages_are_packed_without_build_leftovers(folder: RunFolder, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "wheels", "spam", "1.0")
    files = ("pyproject.toml", "egg.py", "build/x", "inner/build/z.py", "egg.egg-info/y")
    project = write_tree(tmp_path / "egg", dict.fromkeys(files, ""))
    (project / ".#egg.py").symlink_to("an editor's lock")
    os.mkfifo(project / "pipe")
    environment = Environment(pip_packages=(str(wheel), f"-e {project}", "einops"))

    found = packed(folder, environment=environment)

    assert names(found, str(wheel)) == [wheel.name]
    assert names(found, str(project)) == ["egg.py", "inner/build/z.py", "pyproject.toml"]


def test_missing_input_is_named_in_the_error(folder: RunFolder, store: pl.Datastore, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is nothing at 'nowhere'"):
        packed(folder, store.path("nowhere"))
    with pytest.raises(EnvironmentSpecError, match=r"there is no '.*none\.whl'"):
        packed(folder, environment=Environment(pip_packages=(str(tmp_path / "none.whl"),)))


def test_run_submitted_from_inside_another_run_reuses_its_transferred_inputs(
    folder: RunFolder, store: pl.Datastore
) -> None:
    first = packed(folder, store.path("a"))
    (tree,) = first.manifest.trees
    write_tree(folder.path.parent.parent / "carried" / tree, {"1.txt": "one"})
    write_json(folder.carried, first.manifest.to_json())
    again = packed(folder, store.path("a"))
    assert again.manifest == first.manifest
    assert list(again.files[tree]) == ["1.txt"]

    # Each node fetches inputs from a datastore itself, so nothing is packed.
    write_json(folder.carried, replace(first.manifest, store={"url": "/store"}).to_json())
    assert packed(folder, store.path("a")).files == {}


def test_outputs_to_local_folders_are_stored_by_the_submitting_machine(
    folder: RunFolder, store: pl.Datastore, tmp_path: Path
) -> None:
    far = pl.Datastore.register(pl.Workspace(tmp_path / "ws"), "far", "s3://bucket/x")
    plain = DataReference(name="plain", sources=(Source(path=str(tmp_path / "out")),), mode="upload")
    outputs = (far.path("out", "far_out").as_upload(), store.path("out", "model").as_upload(), plain)
    assert packed(folder, store.path("a"), *outputs).manifest.home == ("model", "plain")
    assert pack(make_job(inputs=outputs), folder, reached="lab").manifest.home == ("plain",)


def test_linked_source_files_are_packed_without_secrets(folder: RunFolder, tmp_path: Path) -> None:
    source = write_tree(
        tmp_path / "code", {"data/x.txt": "one", "data/.env": "K=1", "big/x": "", "one.bin": "1", ".env": "K=1"}
    )
    (source / "empty").mkdir()
    (source / "away").symlink_to(write_tree(tmp_path / "mnt", {"y.txt": "y"}))
    record = json.loads(folder.job.read_text()) | {"source_directory": str(source), "job": make_job().to_json()}
    write_json(folder.job, record)
    found = [
        NotCopied(
            path=name,
            why="ignored",
            is_linked=True,
            is_folder=(source / name).is_dir(),
            is_sent=name not in ("big", ".env"),
        )
        for name in ("data", "big", "one.bin", ".env", "empty", "away", "gone")
    ]
    linked.write(folder.linked, found)
    packing = pack_run(folder)
    assert packing is not None
    places = packing.manifest.linked
    assert {name: sorted(packing.files[tree]) for name, (tree, _) in places.items() if tree} == {
        "data": ["x.txt"],
        "one.bin": ["one.bin"],
        "away": ["y.txt"],
    }
    assert {name: inner for name, (_, inner) in places.items()} == {
        "data": "",
        "one.bin": "one.bin",
        "empty": "",
        "away": "",
    }
    assert packing.manifest.trees == sorted(packing.files)
    assert Manifest.from_json(json.loads(json.dumps(packing.manifest.to_json()))) == packing.manifest
    # Equal content has the same name in any folder, so it is sent once.
    again = pack_run(folder)
    assert again is not None
    assert again.manifest == packing.manifest
