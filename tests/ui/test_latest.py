"""The latest values in the list."""

from __future__ import annotations

from paceline.runs import states
from paceline.ui.index import Index
from paceline.ui.latest import LatestValues
from tests.ui.conftest import HOSTILE, Place, log_values


def test_the_latest_values_come_from_the_end_of_the_log(place: Place) -> None:
    folder = place.run(status=states.RUNNING)
    silent = place.run("quiet_1700000001_00000001")
    for name in ("lr", "train/loss", "val/accuracy", "steps"):
        log_values(folder, name, range(500))
    log_values(folder, "val/accuracy", [0.5])
    log_values(folder, "train/loss", [0.25])
    index, latest = Index(place.runs_dir), LatestValues(place.runs_dir)
    index.refresh()
    found = latest.of(index.entries())
    assert found[silent.run_id] == []
    # What is judged by comes first.
    assert found[folder.run_id][:2] == [("val/accuracy", 0.5), ("train/loss", 0.25)]
    with open(folder.metric_log(0), "a") as file:
        file.write('{"name":"val/accuracy","value":0.75,"time":1.0}\n{"name":"val/accuracy","va')
    assert latest.of(index.entries())[folder.run_id][0] == ("val/accuracy", 0.75)


def test_names_in_the_latest_values_are_escaped(place: Place) -> None:
    folder = place.run()
    log_values(folder, HOSTILE, [1.0])
    text = place.client().get("/").text
    assert "&lt;script&gt;document.title" in text
    assert "<script>document" not in text
