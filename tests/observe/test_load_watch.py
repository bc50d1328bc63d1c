"""How busy nodes and workers are: measured, written beside the metrics, and never worth a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import EngineError
from paceline.observe import load_watch
from paceline.observe import loads as read_loads
from paceline.observe.load_watch import LoadWatch, sample_seconds
from paceline.observe.node.load import LoadMeter
from paceline.observe.node.nvml import Nvml
from paceline.runs import metrics
from paceline.runs.folder import RunFolder, load_logs, node_logs
from paceline.ui.curves import Key, RunCurves
from tests.helpers import make_job, make_launch, make_run, wait_until


class Nodes:
    """Two nodes whose answers the test sets."""

    def __init__(self) -> None:
        self.says: list[dict[int, dict[str, Any]] | Exception] = []
        self.asked: list[Any] = []

    def loads(self, workers: Any) -> dict[int, dict[str, Any]]:
        self.asked.append(workers)
        said = self.says.pop(0)
        if isinstance(said, Exception):
            raise said
        return said


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now + 1.7e9


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(load_watch, "time", found)
    return found


def watched(folder: RunFolder, nodes: Any, **values: Any) -> LoadWatch:
    launch = make_launch(make_job(node_count=2, process_count_per_node=2, distributed_backend="gloo"))
    folder.attempt(1).mkdir(parents=True, exist_ok=True)
    return LoadWatch(nodes, folder, launch, lambda: {0: 11, 1: 12, 2: 13}, **values)


def go(watch: LoadWatch, clock: Clock, count: int, seconds: float = 5.0) -> None:
    for _ in range(count):
        clock.now += seconds
        watch.look()


@pytest.mark.promise("nodes-workers-take-sampled-target", "how-busy-nodes-kept-beside")
def test_each_node_has_its_own_load_log(tmp_path: Path, clock: Clock) -> None:
    folder, _ = make_run(tmp_path / "runs")
    nodes = Nodes()
    nodes.says = [
        {0: {"cpu_percent": 50.0, "ranks": {"0": {"cpu_percent": 99.0, "memory_gib": 1.5, "pid": 11.0}}}},
        EngineError("gone"),
        OSError("full"),
        {0: {"cpu_percent": 60.0}, 1: {"memory_gib": 2.0}},
    ]
    watch = watched(folder, nodes)
    go(watch, clock, 5)
    watch.close()
    # Paceline does not measure a worker that has not reported its start.
    assert [list(one["ranks"].items()) for one in nodes.asked[0].values()] == [[("0", 11), ("1", 12)], [("2", 13)]]
    assert sorted(node_logs(folder.metrics)) == [0, 1]
    assert sorted(load_logs(folder.metrics)) == [0]
    curves = RunCurves(folder)
    curves.look()
    assert list(curves.curves[Key("cpu_percent", 0, 1, True)].ys) == [50.0, 60.0]
    assert list(curves.curves[Key("memory_gib", 1, 1, True)].ys) == [2.0]
    assert list(curves.curves[Key("rank_cpu_percent", 0, 1, True)].ys) == [99.0]
    # The steps of these curves are times, so nodes that were measured at different moments share one axis.
    assert curves.curves[Key("cpu_percent", 0, 1, True)].steps[0] > 1.7e9
    assert metrics.read(folder.metrics) == {}
    found = read_loads.series(folder)
    assert found["nodes"][0]["cpu_percent"].values == (50.0, 60.0)
    assert found["ranks"][0]["memory_gib"].values == (1.5,)
    assert "pid" not in found["ranks"][0]
    assert read_loads.last(folder)["nodes"]["1"] == {"name": "node-1", "memory_gib": 2.0}
    assert read_loads.whole(folder, read_loads.last(folder))["nodes"]["0"]["cpu_percent"] == 55.0


def test_load_is_not_recorded_for_short_runs_or_without_load_counters_or_if_sampling_is_disabled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = make_run(tmp_path / "runs")
    watch = watched(folder, Nodes())
    for _ in range(3):
        watch.look()
    watched(folder, object()).look()
    assert node_logs(folder.metrics) == {}
    monkeypatch.setenv("PACELINE_SAMPLE_SECONDS", "0")
    watch = watched(folder, Nodes())
    watch.look()
    watch.look()
    assert [sample_seconds({"PACELINE_SAMPLE_SECONDS": text}) for text in ("0", "x", "0.1", "30")] == [
        0.0,
        5.0,
        1.0,
        30.0,
    ]


def test_load_history_of_a_long_run_is_thinned_to_mean_loads_and_peak_memory(tmp_path: Path, clock: Clock) -> None:
    folder, _ = make_run(tmp_path / "runs")
    nodes = Nodes()
    nodes.says = [{0: {"cpu_percent": float(number % 6), "memory_gib": float(number % 6)}} for number in range(200)]
    watch = watched(folder, nodes)
    go(watch, clock, 3)
    clock.now += 700
    go(watch, clock, 60)
    watch.close()
    found = read_loads.series(folder)["nodes"][0]
    assert len(found["cpu_percent"]) < 15
    assert found["cpu_percent"].values[-3] == 2.5
    assert found["memory_gib"].values[-3] == 5.0


def counted(number: int, slow: int | None) -> dict[int, dict[str, Any]]:
    """What four ranks have counted after so many windows of 5 s; one of them takes twice as long."""
    waits = {rank: 0.0 if rank == slow or slow is None else 2.5 for rank in range(4)}
    ranks = {rank: {"steps": 10.0 * number, "data_s": 0.0, "wait_s": number * waits[rank]} for rank in range(4)}
    return {node: {"ranks": {str(r): ranks[r] for r in (2 * node, 2 * node + 1)}} for node in (0, 1)}


def test_slow_rank_is_profiled_once_and_reported_with_its_code_line(tmp_path: Path, clock: Clock) -> None:
    folder, _ = make_run(tmp_path / "runs")
    nodes, asked = Nodes(), []
    nodes.says = [counted(number, 3) for number in range(40)]
    watch = watched(folder, nodes, look_where=asked.append)
    go(watch, clock, 7)
    assert asked == []
    go(watch, clock, 20)
    assert asked == [(3,)]
    watch.note_place((3,), "data.py:41, `load`", 0.62)
    go(watch, clock, 2)
    told = json.loads(folder.load(1).read_text())["pace"]["straggler"]["text"]
    assert told == (
        "Rank 3 on node-1 is 2.0 times as slow as the others: it takes 0.5 s a step of its own, where they take 0.25 s and then "
        "wait. 62 % of its time in data.py:41, `load`."
    )
    watch.close()
    assert watch.pace().end_text.startswith("Rank 3 on node-1 was 2.0 times as slow as the others")


def test_load_watch_keeps_at_most_240_measurement_intervals_of_a_long_run(tmp_path: Path, clock: Clock) -> None:
    folder, _ = make_run(tmp_path / "runs")
    nodes = Nodes()
    nodes.says = [counted(number, 3) for number in range(1200)]
    watch = watched(folder, nodes)
    go(watch, clock, 1200)
    assert len(watch._windows) <= 240
    assert watch.pace().ranks[0].steps > 11000
    assert watch.pace().straggler.ranks == (3,)


def test_load_meter_measures_cpu_memory_and_network_of_this_machine() -> None:
    meter = LoadMeter(("nothing",))

    def measured() -> bool:
        found = meter.look()
        assert all(0 <= value <= 100 for name, value in found.items() if name.endswith("_percent"))
        assert 0 < found["memory_gib"] < found["memory_total_gib"]
        return "cpu_percent" in found and "net_in_mib_s" in found

    wait_until(measured, "the kernel has counted")


class Driver:
    """NVML with two devices, as far as it is used; each call sets the value behind its last argument."""

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

    def nvmlDeviceGetPowerUsage(self, device: Any, milliwatts: Any) -> int:  # noqa: N802
        milliwatts._obj.value = 350_500
        return 0 if device.value == 1 else 3

    def nvmlDeviceGetComputeRunningProcesses_v3(self, device: Any, count: Any, infos: Any) -> int:  # noqa: N802
        # The first call reports more processes than the given buffer can hold.
        if len(infos) < 70:
            count._obj.value = 70
            return 7
        infos[0].pid, infos[0].used = 40 + device.value, 2 << 30
        infos[1].pid, infos[1].used = 50, 2**64 - 1
        count._obj.value = 2
        return 0


def test_gpu_load_memory_and_power_are_measured_by_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Nvml, "begin", lambda: Nvml(Driver()))
    found = {name: value for name, value in LoadMeter().look().items() if name.startswith("gpu")}
    assert found == {
        "gpu0_percent": 41.0,
        "gpu0_watts": 350.5,
        "gpu1_percent": 42.0,
        "gpu1_memory_gib": 3.0,
        "gpu1_memory_total_gib": 8.0,
    }
    assert [gpu.processes for gpu in Nvml(Driver()).gpus()] == [{41: 2 << 30, 50: 0}, {42: 2 << 30, 50: 0}]
    assert "gpu0_percent" not in LoadMeter(("1",)).look()
    # LoadMeter does not compare device names of other kinds, such as a GPU's UUID, so it reports all GPUs.
    assert "gpu0_percent" in LoadMeter(("GPU-8f6e",)).look()
