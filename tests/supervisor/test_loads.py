"""How busy nodes are: measured, written beside the metrics, and never worth a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import EngineError
from paceline.remote.agent.load import LoadMeter
from paceline.runs import metrics
from paceline.runs.folder import node_logs
from paceline.supervisor import loads
from paceline.supervisor.loads import LoadWatch
from paceline.ui.curves import Key, RunCurves
from tests.helpers import make_run, wait_until


class Nodes:
    """Two nodes, of which what they say is set."""

    def __init__(self) -> None:
        self.says: list[dict[int, dict[str, float]] | Exception] = []

    def loads(self) -> dict[int, dict[str, float]]:
        said = self.says.pop(0)
        if isinstance(said, Exception):
            raise said
        return said


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "_OFTEN_S", 0.0)


def test_each_node_has_a_log_of_its_own_and_no_metric_of_the_run_s(tmp_path: Path, at_once: None) -> None:
    folder, _ = make_run(tmp_path / "runs")
    nodes = Nodes()
    nodes.says = [
        {0: {"cpu_percent": 50.0}},
        EngineError("gone"),
        OSError("full"),
        {0: {"cpu_percent": 60.0}, 1: {"memory_gib": 2.0}},
    ]
    watch = LoadWatch(nodes, folder)
    for _ in range(5):
        watch.look()
    watch.close()
    assert sorted(node_logs(folder.metrics)) == [0, 1]
    curves = RunCurves(folder)
    curves.look()
    assert list(curves.curves[Key("cpu_percent", 0, 1, True)].ys) == [50.0, 60.0]
    assert list(curves.curves[Key("memory_gib", 1, 1, True)].ys) == [2.0]
    # Times are steps: nodes that were asked at different moments have one axis.
    assert curves.curves[Key("cpu_percent", 0, 1, True)].steps[0] > 1.7e9
    assert metrics.read(folder.metrics) == {}


def test_a_short_run_asks_nobody_and_nodes_that_can_t_tell_are_left_alone(tmp_path: Path) -> None:
    folder, _ = make_run(tmp_path / "runs")
    watch = LoadWatch(Nodes(), folder)
    for _ in range(3):
        watch.look()
    LoadWatch(object(), folder).look()
    assert node_logs(folder.metrics) == {}


def test_this_machine_is_measured() -> None:
    meter = LoadMeter(("nothing",))

    def measured() -> bool:
        found = meter.look()
        assert all(0 <= value <= 100 for name, value in found.items() if name.endswith("_percent"))
        assert found["memory_gib"] > 0
        return "cpu_percent" in found

    wait_until(measured, "the kernel has counted")
