"""Secrets on other machines: they reach the workers, and nobody who looks at files, commands or the engine sees them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.runs.remote_status import engine
from tests.engines.conftest import use_mpirun
from tests.engines.lab import WHEEL, log_text, wait_for_end
from tests.engines.places import EACH, TWO, WAYS, Place, place
from tests.helpers import wait_until

VALUE = f"t0p-{os.urandom(8).hex()}"
TOLD = hashlib.sha256(VALUE.encode()).hexdigest()
#: This script prints a hash of the token instead of the token, and works until a signal ends it.
SCRIPT = """
import hashlib, os, time
print(hashlib.sha256(os.environ["MY_TOKEN"].encode()).hexdigest(), flush=True)
time.sleep(600)
"""


#: The targets to test. On Slurm, secrets are passed in two ways: to nodes that see the workspace, and through a login
#: host. `make test` uses both.
WHERE = ["slurm" if way.values == ("slurm",) else way for way in EACH]


@pytest.fixture(params=WHERE)
def there(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with place(request.param, request, tmp_path, monkeypatch) as found:
        yield found


def submit(there: Place, **given: Any) -> pl.Run:
    """Submit a run whose secret is in a file of this machine, and not in the shell, whose variables engines may keep."""
    kept = there.lab.folder / "kept"
    kept.write_text(VALUE)
    kept.chmod(0o600)
    return there.lab.submit(SCRIPT, environment_variables={"MY_TOKEN": pl.secret(f"file:{kept}")}, **(TWO | given))


def wait_until_told(run: pl.Run, *, attempt: int = 1) -> None:
    def is_told() -> bool:
        record = run.record()
        assert not record.is_terminal, f"{record.status}: {record.failure}"
        return len(record.attempts) >= attempt and all(TOLD in log_text(run, rank) for rank in (0, 1))

    wait_until(is_told, "both workers have the secret", 90)


def holders(there: Place, engines: Any) -> set[str]:
    """Files that hold the value, here and on all hosts, each as `name mode`; Slurm's hosts have this machine's own /tmp, which
    is everybody's."""
    # Pass the value on standard input, because on the command line of grep the value would be found, too.
    look = 'grep -rlFsa --devices=skip -f - -- "$@" | while read -r file; do stat -c "%n %a" "$file"; done'
    words = ["sh", "-c", look, "look"]
    folders = {str(there.lab.folder), str(there.folder), str(engines.folder)}
    done = subprocess.run([*words, *folders], input=VALUE, capture_output=True, text=True, check=False)
    found = done.stdout.splitlines()
    inside = ["sh", "-c", look.replace('"$@"', "/tmp/paceline-* /tmp/ray* /dev/shm"), "look"]
    for name in () if there.name.startswith("slurm") else there.hosts:
        found += engines.run(name, inside, input=VALUE, stdin=None, check=False).stdout.splitlines()
    named = {f"{Path(line.rpartition(' ')[0]).name} {line.rpartition(' ')[2]}" for line in found}
    return named - {"kept 600"}


def is_in_a_command() -> bool:
    """Whether any process has the value on its command line; hosts' processes are this machine's too."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and VALUE.encode() in (entry / "cmdline").read_bytes():
                return True
        except OSError:
            continue
    return False


def said_by_engine(there: Place, run: pl.Run, request: pytest.FixtureRequest) -> str:
    """All that the engine shows of the run's job."""
    if there.name.startswith("ray"):
        cluster = request.getfixturevalue("ray_cluster")
        return json.dumps([cluster.ask("/api/jobs/"), cluster.ask(f"/api/jobs/paceline-{run.id}/logs")])
    if there.name.startswith("slurm"):
        cluster, job_id = request.getfixturevalue("slurm_cluster"), str(engine(run.folder)["job_id"])
        return str(
            cluster.run("scontrol", "show", "job", "-dd", job_id)
            + cluster.run("scontrol", "write", "batch_script", job_id, "-")
        )
    return ""


def hosts_of(there: Place, request: pytest.FixtureRequest) -> Any:
    found = request.getfixturevalue(WAYS[there.name][0])
    return getattr(found, "hosts", found)


@pytest.mark.promise("secret-reaches-workers-record-log")
def test_secret_reaches_the_workers_and_is_stored_only_in_a_private_file(
    there: Place, request: pytest.FixtureRequest
) -> None:
    hosts = hosts_of(there, request)
    run = submit(there)
    wait_until_told(run)

    # Exactly one file has the value. It is private, and on the supervisor's machine.
    assert holders(there, hosts) == {"secrets.json 600"}
    assert not is_in_a_command()
    assert VALUE not in said_by_engine(there, run, request)
    run.cancel()
    assert wait_for_end(run) == "Canceled"
    wait_until(lambda: not holders(there, hosts), "no file has it any more", 30)


# Two targets suffice, because mpirun gets its secrets in the same way on every target.
@pytest.mark.parametrize("there", ["ssh", pytest.param("slurm", marks=pytest.mark.proof)], indirect=True)
def test_secret_of_an_mpi_run_is_on_no_command_line(
    there: Place, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_mpirun(WHEEL, monkeypatch)
    run = submit(there, distributed_backend="mpi")
    wait_until_told(run)

    assert not is_in_a_command()
    assert holders(there, hosts_of(there, request)) == {"secrets.json 600"}
    run.cancel()
    assert wait_for_end(run) == "Canceled"


@pytest.mark.proof
@pytest.mark.parametrize("there", ["slurm"], indirect=True)
def test_requeued_slurm_job_gets_its_secret_again(there: Place, request: pytest.FixtureRequest) -> None:
    cluster = request.getfixturevalue("slurm_cluster")
    run = submit(there, max_restarts=1)
    wait_until_told(run)
    cluster.run("scontrol", "requeue", str(engine(run.folder)["job_id"]))
    wait_until_told(run, attempt=2)
    run.cancel()

    assert wait_for_end(run) == "Canceled"
    assert not run.folder.secrets.exists()


@pytest.mark.parametrize("there", ["slurm, login host"], indirect=True)
def test_slurm_job_that_never_starts_leaves_no_secret_on_the_cluster(
    there: Place, request: pytest.FixtureRequest
) -> None:
    cluster = request.getfixturevalue("slurm_cluster")
    nodes = ["scontrol", "update", f"nodename={','.join(cluster.hosts.names)}"]
    cluster.run(*nodes, "state=drain", "reason=test")
    try:
        run = submit(there)
        far = Path(str(engine(run.folder)["run_dir"])) / "secrets.json"
        assert (far.stat().st_mode & 0o777, run.folder.secrets.exists()) == (0o600, False)
        run.cancel()
        assert wait_for_end(run) == "Canceled"
        assert not far.exists()
    finally:
        cluster.run(*nodes, "state=resume")
