"""The warning on workers that each trained alone, from what each of them has left."""

from __future__ import annotations

import os

import pytest

from paceline.supervisor.diagnosis.alone import alone_text
from paceline.system.files import write_json
from tests.helpers import make_job, make_run

TWO = {"process_count_per_node": 2, "distributed_backend": "gloo"}


@pytest.fixture
def folder(tmp_path):
    folder, fd = make_run(tmp_path / "runs")
    os.close(fd)
    folder.attempt(1).mkdir(parents=True)
    return folder


def left(folder, *ranks: int, library: str = "torch") -> None:
    for rank in ranks:
        write_json(folder.worker_alone(1, rank), {"library": library})


def test_it_is_said_once_all_workers_have_left_word(folder):
    left(folder, 0)
    assert alone_text(make_job(**TWO), folder, 1) is None
    left(folder, 1)
    text = alone_text(make_job(**TWO), folder, 1)
    assert text is not None
    assert text.startswith(
        "2 workers, none joined a process group: each has trained alone. Call torch.distributed.init_"
    )
    assert text.endswith("Where it is meant, set PACELINE_SEPARATE_WORKERS=1.")


def test_lightning_is_told_its_own_arguments(folder):
    left(folder, 0, 1, 2, 3, library="lightning")
    text = alone_text(make_job(**{**TWO, "node_count": 2}), folder, 1)
    assert text is not None
    assert "Give the Trainer devices=2, num_nodes=2, strategy='ddp'." in text


def test_one_worker_and_parameter_servers_are_none_of_its_business(folder):
    left(folder, 0, 1, library="tensorflow")
    assert alone_text(make_job(), folder, 1) is None
    servers = {"distributed_backend": "ps", "worker_count": 1, "parameter_server_count": 1}
    assert alone_text(make_job(**servers), folder, 1) is None
