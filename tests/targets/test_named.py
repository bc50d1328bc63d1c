"""`Workspace.compute_targets`."""

from __future__ import annotations

import pytest

from paceline.errors import TargetError
from paceline.system import plugins
from paceline.targets import configured
from paceline.targets.configured import ComputeTargets, Configured


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    places = {"toy": "tests.targets.toy:ToyTarget", "plain": "tests.targets.toy:PlainTarget"}
    monkeypatch.setattr(plugins, "installed", lambda group: places)


def test_compute_targets_are_found_by_name_and_report_their_status(tmp_path):
    targets = ComputeTargets(tmp_path)
    configured.add(tmp_path, Configured(name="lab", kind="toy", settings={"label": "x", "nodes": 3}))
    assert list(targets) == ["local", "lab"]
    assert (len(targets), "lab" in targets, "moon" in targets) == (2, True, False)
    assert (targets["lab"].type, targets["lab"].settings) == ("toy", {"label": "x", "nodes": 3})
    assert targets["lab"].get_status().cores == 12
    assert repr(targets) == "ComputeTargets(local, lab)"


def test_unknown_target_name_raises_key_error_with_the_names(tmp_path):
    with pytest.raises(KeyError, match=r"no compute target 'moon'\. There are local\."):
        ComputeTargets(tmp_path)["moon"]


def test_status_of_a_target_whose_kind_reports_no_nodes_raises_target_error(tmp_path):
    with pytest.raises(TargetError, match="kind 'plain', which reports no nodes"):
        ComputeTargets(tmp_path)["plain"].get_status()


def test_damaged_target_description_raises_target_error(tmp_path):
    (tmp_path / "compute").mkdir()
    (tmp_path / "compute/lab.json").write_text("{")
    with pytest.raises(TargetError, match=r"lab\.json"):
        ComputeTargets(tmp_path)["lab"]
