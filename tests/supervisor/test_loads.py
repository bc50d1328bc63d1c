"""How busy nodes are: measured, written beside the metrics, and never worth a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.errors import EngineError
from paceline.remote.agent import load
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


class Driver:
    """NVML with two devices, as far as it is called; each call sets what its last argument points at."""

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802 - NVML's own names
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, number: int, device: Any) -> int:  # noqa: N802
        device._obj.value = number + 1
        return 0

    def nvmlDeviceGetUtilizationRates(self, device: Any, busy: Any) -> int:  # noqa: N802
        busy._obj[0], busy._obj[1] = 40 + device.value, 5
        return 0

    def nvmlDeviceGetMemoryInfo(self, device: Any, memory: Any) -> int:  # noqa: N802
        memory._obj[0], memory._obj[1], memory._obj[2] = 8 << 30, 5 << 30, 3 << 30
        return 0 if device.value == 2 else 999


def test_gpus_are_measured_by_the_driver_s_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_nvml", Driver)
    found = {name: value for name, value in LoadMeter().look().items() if name.startswith("gpu")}
    assert found == {"gpu0_percent": 41.0, "gpu1_percent": 42.0, "gpu1_memory_gib": 3.0}
    assert "gpu0_percent" not in LoadMeter(("1",)).look()
    # Names of other kinds, such as those of parts of a device, are not told apart here.
    assert "gpu0_percent" in LoadMeter(("GPU-8f6e",)).look()
