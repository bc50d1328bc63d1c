from __future__ import annotations

import pytest

from paceline.errors import LauncherError
from paceline.job.job import BACKENDS
from paceline.launchers import get_launcher, launcher_names
from tests.helpers import make_job, make_launch


def test_every_backend_is_mapped_to_an_existing_launcher():
    assert set(BACKENDS.values()) <= set(launcher_names())
    for name in BACKENDS.values():
        assert callable(get_launcher(name).commands)


def test_unknown_launcher_is_refused_and_the_error_lists_the_known_launchers():
    with pytest.raises(LauncherError, match=r"no launcher 'rocket'; there are .*mpi, processes"):
        get_launcher("rocket")


def test_processes_launcher_accepts_every_job():
    get_launcher("processes").check(make_job())


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"distributed_backend": "gloo", "node_count": 3, "process_count_per_node": 2},
        {"distributed_backend": "ps", "worker_count": 3, "parameter_server_count": 2, "node_count": 2},
    ],
    ids=str,
)
def test_every_worker_is_started_once_on_its_node(values):
    job = make_job(**values)
    launch = make_launch(job)
    commands = get_launcher(job.launcher).commands(launch)
    assert [command.ranks for command in commands] == [(rank,) for rank in range(job.world_size)]
    assert [command.node_rank for command in commands] == [place.node_rank for place in launch.places]
