"""Tests that cross two axes, of which `make test` has every value and `make proof` the other pairs."""

from __future__ import annotations

#: Test -> the pairs that stay.
_KEPT = {
    "test_mpirun_gives_each_worker_its_rank_and_local_rank": ("wheel-2x2", "system-1x4", "wheel-2x1"),
    "test_a_script_finds_a_folder_with_the_files": ("single-as_mount", "gloo-as_download", "mpi-wheel-as_mount"),
    "test_every_node_or_rank_has_its_own_part": ("gloo-rank", "mpi-node"),
    "test_multiprocessing_works_in_a_script": ("single-fork", "mpi-spawn"),
    "test_each_worker_sees_its_own_gpu": ("gloo-2", "mpi-1"),
    "test_no_child_of_a_child_outlives_the_run": ("single-success", "single-cancel", "mpi-failure"),
    "test_under_mpirun_the_exit_code_is_the_workers_own": ("wheel-sys.exit(3)", "system-a null pointer"),
    "test_a_script_whose_name_looks_like_an_option_runs_under_mpirun": ("wheel---.py", "system-sub folder/-y.py"),
}


def is_left_to_proof(nodeid: str) -> bool:
    """Whether this pair of a crossed test's values is among those that `make proof` does."""
    name, _, pair = nodeid.rpartition("::")[2].removesuffix("]").partition("[")
    return name in _KEPT and pair not in _KEPT[name]
