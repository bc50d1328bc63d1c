"""Names that launchers and helpers built on Horovod import from `horovod.runner`."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading

import pytest

from paceline.compat.horovod.runner import _HorovodArgs, launch
from paceline.compat.horovod.runner.common import util
from paceline.compat.horovod.runner.common.util import (
    Timeout,
    TimeoutException,
    host_hash,
    hosts,
    safe_shell_exec,
    tiny_shell_exec,
)
from paceline.compat.horovod.runner.util.threads import execute_function_multithreaded, in_thread, on_event
from paceline.errors import RunFailedError, UserError
from paceline.system import processes
from tests.helpers import wait_until

#: A shell command that prints its child's pid and waits for this child, which sleeps.
_LONG = "sleep 1000 & echo $!; wait"


#: The attributes of the settings class in Horovod.
_ATTRIBUTES = """
autotune autotune_bayes_opt_max_samples autotune_gaussian_process_noise autotune_log_file
autotune_steps_per_sample autotune_warmup_samples binding_args cache_capacity check_build command config_file
cooldown_range cycle_time_ms disable_cache elastic_timeout executable fusion_threshold_mb gloo_timeout_seconds
hierarchical_allgather hierarchical_allreduce host_discovery_script hostfile hosts log_level log_with_timestamp
max_num_proc min_num_proc mpi_args mpi_threads_disable nic nics no_stall_check num_nccl_streams num_proc
output_filename prefix_output_with_timestamp reset_limit run_func slots ssh_identity_file ssh_port
stall_check_shutdown_time_seconds stall_check_warning_time_seconds start_timeout tcp_flag thread_affinity
timeline_filename timeline_mark_cycles torus_allreduce use_gloo use_jsrun use_mpi verbose
"""


def args(**given: object) -> _HorovodArgs:
    made = _HorovodArgs()
    made.use_gloo = True
    for name, value in given.items():
        assert hasattr(made, name), name
        setattr(made, name, value)
    return made


def test_horovod_args_object_has_the_same_attributes_as_in_horovod():
    assert vars(_HorovodArgs()) == dict.fromkeys(_ATTRIBUTES.split()) | {"num_proc": 1}


def test_launch_run_starts_a_command_on_several_ranks(capfd):
    words = [sys.executable, "-c", "import os; print('rank', os.environ['HOROVOD_RANK'])"]
    assert launch._run(args(num_proc=2, command=words, hosts="localhost:2")) is None
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0]<stdout>:rank 0", "[1]<stdout>:rank 1"]


def test_launch_run_raises_an_error_that_names_the_failed_rank():
    words = [sys.executable, "-c", "import os, sys; sys.exit(7 * (os.environ['HOROVOD_RANK'] == '1'))"]
    with pytest.raises(RunFailedError, match=r"rank 1 on .* failed first: its process ended with exit code 7"):
        launch._run(args(num_proc=2, command=words))
    with pytest.raises(UserError, match="they have to grow"):
        launch._run(args(min_num_proc=2, command=words))


def test_launch_run_returns_the_result_of_its_function_from_each_rank():
    assert launch._run(args(num_proc=2, run_func=lambda: int(os.environ["HOROVOD_RANK"]))) == [0, 1]
    # Regression: when launch_run started a function instead of a program, engine options such as cycle_time_ms were ignored.
    found = launch._run(args(run_func=lambda: os.environ["HOROVOD_CYCLE_TIME"], cycle_time_ms=2.5))
    assert found == ["2.5"]


def test_options_changed_between_parse_args_and_launch_run_are_used(monkeypatch, capfd):
    program = "import os; print(os.environ['HOROVOD_SIZE'])"
    monkeypatch.setattr(sys, "argv", ["launcher", "-np", "2", "--gloo", sys.executable, "-c", program])
    options = launch.parse_args()
    options.np = 1
    launch._run(options)
    assert capfd.readouterr().out == "[0]<stdout>:1\n"


def test_shell_command_is_run_and_its_output_forwarded():
    out, error = io.StringIO(), io.StringIO()
    command = "echo one; echo two >&2; printf '\\303\\244'; exit 3"
    assert safe_shell_exec.execute(command, stdout=out, stderr=error, index=5) == 3
    assert (out.getvalue(), error.getvalue()) == ("[5]<stdout>:one\n[5]<stdout>:ä", "[5]<stderr>:two\n")
    assert tiny_shell_exec.execute("echo $A", env={"A": "b"}) == ("b\n", 0)
    assert safe_shell_exec.execute("kill -9 $$", stdout=out) == 128 + signal.SIGKILL


def test_shell_command_ends_although_the_caller_blocks_sigchld():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    try:
        assert safe_shell_exec.execute("exit 3") == 3
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_setting_the_event_ends_the_shell_command_and_its_children():
    out, event = io.StringIO(), threading.Event()
    done: list[int] = []
    thread = in_thread(lambda: done.append(safe_shell_exec.execute(_LONG, stdout=out, events=[event])))
    wait_until(out.getvalue, "the command has begun")
    event.set()
    thread.join(60)
    assert done == [128 + signal.SIGTERM]
    wait_until(lambda: not processes.is_alive(int(out.getvalue())), "its child has ended")


def test_shell_command_ends_when_its_caller_is_killed(tmp_path):
    code = (
        "from paceline.compat.horovod.runner.common.util import safe_shell_exec as s\n"
        f"s.execute({_LONG!r}, stdout=open({str(tmp_path / 'out')!r}, 'w'))"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as caller:
        out = tmp_path / "out"
        wait_until(lambda: out.exists() and out.read_text().endswith("\n"), "the command has begun")
        caller.kill()
    wait_until(lambda: not processes.is_alive(int(out.read_text())), "what it had started has ended")


def test_execute_function_multithreaded_returns_results_by_index_or_raises_if_a_call_raises():
    assert execute_function_multithreaded(lambda a, b: a + b, [[1, 2], [3, 4]]) == {0: 3, 1: 7}
    with pytest.raises(RuntimeError, match="did not complete successfully: division by zero"):
        execute_function_multithreaded(lambda a: 1 / a, [[0], [1]])
    called = threading.Event()
    assert execute_function_multithreaded(called.set, [[]], block_until_all_done=False) is None
    assert called.wait(60)
    event, stop, seen = threading.Event(), threading.Event(), []
    event.set()
    on_event(event, seen.append, (1,)).join(60)
    stop.set()
    on_event(threading.Event(), seen.append, (2,), stop=stop, check_stop_interval_s=0.01).join(60)
    assert seen == [1]
    with pytest.raises(ValueError, match="must be a tuple"):
        in_thread(print, "ab")  # type: ignore[arg-type]


def test_digest_check_succeeds_for_the_digests_message_and_fails_for_another_message():
    key = util.make_secret_key()
    digest = util.compute_digest(key, b"message")
    assert (len(key), len(digest)) == (util.SECRET_LENGTH, util.DIGEST_LENGTH)
    assert util.check_digest(key, b"message", digest)
    assert not util.check_digest(key, b"another", digest)


def test_rank_and_size_are_read_from_the_launchers_variables(monkeypatch):
    for prefix in ("HOROVOD", "OMPI_COMM_WORLD", "PMI"):
        monkeypatch.delenv(f"{prefix}_RANK", raising=False)
        monkeypatch.delenv(f"{prefix}_SIZE", raising=False)
    assert util.get_env_rank_and_size() == (0, 1)
    monkeypatch.setenv("PMI_RANK", "3")
    with pytest.raises(RuntimeError, match="PMI_RANK is set and PMI_SIZE is not"):
        util.get_env_rank_and_size()
    monkeypatch.setenv("PMI_SIZE", "4")
    assert util.get_env_rank_and_size() == (3, 4)
    assert [util.is_exportable(name) for name in ("PATH", "CUDA_VISIBLE_DEVICES", "BASH_FUNC_a")] == [
        True,
        False,
        False,
    ]


def test_hosts_and_slots_are_parsed_and_assigned_to_ranks_as_in_horovod(tmp_path):
    (tmp_path / "hosts").write_text("a slots=2\nb slots=1\n")
    assert hosts.parse_host_files(str(tmp_path / "hosts")) == "a:2,b:1"
    assert hosts.parse_hosts_and_slots("a:2,b:1") == (["a", "b"], {"a": 2, "b": 1})
    places = hosts.get_host_assignments(hosts.parse_hosts("a:2,b:1"), 3)
    assert [place.to_response_string() for place in places] == ["0,3,0,2,0,2", "1,3,1,2,0,1", "2,3,0,1,1,2"]
    assert len(hosts.get_host_assignments(hosts.parse_hosts("a:2,b:1"), 1, 2)) == 2
    assert len(hosts.get_host_assignments(hosts.parse_hosts("a:2,b:1"), 1)) == 3
    with pytest.raises(ValueError, match="-np 4 needs as many slots"):
        hosts.get_host_assignments(hosts.parse_hosts("a:2,b:1"), 4)
    with pytest.raises(ValueError, match="'b' in 'a:1,b' is not a host"):
        hosts.parse_hosts_and_slots("a:1,b")


def test_horovod_base64_host_hash_timeout_and_settings_helpers_behave_as_in_horovod(monkeypatch):
    text = util.dumps_base64({"a": [1]})
    assert isinstance(text, str)
    assert util.loads_base64(text) == {"a": [1]} == util.loads_base64(util.dumps_base64({"a": [1]}, to_ascii=False))
    assert host_hash.host_hash() == host_hash.host_hash()
    assert host_hash.host_hash("other") != host_hash.host_hash()
    assert Timeout(1000, "no").remaining() > 900
    with pytest.raises(TimeoutException, match=r"waiting for x\. Timeout after -1 seconds\."):
        Timeout(-1, "waiting for {activity}").check_time_out_for("x")
    assert util.Settings(hosts="a:1", num_proc=2).num_proc == 2
