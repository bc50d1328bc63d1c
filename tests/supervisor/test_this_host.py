"""What a supervisor starts on its own machine while its nodes are elsewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from paceline.job.plan import Command
from paceline.supervisor.this_host import ThisHost
from paceline.system import processes
from tests.helpers import wait_until


def command(folder: Path, code: str) -> Command:
    return Command(argv=(sys.executable, "-S", "-c", code), log=folder / "log")


def test_its_own_process_is_ended_and_the_links_to_nodes_are_left(tmp_path: Path) -> None:
    # Story: outputs were looked at with the nodes of `local`, which end all that is below the supervisor: each node's ssh.
    with subprocess.Popen(["sleep", "60"]) as link:
        try:
            nodes = ThisHost()
            started = nodes.start(command(tmp_path, "import time; time.sleep(60)"), tmp_path, {})
            nodes.kill_all()
            assert not processes.is_alive(started.pid)
            assert processes.is_alive(link.pid)

            started = nodes.start(command(tmp_path, "raise SystemExit(3)"), tmp_path, {})
            ends = []
            wait_until(lambda: ends.extend(nodes.ended()) or ends, "its end is told")
            assert [(end.pid, end.exit_code) for end in ends] == [(started.pid, 3)]
            assert link.poll() is None
        finally:
            link.kill()
