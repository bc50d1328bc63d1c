"""Ranks that disagree, stall, fail and die, over both transports; what they leave behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.collectives.gloo_world import Ranks
from tests.helpers import free_port
from tests.torch_mpi.test_world import mpirun, need_mpi

CHECKS = Path(__file__).with_name("robust_checks.py")


def run(transport: str, ranks: int, folder: Path, *arguments: object, **variables: str) -> list[str]:
    """What each rank has printed, once all have ended well; over MPI the ranks' lines are one text."""
    if transport == "gloo":
        world = Ranks(ranks, CHECKS, *arguments, cwd=folder, **variables).wait()
        assert world.codes == [0] * ranks, world.told()
        return world.outputs
    need_mpi()
    done = mpirun(ranks, CHECKS, *arguments, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return [done.stdout]


@pytest.mark.parametrize("transport", ["mpi", "gloo"])
def test_disagreement_about_process_sets_raises_on_all_ranks_and_changes_no_set(transport, tmp_path):
    checks = (
        "different_process_sets_are_told_to_all",
        "sets_that_come_and_go_leave_nothing_behind",
        "starts_and_stops_leave_nothing_behind",
    )
    run(transport, 3, tmp_path, ",".join(checks))


@pytest.mark.parametrize("transport", ["mpi", "gloo"])
def test_begin_and_end_of_a_stalled_operation_are_written_to_the_stall_file(transport, tmp_path, monkeypatch):
    file = tmp_path / "stalls with a space.jsonl"
    monkeypatch.setenv("PACELINE_STALL_FILE", str(file))
    run(transport, 2, tmp_path, "a_stall_is_told_and_over", file, PACELINE_STALL_FILE=str(file))


@pytest.mark.promise("stall-names-ranks-missing")
@pytest.mark.parametrize("transport", ["mpi", "gloo"])
def test_operation_stalled_for_the_time_limit_fails_on_every_rank_and_names_the_missing_rank(transport, tmp_path):
    printed = "".join(run(transport, 3, tmp_path, "a_stall_is_ended_at_the_limit"))
    told = [line for line in printed.splitlines() if line.startswith("told:")]
    assert len(told) == 3
    assert all("allreduce 'one' has waited for" in line and "missing on rank 1" in line for line in told), told


@pytest.mark.promise("rank-killed-told-others")
def test_killed_rank_is_reported_to_the_others_over_gloo(tmp_path):
    world = Ranks(3, CHECKS, "a_rank_killed_in_the_middle_is_told_to_the_others", cwd=tmp_path).wait()
    assert world.codes == [0, 0, -9], world.told()
    for output in world.outputs[:2]:
        assert any(line.startswith("told: ") and "rank 2 " in line for line in output.splitlines()), output
        assert "refused: rank 2 of 3 was lost and not started again" in output


def test_engine_failure_on_one_rank_is_reported_to_the_others_over_gloo(tmp_path):
    for output in run("gloo", 3, tmp_path, "an_engine_that_fails_alone_is_told_to_the_others"):
        assert "communication has failed (TypeError" in output


def test_surviving_ranks_can_allreduce_in_a_new_gloo_world_after_a_second_rendezvous(tmp_path):
    outputs = run_survivors(tmp_path)
    assert all("together again: 2.0" in output for output in outputs), outputs


def run_survivors(folder: Path) -> list[str]:
    # Rank 0 dies, and with it the store that it hosts.
    world = Ranks(3, CHECKS, "survivors_meet_again", free_port(), cwd=folder).wait()
    assert world.codes == [-9, 0, 0], world.told()
    return world.outputs[1:]
