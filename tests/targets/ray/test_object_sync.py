"""A run that goes to another machine and comes back through a datastore; here both are folders of this one."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.data.stores.filesystem import Store
from paceline.errors import DataError, TargetError, TransferError
from paceline.job.data_reference import DataReference, Source
from paceline.remote.staging.stage_out_local import settle
from paceline.remote.wire import frame
from paceline.runs import read, states, store
from paceline.runs.folder import RunFolder
from paceline.system.files import read_json, write_json
from paceline.targets.ray.client import RayClient
from paceline.targets.ray.object_sync import (
    Ticket,
    fetch_run,
    remove_sealed,
    send_run,
    signed_part,
    snapshot_name,
)
from paceline.targets.ray.settings import RaySettings, read_settings
from paceline.targets.ray.store_objects import get, unpack
from tests.helpers import make_job, make_run, write_tree
from tests.targets.ray.fake_cluster import FakeCluster

NASTY = "a 'b\" $(touch oops)"
#: This program stands in for a supervisor, and leaves the files that a supervisor leaves.
SUPERVISOR = """\
import json, os, pathlib, sys
folder = pathlib.Path(sys.argv[1])
print("the supervisor's own words", flush=True)
(folder / "outputs" / "data").write_bytes((folder / "snapshot" / "data.txt").read_bytes())
(folder / "attempts" / "1").mkdir(parents=True)
(folder / "attempts" / "1" / "rank_0.log").write_text("line\\n")
(folder / "logs" / "rank_0.log").symlink_to("../attempts/1/rank_0.log")
secrets = folder / "secrets.json"
if secrets.exists():
    told = [json.loads(secrets.read_text())["A"][::-1], oct(secrets.stat().st_mode & 0o777)]
    (folder / "outputs" / "told").write_text(json.dumps(told))
job = json.loads((folder / "job.json").read_text())["job"]
if job["inputs"]:
    from paceline.job.job import Job
    from paceline.node.output import store_outputs
    from paceline.runs.folder import RunFolder
    assert not RunFolder(folder).home.exists()
    (folder / "uploads" / "model").mkdir(parents=True)
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "checkpoints" / "9.pt").write_text("Linux\\n")
    (folder / "uploads" / "model" / "link.pt").symlink_to(folder / "checkpoints" / "9.pt")
    (folder / "data.json").write_text(json.dumps(store_outputs(Job.from_json(job), RunFolder(folder), 0)))
state = json.loads((folder / "state.json").read_text())
(folder / "state.json").write_text(json.dumps({**state, "status": os.environ["END"], "canceled_by": "SIGTERM"}))
"""
#: An interpreter that runs SUPERVISOR in place of the module paceline.supervisor.
PYTHON = """\
#!{own}
import sys
sys.executable, module, sys.argv = {there!r}, sys.argv[2], sys.argv[2:]
if module == "paceline.supervisor":
    exec({supervisor!r})
else:
    from paceline.targets.ray.remote_supervisor import main
    sys.exit(main(sys.argv[1:]))
"""


class Trip:
    def __init__(self, top: Path, cluster: FakeCluster, **values: Any) -> None:
        self.workspace = top / NASTY
        self.store = top / "the store"
        self.folder, fd = make_run(self.workspace / "runs", **values)
        os.close(fd)
        snapshot = self.workspace / "snapshots" / "abc123"
        snapshot.mkdir(parents=True)
        (snapshot / "data.txt").write_text("source")
        self.folder.snapshot.symlink_to(os.path.relpath(snapshot, self.folder.path))
        (self.workspace / "datastores").mkdir()
        write_json(
            self.workspace / "datastores" / "lab.json", {"url": str(self.store), "options": {}, "credentials": None}
        )
        settings: dict[str, Any] = {"address": cluster.address, "datastore": "lab", "folder": str(top / "node")}
        self.settings: RaySettings = read_settings("lab", settings)
        self.client = RayClient(self.settings)
        self.node = top / "node"

    def send(self) -> str:
        """The job's script."""
        library = Path(paceline.__file__).parent.parent
        script, runtime_env = send_run(self.settings, self.client, self.folder, library)
        assert re.fullmatch(r"gcs://_ray_pkg_[0-9a-f]{16}\.zip", runtime_env["working_dir"])
        return script

    def run_there(self, script: str, tmp_path: Path, end: str = states.COMPLETED) -> subprocess.CompletedProcess[str]:
        """What the job's script does on the cluster, with a stand-in for the supervisor."""
        python = tmp_path / "python"
        python.write_text(PYTHON.format(own=sys.executable, there=str(python), supervisor=SUPERVISOR))
        python.chmod(0o755)
        word = shlex.split(script.splitlines()[-1])[-1]
        environment = {**os.environ, "END": end, "PYTHONPATH": str(Path(paceline.__file__).parent.parent)}
        return subprocess.run(
            [str(python), "-m", "paceline.targets.ray.remote_supervisor", word],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=180,
        )

    def files_in_store(self) -> list[str]:
        return sorted(str(path.relative_to(self.store)) for path in self.store.rglob("*") if path.is_file())


@pytest.fixture
def trip(tmp_path: Path, cluster: FakeCluster) -> Trip:
    return Trip(tmp_path, cluster)


def test_run_sent_through_a_datastore_returns_its_results_and_leaves_only_its_snapshot_there(
    trip: Trip, tmp_path: Path
) -> None:
    done = trip.run_there(trip.send(), tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (trip.node / "away" / trip.folder.run_id).exists()
    fetch_run(trip.settings, trip.folder)
    folder = trip.folder
    assert store.stored(folder).status == states.COMPLETED
    assert (folder.outputs / "data").read_text() == "source"
    assert folder.live_log(0).read_text() == "line\n"
    assert "the supervisor's own words" in folder.driver_log.read_text()
    assert not folder.ballast.exists()
    assert trip.files_in_store() == ["paceline/snapshots/abc123.tar.gz"]
    assert not list(tmp_path.rglob("oops"))


@pytest.fixture
def with_output(tmp_path: Path, cluster: FakeCluster) -> Trip:
    reference = DataReference(name="model", sources=(Source(datastore="default", path="m"),), mode="upload")
    return Trip(tmp_path, cluster, job=make_job(inputs=(reference,)))


def test_output_is_stored_locally_before_the_run_completes(with_output: Trip, tmp_path: Path) -> None:
    trip = with_output
    done = trip.run_there(trip.send(), tmp_path)
    assert done.returncode == 0, done.stderr
    fetch_run(trip.settings, trip.folder)
    assert store.stored(trip.folder).status == states.FINALIZING
    assert trip.files_in_store() == ["paceline/snapshots/abc123.tar.gz"], "all of it is here"
    assert settle(trip.folder)
    assert store.stored(trip.folder).status == states.COMPLETED
    assert (trip.workspace / "data" / "m" / "link.pt").read_text() == "Linux\n"
    assert read_json(trip.folder.data)["outputs"][0]["files"] == 1


def test_run_files_are_fetched_again_if_the_last_fetch_crashed_before_it_recorded_the_end(
    with_output: Trip, tmp_path: Path
) -> None:
    trip = with_output
    trip.run_there(trip.send(), tmp_path)
    back = trip.store / "paceline/runs" / trip.folder.run_id / "back"
    parts = {path: path.read_bytes() for path in back.iterdir()}
    fetch_run(trip.settings, trip.folder)
    # Simulate that the first fetch was killed after it had stored the record, and before it had noted this.
    shutil.rmtree(trip.folder.uploads)
    for path, data in parts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    write_json(trip.folder.path / ".travel.json", {"next": 0, "time": 0.0})
    fetch_run(trip.settings, trip.folder)
    assert not trip.folder.uploads.exists()
    assert read_json(trip.folder.path / ".travel.json")["ended"]


def test_snapshot_that_is_already_in_the_datastore_is_not_stored_again(trip: Trip) -> None:
    trip.send()
    (path,) = (trip.store / "paceline" / "snapshots").iterdir()
    before = path.stat()
    trip.send()
    assert path.stat().st_ino == before.st_ino


def test_failed_run_is_a_failed_ray_job(trip: Trip, tmp_path: Path) -> None:
    assert trip.run_there(trip.send(), tmp_path, end=states.FAILED).returncode == 1


def test_fetched_run_has_the_name_of_the_user_who_canceled_it(trip: Trip, tmp_path: Path) -> None:
    script = trip.send()
    read.request_cancel(trip.folder, "ada")
    trip.run_there(script, tmp_path, end=states.CANCELED)
    fetch_run(trip.settings, trip.folder)
    assert store.stored(trip.folder).canceled_by == "ada"


def test_incomplete_fetch_of_a_run_continues_when_its_last_file_arrives_in_the_datastore(
    trip: Trip, tmp_path: Path
) -> None:
    trip.run_there(trip.send(), tmp_path)
    parts = sorted((trip.store / "paceline/runs" / trip.folder.run_id / "back").iterdir())
    assert len(parts) >= 2
    last = parts[-1].read_bytes()
    parts[-1].unlink()
    fetch_run(trip.settings, trip.folder)
    state = read_json(trip.folder.path / ".travel.json")
    assert not state.get("ended")
    parts[-1].parent.mkdir(parents=True, exist_ok=True)
    parts[-1].write_bytes(last)
    fetch_run(trip.settings, trip.folder)
    assert not read_json(trip.folder.path / ".travel.json").get("ended"), "it was looked at a moment ago"
    write_json(trip.folder.path / ".travel.json", {**state, "time": 0.0})
    fetch_run(trip.settings, trip.folder)
    assert read_json(trip.folder.path / ".travel.json")["ended"]


@pytest.mark.promise("job-source-replaced-ray-run")
def test_archive_of_a_submitted_run_is_refused_if_it_was_replaced_in_the_datastore(trip: Trip, tmp_path: Path) -> None:
    script = trip.send()
    packed = trip.store / "paceline" / "runs" / trip.folder.run_id / "start.tar.gz"
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path / "forged", filter="tar")
    (record,) = (tmp_path / "forged").rglob("job.json")
    record.write_text(record.read_text().replace("train.py", "other.py"))
    with tarfile.open(packed, "w:gz") as archive:
        archive.add(tmp_path / "forged", arcname=".")
    done = trip.run_there(script, tmp_path)
    assert done.returncode == 70
    assert "start.tar.gz' differs from the submitted one: its SHA-256 is another. Submit the run again" in done.stdout
    assert not any("/back/" in name for name in trip.files_in_store()), "nothing has run"


@pytest.mark.promise("job-source-replaced-ray-run")
@pytest.mark.parametrize("forge", ["other text", "one file more", "executable", "link"])
def test_snapshot_that_was_replaced_in_the_store_is_refused(trip: Trip, tmp_path: Path, forge: str) -> None:
    script = trip.send()
    forged = tmp_path / "forged"
    write_tree(forged, {"data.txt": "other" if forge == "other text" else "source"})
    if forge == "one file more":
        (forged / "sitecustomize.py").write_text("")
    elif forge == "executable":
        (forged / "data.txt").chmod(0o755)
    elif forge == "link":
        (forged / "also.txt").symlink_to("data.txt")
    packed = trip.store / "paceline" / "snapshots" / "abc123.tar.gz"
    with tarfile.open(packed, "w:gz") as archive:
        archive.add(forged, arcname=".")
    done = trip.run_there(script, tmp_path)
    assert done.returncode == 70
    assert "abc123.tar.gz' does not hold the source that was submitted. Remove it there and submit" in done.stdout
    assert not any("/back/" in name for name in trip.files_in_store()), "nothing has run"
    # The error message advises to remove this file.
    packed.unlink()
    assert trip.run_there(trip.send(), tmp_path).returncode == 0


def test_ray_job_fails_with_an_explanation_if_the_cluster_uses_another_store(trip: Trip, tmp_path: Path) -> None:
    script = trip.send()
    word = shlex.split(script.splitlines()[-1])[-1]
    ticket = Ticket.from_word(word)
    elsewhere = Ticket(**{**ticket.__dict__, "url": str(tmp_path / "other")})
    done = trip.run_there(script.replace(word, elsewhere.word()), tmp_path)
    assert done.returncode == 70
    assert done.stdout.startswith("paceline: ")
    assert "Does the cluster reach the very store" in done.stdout


def test_ray_job_command_has_references_to_secrets_but_no_secret(trip: Trip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAB_SECRET", "hush-hush")
    write_json(
        trip.workspace / "datastores" / "lab.json",
        {"url": str(trip.store), "options": {}, "credentials": {"secret": "env:LAB_SECRET"}},
    )
    script = trip.send()
    word = shlex.split(script.splitlines()[-1])[-1]
    assert json.loads(base64.urlsafe_b64decode(word))["credentials"] == {"secret": "env:LAB_SECRET"}
    assert "hush-hush" not in script
    assert Ticket.from_word(word).record.credentials == {"secret": "env:LAB_SECRET"}


def test_secrets_are_sent_encrypted_and_removed_from_the_store_once_read(trip: Trip, tmp_path: Path) -> None:
    write_json(trip.folder.secrets, {"A": "hush-hush"}, mode=0o600)
    script = trip.send()
    word = shlex.split(script.splitlines()[-1])[-1]
    name = f"paceline/runs/{trip.folder.run_id}/sealed"

    assert not trip.folder.secrets.exists()
    assert name in trip.files_in_store()
    in_store = b"".join((trip.store / file).read_bytes() for file in trip.files_in_store())
    assert b"hush" not in in_store + script.encode() + base64.urlsafe_b64decode(word)
    with tarfile.open(trip.store / "paceline" / "runs" / trip.folder.run_id / "start.tar.gz") as archive:
        assert "run/secrets.json" not in archive.getnames()

    assert trip.run_there(script, tmp_path).returncode == 0
    assert name not in trip.files_in_store()
    fetch_run(trip.settings, trip.folder)
    assert json.loads((trip.folder.outputs / "told").read_text()) == ["hsuh-hsuh", "0o600"]
    assert not trip.folder.secrets.exists()


def test_private_key_of_an_interactive_session_is_not_sent_through_the_datastore(trip: Trip) -> None:
    trip.folder.session.mkdir()
    (trip.folder.session / "key").write_text("PRIVATE KEY")
    trip.send()
    with tarfile.open(trip.store / "paceline" / "runs" / trip.folder.run_id / "start.tar.gz") as archive:
        assert not [name for name in archive.getnames() if "session" in name]


@pytest.mark.promise("secret-changed-ray-run-s")
def test_secret_that_was_changed_in_the_store_is_refused(trip: Trip, tmp_path: Path) -> None:
    write_json(trip.folder.secrets, {"A": "the secret"})
    script = trip.send()
    sealed = trip.store / "paceline" / "runs" / trip.folder.run_id / "sealed"
    data = bytearray(sealed.read_bytes())
    data[-20] ^= 1
    sealed.write_bytes(data)
    done = trip.run_there(script, tmp_path)
    assert done.returncode == 70
    assert "was changed by somebody without the run's key. Submit the run again" in done.stdout


def test_secrets_that_the_cluster_never_fetched_can_be_removed_from_the_store(trip: Trip) -> None:
    write_json(trip.folder.secrets, {"A": "hush-hush"}, mode=0o600)
    trip.send()
    remove_sealed(trip.settings, trip.folder)
    remove_sealed(trip.settings, trip.folder)

    assert not [name for name in trip.files_in_store() if name.endswith("sealed")]


def test_unknown_and_read_only_datastores_are_refused(trip: Trip) -> None:
    write_json(trip.workspace / "datastores" / "lab.json", {"url": "https://example.org/x", "options": {}})
    with pytest.raises(TargetError, match="both sides have to write"):
        trip.send()
    (trip.workspace / "datastores" / "lab.json").unlink()
    with pytest.raises(DataError, match="no datastore 'lab'"):
        trip.send()


def test_transferred_file_keeps_its_mode(trip: Trip, tmp_path: Path) -> None:
    script = trip.workspace / "snapshots" / "abc123" / "data.txt"
    script.chmod(0o755)
    packed = trip.send()
    assert packed
    with Store(Ticket.from_word(shlex.split(packed.splitlines()[-1])[-1]).record) as found:
        data = get(found, snapshot_name("abc123"))
    assert data is not None
    unpack(data, tmp_path / "there")
    assert stat.S_IMODE((tmp_path / "there" / "data.txt").stat().st_mode) == 0o755
    assert RunFolder(trip.folder.path).snapshot.is_symlink()


def packed(*members: tarfile.TarInfo) -> bytes:
    """Return a forged archive."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(b"x" * member.size))
    return made.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.linkname, found.size, found.mode = kind, link, int(kind == tarfile.REGTYPE), 0o644
    return found


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ([member("../x")], "leads outside"),
        ([member("/tmp/paceline-test-x")], "leads outside"),
        ([member("esc", tarfile.SYMTYPE, "/OUTSIDE"), member("esc/pwn")], "is a link that leads outside"),
        ([member("esc", tarfile.SYMTYPE, "../outside"), member("esc/pwn")], "leads outside"),
        ([member("esc", tarfile.SYMTYPE, "../outside")], "is a link that leads outside"),
        ([member("d", tarfile.SYMTYPE, "."), member("d/x")], "leads outside"),
        ([member("d", tarfile.SYMTYPE, "e"), member("d")], "is there already, as a link"),
        ([member("h", tarfile.LNKTYPE, "../outside/file")], "is a link that leads outside"),
        (
            [member("s", tarfile.SYMTYPE, "../outside/file"), member("h", tarfile.LNKTYPE, "s")],
            "a link that leads outside",
        ),
        ([member("pipe", tarfile.FIFOTYPE)], "is of no file"),
        ([member("device", tarfile.CHRTYPE)], "is of no file"),
    ],
)
def test_malicious_archive_is_refused_and_writes_nothing_outside_the_destination_folder(
    tmp_path: Path, members: list[tarfile.TarInfo], why: str
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("mine")
    for one in members:
        one.linkname = one.linkname.replace("/OUTSIDE", str(tmp_path / "outside"))
    with pytest.raises(TargetError, match=why):
        unpack(packed(*members), tmp_path / "there")
    assert [(path.name, path.read_text()) for path in (tmp_path / "outside").iterdir()] == [("file", "mine")]
    assert not (tmp_path / "x").exists()


def test_setuid_bits_of_an_archive_are_not_kept(tmp_path: Path) -> None:
    member, packed = tarfile.TarInfo("tool"), io.BytesIO()
    member.mode = 0o6755
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.addfile(member)
    (tmp_path / "to").mkdir()
    unpack(packed.getvalue(), tmp_path / "to")
    assert stat.S_IMODE((tmp_path / "to" / "tool").stat().st_mode) == 0o755


def test_links_inside_an_archive_are_kept(tmp_path: Path) -> None:
    unpack(
        packed(member("d/x"), member("d/l", tarfile.SYMTYPE, "../d/x"), member("h", tarfile.LNKTYPE, "d/x")), tmp_path
    )
    assert ((tmp_path / "d/l").read_text(), os.readlink(tmp_path / "d/l"), (tmp_path / "h").read_text()) == (
        "x",
        "../d/x",
        "x",
    )


def _signed(trip: Trip, part: bytes, number: int) -> bytes:
    return signed_part(part, trip.folder.exec_key.read_text(), trip.folder.run_id, number)


def _truncated(parts: list[bytes], other: bytes) -> None:
    parts[0] = parts[0][:-1]


def _result_changed(parts: list[bytes], other: bytes) -> None:
    parts[:] = [part.replace(b"source", b"forged") for part in parts]


def _unsigned(parts: list[bytes], other: bytes) -> None:
    parts[0] = parts[0][32:]


def _empty(parts: list[bytes], other: bytes) -> None:
    parts[0] = b""


def _older_again(parts: list[bytes], other: bytes) -> None:
    parts[1] = parts[0]


def _of_another_run(parts: list[bytes], other: bytes) -> None:
    parts[0] = other


def _in_another_order(parts: list[bytes], other: bytes) -> None:
    parts.reverse()


@pytest.mark.promise("part-ray-run-s-results")
@pytest.mark.parametrize(
    "forge",
    [_truncated, _result_changed, _unsigned, _empty, _older_again, _of_another_run, _in_another_order],
)
def test_returned_run_files_are_refused_if_they_were_changed_in_the_datastore(
    trip: Trip, tmp_path: Path, cluster: FakeCluster, forge: Callable[[list[bytes], bytes], None]
) -> None:
    # Regression: another user who could write to the datastore replaced the results of a run, and Paceline did not
    # detect the change.
    trip.run_there(trip.send(), tmp_path)
    (tmp_path / "other").mkdir()
    other = Trip(tmp_path / "other", cluster, run_id="other_1700000000_00000001")
    other.run_there(other.send(), tmp_path / "other")

    def paths(of: Trip) -> list[Path]:
        return sorted((of.store / "paceline/runs" / of.folder.run_id / "back").iterdir())

    parts = [path.read_bytes() for path in paths(trip)]
    forge(parts, paths(other)[0].read_bytes())
    for path, part in zip(paths(trip), parts, strict=True):
        path.write_bytes(part)
    with pytest.raises(TransferError, match=r"back/0000000\d' is not signed by the run.*Remove that object, or cancel"):
        fetch_run(trip.settings, trip.folder)
    assert store.stored(trip.folder).status != states.COMPLETED
    assert not (trip.folder.outputs / "data").exists() or (trip.folder.outputs / "data").read_text() == "source"


def test_returned_run_files_are_refused_if_the_key_of_the_run_is_missing(trip: Trip, tmp_path: Path) -> None:
    trip.run_there(trip.send(), tmp_path)
    trip.folder.exec_key.unlink()
    with pytest.raises(TransferError, match="Look at the run as the user that submitted it"):
        fetch_run(trip.settings, trip.folder)
    assert store.stored(trip.folder).status != states.COMPLETED


def test_sending_secrets_without_the_cryptography_package_is_refused_with_the_install_command(
    trip: Trip, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    trip.send()  # there are no secrets, so nothing has to be encrypted
    write_json(trip.folder.secrets, {"A": "hush-hush"}, mode=0o600)
    with pytest.raises(TargetError, match=r"needs cryptography. Install it there: pip install 'cryptography>=42'"):
        trip.send()


def test_signed_file_that_a_ray_cluster_is_not_allowed_to_return_is_refused(trip: Trip) -> None:
    trip.send()
    back = trip.store / "paceline/runs" / trip.folder.run_id / "back"
    header = {"file": "target.json", "how": "part", "key": 1, "at": 0, "end": True, "mode": 420, "stamp": [2, 1, 1]}
    write_tree(back, {"00000000": _signed(trip, frame(header, b"{}"), 0)})
    before = trip.folder.target.read_bytes() if trip.folder.target.exists() else None
    with pytest.raises(TransferError, match=r"'target.json' is not one that the other side may send.*somebody else"):
        fetch_run(trip.settings, trip.folder)
    assert (trip.folder.target.read_bytes() if trip.folder.target.exists() else None) == before
