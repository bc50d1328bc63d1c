"""Tests that cross two axes, of which `make test` has every value and `make proof` the other pairs."""

from __future__ import annotations

from collections.abc import Iterable

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
    name, pair = _parts(nodeid)
    return name in _KEPT and pair not in _KEPT[name]


def unknown(nodeids: Iterable[str]) -> list[str]:
    """Those that are to stay, of tests that are among these, but that no test has: with other names for its values, `make test`
    would lose the test without a word."""
    found = {_parts(nodeid) for nodeid in nodeids}
    names = {name for name, _ in found}
    wanted = {(name, pair) for name in _KEPT.keys() & names for pair in _KEPT[name]}
    return sorted(f"{name}[{pair}]" for name, pair in wanted - found)


def _parts(nodeid: str) -> tuple[str, str]:
    name, _, pair = nodeid.rpartition("::")[2].removesuffix("]").partition("[")
    return name, pair
