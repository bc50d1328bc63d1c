import pytest

from paceline.errors import TargetError
from paceline.targets.slurm import scheduler as module
from paceline.targets.slurm.scheduler import AwayError, CommandResult, Scheduler, plain
from paceline.targets.slurm.settings import SlurmSettings
from tests.targets.slurm.conftest import FakeSlurm
from tests.targets.slurm.recordings import VERSIONS, failure


def make(**settings: object) -> Scheduler:
    return Scheduler("compute target 'c'", SlurmSettings.of("c", settings))


def test_slurm_call_returns_exit_code_output_and_error(slurm: FakeSlurm):
    slurm.say("squeue", "out\n", err="squeue: error: no\nsqueue: error: no\n", code=3)
    done = make().call(["squeue", "-h"])
    assert (done.returncode, done.stdout, done.said) == (3, "out\n", "no")
    assert slurm.calls == ["squeue -h"]


@pytest.mark.parametrize(
    "words",
    [
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
        "slurm_load_jobs error: Zero Bytes were transmitted or received",
        "Slurm temporarily unable to accept job, sleeping and retrying",
    ],
)
def test_slurm_call_raises_away_error_if_the_slurm_controller_does_not_answer(slurm: FakeSlurm, words: str):
    slurm.say("squeue", err=words, code=1)
    with pytest.raises(AwayError, match="compute target 'c': Slurm's controller does not answer"):
        make().call(["squeue"])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("what", "program"),
    [
        *((f"controller down: {call}", call.split()[0]) for call in ("squeue", "sbatch", "scancel", "sinfo", "salloc")),
        *((f"controller hangs: {call}", call.split()[0]) for call in ("squeue", "sbatch", "scancel", "sinfo")),
        *((f"munge down: {call}", call.split()[0]) for call in ("squeue", "sbatch --test-only")),
        ("controller down: sbatch --test-only", "sbatch"),
        ("controller down: scontrol show", "scontrol"),
        ("slurmdbd down: sacct", "sacct"),
    ],
)
def test_unreachable_slurm_daemon_is_recognized_from_the_error_of_each_version(
    slurm: FakeSlurm, version: str, what: str, program: str
):
    # The fake Slurm has no salloc, but only the error message matters here.
    name = "sbatch" if program == "salloc" else program
    said = failure(version, what)
    slurm.say(name, err=said.stderr, code=said.returncode)
    who = "accounting" if program == "sacct" else "controller"
    with pytest.raises(AwayError, match=f"Slurm's {who} does not answer"):
        make().call([name])


def test_missing_slurm_configuration_is_not_reported_as_an_unreachable_controller(slurm: FakeSlurm):
    # Regression: on a machine with Slurm's programs but without a slurm.conf, a submission was retried for two minutes.
    words = (
        "squeue: error: resolve_ctls_from_dns_srv: res_nsearch error: {}\nsqueue: error: fetch_config: DNS SRV lookup failed\n"
        "squeue: fatal: Could not establish a configuration source\n"
    )
    slurm.say("squeue", err=words.format("Unknown host"), code=1)
    with pytest.raises(TargetError, match=r"neither a slurm.conf nor .* Set SLURM_CONF there, or submit") as caught:
        make().call(["squeue"])
    assert not isinstance(caught.value, AwayError)
    # If a cluster has no configuration files, this error means that its DNS is unreachable.
    slurm.say("squeue", err=words.format("Host name lookup failure"), code=1)
    with pytest.raises(AwayError, match="does not answer"):
        make().call(["squeue"])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("what", ["sbatch: partition", "sbatch: bad time", "scancel unknown", "scancel another's"])
def test_slurm_error_message_of_each_version_is_reported_without_the_program_name(
    slurm: FakeSlurm, version: str, what: str
):
    said = failure(version, what)
    slurm.say("sbatch", err=said.stderr, code=said.returncode)
    done = make().call(["sbatch"])
    assert done.returncode == said.returncode != 0
    assert not done.said.startswith(("sbatch", "scancel", "error"))


def test_missing_slurm_program_suggests_a_login_host(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TargetError, match=r"no program 'sbatch' on this machine's PATH.*the setting login"):
        make().call(["sbatch"])


def test_slurm_program_that_times_out_raises_away_error(slurm: FakeSlurm):
    (slurm.folder / "bin" / "squeue").write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(AwayError, match="squeue gave no answer in 0 s"):
        make().call(["squeue"], timeout_s=0.1)


def test_call_with_retries_succeeds_after_a_slurm_controller_restart(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_PAUSES_S", (0.001,))
    answers: list[AwayError | CommandResult] = [
        AwayError("away."),
        AwayError("away."),
        CommandResult(returncode=0, stdout="1", stderr=""),
    ]
    told: list[str] = []

    def call() -> CommandResult:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert make().call_patiently(call, tell=told.append).stdout == "1"
    assert told == ["away. Trying again, for up to 120 s."]


def test_call_with_retries_fails_after_its_time_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_PAUSES_S", (0.001,))

    def call() -> CommandResult:
        raise AwayError("away.")

    with pytest.raises(AwayError, match=r"away\. Tried for 0 s"):
        make().call_patiently(call, patience_s=0.01)


def test_slurm_output_format_variables_are_removed_from_the_environment_of_slurm_calls():
    shell = {
        "SQUEUE_FORMAT": "%i",
        "SLURM_TIME_FORMAT": "relative",
        "SACCT_FORMAT": "x",
        "SLURM_CONF": "/c",
        "HOME": "/h",
    }
    assert plain(shell) == {"SLURM_CONF": "/c", "HOME": "/h"}


@pytest.mark.usefixtures("ssh_client")
def test_call_through_a_login_host_is_one_quoted_ssh_argument(slurm: FakeSlurm):
    words = make(login="me@head", ssh_options=["Port=2222"]).words(["squeue", "-o", "%i|%T; rm -rf /"])
    assert words[-1] == "env -u SLURM_TIME_FORMAT squeue -o '%i|%T; rm -rf /'"
    assert words[-2] == "head"
    advice = make(login="me@head", ssh_options=["Port=2222"]).explain("Permission denied (publickey).", 255)
    assert "`ssh -l me -o Port=2222 head`" in advice
    assert words[words.index("-l") :][:2] == ["-l", "me"]
    assert "Port=2222" in words


@pytest.mark.usefixtures("ssh_client")
def test_login_host_is_a_name_even_if_a_file_has_this_name(tmp_path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "head").write_text("other\n")
    monkeypatch.chdir(tmp_path)
    assert make(login="head").words(["squeue"])[-2] == "head"


def test_slurm_call_raises_away_error_if_the_login_host_is_unreachable(slurm: FakeSlurm):
    from tests.helpers import write_program

    write_program(
        slurm.folder / "bin" / "ssh",
        "#!/bin/sh\necho 'ssh: connect to host head port 22: Connection refused' >&2\nexit 255\n",
    )
    with pytest.raises(AwayError, match="the login host head: the machine is there, but no sshd"):
        make(login="head").call(["squeue"])
    write_program(slurm.folder / "bin" / "ssh", "#!/bin/sh\necho 'bash: squeue: command not found' >&2\nexit 127\n")
    with pytest.raises(TargetError, match="the login host head has no program 'squeue'"):
        make(login="head").call(["squeue"])


@pytest.mark.parametrize("version", VERSIONS)
def test_exit_code_255_of_sbatch_is_not_an_ssh_failure(slurm: FakeSlurm, version: str):
    from tests.helpers import write_program

    said = failure(version, "sbatch: bad time")
    assert said.returncode == 255
    (slurm.folder / "said").write_text(said.stderr)
    write_program(slurm.folder / "bin" / "ssh", f"#!/bin/sh\ncat '{slurm.folder}/said' >&2\nexit 255\n")
    done = make(login="head").call(["sbatch", "--time=abc"])
    assert "Invalid --time specification" in done.said
