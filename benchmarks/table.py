"""Fill the table of benchmarks/README.md from the files in benchmarks/results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common import RESULTS, _text

README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- table.py: begin -->\n", "<!-- table.py: end -->\n"
#: In the order of the table.
NAMES = [
    "import_time",
    "version_time",
    "waiting_runs",
    "urgent",
    "shared_days",
    "recovery_elastic_gloo_replace",
    "recovery_parallel_gloo_replace",
    "recovery_ddp_gloo",
    "recovery_cut_ssh",
    "recovery_cut_quick_ssh",
    "kubernetes_first_line",
    "kubernetes_training",
    "kubernetes_pods_to_line",
    "kubernetes_job_created",
    "first_line_one",
    "first_line_gloo",
    "first_line_mpi",
    "first_line_ssh",
    "first_line_slurm",
    "first_line_ray",
    "first_line_ray_one",
    "first_line_ray_datastore",
    "cancel_ssh",
    "cancel_slurm",
    "cancel_ray",
    "node_lost_ssh",
    "node_lost_slurm",
    "node_lost_ray",
    "throughput",
    "log_rate",
    "log_rate_flat",
    "log_rate_mlflow",
    "get_metrics",
    "resubmit",
    "ignored_data",
    "function_result",
    "function_map",
    "session_local",
    "session_ssh",
    "session_slurm",
    "list_runs",
    "queued_submissions",
    "layered_environment_first",
    "layered_environment_second",
    "s3_download",
    "s3_download_warm",
    "partition",
    "torch_mpi_all_reduce_4k",
    "torch_mpi_all_reduce_1024k",
    "torch_mpi_all_reduce_16384k",
    "torch_mpi_all_reduce_65536k",
    "torch_mpi_step_transformer",
    "torch_mpi_step_cnn",
    "hvd_allreduce_4k",
    "hvd_allreduce_1024k",
    "hvd_allreduce_16384k",
    "hvd_allreduce_65536k",
    "collectives_16m",
    "collectives_64m",
    "hvd_tensors",
    "hvd_step_transformer",
    "hvd_step_cnn",
    "collectives_idle",
    "collectives_negotiation",
    "parallel_data",
    "parallel_pipeline",
    "parallel_data_mpi",
    "first_check_data",
    "first_check_shard",
    "first_check_pipeline",
    "reads_changed",
    "reads_compared",
    "pipeline_bubble",
    "sweep_asha_simulated_promote",
    "sweep_asha_simulated_bandit",
    "sweep_asha_digits_promote",
    "sweep_asha_digits_bandit",
    "sweep_regret_branin",
    "sweep_regret_hartmann6",
    "sweep_regret_rosenbrock5",
    "sweep_regret_mixed",
    "sweep_overhead_random",
    "sweep_overhead_grid",
    "sweep_overhead_tpe",
    "sweep_busy",
    "sweep_large_memory",
    "sweep_large_show",
    "sweep_stop_latency",
    "sweep_ray_tune",
    "model_register",
    "serve_start",
    "serve_update",
    "serve_killed",
    "serve_batching",
    "serve_batching_one",
    "serve_azure",
    "serve_litserve",
    "serve_mlserver",
    "serve_one_client",
    "azureml_import",
    "azureml_submit",
    "event_files",
    "mlflow_plugin",
    "stacks_local",
    "stacks_ssh",
    "stacks_board",
    "sampling_meter",
    "sampling_local",
    "sampling_ssh",
    "sampling_worker",
    "elastic_ssh",
    "elastic_slurm",
    "elastic_ray",
    "ui_list",
    "ui_run",
    "ui_live",
    "ui_memory",
    "ui_list_10000",
    "auto_choice_2",
    "auto_choice_4",
    "llama_data_2",
    "llama_shard_2",
    "llama_pipeline_2",
    "llama_tensor_2",
    "llama_data_4",
    "llama_shard_4",
    "llama_pipeline_4",
    "llama_tensor_4",
    "llama_start",
    "many_nodes",
    "checkpoint_stop",
]


def table() -> str:
    """The results as a table in Markdown, and under it what they were measured on."""
    found = {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in NAMES if _is_there(name)}
    lines = ["| measure | script | target | result | |", "|---|---|---|---|---|"]
    machines: dict[str, None] = {}
    for result in found.values():
        script = result["command"].split()[1].removeprefix("benchmarks/")
        met = "met" if result["met"] else "**missed**"
        lines.append(f"| {result['measure']} | `{script}` | {result['target']} | {_figures(result)} | {met} |")
        hardware = result["hardware"]
        machines[
            f"{result['date']}, {hardware['processor']}, {hardware['cores']} cores, {hardware['memory_gib']} GiB, "
            f"{hardware['system']}, Python {hardware['python']}"
        ] = None
    return "\n".join([*lines, "", f"Measured on: {'; '.join(machines)}."]) + "\n"


def _figures(result: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {_text(value)}"
        for name, value in result.items()
        if isinstance(value, (int, float)) and name not in ("met", "rounds")
    )


def _is_there(name: str) -> bool:
    there = (RESULTS / f"{name}.json").exists()
    if not there:
        print(f"results/{name}.json is missing: its script was not run.")
    return there


def main() -> None:
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(before + BEGIN + table() + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
