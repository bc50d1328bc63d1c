"""A model as its users meet it: registered from a run or a folder, found again, checked, copied."""

from __future__ import annotations

import os
import shutil

import pytest

import paceline as pl
from paceline import models
from paceline.errors import ModelChangedError, ModelError, ModelNotFoundError, RunStateError
from tests.helpers import write_tree


@pytest.fixture
def workspace(tmp_path):
    return pl.Workspace(tmp_path / "ws")


@pytest.fixture
def run(workspace):
    """A run that a program logs, with a model in its outputs."""
    with pl.Experiment(workspace, "digits").start_logging() as run:
        run.log("accuracy", 0.75)
        run.log("accuracy", 0.5)
        write_tree(run.folder.outputs, {"model/weights.bin": b"\x01" * 100, "model/config/a.json": "{}"})
        yield run


def register(workspace, tmp_path, name="digits", content=b"weights", **values):
    write_tree(tmp_path, {"made/model.bin": content})
    return pl.Model.register(workspace, tmp_path / "made", name, **values)


def test_registered_run_folder_is_version_1_with_its_lineage(workspace, run):
    model = run.register_model("digits", "./outputs/model", tags={"stage": "try"}, properties={"seed": 3})
    assert (model.name, model.version, model.id, model.run_id) == ("digits", 1, "digits:1", run.id)
    assert (model.tags, model.properties, model.description) == ({"stage": "try"}, {"seed": "3"}, None)
    assert model.artifact == workspace.path / "models/digits/1/files/model"
    assert {str(path.relative_to(model.path)) for path in model.path.rglob("*.*")} == {
        "model/weights.bin",
        "model/config/a.json",
    }
    assert model.run == run
    assert run.models == [model]
    told = model.record.run
    assert told["metrics"]["accuracy"] == {"last": 0.5, "min": 0.5, "max": 0.75, "last_step": None, "count": 2}
    assert any(package.startswith("pytest==") for package in told["environment"]["packages"])
    assert told["environment"]["seen"] == "in the run"


def test_registered_single_file_keeps_its_name(workspace, run):
    model = run.register_model("digits", "outputs/model/weights.bin")
    assert model.artifact.read_bytes() == b"\x01" * 100
    assert [file.name for file in model.record.files] == ["weights.bin"]


def test_register_model_without_a_path_registers_the_run_file_with_the_models_name(workspace, run, tmp_path):
    run.upload_file("digits.bin", write_tree(tmp_path, {"up": "1"}) / "up")
    assert run.register_model("digits.bin").record.top == "digits.bin"


def test_model_without_version_or_alias_is_the_latest(workspace, tmp_path):
    first, second = register(workspace, tmp_path), register(workspace, tmp_path, content=b"better")
    assert (first.version, second.version) == (1, 2)
    assert first.set_alias("production") is None
    for meant in (
        pl.Model(workspace, "digits", version=1),
        pl.Model(workspace, "digits", version="1"),
        pl.Model(workspace, "digits", alias="production"),
        pl.Model(workspace, "digits:1"),
        pl.Model(workspace, "digits@production"),
    ):
        assert meant == first
    for meant in ("digits", "digits:latest"):
        assert pl.Model(workspace, meant) == second
        assert models.resolve(workspace.path, meant).version == 2
    assert workspace.models == {"digits": second}
    assert pl.Model.list(workspace) == [second, first]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"name": "digits", "version": 3}, r"'digits' has no version 3\. It has: 1\."),
        ({"name": "digits", "alias": "prod"}, r"no alias 'prod'\. It has: production\."),
        ({"name": "digit"}, r"no model 'digit' .* There are: digits\."),
        ({"name": "digits", "version": 0}, "the version 0: a version is a whole number from 1 on"),
        ({"name": "digits", "version": True}, "the version True"),
        ({"name": "digits", "version": 1, "alias": "production"}, "give one of the two"),
        ({"name": "digits:1", "version": 1}, "says which version already"),
        ({"name": "../digits"}, "the model name '../digits'"),
        ({"name": "digits:1@production"}, "names no model"),
    ],
)
def test_unknown_model_name_version_or_alias_is_refused_and_the_error_lists_existing_values(
    workspace, tmp_path, values, said
):
    register(workspace, tmp_path).set_alias("production")
    with pytest.raises(ModelError, match=said) as error:
        pl.Model(workspace, **values)
    assert isinstance(error.value, ModelNotFoundError) == ("It has" in said or "There are" in said)


@pytest.mark.promise("model-changed-disk-refused-changed")
def test_model_path_raises_if_a_file_changed_and_verify_finds_changes_that_kept_size_and_time(workspace, tmp_path):
    model = register(workspace, tmp_path)
    path = model.artifact / "model.bin"
    path.chmod(0o644)
    path.write_bytes(b"wEights")
    with pytest.raises(
        ModelChangedError,
        match=r"files of model digits:1 have changed since its registration: 'made/model.bin' has other content",
    ):
        model.path  # noqa: B018
    # Keep the old time, as an attacker would, and as happens if a disk loses bits.
    os.utime(path, ns=(10**18, 10**18))
    assert model.path
    with pytest.raises(ModelChangedError, match="has other content"):
        model.verify()


@pytest.mark.promise("run-changes-later-model-s")
def test_later_changes_of_the_run_do_not_change_the_model(workspace, run):
    model = run.register_model("digits", "outputs/model")
    (run.folder.outputs / "model/weights.bin").write_bytes(b"other")
    model.verify()


def test_downloaded_copy_is_writable_and_replaced_only_with_exist_ok(workspace, tmp_path):
    model = register(workspace, tmp_path)
    copy = model.download(tmp_path / "there")
    assert copy == str(tmp_path / "there/made")
    (tmp_path / "there/made/model.bin").write_bytes(b"mine")
    with pytest.raises(ModelError, match="exists already"):
        model.download(tmp_path / "there")
    assert model.download(tmp_path / "there", exist_ok=True) == copy
    assert (tmp_path / "there/made/model.bin").read_bytes() == b"weights"
    assert os.listdir(tmp_path / "there") == ["made"]
    model.verify()


def test_version_with_an_alias_cannot_be_deleted(workspace, tmp_path):
    first, second = register(workspace, tmp_path), register(workspace, tmp_path)
    first.set_alias("production")
    with pytest.raises(ModelError, match=r"digits:1 is 'production'\. Move the alias first"):
        first.delete()
    assert second.set_alias("production") == 1
    first.delete()
    assert pl.Model.list(workspace) == [second]
    second.verify()
    assert register(workspace, tmp_path).version == 3


def test_model_list_filters_versions_by_tags_properties_and_run(workspace, tmp_path, run):
    first = register(workspace, tmp_path, tags={"stage": "try", "bare": None}, properties={"seed": 3})
    second = register(workspace, tmp_path, name="letters", tags={"stage": "good"}, run=run)
    third = run.register_model("digits", "outputs/model")
    assert pl.Model.list(workspace, tags={"stage": "try"}) == [first]
    assert pl.Model.list(workspace, tags="stage") == [second, first]
    assert pl.Model.list(workspace, tags=["bare", ("stage", "try")]) == [first]
    assert pl.Model.list(workspace, tags={"bare": None}) == [first]
    assert pl.Model.list(workspace, properties={"seed": 3}) == [first]
    assert pl.Model.list(workspace, run_id=run.id) == [third, second] == run.models
    assert pl.Model.list(workspace, "digits", latest=True) == [third]
    assert pl.Model.list(workspace, latest=True) == [third, second]
    assert pl.Model.list(workspace, "nix") == []


def test_tags_and_description_of_a_model_can_change_but_properties_cannot(workspace, tmp_path):
    model = register(workspace, tmp_path, tags={"stage": "try", "old": 1}, properties={"seed": 3}, description="first")
    model.update(tags={"stage": "good"}, description="better")
    model.remove_tags("old")
    model.add_properties({"reviewed": "yes"})
    again = pl.Model(workspace, "digits")
    assert (again.tags, again.description) == ({"stage": "good"}, "better")
    assert again.properties == {"seed": "3", "reviewed": "yes"}
    with pytest.raises(RunStateError, match="property 'seed' is '3' already"):
        model.add_properties({"seed": 4})
    assert again.record == model.record
    model.delete()
    for change in (lambda: model.add_tags({"a": 1}), lambda: model.update(description="x"), model.delete):
        with pytest.raises(ModelNotFoundError, match="digits:1 was removed meanwhile"):
            change()


def test_removing_an_alias_through_a_model_version_that_does_not_have_it_raises(workspace, tmp_path):
    first, second = register(workspace, tmp_path), register(workspace, tmp_path)
    first.set_alias("production")
    with pytest.raises(ModelNotFoundError, match=r"digits:2 has no alias 'production'\. It has: none\."):
        second.remove_alias("production")
    first.remove_alias("production")
    assert (first.aliases, [one["version"] for one in first.alias_history("production")]) == ([], [1, None])


@pytest.mark.parametrize("datasets", [["digits"], [("training",)], [3]])
def test_register_refuses_datasets_that_are_not_given_as_pairs_of_purpose_and_dataset(workspace, tmp_path, datasets):
    with pytest.raises(ModelError, match=r"is not \(purpose, dataset\)"):
        register(workspace, tmp_path, datasets=datasets)
    assert pl.Model.list(workspace) == []


def test_model_constructor_refuses_an_argument_that_is_not_a_workspace(tmp_path):
    with pytest.raises(ModelError, match="'here' is not a workspace"):
        pl.Model("here", "digits")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "model.bin").unlink(), "'made/model.bin' is not there"),
        (lambda folder: (folder / "more").write_text("1"), "'made/more' was not registered"),
        (lambda folder: (folder / "more").symlink_to("/etc"), "'made/more' was not registered"),
        (lambda folder: os.truncate(folder / "model.bin", 3), "'made/model.bin' has 3 bytes in place of 7"),
        (
            lambda folder: ((folder / "model.bin").unlink(), (folder / "model.bin").symlink_to("x")),
            "is no longer a file",
        ),
    ],
    ids=["gone", "more", "link", "short", "link-for-file"],
)
def test_changed_missing_or_added_file_of_a_version_is_detected(workspace, tmp_path, spoil, said):
    model = register(workspace, tmp_path)
    spoil(model.artifact)
    with pytest.raises(ModelChangedError, match=said):
        model.verify()
    with pytest.raises(ModelChangedError, match=said):
        model.path  # noqa: B018


def test_model_copied_without_its_file_times_is_verified_by_reading_its_content(workspace, tmp_path):
    shutil.copytree(register(workspace, tmp_path).workspace.path, tmp_path / "copy", copy_function=shutil.copyfile)
    model = pl.Model(pl.Workspace(tmp_path / "copy"), "digits")
    assert model.path
    os.chmod(model.artifact / "model.bin", 0o644)
    (model.artifact / "model.bin").write_bytes(b"spoiled")
    with pytest.raises(ModelChangedError, match="has other content"):
        model.path  # noqa: B018
