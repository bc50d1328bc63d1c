from __future__ import annotations

import pytest

from paceline.compat.horovod.runner import options, requested_job
from paceline.errors import UserError

#: Every option of Horovod's command, with a value if the option has one.
ALL = [
    *(
        "--disable-cache",
        "--start-timeout",
        "30",
        "--network-interfaces",
        "lo",
        "--output-filename",
        "out",
        "--verbose",
    ),
    *("-p", "22", "--ssh-port", "22", "-i", "key", "--ssh-identity-file", "key", "-H", "localhost:2"),
    *("--fusion-threshold-mb", "32", "--cycle-time-ms", "2.5", "--cache-capacity", "7"),
    *("--hierarchical-allreduce", "--no-hierarchical-allgather", "--torus-allreduce", "--no-torus-allreduce"),
    *(
        "--autotune",
        "--autotune-log-file",
        "a.csv",
        "--autotune-warmup-samples",
        "3",
        "--autotune-steps-per-sample",
        "10",
    ),
    *("--autotune-bayes-opt-max-samples", "20", "--autotune-gaussian-process-noise", "0.8"),
    *("--min-np", "1", "--min-num-proc", "1", "--max-np", "4", "--max-num-proc", "4", "--slots-per-host", "2"),
    *("--elastic-timeout", "600", "--reset-limit", "3", "--blacklist-cooldown-range", "1", "9"),
    *("--timeline-filename", "t.json", "--timeline-mark-cycles", "--no-timeline-mark-cycles"),
    *("--no-stall-check", "--stall-check", "--stall-check-warning-time-seconds", "60"),
    *("--stall-check-shutdown-time-seconds", "0", "--mpi-threads-disable", "--no-mpi-threads-disable"),
    *("--mpi-args=--map-by node", "--tcp", "--binding-args=--bind-to core", "--num-nccl-streams", "2"),
    *("--thread-affinity", "0", "--gloo-timeout-seconds", "30", "--log-level", "TRACE", "--log-with-timestamp"),
    *("--log-without-timestamp", "--log-hide-timestamp", "--no-log-hide-timestamp", "-prefix-timestamp"),
    *("--prefix-output-with-timestamp", "--gloo"),
]


def parse(*words: str):
    return options.parse([*words, "-np", "2", "python", "train.py"])


def test_every_option_of_horovodrun_is_accepted():
    found = parse(*ALL)
    assert (found.np, found.command) == (2, ["python", "train.py"])


def test_options_after_the_command_are_passed_to_the_command():
    found = options.parse(["-np", "2", "python", "train.py", "-np", "9", "--verbose", "--lr=1", "-H", "x"])
    assert found.command == ["python", "train.py", "-np", "9", "--verbose", "--lr=1", "-H", "x"]
    assert (found.np, found.verbose, found.hosts) == (2, False, None)


def test_two_dashes_may_precede_the_command():
    assert options.parse(["-np", "2", "--", "-weird"]).command == ["-weird"]


@pytest.mark.parametrize(
    "words",
    [
        ["-np", "0"],
        ["-np", "two"],
        ["--cycle-time-ms", "-1"],
        ["--cache-capacity", "1.5"],
        ["--log-level", "LOUD"],
        ["--gloo", "--mpi"],
        ["-H", "a:1", "--hostfile", "f"],
        ["--start-timeout", "nan"],
        ["--verb"],
    ],
)
def test_invalid_option_exits_with_code_2(words, capsys):
    with pytest.raises(SystemExit) as end:
        options.parse([*words, "python", "train.py"])
    assert end.value.code == 2
    assert "horovodrun: error:" in capsys.readouterr().err


def test_options_set_the_engines_environment_variables():
    found = requested_job.variables(
        parse(
            *("--fusion-threshold-mb", "0.5", "--cycle-time-ms", "2.5", "--cache-capacity", "7"),
            *("--no-stall-check", "--stall-check-warning-time-seconds", "5", "--log-level", "debug"),
            *("--timeline-mark-cycles", "--log-without-timestamp"),
        )
    )
    assert found == {
        "HOROVOD_FUSION_THRESHOLD": "524288",
        "HOROVOD_CYCLE_TIME": "2.5",
        "HOROVOD_CACHE_CAPACITY": "7",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "5.0",
        "HOROVOD_LOG_LEVEL": "DEBUG",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_LOG_HIDE_TIME": "1",
    }


def test_values_of_repeated_network_interface_options_are_joined_into_one_list():
    found = parse("--network-interface", "a", "--network-interface", "b", "--network-interfaces", "c,d")
    assert found.network_interfaces == "a,b,c,d"


def test_tcp_option_disables_infiniband_for_nccl():
    assert requested_job.variables(parse("--tcp")) == {"NCCL_IB_DISABLE": "1"}


def test_omitted_options_set_no_variables():
    assert requested_job.variables(parse()) == {}


def test_option_with_value_zero_sets_its_variable():
    assert requested_job.variables(parse("--fusion-threshold-mb", "0")) == {"HOROVOD_FUSION_THRESHOLD": "0"}


def test_path_of_the_timeline_is_made_absolute(tmp_path):
    assert requested_job.variables(parse("--timeline-filename", "t.json")) == {
        "HOROVOD_TIMELINE": str(tmp_path / "t.json")
    }


def test_given_options_without_effect_are_named_once():
    told = requested_job.without_meaning(
        parse("--num-nccl-streams", "2", "--no-torus-allreduce", "--thread-affinity", "0")
    )
    assert [line.partition(":")[0] for line in told] == ["--num-nccl-streams", "--thread-affinity"]
    assert requested_job.without_meaning(parse()) == []


# --- tests of the configuration file


@pytest.fixture
def config(tmp_path):
    def write(text):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_command_line_overrides_the_config_file(config):
    # Horovod's help says that the order of --config-file and options counts. Its parser and its tests ignore the order.
    path = config("controller: Gloo\nparams: {cycle_time_ms: 5, cache_capacity: 9, torus_allreduce: true}\n")
    found = parse("--cycle-time-ms", "0", "--no-torus-allreduce", "--mpi", "--config-file", path)
    assert (found.cycle_time_ms, found.cache_capacity, found.torus_allreduce) == (0.0, 9, False)
    assert (found.mpi, found.gloo) == (True, False)
    assert parse("--config-file", path).gloo


def test_config_file_accepts_each_spelling_of_an_option(config):
    found = options.parse(["--config-file", config("num-proc: 3\nprefix-output-with-timestamp: true\n"), "x"])
    assert (found.np, found.prefix_timestamp) == (3, True)


@pytest.mark.parametrize(("text", "hides"), [("with_timestamp: true", "0"), ("with_timestamp: false", "1")])
def test_logging_timestamp_in_the_config_file_shows_or_hides_the_time(config, text, hides):
    found = parse("--config-file", config(f"logging: {{{text}}}\n"))
    assert requested_job.variables(found) == {"HOROVOD_LOG_HIDE_TIME": hides}


def test_all_sections_of_the_config_file_are_read(config):
    path = config(
        "controller: gloo\n"
        "verbose: true\nhosts: localhost:2\nstart-timeout: 7\n"
        "params: {fusion_threshold_mb: 16, hierarchical_allreduce: true}\n"
        "autotune: {enabled: true, log_file: a.csv, warmup_samples: 1, steps_per_sample: 2, bayes_opt_max_samples: 3}\n"
        "timeline: {filename: /t.json, mark_cycles: false}\n"
        "stall_check: {enabled: false, warning_time_seconds: 9, shutdown_time_seconds: 0}\n"
        "library_options: {num_nccl_streams: 3}\n"
        "logging: {level: info, hide_timestamp: true}\n"
    )
    found = parse("--config-file", path)
    assert (found.gloo, found.mpi, found.verbose, found.hosts, found.start_timeout) == (
        True,
        False,
        True,
        "localhost:2",
        7,
    )
    assert requested_job.variables(found) == {
        "HOROVOD_FUSION_THRESHOLD": str(16 << 20),
        "HOROVOD_TIMELINE": "/t.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "0",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "9.0",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0.0",
        "HOROVOD_LOG_LEVEL": "INFO",
        "HOROVOD_LOG_HIDE_TIME": "1",
    }
    assert [line.partition(":")[0] for line in requested_job.without_meaning(found)] == [
        "--hierarchical-allreduce",
        "--num-nccl-streams",
        "--autotune",
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("params: {cycle_time: 5}\n", r"params\.cycle_time in .* is not an option\. Known: fusion_threshold_mb"),
        ("parms: {cycle_time_ms: 5}\n", "'parms' in .* is not an option"),
        ("params: {cycle_time_ms: fast}\n", "params.cycle_time_ms in .* is 'fast'"),
        ("autotune: {enabled: sometimes}\n", "autotune.enabled in .* is 'sometimes'"),
        ("logging: {level: loud}\n", "logging.level in .* is 'loud'"),
        ("controller: pigeons\n", "controller in .* is 'pigeons'"),
        ("params: 5\n", "params in .* is 5"),
        ("- a\n", "holds no mapping"),
        ("a: [\n", "can't be read"),
        ("command: [rm]\n", "'command' in .* is not an option"),
    ],
)
def test_invalid_config_file_is_refused(config, text, complaint):
    with pytest.raises(UserError, match=complaint):
        parse("--config-file", config(text))


def test_empty_config_file_sets_nothing(config):
    assert requested_job.variables(parse("--config-file", config(""))) == {}


def test_missing_config_file_is_named_in_the_error(tmp_path):
    with pytest.raises(UserError, match=r"--config-file '.*gone\.yaml' can't be read"):
        parse("--config-file", str(tmp_path / "gone.yaml"))
