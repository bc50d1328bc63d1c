"""Functions and sessions on other machines: arguments and results travel, and a tunnel leads to a session's server."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import paceline as pl
from paceline.errors import RunStateError
from paceline.runs.tunnel import Tunnel
from tests.engines.lab import log_text
from tests.engines.places import EACH, WAYS, Place, place
from tests.functions.helpers import module_of
from tests.helpers import wait_until

CODE = """
@paceline.job(compute_target="there")
def double(x, n=0):
    if n == 3:
        raise ValueError("bad lr")
    return x + x, os.uname().nodename

@paceline.job(compute_target="there", nodes=2)
def rank(x):
    return x + int(os.environ["RANK"])
"""
SERVER = """
import http.server, os
os.chdir("/")
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
print(f"port {server.server_port}", flush=True)
server.serve_forever()
"""


@pytest.fixture(params=["slurm" if way.values == ("slurm",) else way for way in EACH])
def there(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    assert WAYS
    with place(request.param, request, tmp_path, monkeypatch) as found:
        yield found


@pytest.mark.promise("function-result-back")
def test_functions_submitted_to_other_machines_return_their_results(
    there: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = module_of(CODE, tmp_path, monkeypatch)
    on = {"workspace": there.lab.workspace_dir}
    # Tuples and long texts do not fit on a command line, so Paceline passes such arguments in a file.
    run = module.double.options(**on).submit(("a", "b" * 5000))
    calls = module.double.options(**on).map([1, 2, 3, 4], [0, 1, 3, 2])
    ranks = module.rank.options(**on).submit(5)
    value, node = run.result(timeout=120)
    assert value == ("a", "b" * 5000) * 2
    assert node in there.hosts
    assert [calls[number].result(timeout=120)[0] for number in (0, 1, 3)] == [2, 4, 8]
    assert "bad lr" in str(calls[2].exception(timeout=120))
    assert [ranks.result(timeout=120), ranks.result(rank=1)] == [5, 6]


@pytest.mark.promise("tunnel-reaches-worker-port")
def test_tunnel_reaches_a_port_of_another_machine(there: Place) -> None:
    run = there.lab.submit(SERVER, compute_target="there")
    log = run.folder.live_log(0)

    def listens() -> bool:
        assert not run.record().is_terminal, run.record().failure
        return log.exists() and "port" in log_text(run, 0)

    wait_until(listens, "the worker listens", 90)
    port = int(log_text(run, 0).split()[1])
    with Tunnel(run.folder, port) as tunnel, ThreadPoolExecutor(1) as pool:

        def fetch() -> str:
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            return str(opener.open(f"http://127.0.0.1:{tunnel.local_port}/etc/hostname", timeout=100).status)

        found = pool.submit(fetch)
        while not found.done():
            tunnel.step()
        assert found.result() == "200"
        run.cancel()
        with pytest.raises(RunStateError):
            tunnel.serve()
    assert isinstance(run, pl.Run)
    run.wait_for_completion(raise_on_error=False)
