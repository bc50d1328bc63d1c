from __future__ import annotations

import threading

from paceline.job.plan import Command


def test_links_share_the_threads_of_one_hub(open_link):
    open_link("first")
    before = {thread for thread in threading.enumerate() if thread.name.startswith("paceline-")}
    others = [open_link(f"node-{number}") for number in range(3)]
    assert [link.run(["echo", "here"]).stdout for link in others] == [b"here\n"] * 3
    assert {thread for thread in threading.enumerate() if thread.name.startswith("paceline-")} <= before


def test_commands_of_all_nodes_start_by_one_request_to_each(make_nodes, run_folder, library, tmp_path):
    nodes = make_nodes(2)
    seen = nodes.send(run_folder, library)
    log = seen.run_dir / "logs/rank_0.log"
    commands = [
        Command(
            argv=argv, environment={"ONLY": str(number), "SAME": "x"}, node_rank=number % 2, ranks=(number,), log=log
        )
        for number, argv in enumerate([("sh", "-c", "echo $SAME $ONLY >> out"), ("none-such",)] * 2)
    ]
    found = nodes.start_all(commands, tmp_path, {0: {"PATH": "/bin:/usr/bin"}, 1: {"PATH": "/bin"}})
    assert [getattr(one, "command", None) for one in found] == [commands[0], None, commands[2], None]
    assert all(isinstance(one, FileNotFoundError) for one in found[1::2])
    ended: list[int] = []
    while len(ended) < 2:
        ended += [one.exit_code for one in nodes.ended()]
    assert ended == [0, 0]
    assert sorted((tmp_path / "out").read_text().splitlines()) == ["x 0", "x 2"]
