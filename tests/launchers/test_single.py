from __future__ import annotations

from paceline.launchers.single import SingleLauncher
from tests.helpers import make_job, make_launch


def test_the_script_is_started_once_in_a_world_of_one():
    (command,) = SingleLauncher().commands(make_launch(make_job(arguments=("--a",))))
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
    assert [command.environment[name] for name in names] == ["0", "1", "0", "1", "0"]
    assert command.argv[-3:] == ("--", "train.py", "--a")
    assert (command.ranks, command.node_rank, command.is_launcher) == ((0,), 0, False)
