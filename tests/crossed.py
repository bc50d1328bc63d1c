"""Tests with several values or pairs of values, of which `make test` has those that differ in what they run, `make proof` all."""

from __future__ import annotations

from collections.abc import Iterable

#: Test -> the values, or pairs of values, that stay.
_KEPT = {
    "test_mpirun_gives_each_worker_its_rank_and_local_rank": ("wheel-2x2", "system-1x4", "wheel-2x1"),
    "test_a_script_finds_a_folder_with_the_files": ("single-as_mount", "gloo-as_download", "mpi-wheel-as_mount"),
    "test_every_node_or_rank_has_its_own_part": ("gloo-rank", "mpi-node"),
    "test_multiprocessing_works_in_a_script": ("single-fork", "mpi-spawn"),
    "test_each_worker_sees_its_own_gpu": ("gloo-2", "mpi-1"),
    "test_no_child_of_a_child_outlives_the_run": ("single-success", "single-cancel", "mpi-failure"),
    "test_under_mpirun_the_exit_code_is_the_workers_own": ("wheel-sys.exit(3)", "system-a null pointer"),
    "test_a_script_whose_name_looks_like_an_option_runs_under_mpirun": ("wheel---.py", "system-sub folder/-y.py"),
    "test_a_module_runs_as_under_python_m": ("None-1", "mpi-2"),
    "test_mpi4py_adds_up_over_two_workers_and_a_rank_that_raises_ends_the_one_that_waits_for_it": ("system",),
    # A controller, links and trials go through the same code with every engine; each job of Ray's starts six processes.
    "test_a_controller_in_the_engine_is_looked_after_killed_and_gone_on_with": ("slurm",),
    "test_links_are_resolved_where_they_were_made_and_no_other_files_are_had_through_them": (
        "local",
        "ssh",
        "slurm, login host",
    ),
    "test_trials_of_two_nodes_are_judged_and_the_parent_s_end_is_theirs": ("ssh",),
    # TensorFlow takes eight seconds of a processor to load.
    "test_the_examples_in_the_style_of_each_era_run_as_they_are": ("2019", "2020", "2022"),
    "test_the_programs_with_a_library_run": ("torch", "pandas"),
    "test_a_step_that_one_rank_leaves_out_is_seen": ("PipelineParallel()", "DataParallel()"),
    "test_sequences_in_parts_and_spread_experts_are_compared_too": ("ContextParallel()-context 2",),
    # What the engine does is above its transport.
    "test_disagreement_about_process_sets_is_told_to_all_and_nothing_is_left_behind": ("mpi",),
    "test_a_stall_is_written_down_when_it_begins_and_when_it_is_over": ("mpi",),
    "test_any_operations_in_any_order_give_what_numpy_gives": ("1", "2", "3"),
    # Files of S3 that fsspec reads go the way of those of other stores.
    "test_one_failed_file_fails_the_whole": ("obstore",),
    "test_what_came_of_an_old_version_is_no_beginning_of_the_new_one": ("obstore",),
    "test_a_large_file_comes_in_ranges_and_only_the_missing_ones_come_again": ("obstore",),
    "test_a_line_that_always_breaks_is_one_error_and_nothing_half_is_left": ("obstore",),
    "test_a_version_changes_with_the_content": ("obstore",),
    # uv and pip are given the same words; pip takes seconds for what uv does at once.
    "test_a_password_from_a_variable_is_used_and_kept_nowhere": ("uv",),
    "test_hashes_are_checked": ("uv",),
    "test_an_editable_folder_is_read_where_it_lies": ("uv-False",),
    "test_a_newer_version_asked_for_by_name_goes_into_the_layer_and_wins": ("uv",),
    # What podman and docker are asked is one command line; each is asked it in the tests of containers that stay.
    "test_a_container_killed_while_it_is_made_leaves_nothing": ("podman",),
    "test_packages_on_top_of_an_image_are_there_beside_its_own": ("podman",),
    "test_what_a_killed_client_leaves_is_removed": ("docker",),
    "test_what_a_script_leaves_behind_ends_with_its_container": ("docker",),
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
