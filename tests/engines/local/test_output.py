"""The workers' output: whole, live, each in its own file, of any size and content."""

from __future__ import annotations

import resource
import subprocess
import sys
from typing import Any

import pytest

import paceline as pl
from paceline.runs import follow, states
from paceline.runs.follow import Show
from paceline.runs.logs import LogLine
from paceline.runs.record import RunRecord
from tests.engines.lab import Lab, log_text, wait_for_file
from tests.engines.parents import BELOW_MPIRUN
from tests.helpers import wait_until


def lines_of(run: pl.Run) -> list[tuple[int, str]]:
    """(rank, text) of the merged view, to the run's end."""
    lines: list[LogLine] = []
    Show(run.folder, line=lines.append, state=lambda record: None).to_the_end()
    return [(line.rank, line.text) for line in lines]


@BELOW_MPIRUN
def test_output_is_kept_byte_by_byte_without_newlines_and_with_binary_data(lab: Lab, parent: dict[str, Any]) -> None:
    script = """
        import os, sys
        garbage = bytes(range(256)) * 3 + b"\\xff\\xfe\\n\\x00\\n"
        os.write(1, garbage)
        sys.stderr.write("to stderr\\n")
        print("no newline at the end", end="")
    """
    run = lab.submit(script, **parent)
    lines = lines_of(run)

    expected = bytes(range(256)) * 3 + b"\xff\xfe\n\x00\nto stderr\nno newline at the end"
    for rank in range(len(parent) or 1):
        assert run.folder.live_log(rank).read_bytes() == expected
        mine = [text for of, text in lines if of == rank]
        assert mine[-2:] == ["to stderr", "no newline at the end"]
        assert "\x00" in mine


def test_output_is_readable_while_the_script_runs(lab: Lab, parent: dict[str, Any]) -> None:
    gate = lab.folder / "gate"
    script = f"""
        import os, time
        print("live")
        while not os.path.exists({str(gate)!r}):
            time.sleep(0.01)
        print("at last")
    """
    run = lab.submit(script, **parent)
    wait_until(lambda: wait_for_file(run.folder.rank_log(1, 0)) == "live\n", "the line is there", 60)
    gate.touch()
    run.wait_for_completion()
    assert log_text(run) == "live\nat last\n"


@pytest.mark.promise("worker-prints-much-disturbs-other")
def test_line_of_100_megabytes_from_one_worker_is_kept_and_the_log_of_the_other_worker_is_complete(lab: Lab) -> None:
    script = """
        import os, sys
        if os.environ["PACELINE_RANK"] == "0":
            for _ in range(100):
                sys.stdout.write("x" * (1 << 20))
        else:
            for number in range(1000):
                print("line", number)
    """
    run = lab.complete(script, process_count_per_node=2, distributed_backend="gloo")

    assert run.folder.live_log(0).stat().st_size == 100 << 20
    assert log_text(run, 1) == "".join(f"line {number}\n" for number in range(1000))
    # The whole log is one line. Reading it in the merged view must not take more memory than a short line.
    program = """
        import sys, resource
        from pathlib import Path
        from paceline.runs.folder import RunFolder
        from paceline.runs.follow import Show
        sizes = [0, 0]
        def line(found):
            sizes[found.rank] += len(found.text) + (found.rank == 1)
        Show(RunFolder(Path(sys.argv[1])), line=line, state=print).to_the_end()
        print(*sizes)
    """
    limit = 64 << 20
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(line[8:] for line in program.splitlines()), run.folder.path],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{100 << 20} {run.folder.live_log(1).stat().st_size}\n"


def test_failure_report_stays_short_if_the_worker_printed_megabytes_of_output(lab: Lab) -> None:
    run = lab.finish("import os, sys\nos.write(1, b'y' * 5_000_000 + b'\\n')\nprint('last words')\nos._exit(3)\n")

    assert run.failure is not None
    assert run.failure.last_lines[-1] == "last words"
    assert sum(map(len, run.failure.last_lines)) < 50_000
    assert run.folder.state.stat().st_size < 100_000


@pytest.mark.promise("lines-several-ranks-stand-order")
def test_lines_of_all_ranks_come_in_the_order_they_were_written(lab: Lab) -> None:
    # Rank 0 prints a, rank 1 prints b, rank 0 prints c. Each rank waits until the supervisor has noted the previous line.
    script = """
        import os, time
        rank, notes = os.environ["PACELINE_RANK"], os.path.join(os.environ["PACELINE_RUN_DIR"], "attempts/1/log_order.txt")
        def wait(name):
            while not os.path.exists(name):
                time.sleep(0.005)
        def say(letter):
            print(letter, flush=True)
            while f" {rank} 2\\n" not in open(notes).read():
                time.sleep(0.005)
            open(f"outputs/{letter}", "w")
        if rank == "0":
            say("a")
            wait("outputs/b")
            print("c")
        else:
            wait("outputs/a")
            say("b")
    """
    run = lab.complete(script, process_count_per_node=2, distributed_backend="gloo")

    # The order is kept after the end of the run.
    assert lines_of(run) == [(0, "a"), (1, "b"), (0, "c")]


def test_show_output_prints_log_lines_with_ranks_and_run_states(
    lab: Lab, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, state_text = lab.folder / "gate", follow.state_text

    def shown(record: RunRecord) -> str:
        if record.status == states.RUNNING:
            gate.touch()
        return state_text(record)

    monkeypatch.setattr(follow, "state_text", shown)
    script = f"import os, time\nprint('hello')\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
    run = lab.submit(script, process_count_per_node=2, distributed_backend="gloo")
    run.wait_for_completion(show_output=True)

    text = capsys.readouterr().out
    assert text.startswith(f"RunId: {run.id}\n")
    assert "[rank 0] hello\n" in text
    assert "[rank 1] hello\n" in text
    assert "-- Running\n" in text
    assert "-- Completed in " in text.splitlines()[-1]
