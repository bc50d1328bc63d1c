"""paceline model: as a user types it."""

from __future__ import annotations

import json
import pickle
import struct

import pytest

from paceline.workspace import Experiment, Workspace
from tests.cli.conftest import Cli
from tests.helpers import write_tree


@pytest.fixture
def made(cli: Cli) -> Cli:
    """A folder with a model of three files, and a run with one in its outputs."""
    text = json.dumps({"layer.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode()
    write_tree(
        cli.folder / "made",
        {
            "model.safetensors": struct.pack("<Q", len(text)) + text + bytes(24),
            "scaler.pkl": pickle.dumps([1]),
            "config.json": "{}",
        },
    )
    return cli


@pytest.fixture
def run_id(cli: Cli) -> str:
    with Experiment(Workspace(cli.folder / ".paceline"), "digits").start_logging() as run:
        run.log("accuracy", 0.5)
        write_tree(run.folder.outputs, {"model/weights": "1"})
        return run.id


def test_model_commands_register_show_alias_verify_download_and_delete_a_model(made: Cli) -> None:
    done = made("model", "register", "digits", "made", "--tag", "stage=try", "--tag", "bare", "--property", "seed=3")
    assert done.stdout == "digits:1\n"
    assert "3 files, " in done.stderr
    assert "paceline: warning: made/scaler.pkl: a pickle runs code of its author's when it is loaded." in done.stderr
    assert "made/model.safetensors" not in done.stderr

    shown = made("model", "show", "digits")
    assert "made/model.safetensors: 1 tensor, 6 parameters\n  F32      2x3              layer.weight" in shown.stdout
    assert "made/scaler.pkl  [pickle]" in shown.stdout
    assert "Tags:        stage=try, bare" in shown.stdout
    assert "made/scaler.pkl: a pickle runs code" in shown.stderr

    assert made("model", "register", "digits", "made").stdout == "digits:2\n"
    assert made("model", "alias", "digits", "production", 1).stdout == "digits@production: digits:1\n"
    moved = made("model", "alias", "digits", "production", 2)
    assert moved.stdout == "digits@production: digits:2, before it digits:1\n"
    assert [one["version"] for one in made.json("model", "alias", "digits")] == [1, 2]
    listed = made("model", "list").stdout.splitlines()
    assert [line.split()[:2] for line in listed[1:]] == [["digits:2", "production"], ["digits:1", "-"]]

    assert "digits:2: 3 files as registered" in made("model", "verify", "digits@production").stdout
    assert made("model", "download", "digits:1", "--to", "there").stdout == "there/made\n"
    assert (made.folder / "there/made/config.json").read_text() == "{}"
    assert "exists already. --overwrite" in made("model", "download", "digits:1", "--to", "there", code=2).stderr

    assert "digits:2 is 'production'. Move the alias first" in made("model", "delete", "digits:2", "-y", code=2).stderr
    assert "say which version, such as digits:2" in made("model", "delete", "digits", "-y", code=2).stderr
    assert made("model", "delete", "digits:1", "-y").stdout == "digits:1: removed, 0 B freed\n"
    assert made("model", "alias", "digits", "production", "--remove").stdout.count("\n") == 4
    assert "B freed" in made("model", "delete", "digits:2", "-y").stdout
    assert "No models in" in made("model", "list").stdout


def test_model_update_changes_tags_and_model_diff_compares_two_versions(made: Cli) -> None:
    made("model", "register", "digits", "made", "--tag", "old")
    (made.folder / "made/config.json").write_text('{"a": 1}')
    made("model", "register", "digits", "made")
    done = made(
        "model", "update", "digits:1", "--tag", "checked=yes", "--remove-tag", "old", "--description", "**good**"
    )
    assert done.stdout == "digits:1: checked=yes\n"
    assert made.json("model", "show", "digits:1")["description"] == "**good**"
    assert "nothing to update. Give --tag" in made("model", "update", "digits:1", code=2).stderr
    lines = made("model", "diff", "digits:1", "digits:2").stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [["PART", "NAME"], ["files", "made/config.json"]]
    found = made.json("model", "diff", "digits:1", "digits:2")
    assert found["models"] == ["digits:1", "digits:2"]
    assert {fact["name"]: fact["is_different"] for fact in found["facts"]}["made/scaler.pkl"] is False
    assert "made/scaler.pkl" in made("model", "diff", "digits:1", "digits:2", "--all").stdout
    assert "one version is named, 'digits:1'" in made("model", "diff", "digits:1", code=2).stderr


def test_registered_model_records_its_run_and_the_show_command_of_the_run_lists_the_model(
    cli: Cli, run_id: str
) -> None:
    model = cli.json("model", "register", "digits", "outputs/model", "--run", run_id)
    assert (model["id"], model["run_id"]) == ("digits:1", run_id)
    assert cli.json("show", run_id)["models"] == ["digits:1"]
    shown = cli("model", "show", "digits").stdout
    assert f"Run:         {run_id}" in shown
    assert "accuracy: 0.5" in shown
    assert "Make again" not in shown, "a program logged it, and it alone can run again"
    assert cli.json("model", "list", "--run", run_id) == [model]
    write_tree(cli.folder, {"mine": "1"})
    assert cli.json("model", "register", "digits", "mine", "--made-by", run_id)["run_id"] == run_id


@pytest.mark.promise("paceline-rerun-makes-model-again")
def test_model_show_has_the_command_that_reproduces_it(cli: Cli) -> None:
    run_id = cli.submit("open('outputs/m', 'w').write('1')")
    assert cli.wait(run_id) == "Completed"
    cli("model", "register", "m", "outputs/m", "--run", run_id)
    assert f"Make again:  paceline rerun {run_id}" in cli("model", "show", "m").stdout
    again = cli.json("rerun", "m:1", "--detach")["run_id"]
    assert cli.wait(again) == "Completed"
    first, second = cli.json("model", "show", "m"), cli.json("model", "register", "m", "outputs/m", "--run", again)
    assert first["digest"] == second["digest"]
    (cli.folder / "bare").write_text("1")
    cli("model", "register", "bare")
    assert "bare:1 was registered without the run that made it" in cli("rerun", "bare:1", code=2).stderr
    cli("rm", "-y", run_id)
    shown = cli.json("model", "show", "m:1")
    assert (shown["can_be_made_again"], shown["run"]["run_id"]) == (False, run_id)


def test_model_is_pushed_and_pulled_through_a_datastore(made: Cli) -> None:
    made("model", "register", "digits", "made")
    made("data", "add", "lab", made.folder / "near")
    assert made("model", "push", "digits:1", "lab").stdout.startswith(
        "digits:1: stored in lab:models: 3 new contents, "
    )
    for words in ((), ("--verify",)):
        done = made("model", "push", "digits", "lab", *words)
        assert "digits:1: there already in lab:models: 0 new contents" in done.stdout
    assert "goes with a datastore" in made("model", "push", "digits", "--mlflow", "x", "--verify", code=2).stderr
    assert made("model", "list", "--at", "lab").stdout == "digits:1\n"
    elsewhere = {"PACELINE_WORKSPACE": str(made.folder / "elsewhere")}
    place = made.folder / "near/models"
    assert made("model", "pull", place, "digits", env=elsewhere).stdout == "digits:1\n"
    assert "3 files as registered" in made("model", "verify", "digits:1", env=elsewhere).stdout
    for words, said in (
        (("pull", place, "letters"), "there is no model 'letters' in"),
        (("pull", place, "digits:2"), "There are: digits:1."),
        (("pull", place, "digits@production"), "aliases are each workspace's own"),
        (("pull", "nix", "digits"), "nix"),
        (("push", "digits"), "name a datastore"),
        (("push", "digits", "lab", "--mlflow", "x"), "name a datastore"),
        (("push", "digits", "./x"), "is not a place of models"),
    ):
        assert said in made("model", *words, code=2).stderr


def test_verify_names_changed_files_and_exits_with_1(made: Cli) -> None:
    made("model", "register", "digits", "made")
    made("model", "register", "letters", "made/config.json")
    path = made.folder / ".paceline/models/letters/1/files/config.json"
    path.chmod(0o644)
    path.write_text("[]")
    done = made("model", "verify", code=1)
    assert "letters:1 have changed since its registration: 'config.json' has other content" in done.stderr
    found = {one["id"]: one["changed"] for one in json.loads(made("model", "verify", "--json", code=1).stdout)}
    # Both models share one stored file, because its content is the same.
    assert [one["name"] for one in found["digits:1"]] == ["made/config.json"]
    assert found["letters:1"] == [{"name": "config.json", "why": "has other content"}]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("register", "digits", "nix"), "there is no 'nix' here"),
        (("register", "a/b", "made"), "the model name 'a/b': give letters"),
        (("register", "digits", "made", "--run", "x", "--made-by", "y"), "give one of the two"),
        (("register", "digits", "made", "--property", "seed"), "--property 'seed' is not KEY=VALUE"),
        (("register", "digits", "made", "--run", "nix"), "no run 'nix' in"),
        (("show", "nix"), "there is no model 'nix'"),
        (("show", "digits:x"), "the version 'x': a version is a whole number"),
        (("alias", "digits", "production", "1"), "there is no model 'digits'"),
        (("alias", "digits", "--remove"), "give NAME ALIAS VERSION"),
        (("verify", "digits:1"), "there is no model 'digits'"),
        (("download", "digits"), "there is no model 'digits'"),
    ],
)
def test_invalid_model_command_is_refused_and_registers_no_model(made: Cli, words: tuple[str, ...], said: str) -> None:
    done = made("model", *words, code=2)
    assert said in done.stderr
    assert not (made.folder / ".paceline/models").exists()
