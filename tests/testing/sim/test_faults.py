from __future__ import annotations

import pytest

from paceline.errors import TargetError
from paceline.testing.sim.faults import SimSettings


def settings(**values):
    return SimSettings.read("sim", "cluster", values)


def faulty(found):
    return {
        number: [name for name in ("silent_s", "killed_s", "full_s") if getattr(one, name) is not None]
        for number, one in found.items()
        if one.factor > 1 or one.silent_s or one.killed_s or one.full_s
    }


def test_seed_determines_failing_nodes_and_times():
    given = {"nodes": 50, "slow": 2, "dead": 3, "killed": 1, "full_disks": 1}
    found = settings(seed=7, **given).behaviors(range(50))
    assert found == settings(seed=7, **given).behaviors(range(50))
    assert found != settings(seed=8, **given).behaviors(range(50))
    assert sorted(faulty(found).values()) == [[], [], ["full_s"], ["killed_s"], *[["silent_s"]] * 3]


def test_only_slow_nodes_stay_faulty_in_later_simulated_attempts():
    found = settings(nodes=9, slow=1, dead=4, killed=4).behaviors(range(9), has_faults=False)
    assert list(faulty(found).values()) == [[]]


def test_simulated_faults_happen_within_the_configured_time():
    found = settings(nodes=40, dead=40, fault_after_s=10, fault_within_s=5).behaviors(range(40))
    assert all(10 <= one.silent_s <= 15 for one in found.values())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nodes": 0}, "nodes=0"),
        ({"nodes": 3, "dead": 2, "slow": 2}, "4 nodes together, of 3"),
        ({"loss": 1.0}, "loss=1 must be less than 1"),
        ({"latency_ms": -1.0}, "latency_ms=-1.0"),
        ({"nodez": 3}, "no setting 'nodez'"),
    ],
)
def test_invalid_fault_settings_of_the_simulation_are_refused(values, message):
    with pytest.raises(TargetError) as error:
        settings(**values)
    assert message in str(error.value)
