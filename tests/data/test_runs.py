"""Whole runs against an S3 server: data arrives, secrets stay secret, and faults are reported before the workers start."""

from __future__ import annotations

import base64
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest

import paceline as pl
from paceline.compat import azureml
from paceline.runs import states
from paceline.workspace import Workspace
from tests.data import servers
from tests.engines.lab import KEEP, Lab, processes_below, seen, wait_for_end, wait_for_file
from tests.helpers import wait_until

PLANTED = "plAnted+secret/of a run=="
LOOK = KEEP + "keep(sorted(os.listdir(sys.argv[2])))\nopen(sys.argv[4] + '/model.bin', 'wb').write(b'm' * 1000)\n"


@pytest.fixture
def lab(tmp_path: Path, workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    """Submits to the workspace of these tests; the secret is nowhere but in LAB_SECRET."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("LAB_KEY", servers.KEY)
    monkeypatch.setenv("LAB_SECRET", PLANTED)
    yield Lab(tmp_path)
    wait_until(lambda: not processes_below(tmp_path), "no process of a run is left")


@pytest.fixture
def store(workspace: Workspace, s3_once: servers.S3, bucket: str) -> pl.Datastore:
    s3_once.bucket(bucket, {f"mnist/{name}.txt": name.encode() * 100 for name in "abc"})
    return register(workspace, s3_once.url, bucket)


def register(workspace: Workspace, url: str, bucket: str) -> pl.Datastore:
    credentials = {"key": "env:LAB_KEY", "secret": "env:LAB_SECRET"}
    options = {"endpoint_url": url, "client_kwargs": {"region_name": "us-east-1"}}
    return pl.Datastore.register(
        workspace, "lab", f"s3://{bucket}", options=options, credentials=credentials, overwrite=True
    )


def spellings(secret: str) -> set[bytes]:
    """Return a secret in each form in which a file may have it: plain, quoted for a URL or a shell or JSON, in base64."""
    plain = {secret, quote(secret), quote(secret, safe=""), quote_plus(secret)}
    return {text.encode() for text in plain} | {base64.b64encode(secret.encode()).rstrip(b"=")}


def files_with(top: Path, secrets: set[bytes]) -> list[str]:
    """The files below a folder that hold one of these."""
    found = []
    for folder, _, names in os.walk(top):
        for name in names:
            path = Path(folder, name)
            if path.is_file() and any(secret in path.read_bytes() for secret in secrets):
                found.append(str(path))
    return found


def command_lines_with(secrets: set[bytes]) -> list[bytes]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue
        if any(secret in line for secret in secrets):
            found.append(line)
    return found


@pytest.mark.promise("store-s-secret-file-log")
def test_run_reads_and_writes_s3_without_showing_the_secret(
    lab: Lab, store: pl.Datastore, s3_once: servers.S3, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    secrets = spellings(PLANTED)
    params = {"--data": store.path("mnist").as_download(), "--out": store.path("models", "out").as_upload()}
    script = LOOK + "import time\nwhile not os.path.exists('outputs/go'): time.sleep(0.02)\n"
    run = lab.submit(script, script_params=params, environment_variables={"LAB_SECRET": ""})
    wait_for_file(run.folder.outputs / "seen_0.json")
    assert command_lines_with(secrets) == []
    (run.folder.outputs / "go").touch()
    run.wait_for_completion(show_output=True)

    assert seen(run) == ["a.txt", "b.txt", "c.txt"]
    assert s3_once.get(store.url.removeprefix("s3://"), "models/model.bin") == b"m" * 1000
    assert files_with(tmp_path, secrets) == []
    details = azureml.Run(run.experiment, run.id).get_details()
    shown = "".join(map(repr, (run, store, details, run.input_datasets, run.record()))) + capfd.readouterr().out
    assert not any(secret in shown.encode() for secret in secrets)


def test_run_fails_before_workers_start_if_the_datastore_refuses_the_key_and_the_key_is_not_shown(
    lab: Lab, store: pl.Datastore, s3_once: servers.S3, tmp_path: Path
) -> None:
    s3_once.check_keys(True)
    try:
        run = lab.finish("print('ran')\n", inputs=[store.path("mnist").as_download()])
    finally:
        s3_once.check_keys(False)
    assert run.failure is not None
    assert (run.failure.cause, run.record().attempts) == ("data", ())
    assert "lab" in run.failure.message
    assert files_with(tmp_path, spellings(PLANTED)) == []


def test_run_fails_before_workers_start_and_names_the_secret_variable_that_is_not_set(
    lab: Lab, store: pl.Datastore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LAB_SECRET")
    run = lab.finish("print('ran')\n", inputs=[store.path("mnist").as_download()])
    assert run.failure is not None
    assert (run.failure.cause, run.record().attempts) == ("data", ())
    assert "LAB_SECRET" in run.failure.message


def test_unreachable_store_fails_the_run_before_workers_start(lab: Lab, workspace: Workspace, bucket: str) -> None:
    store = register(workspace, "http://127.0.0.1:9", bucket)
    run = lab.finish("print('ran')\n", inputs=[store.path("mnist").as_download()])
    assert run.failure is not None
    assert (run.failure.cause, run.record().attempts) == ("data", ())
    assert "lab" in run.failure.message


def test_next_run_gets_whole_files_after_a_canceled_download(
    lab: Lab,
    workspace: Workspace,
    s3_once: servers.S3,
    bucket: str,
    proxied: Callable[..., servers.Proxy],
) -> None:
    content = {f"mnist/{number}.bin": bytes([number]) * 300_000 for number in range(6)}
    s3_once.bucket(bucket, content)
    hold = threading.Event()
    proxy = proxied(s3_once.port, lambda answer: None if hold.is_set() else _hold(answer, hold))
    store = register(workspace, f"http://127.0.0.1:{proxy.port}", bucket)
    script = (
        KEEP + "keep({name: len(open(f'{sys.argv[2]}/{name}', 'rb').read()) for name in os.listdir(sys.argv[2])})\n"
    )
    params = {"--data": store.path("mnist").as_download()}
    run = lab.submit(script, script_params=params)
    wait_until(lambda: bool(proxy.gets(".bin")), "a file is asked for")
    run.cancel()
    assert wait_for_end(run) == states.CANCELED
    hold.set()

    assert seen(lab.complete(script, script_params=params)) == {f"{number}.bin": 300_000 for number in range(6)}


def _hold(answer: servers.Answer, hold: threading.Event) -> None:
    """Let nothing of a file through while it is held."""
    if answer.path.endswith(".bin"):
        hold.wait(120)
