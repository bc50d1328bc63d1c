"""GPUs and cores that processes outside Paceline use."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from paceline.observe.node import outside

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        yield process
        process.kill()


@pytest.mark.promise("use-outside-paceline-not-handed-out")
def test_gpu_used_by_a_process_outside_paceline_is_reported_with_the_owner_of_the_process(
    busy: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    uses = {"0": {busy.pid: 40 * 10**9}, "GPU-5a": {busy.pid: 40 * 10**9}, "1": {os.getpid(): 1}, "2": {}}
    monkeypatch.setattr(outside, "driver", lambda: SimpleNamespace(processes_by_name=lambda: uses))
    text = f"used by {getpass.getuser()}'s python"
    found = outside.used_gpus(["0", "1", "2"], {os.getpid() + 1})
    assert found["0"].startswith(text)
    assert found["0"].endswith(f"(pid {busy.pid}), 40.0 GB")
    assert set(found) == {"0", "1"}
    # The GPUs are used by this process and by its child. This process has a ticket in Paceline's queue, so both count
    # as a part of Paceline.
    assert outside.used_gpus(["0", "1", "2"], {os.getpid()}) == {}


@pytest.mark.promise("use-outside-paceline-not-handed-out")
def test_cpu_cores_of_a_long_running_process_outside_paceline_are_reported_as_used(
    busy: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert busy.pid not in outside.used_cores(set()), "it runs for less than a minute"
    monkeypatch.setattr(outside, "_BUSY_S", 0.05)
    monkeypatch.setattr(outside, "_BUSY_SHARE", 0.001)
    deadline = time.monotonic() + 90
    while busy.pid not in (found := outside.used_cores(set())) and time.monotonic() < deadline:
        time.sleep(0.02)
    cores, text = found[busy.pid]
    assert 0 < cores < 1.5
    assert text.endswith(f"(pid {busy.pid})")
    assert busy.pid not in outside.used_cores({os.getpid()})
