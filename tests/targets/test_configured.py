"""The compute targets of a workspace: kept, found by name, and copied into the folders of their runs."""

from __future__ import annotations

import json
import multiprocessing
from typing import Any

import pytest

from paceline.errors import TargetError
from paceline.system import plugins
from paceline.targets import configured
from paceline.targets.configured import Configured
from paceline.targets.local import LocalTarget
from tests.targets.toy import PlainTarget, ToyTarget


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    places = {
        "toy": "tests.targets.toy:ToyTarget",
        "plain": "tests.targets.toy:PlainTarget",
        "gone": "no.such.module:Target",
        "local": "tests.targets.toy:ToyTarget",
    }
    monkeypatch.setattr(plugins, "installed", lambda group: places)


def lab(**settings: object) -> Configured:
    return Configured(name="lab", kind="toy", settings={"label": "x", **settings})


def test_target_is_added_found_and_removed(tmp_path):
    target: Any = configured.add(tmp_path, lab(label='a\'b; $(c) "d" ü'))
    assert target.settings["label"] == 'a\'b; $(c) "d" ü'
    assert json.loads((tmp_path / "compute/lab.json").read_text()) == {
        "name": "lab",
        "kind": "toy",
        "settings": {"label": 'a\'b; $(c) "d" ü'},
    }
    found = configured.find_target("lab", tmp_path)
    assert isinstance(found, ToyTarget)
    assert (found.name, found.settings["label"], found.values["nodes"]) == ("lab", 'a\'b; $(c) "d" ü', 2)
    assert configured.names(tmp_path) == ["local", "lab"]
    configured.remove(tmp_path, "lab")
    assert configured.names(tmp_path) == ["local"]
    with pytest.raises(TargetError, match="there is no compute target 'lab'"):
        configured.find_target("lab", tmp_path)


def test_target_settings_are_normalized_by_their_target_kind(tmp_path):
    configured.add(tmp_path, lab(label="  x "))
    assert configured.read(tmp_path, "lab").settings == {"label": "x"}


def test_local_target_and_kinds_without_required_settings_need_no_configuration(tmp_path):
    assert isinstance(configured.find_target("local", tmp_path), LocalTarget)
    assert isinstance(configured.find_target("plain", tmp_path), PlainTarget)
    with pytest.raises(TargetError, match="there is no compute target 'toy'"):
        configured.find_target("toy", tmp_path)


def test_misspelled_target_name_suggests_the_nearest(tmp_path):
    configured.add(tmp_path, lab())
    with pytest.raises(TargetError, match=r"no compute target 'lap'\. Did you mean 'lab'\? There are local, lab\."):
        configured.find_target("lap", tmp_path)


@pytest.mark.parametrize("name", ["", "-x", "a/b", "../lab", "a b", "a\n", "x" * 65, "ü", None, 3])
def test_invalid_target_name_is_refused(tmp_path, name):
    with pytest.raises(TargetError, match="compute target name"):
        Configured(name=name, kind="toy")
    with pytest.raises(TargetError, match="there is no compute target"):
        configured.read(tmp_path, name)
    with pytest.raises(TargetError, match="no compute target"):
        configured.remove(tmp_path, name)


def test_existing_or_reserved_target_names_are_refused(tmp_path):
    with pytest.raises(TargetError, match="'local' is this machine"):
        configured.add(tmp_path, Configured(name="local", kind="toy", settings={"label": "x"}))
    with pytest.raises(TargetError, match="the name 'slurm' is that of a kind"):
        configured.add(tmp_path, Configured(name="slurm", kind="toy", settings={"label": "x"}))
    configured.add(tmp_path, lab())
    with pytest.raises(TargetError, match="there is a compute target 'lab' already"):
        configured.add(tmp_path, lab(nodes=3))
    assert configured.read(tmp_path, "lab").settings == {"label": "x"}
    configured.add(tmp_path, lab(nodes=3), replace=True)
    assert configured.read(tmp_path, "lab").settings == {"label": "x", "nodes": 3}


def test_a_target_with_a_wrong_setting_is_not_kept(tmp_path):
    with pytest.raises(TargetError, match="nodes=0 is less than 1"):
        configured.add(tmp_path, lab(nodes=0))
    assert configured.names(tmp_path) == ["local"]


def test_concurrent_additions_of_targets_with_one_name_let_one_succeed(tmp_path):
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        told = pool.starmap(_add, [(tmp_path, number) for number in range(8)])
    assert sorted(told) == ["", *["there is a compute target 'lab' already"] * 7]
    assert [path.name for path in (tmp_path / "compute").iterdir()] == ["lab.json"]


def _add(folder, number):
    try:
        configured.add(folder, Configured(name="lab", kind="local"))
    except TargetError as error:
        return str(error).split(".")[0]
    return ""


@pytest.mark.parametrize("text", ["", "{", "[]", '{"name": "lab"}', '{"name": "other", "kind": "toy", "settings": {}}'])
def test_error_for_an_invalid_target_description_names_the_file(tmp_path, text):
    (tmp_path / "compute").mkdir()
    (tmp_path / "compute/lab.json").write_text(text)
    with pytest.raises(TargetError, match=r"compute/lab\.json"):
        configured.find_target("lab", tmp_path)
    assert configured.names(tmp_path) == ["local", "lab"]


def test_run_keeps_its_copy_of_the_target_settings_after_the_target_is_removed(tmp_path):
    run_dir = tmp_path / "runs" / "exp_1_00000000"
    run_dir.mkdir(parents=True)
    configured.add(tmp_path, lab(nodes=3))
    configured.keep_copy(run_dir, configured.read(tmp_path, "lab"))
    configured.remove(tmp_path, "lab")
    found: Any = configured.target_of_run(run_dir)
    assert (found.name, found.values["nodes"]) == ("lab", 3)


def test_run_of_an_older_version_uses_the_target_named_in_its_record(tmp_path):
    run_dir = tmp_path / "runs" / "exp_1_00000000"
    run_dir.mkdir(parents=True)
    assert isinstance(configured.target_of_run(run_dir), LocalTarget)
    configured.add(tmp_path, lab())
    (run_dir / "job.json").write_text('{"target": "lab"}')
    found: Any = configured.target_of_run(run_dir)
    assert found.name == "lab"


def test_target_kind_that_fails_to_load_is_reported_with_its_module_and_affects_no_other_kind(tmp_path):
    assert list(configured.load_errors()) == ["gone"]
    with pytest.raises(TargetError, match=r"no\.such\.module:Target can't be loaded \(ModuleNotFoundError"):
        Configured(name="x", kind="gone").make()
    with pytest.raises(TargetError, match=r"no kind 'tory'.* Did you mean 'toy'"):
        Configured(name="x", kind="tory").make()
    assert isinstance(lab().make(), ToyTarget)


def test_target_kind_without_options_refuses_settings():
    assert isinstance(Configured(name="x", kind="plain").make(), PlainTarget)
    with pytest.raises(TargetError, match="kind 'plain' has no settings; found a"):
        Configured(name="x", kind="plain", settings={"a": 1}).make()
