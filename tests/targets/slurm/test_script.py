import os
import shlex
import signal
import subprocess
from pathlib import Path, PurePosixPath

import pytest

from paceline.errors import TargetError
from paceline.targets.slurm.script import controller_text, extension_text, sbatch_text, warning_s
from paceline.targets.slurm.settings import SlurmSettings
from tests.helpers import make_job, wait_until, write_program

NASTY = "/w s/a'b\"c$d;e&f%j#g"


def text(run_dir: str = "/ws/runs/lab_1_2", job: dict[str, object] | None = None, **settings: object) -> str:
    return sbatch_text(
        make_job(**(job or {})),
        SlurmSettings.of("cluster", settings),
        run_id="lab_1_2",
        run_dir=PurePosixPath(run_dir),
        library_dir=PurePosixPath("/ws/lib/0123"),
        python="/env/bin/python",
    )


def options(job: dict[str, object] | None = None, **settings: object) -> list[str]:
    lines = text(job=job, **settings).splitlines()
    return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]


def test_elastic_job_script_has_the_no_kill_option_and_a_second_script_requests_more_nodes():
    # Regression: with --ntasks-per-node=1, Slurm computed the number of tasks from the smallest number of nodes, and
    # never allocated more nodes.
    job = {"node_count": (2, 4), "process_count_per_node": 2, "distributed_backend": "gloo"}
    asked = options(job, cpus_per_process=3)
    for option in ("--nodes=2-4", "--no-kill", "--requeue", "--cpus-per-task=6"):
        assert option in asked
    assert not [option for option in asked if option.startswith("--ntasks")]

    settings = SlurmSettings.of("cluster", {"partition": "main", "nodelist": "n1", "exclude": "n9"})
    more = extension_text(make_job(**job), settings, run_id="lab_1_2", job_id="7", count=2, exclude=["n1", "n2"])
    for option in (
        "--job-name=paceline-lab_1_2-more",
        "--nodes=1-2",
        "--no-requeue",
        "--exclude=n1,n2,n9",
        "--partition=main",
    ):
        assert f"#SBATCH {option}\n" in more
    assert "--nodelist" not in more


def test_batch_script_of_a_two_node_job_has_the_expected_text():
    job = {"node_count": 2, "process_count_per_node": 4, "distributed_backend": "gloo", "max_restarts": 1}
    assert text(job=job, partition="gpu", time="2:00:00", setup=["module load cuda"]) == (
        "#!/bin/bash\n"
        "#SBATCH --job-name=paceline-lab_1_2\n"
        '#SBATCH "--comment=paceline run lab_1_2"\n'
        "#SBATCH --chdir=/ws/runs/lab_1_2\n"
        "#SBATCH --output=/ws/runs/lab_1_2/logs/driver.log\n"
        "#SBATCH --open-mode=append\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --ntasks-per-node=4\n"
        "#SBATCH --cpus-per-task=1\n"
        "#SBATCH --signal=B:USR2@60\n"
        "#SBATCH --requeue\n"
        "#SBATCH --partition=gpu\n"
        "#SBATCH --time=2:00:00\n"
        "\n"
        "module load cuda\n"
        "cd /ws/runs/lab_1_2 || exit 1\n"
        'export PACELINE_SHELL_PYTHONPATH="${PYTHONPATH-}"\n'
        "export PYTHONPATH=/ws/lib/0123 PACELINE_SUPERVISOR=lab_1_2\n"
        "unset PACELINE_RUN_DIR PACELINE_RUN_ID\n"
        "exec /env/bin/python -m paceline.supervisor /ws/runs/lab_1_2\n"
    )


def test_each_slurm_setting_becomes_its_sbatch_option():
    made = options(
        account="physics",
        qos="long",
        constraint="a100&ib",
        memory="64G",
        cpus_per_process=8,
        reservation="r",
        nodelist="n[1-2]",
        exclude="n3",
        exclusive=True,
        options=["--licenses=matlab:1"],
    )
    assert {
        "--account=physics",
        "--qos=long",
        '"--constraint=a100&ib"',
        "--mem=64G",
        "--cpus-per-task=8",
        "--reservation=r",
        '"--nodelist=n[1-2]"',
        "--exclude=n3",
        "--exclusive",
        "--licenses=matlab:1",
        "--no-requeue",
    } <= set(made)


def test_each_worker_of_a_gpu_job_gets_one_gpu():
    job = {"use_gpu": True, "process_count_per_node": 4, "distributed_backend": "nccl"}
    assert "--gres=gpu:4" in options(job)
    assert "--gres=gpu:a100:4" in options(job, gpu_type="a100")
    assert "--gres=nvme:1,gpu:4" in options(job, gres="nvme:1")
    # A job with explicit GPU options gets only the GPUs of these options.
    assert "--gres=gpu:8" in options(job, gres="gpu:8")
    assert not [option for option in options(job, options=["--gpus-per-node=8"]) if option.startswith("--gres")]
    assert not [option for option in options() if "gpu" in option]


def test_parameter_servers_are_included_in_the_tasks_per_node():
    job = {"node_count": 2, "worker_count": 4, "parameter_server_count": 1, "distributed_backend": "ps"}
    assert "--ntasks-per-node=3" in options(job)


def test_lead_time_of_the_slurm_warning_covers_the_grace_period_up_to_a_third_of_the_time_limit():
    assert warning_s(make_job(grace_period_seconds=90.5), SlurmSettings.of("c", {"time": "2:00:00"})) == 121
    assert warning_s(make_job(grace_period_seconds=30), SlurmSettings.of("c", {"time": "2"})) == 40
    assert warning_s(make_job(grace_period_seconds=1e6), SlurmSettings.of("c", {})) == 65535


def test_names_with_shell_characters_are_quoted():
    made = text(NASTY, partition="a;b", options=["--licenses=$(touch x)`y`\\'\""])
    lines = made.splitlines()
    assert f'#SBATCH "--chdir={NASTY}"'.replace('b"c', 'b\\"c') in lines
    assert '#SBATCH "--partition=a;b"' in lines
    assert '#SBATCH "--licenses=$(touch x)`y`\\\\\'\\""' in lines
    # The % is doubled, because Slurm would replace a single % by the job id.
    assert f'#SBATCH "--output={NASTY}/logs/driver.log"'.replace('b"c', 'b\\"c').replace("%", "%%") in lines
    assert shlex.split(lines[-1])[-1] == NASTY
    assert shlex.split(lines[-5])[1] == NASTY


@pytest.mark.parametrize("run_dir", ["/a\nb", "/a\tb", "/a\\b"])
def test_run_folder_with_a_newline_tab_or_backslash_in_its_path_is_refused(run_dir: str):
    with pytest.raises(TargetError):
        text(run_dir)


def test_sweep_controller_requeues_its_slurm_job_before_the_time_limit(tmp_path: Path):
    run = tmp_path / "it's 1"
    run.mkdir()
    python = write_program(tmp_path / "python 3", f'#!/bin/sh\necho "$@" >{tmp_path}/begun\nexec sleep 600\n')
    write_program(tmp_path / "bin" / "scontrol", f'#!/bin/sh\necho "$@" >{tmp_path}/asked\n')
    settings = SlurmSettings.of("cluster", {"partition": "long", "gres": "gpu:4", "memory": "64G", "time": "10"})
    script = controller_text(
        settings,
        run_id="lab_1_2",
        run_dir=PurePosixPath(run),
        library_dir=PurePosixPath("/lib"),
        python=str(python),
    )
    told = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    # The job of the controller does not request the nodes that the trials request.
    assert told[-8:] == [
        *("--open-mode=append", "--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--mem=1024M"),
        *("--signal=B:USR2@60", "--requeue", "--partition=long"),
    ]
    (tmp_path / "script").write_text(script)
    environment = {"SLURM_JOB_ID": "7", "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    shell = subprocess.Popen(["bash", tmp_path / "script"], env=environment, cwd="/")
    try:
        wait_until((tmp_path / "begun").exists, "the controller runs")
        assert (tmp_path / "begun").read_text() == f"-m paceline.sweeps {run}\n"
        shell.send_signal(signal.SIGUSR2)
        wait_until((tmp_path / "asked").exists, "Slurm is asked")
        assert (tmp_path / "asked").read_text() == "requeue 7\n"
        assert shell.poll() is None
        shell.terminate()
        assert shell.wait(60) == 128 + signal.SIGTERM
    finally:
        shell.kill()
