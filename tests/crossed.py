"""Tests with several values or pairs of values. `make test` has those that run different code, `make proof` all."""

from __future__ import annotations

from collections.abc import Iterable

#: Test -> the parameter values, or pairs of values, with which `make test` runs this test. `make proof` uses all
#: values.
_KEPT = {
    "test_mpirun_gives_each_worker_its_rank_and_local_rank": ("wheel-2x2", "system-1x4", "wheel-2x1"),
    "test_datastore_input_reaches_the_script_as_a_folder_with_all_files": (
        "single-as_mount",
        "gloo-as_download",
        "mpi-wheel-as_mount",
    ),
    "test_partitioned_input_gives_each_node_or_rank_its_own_files": ("gloo-rank", "mpi-node"),
    "test_script_can_use_a_multiprocessing_pool_whose_processes_log_metrics": ("single-fork", "mpi-spawn"),
    "test_each_worker_sees_only_its_own_gpu_by_default": ("gloo-2", "mpi-1"),
    "test_daemon_started_by_a_worker_ends_with_the_run": ("single-success", "single-cancel", "mpi-failure"),
    "test_exit_code_of_an_mpirun_run_is_that_of_its_failed_worker": ("wheel-sys.exit(3)", "system-a null pointer"),
    "test_a_script_whose_name_looks_like_an_option_runs_under_mpirun": ("wheel---.py", "system-sub folder/-y.py"),
    "test_paceline_run_with_m_executes_a_module_in_the_same_way_as_python_m": ("None-1", "mpi-2"),
    "test_mpi4py_sums_over_two_workers_and_a_raising_rank_ends_the_other": ("system",),
    # Paceline uses the same code on Slurm and on Ray. A Ray job starts six processes, so keep only Slurm.
    "test_killed_sweep_controller_is_replaced_if_it_ran_as_a_slurm_or_ray_job": ("slurm",),
    "test_symlinks_in_outputs_are_resolved_on_the_node_and_links_to_outside_files_are_left_out": (
        "local",
        "ssh",
        "slurm, login host",
    ),
    "test_policy_stops_a_two_node_trial_and_canceling_the_sweep_ends_all_trials": ("ssh",),
    # Keep few examples with TensorFlow, because TensorFlow takes eight CPU seconds to load.
    "test_azure_sdk_examples_of_each_release_era_run_unchanged": ("2019", "2020", "2022"),
    "test_documented_dataset_programs_of_each_library_run_without_error": ("torch", "pandas"),
    "test_training_step_skipped_by_one_rank_is_reported": ("PipelineParallel()", "DataParallel()"),
    "test_paceline_check_compares_context_and_expert_parallelism_with_one_process": ("ContextParallel()-context 2",),
    # Paceline's collectives use the same code with MPI and with Gloo, so keep only MPI.
    "test_disagreement_about_process_sets_raises_on_all_ranks_and_changes_no_set": ("mpi",),
    "test_begin_and_end_of_a_stalled_operation_are_written_to_the_stall_file": ("mpi",),
    "test_random_operation_sequences_equal_numpy": ("1", "2", "3"),
    # S3 files that fsspec reads use the same code as files of other stores, so keep only obstore.
    "test_fetch_raises_and_leaves_no_input_folder_if_one_file_cannot_be_downloaded": ("obstore",),
    "test_partial_file_of_an_old_version_is_discarded": ("obstore",),
    "test_resumed_download_of_a_large_file_fetches_only_its_missing_byte_ranges": ("obstore",),
    "test_permanently_broken_connection_raises_and_leaves_no_partial_file": ("obstore",),
    "test_fingerprint_changes_with_the_content_of_an_object": ("obstore",),
    # uv and pip get the same arguments, but pip takes seconds, so keep only uv.
    "test_index_password_from_a_variable_is_used_but_not_stored": ("uv",),
    "test_requirement_hashes_are_verified": ("uv",),
    "test_editable_folder_is_used_in_place": ("uv-False",),
    "test_newer_version_in_a_layered_environment_overrides_the_base": ("uv",),
    # podman and docker get the same command line. The kept container tests use each of them.
    "test_killing_a_container_start_at_any_moment_leaves_no_container_and_no_process": ("podman",),
    "test_script_imports_packages_added_to_an_image_and_packages_of_the_image": ("podman",),
    "test_container_of_a_killed_podman_or_docker_client_keeps_running_until_it_is_removed": ("docker",),
    "test_background_process_left_by_a_script_is_killed_when_its_container_is_removed": ("docker",),
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
