"""Checks of runs that complete, and of reading the files of live runs.

For each launcher, the first three checks share one run.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.runs import states, store
from paceline.testing import scripts
from paceline.testing.bench import ODD_FOLDER, WORDS, Bench, seen, states_of, text_of
from paceline.testing.worker_environment import expected, foreign

WAYS = pytest.mark.parametrize("backend", [None, "gloo", "mpi"], ids=["single", "gloo", "mpi"])


class CompletingChecks:
    """Checks of a compute target with scripts that succeed."""

    @WAYS
    def test_a_run_goes_through_its_states_in_order(self, bench: Bench, backend: str | None) -> None:
        run = bench.plain(backend)

        assert states_of(run) == [
            states.NOT_STARTED,
            states.QUEUED,
            states.PREPARING,
            states.STARTING,
            states.RUNNING,
            states.FINALIZING,
            states.COMPLETED,
        ]
        record = run.record()
        (attempt,) = record.attempts
        assert (record.exit_code, record.failure, record.target) == (0, None, bench.target.name)
        assert (attempt.number, attempt.cause, set(attempt.exit_codes.values())) == (1, None, {0})
        assert record.job is not None
        assert len(attempt.exit_codes) == record.job.world_size
        assert len(set(attempt.nodes)) == record.job.node_count
        times = [record.created_utc, record.started_utc, attempt.started_utc, attempt.ended_utc, record.ended_utc]
        assert all(times)

    @WAYS
    def test_workers_logs_outputs_and_metrics_arrive_in_the_run_folder(self, bench: Bench, backend: str | None) -> None:
        run = bench.plain(backend)
        job = run.record().job
        assert job is not None
        for rank in range(job.world_size):
            lines = text_of(run.folder.live_log(rank)).splitlines()
            assert lines[:2] == [f"rank {rank} of {job.world_size}: first line", f"rank {rank}: to standard error"]
            assert lines[2:] == [f"rank {rank}: line {number}" for number in range(2000)]

            blob = run.folder.outputs / ODD_FOLDER / f"blob_{rank}"
            assert hashlib.sha256(blob.read_bytes()).hexdigest() == seen(run, rank)["blob"]
            assert os.access(blob, os.X_OK)
            assert (run.folder.outputs / f"empty_{rank}").read_bytes() == b""
            assert (run.folder.checkpoints / f"rank_{rank}").read_text() == "last"
            assert run.get_metrics("loss", rank=rank) == {"loss": [rank + 1 / (step + 1) for step in range(5)]}
        assert run.folder.driver_log.exists()
        assert run.tags == {"said": "by the worker; $(touch owned)"}
        kept = Path(run.download_file("kept/model.bin", bench.target.folder / "model.bin"))
        assert kept.read_bytes() == b"model"

    @WAYS
    def test_workers_get_the_documented_environment_variables(self, bench: Bench, backend: str | None) -> None:
        run = bench.plain(backend)
        job = run.record().job
        assert job is not None
        paths = set()
        for rank in range(job.world_size):
            what = seen(run, rank)
            variables = what["environment"]
            wanted = expected(run, rank, variables)
            assert {name: variables.get(name) for name in wanted} == wanted
            assert foreign(variables, wanted) == []
            if job.has_launcher:
                assert int(variables["OMP_NUM_THREADS"]) >= 1
                assert variables["PYTHONUNBUFFERED"] == variables["PYTHONFAULTHANDLER"] == "1"
                assert variables["PYTHONHASHSEED"] == "0"
            paths.add(
                (
                    variables["PYTHONPATH"].split(os.pathsep)[0],
                    variables["PACELINE_RUN_DIR"],
                    variables.get("MASTER_ADDR"),
                )
            )

            assert what["argv"] == list(WORDS)
            assert what["cwd"] == variables.get("AZUREML_SOURCE_DIRECTORY", what["cwd"])
            assert what["file"] == f"{what['cwd']}/{job.entry_script}"
            assert (what["stdin"], what["tool"], what["link"]) == ("", True, "tool.sh")
            # `meet` returns the right sum only if all workers have reached the first node at the node's address and port.
            assert what["sum"] == sum(range(job.world_size))
            assert what["mpi_sum"] in (None, what["sum"])
        assert len(paths) == 1, "all nodes see the run at the same path and the first node at the same address"

    def test_runs_at_the_same_time_have_separate_outputs_and_logs(self, bench: Bench) -> None:
        script = "import os\nopen('outputs/mine', 'w').write(os.environ['PACELINE_RUN_ID'])\nprint('done')\n"
        runs = [bench.submit(script) for _ in range(2)]
        for run in runs:
            assert bench.wait_for_end(run) == states.COMPLETED, bench.story(run)

        assert [(run.folder.outputs / "mine").read_text() for run in runs] == [run.id for run in runs]
        assert [text_of(run.folder.live_log(0)) for run in runs] == ["done\n"] * 2

    @WAYS
    def test_a_run_whose_worker_was_killed_makes_a_second_attempt(self, bench: Bench, backend: str | None) -> None:
        run = bench.finish(scripts.KILLED_ONCE, backend, max_restarts=1)

        assert run.status == states.COMPLETED, bench.story(run)
        first, second = run.record().attempts
        job = run.record().job
        assert job is not None
        last = job.world_size - 1
        assert (first.number, first.cause, first.exit_codes[str(last)]) == (1, "killed", 137)
        assert (second.number, second.cause, set(second.exit_codes.values())) == (2, None, {0})
        for rank in range(job.world_size):
            (before,) = text_of(run.folder.rank_log(1, rank)).splitlines()
            after, resumed = text_of(run.folder.rank_log(2, rank)).splitlines()
            # All ranks share the checkpoint folder, so every rank resumes from the same checkpoint.
            assert (before.replace("attempt 1", "attempt 2"), resumed) == (after, "resumed from step 10")
            assert text_of(run.folder.live_log(rank)) == text_of(run.folder.rank_log(2, rank))
            assert run.get_metrics("attempt", rank=rank) == {"attempt": [1, 2]}
            assert (run.folder.outputs / f"attempt_{rank}").read_text() == "2"


class ReadingChecks:
    """Checks that a live run's logs, metrics and files can be read.

    If nodes do not share the run's folder, each read copies the files to this machine.
    """

    def test_metrics_logs_and_outputs_can_be_read_while_a_run_runs(self, bench: Bench) -> None:
        run, top = bench.submit(scripts.LEAVE_AND_WAIT), bench.target.folder / "early"

        def until(condition: Callable[[], bool], what: str) -> None:
            # Read the stored record, because reading the state would update the run.
            bench.wait_until(lambda: condition() or store.stored(run.folder).is_terminal, what)
            assert condition(), bench.story(run)

        until(lambda: run.get_metrics() == {"early": 0.5}, "the metric is there")
        assert (run.metrics("early").steps, run.metrics("early").values) == ((3,), (0.5,))
        until(lambda: run.tags == {"early": "tag"}, "the tag is there")
        until(lambda: "has left it\n" in "".join(text_of(Path(log)) for log in run.get_all_logs(top)), "its last line")
        if bench.target.has_outputs_early:
            until(lambda: {"kept/early.txt", "outputs/early.txt"} <= {*run.get_file_names()}, "the files are there")
            assert Path(run.download_file("outputs/early.txt", top / "copy")).read_text() == "early"

        run.cancel()
        record = run.wait_for_completion(raise_on_error=False)
        assert record.status == states.CANCELED
        assert record.canceled_by
        # At the run's end, Paceline has copied all of the run's files to this machine.
        assert text_of(run.folder.live_log(0)).splitlines() == ["has left it", "told to end"], bench.story(run)
        assert {"kept/early.txt", "outputs/early.txt"} <= {*run.get_file_names()}
        assert run.get_metrics() == {"early": 0.5}
