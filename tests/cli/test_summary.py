"""What `show` prints about a run's environment and data."""

from __future__ import annotations

import pytest

from paceline.cli.summary import data_texts, environment_text
from paceline.environments.environment import Environment
from tests.helpers import make_job

BUILT = {"key": "0123456789abcdef", "is_layered": True, "pip": ["a==1"], "conda": []}


@pytest.mark.parametrize(
    ("environment", "built", "text"),
    [
        ({}, None, ""),
        ({"python": "/usr/bin/python3"}, None, "/usr/bin/python3"),
        ({"docker_image": "lab/torch:2"}, None, "image lab/torch:2"),
        ({"pip_packages": ("a",)}, BUILT, "0123456789ab (layered): a==1"),
        ({"pip_packages": ("a",)}, {**BUILT, "is_layered": False, "pip": []}, "0123456789ab (whole): nothing to add"),
        (
            {"pip_packages": ("a",)},
            {**BUILT, "conda": ["c"], "pip": [str(n) for n in range(9)]},
            "0123456789ab (layered): c, 0, 1, 2, 3, 4 and 4 more",
        ),
    ],
)
def test_run_summary_shows_the_python_path_the_container_image_or_the_added_packages(environment, built, text):
    assert environment_text(make_job(environment=Environment(**environment)), built) == text


def test_summary_names_each_input_and_output_with_its_file_count_and_size():
    source = {"datastore": "lab", "path": "mnist"}
    data = {
        "inputs": [
            {"name": "a", "sources": [source], "mode": "download", "files": 12, "bytes": 45_200_000},
            {"name": "b", "sources": [{"path": "/x"}], "partition": "node", "node_rank": 1, "files": 0, "bytes": 0},
            {"name": "c", "sources": [source], "dataset": "mnist:2"},
        ],
        "outputs": [{"name": "d", "sources": [source], "mode": "upload", "files": 1, "bytes": 100_000}],
    }
    assert data_texts(data) == [
        "a = lab:mnist, 12 files, 45.2 MB",
        "b = /x, 0 files, 0.0 MB on node 1, a part for each node",
        "c = mnist:2",
        "d -> lab:mnist, 1 files, 0.1 MB",
    ]
    assert data_texts({"inputs": [], "outputs": []}) == []
