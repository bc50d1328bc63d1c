from __future__ import annotations

import io

import pytest

from paceline.errors import MetricError
from paceline.runs.offline import OfflineRun


def test_offline_run_prints_logged_values(capsys):
    run = OfflineRun()
    run.log("loss", 0.5)
    run.log_list("l", [1, 2])
    run.log_row("r", x=1)
    run.log_table("t", {"x": [1]})
    run.log_image("i", path="a.png")
    assert capsys.readouterr().out == (
        "Attempted to log scalar metric loss:\n0.5\n"
        "Attempted to log list metric l:\n[1, 2]\n"
        "Attempted to log row metric r:\n{'x': 1}\n"
        "Attempted to log table metric t:\n{'x': [1]}\n"
        "Attempted to log image metric i:\na.png\n"
    )


def test_offline_run_id_is_unique_and_has_the_prefix_offlinerun():
    one, other = OfflineRun(), OfflineRun()
    assert one.id.startswith("OfflineRun_")
    assert one.id != other.id
    assert repr(one) == f"OfflineRun(id={one.id!r})"


def test_offline_run_validates_metric_names(capsys):
    OfflineRun().log("loss", [1])
    OfflineRun().log("loss", None)
    assert "[1]" in capsys.readouterr().out
    with pytest.raises(MetricError, match="metric name"):
        OfflineRun().log("", 1)


def test_offline_run_keeps_tags_and_properties():
    run = OfflineRun()
    run.tag("lr", 0.1)
    run.set_tags({"best": None})
    run.add_properties({"n": 1})
    assert (run.tags, run.properties) == ({"lr": "0.1", "best": None}, {"n": "1"})


def test_offline_run_only_prints_uploads_and_stores_no_files(capsys, tmp_path):
    run = OfflineRun()
    assert run.upload_file("outputs/a", io.BytesIO()) == "outputs/a"
    assert run.upload_files(["a", "b"], ["x", "y"]) == ["a", "b"]
    assert run.upload_folder("plots", "nowhere") == []
    assert "Attempted to upload folder plots" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_offline_child_run_has_its_parent():
    run = OfflineRun()
    with run.child_run("child") as child:
        assert (child.parent, child.name) == (run, "child")


@pytest.mark.parametrize(
    ("call", "status"), [("complete", "Completed"), ("fail", "Failed"), ("cancel", "Canceled"), ("start", "Running")]
)
def test_offline_run_status_follows_complete_fail_and_cancel(call, status):
    run = OfflineRun()
    getattr(run, call)()
    assert run.status == status
