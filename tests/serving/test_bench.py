"""A load test of a server, and its report."""

from __future__ import annotations

import pytest

from paceline.errors import ServingError
from paceline.serving.bench import BenchResult, bench, picture, table
from tests.serving.servers import serving

SCRIPT = """
import json
def init():
    pass
def run(data):
    if json.loads(data) == "wrong":
        raise RuntimeError
    return {"got": data}
"""


def test_bench_reports_latency_and_rate_for_each_number_of_clients(tmp_path):
    with serving(tmp_path, SCRIPT) as server:
        found = bench(f"{server.url}/score", b"1", clients=(1, 4), seconds=0.3)
        assert [each.clients for each in found] == [1, 4]
        for each in found:
            assert each.requests > 0
            assert each.failures == 0
            assert 0 < each.p50_ms <= each.p95_ms <= each.p99_ms
            # The last responses may come after 0.3 s, and long after that on a busy machine.
            assert 0 < each.per_second <= 1.9 * each.requests / 0.3
        text = server.client.get("/metrics").text
        asked = sum(each.requests for each in found) + 1
        assert f'paceline_requests_total{{service="svc",path="/score",status="200"}} {asked}' in text
        with pytest.raises(ServingError, match="answers 500: An unexpected error"):
            bench(f"{server.url}/score", b'"wrong"', seconds=0.1)
        url = f"{server.url}/score"
    with pytest.raises(ServingError, match="there is no answer from"):
        bench(url, b"1", seconds=0.1)
    with pytest.raises(ServingError, match="is not an address of a server"):
        bench("localhost:80", b"1")


def test_bench_results_are_written_as_a_table_and_a_plot(tmp_path):
    one = {"requests": 10, "failures": 0, "per_second": 100.0, "p50_ms": 1.0, "p95_ms": 2.0, "p99_ms": 3.0}
    results = [BenchResult(clients=count, **one) for count in (1, 8)]
    assert table(results)[1] == ["1", "100", "1.00", "2.00", "3.00", "10", "0"]
    picture(results, tmp_path / "b.png", "digits")
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
