"""The login host here is this machine, behind an `ssh` that hands its last word to a shell."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import DataError, TargetError
from paceline.job.data_reference import DataReference, Source
from paceline.node.output import check_outputs, store_outputs
from paceline.remote.staging.stage_in import as_here
from paceline.remote.staging.stage_out_local import settle
from paceline.remote.wire import frame
from paceline.runs import states, store
from paceline.runs.folder import RunFolder
from paceline.system import processes
from paceline.system.files import read_json, write_json
from paceline.targets.slurm.login import Login, LoginChannel, There
from paceline.targets.slurm.scheduler import AwayError, Scheduler
from paceline.targets.slurm.settings import SlurmSettings
from tests.helpers import make_job, make_run, old_python, wait_until, write_program, write_tree
from tests.targets.answering import answering

#: This fake ssh prints a greeting first, as many login hosts do.
SSH = """#!/bin/sh
[ "$1" = -G ] && exit 0
echo 'Welcome to the cluster!'
for last; do :; done
HOME={home} exec sh -c "$last"
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home on the login host."""
    folder = tmp_path / "far home; $(touch x)"
    folder.mkdir()
    write_program(tmp_path / "bin" / "ssh", SSH.format(home="'" + str(folder) + "'"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return folder


def make_login(**settings: object) -> Login:
    made = SlurmSettings.of("far", {"login": "head", "python": sys.executable, **settings})
    return Login(Scheduler("compute target 'far'", made))


def submitted(tmp_path: Path, **values: Any) -> RunFolder:
    """A run here whose snapshot has a script and a link."""
    snapshot = write_tree(tmp_path / "ws" / "snapshots" / "abc123", {"train.py": "print(1)", "lib/a b.py": ""})
    (snapshot / "link").symlink_to("train.py")
    folder, fd = make_run(tmp_path / "ws" / "runs", **values)
    os.close(fd)
    folder.snapshot.symlink_to("../../snapshots/abc123")
    (folder.path / "target.json").write_text("{}")
    return folder


def library(tmp_path: Path) -> Path:
    """A small one."""
    folder = tmp_path / "ws" / "lib" / "0123"
    if not folder.exists():
        write_tree(tmp_path / "installed", {"paceline/__init__.py": "", "paceline/__pycache__/x.pyc": ""})
        folder.mkdir(parents=True)
        (folder / "paceline").symlink_to(tmp_path / "installed" / "paceline")
    return folder


def push(tmp_path: Path) -> tuple[RunFolder, There, Login]:
    folder, login = submitted(tmp_path), make_login()
    return folder, login.push(folder, library(tmp_path)), login


def test_pushing_a_run_to_a_login_host_copies_its_record_snapshot_and_the_paceline_library(tmp_path: Path, home: Path):
    folder, there, _ = push(tmp_path)
    assert there.folder == str(home / ".paceline")
    assert there.run_dir == f"{there.folder}/runs/{folder.run_id}"
    far = RunFolder(Path(there.run_dir))
    assert (far.snapshot / "link").read_text() == "print(1)"
    assert store.stored(far) == store.stored(folder)
    assert (Path(there.library_dir) / "paceline" / "__init__.py").exists()
    assert not list(Path(there.library_dir).rglob("__pycache__"))
    assert read_json(far.engine) == {"engine": "slurm"}
    assert not list(home.rglob(".incoming*"))
    assert not list(tmp_path.rglob("x"))


def test_snapshot_files_already_on_the_login_host_are_not_sent_again(tmp_path: Path, home: Path):
    _, there, login = push(tmp_path)
    script = Path(there.folder) / "snapshots" / "abc123" / "train.py"
    stamp = script.stat().st_mtime_ns, script.stat().st_ino
    other, fd = make_run(tmp_path / "ws" / "runs", "lab_1800000000_00000002")
    os.close(fd)
    other.snapshot.symlink_to("../../snapshots/abc123")
    login.push(other, library(tmp_path))
    assert (script.stat().st_mtime_ns, script.stat().st_ino) == stamp
    assert (Path(there.folder) / "runs" / other.run_id / "snapshot" / "train.py").exists()


def test_local_inputs_of_the_job_are_sent_once(tmp_path: Path, home: Path):
    write_tree(tmp_path / "data", {"a.txt": "a", "deep/b c.txt": "b"})
    os.link(tmp_path / "data" / "a.txt", tmp_path / "data" / "again.txt")
    (tmp_path / "data" / "link.txt").symlink_to("a.txt")
    reference = DataReference(name="data", sources=(Source(path=str(tmp_path / "data")),))
    folder = submitted(tmp_path, job=make_job(inputs=(reference,)))

    there = make_login().push(folder, library(tmp_path))

    far = RunFolder(Path(there.run_dir))
    came = as_here(far)
    assert not folder.carried.exists()
    (tree,) = came.manifest.trees
    top = Path(there.folder) / "carried" / tree
    texts = {str(path.relative_to(top)): path.read_text() for path in top.rglob("*") if path.is_file()}
    assert texts == {"a.txt": "a", "again.txt": "a", "link.txt": "a", "deep/b c.txt": "b"}
    assert not any(path.is_symlink() or path.stat().st_mode & 0o222 for path in top.rglob("*.txt"))

    stamp = (top / "a.txt").stat().st_ino
    make_login().push(folder, library(tmp_path))
    assert (top / "a.txt").stat().st_ino == stamp


def run_on(far: RunFolder) -> None:
    """What a supervisor and two workers leave."""
    for name, text in {
        "attempts/1/rank_0.log": "one\n",
        "attempts/1/rank_0.held": "x" * 100,
        "logs/driver.log": "driver\n",
        "metrics/rank_0.jsonl": '{"a": 1}\n',
        "outputs/model.bin": "weights",
        "checkpoints/step_1/state": "state",
    }.items():
        path = far.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    far.live_log(0).symlink_to("../attempts/1/rank_0.log")


def due(folder: RunFolder) -> None:
    told = read_json(folder.path / "mirrored.json")
    write_json(folder.path / "mirrored.json", {**told, "time": 0.0})


def test_logs_and_metrics_come_back_live_and_outputs_at_the_end(tmp_path: Path, home: Path):
    folder, there, login = push(tmp_path)
    far = RunFolder(Path(there.run_dir))
    run_on(far)
    record = store.change(far, store.stored(far), states.RUNNING)
    login.pull(folder, there.run_dir)
    assert folder.live_log(0).read_text() == "one\n"
    assert folder.metric_log(0).read_text() == '{"a": 1}\n'
    assert store.stored(folder).status == states.RUNNING
    assert not list(folder.outputs.iterdir())
    assert not list(folder.path.rglob("*.held"))

    with open(far.rank_log(1, 0), "a") as log:
        log.write("two\n")
    store.change(far, record, states.COMPLETED, exit_code=0)
    due(folder)
    login.pull(folder, there.run_dir)
    assert folder.live_log(0).read_text() == "one\ntwo\n"
    assert (folder.outputs / "model.bin").read_text() == "weights"
    assert (folder.checkpoints / "step_1" / "state").read_text() == "state"
    assert store.stored(folder).status == states.COMPLETED
    assert (folder.path / "lock").exists()


@pytest.mark.parametrize("text", ["new\n", "another driver's\n", "anothr\n"])
def test_log_of_a_restarted_supervisor_replaces_the_mirrored_log(tmp_path: Path, home: Path, text: str):
    """A shorter one, a longer one, one that is as long."""
    folder, there, login = push(tmp_path)
    far = RunFolder(Path(there.run_dir))
    run_on(far)
    login.pull(folder, there.run_dir)
    write_tree(far.logs, {".beside": text})
    (far.logs / ".beside").replace(far.driver_log)
    due(folder)
    login.pull(folder, there.run_dir)
    assert folder.driver_log.read_text() == text


def test_notes_written_on_this_machine_and_on_the_cluster_are_merged(tmp_path: Path, home: Path):
    folder, login = submitted(tmp_path), make_login()
    folder.notes.write_text("before\n")
    there = login.push(folder, library(tmp_path))
    far = RunFolder(Path(there.run_dir))
    for place, text in ((folder, "here, a long one\n"), (far, "there\n")):
        with open(place.notes, "a") as notes:
            notes.write(text)
    for _ in range(2):
        login.pull(folder, there.run_dir)
        due(folder)
    assert folder.notes.read_text() == "before\nhere, a long one\nthere\n"


@pytest.mark.skipif(old_python() is None, reason="needs a Python 3.6, to stand for that of a login host")
def test_login_host_needs_only_python_3_6(tmp_path: Path, home: Path):
    folder, login = submitted(tmp_path), make_login(python=old_python())
    there = login.push(folder, library(tmp_path))
    far = RunFolder(Path(there.run_dir))
    run_on(far)
    store.change(far, store.stored(far), states.COMPLETED, exit_code=0)
    login.pull(folder, there.run_dir)
    assert (store.stored(folder).status, folder.live_log(0).read_text()) == (states.COMPLETED, "one\n")
    assert (folder.checkpoints / "step_1" / "state").read_text() == "state"


def test_run_sent_by_an_older_paceline_continues(tmp_path: Path, home: Path):
    folder, there, login = push(tmp_path)
    far = RunFolder(Path(there.run_dir))
    run_on(far)
    login.pull(folder, there.run_dir)
    write_json(folder.path / "mirrored.json", {"time": 0.0})
    with open(far.rank_log(1, 0), "a") as log:
        log.write("two\n")
    login.pull(folder, there.run_dir)
    assert folder.live_log(0).read_text() == "one\ntwo\n"


def test_a_folder_is_mirrored_once_a_second_at_most(tmp_path: Path, home: Path):
    folder, there, login = push(tmp_path)
    far = RunFolder(Path(there.run_dir))
    login.pull(folder, there.run_dir)
    store.change(far, store.stored(far), states.RUNNING)
    login.pull(folder, there.run_dir)
    assert store.stored(folder).status == states.NOT_STARTED


def test_connection_lost_during_the_last_pull_leaves_the_run_unfinished(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
):
    folder, there, login = push(tmp_path)
    far = RunFolder(Path(there.run_dir))
    run_on(far)
    store.change(far, store.stored(far), states.COMPLETED, exit_code=0)
    text = (tmp_path / "bin" / "ssh").read_text()
    write_program(tmp_path / "bin" / "ssh", text.replace('exec sh -c "$last"', 'sh -c "$last" | head -c 900; exit 255'))
    with pytest.raises(AwayError, match="login host head can't be used"):
        login.pull(folder, there.run_dir)
    assert store.stored(folder).status == states.NOT_STARTED
    write_program(tmp_path / "bin" / "ssh", text)
    login.pull(folder, there.run_dir)
    assert store.stored(folder).status == states.COMPLETED
    assert (folder.outputs / "model.bin").read_text() == "weights"


def test_output_is_stored_locally_before_the_run_completes(tmp_path: Path, home: Path):
    reference = DataReference(name="model", sources=(Source(datastore="default", path="m"),), mode="upload")
    folder, login = submitted(tmp_path, job=make_job(inputs=(reference,))), make_login()
    there = login.push(folder, library(tmp_path))
    far = RunFolder(Path(there.run_dir))
    assert not far.home.exists()
    write_tree(far.uploads / "model", {"deep/a.pt": "weights"})
    (far.uploads / "model" / "link.pt").symlink_to(write_tree(far.work, {"b.pt": "elsewhere"}) / "b.pt")
    assert check_outputs([reference], as_here(far)) == {}
    assert store_outputs(make_job(inputs=(reference,)), far, 0) == {"outputs": [reference.to_json()], "left_out": []}
    store.change(far, store.stored(far), states.COMPLETED, exit_code=0)

    login.pull(folder, there.run_dir)
    assert store.stored(folder).status == states.FINALIZING
    assert settle(folder)
    assert store.stored(folder).status == states.COMPLETED
    stored = tmp_path / "ws" / "data" / "m"
    texts = {str(path.relative_to(stored)): path.read_text() for path in stored.rglob("*") if path.is_file()}
    assert texts == {"deep/a.pt": "weights", "link.pt": "elsewhere"}
    assert not folder.home.exists()


def test_output_path_that_already_has_files_is_refused_before_anything_is_sent(tmp_path: Path, home: Path):
    write_tree(tmp_path / "ws" / "data", {"m/old.pt": ""})
    reference = DataReference(name="model", sources=(Source(datastore="default", path="m"),), mode="upload")
    folder = submitted(tmp_path, job=make_job(inputs=(reference,)))
    with pytest.raises(DataError, match=r"'model' is to be stored at 'm'.*there are 1 files already"):
        make_login().push(folder, library(tmp_path))
    assert not list(home.iterdir())


def test_cancel_request_is_written_to_the_remote_run_folder(tmp_path: Path, home: Path):
    _, there, login = push(tmp_path)
    login.put(f"{there.run_dir}/cancel.json", {"by": "mé"})
    assert json.loads((Path(there.run_dir) / "cancel.json").read_text()) == {"by": "mé"}


def test_uncreatable_remote_folder_raises_target_error(tmp_path: Path, home: Path):
    folder = submitted(tmp_path)
    with pytest.raises(TargetError, match=r"on the login host head: .*'/proc/x.*the setting folder"):
        make_login(folder="/proc/x").push(folder, library(tmp_path))


def test_push_to_a_login_host_without_the_configured_python_is_reported(tmp_path: Path, home: Path):
    folder = submitted(tmp_path)
    with pytest.raises(AwayError, match="no '/nowhere/python3' there"):
        make_login(python="/nowhere/python3").push(folder, library(tmp_path))


def test_symlinks_to_outputs_and_checkpoints_are_pulled_and_symlinks_out_of_the_run_are_skipped(
    tmp_path: Path, home: Path
):
    folder, login = submitted(tmp_path), make_login()
    there = login.push(folder, library(tmp_path))
    far = RunFolder(Path(there.run_dir))
    write_tree(far.path, {"outputs/step/a": "1", "checkpoints/9.pt": "nine", "work/w": "w"})
    write_tree(tmp_path, {"mine": "secret"})
    for name, target in {
        "latest": far.outputs / "step",
        "best.pt": "../checkpoints/9.pt",
        "w": far.work / "w",
        "mine": tmp_path / "mine",
        "record": "../state.json",
    }.items():
        (far.outputs / name).symlink_to(target)
    os.mkfifo(far.outputs / "pipe")
    store.change(far, store.stored(far), states.COMPLETED, exit_code=0)

    login.pull(folder, there.run_dir)

    assert sorted(path.name for path in folder.outputs.iterdir()) == ["best.pt", "latest", "step", "w"]
    assert (os.readlink(folder.outputs / "latest"), os.readlink(folder.outputs / "best.pt")) == (
        "step",
        "../checkpoints/9.pt",
    )
    assert (folder.outputs / "latest/a").read_text() + (folder.outputs / "best.pt").read_text() == "1nine"
    assert ((folder.outputs / "w").read_text(), (folder.outputs / "w").is_symlink()) == ("w", False)


#: This program runs in place of the program that Paceline sends to the login host. It prints any text instead of a
#: valid answer.
LIAR = """#!{python}
import re, sys
if sys.argv[1] != "-G":
    mark = re.search(rb"PACELINE-[0-9a-f]{{16}}", sys.stdin.buffer.read())[0]
    sys.stdout.buffer.write(b"\\n" + mark + b"\\n" + open({said!r}, "rb").read())
"""


def lie(tmp_path: Path, said: bytes) -> None:
    (tmp_path / "said").write_bytes(said)
    write_program(tmp_path / "bin" / "ssh", LIAR.format(python=sys.executable, said=str(tmp_path / "said")))


@pytest.mark.parametrize(
    "header",
    [
        {"file": "outputs/x", "how": "link", "target": "../state.json", "stamp": [1, 1, 1]},
        {"file": "target.json", "how": "part", "key": 1, "at": 0, "end": True, "mode": 0o644, "stamp": [2, 1, 1]},
    ],
)
def test_malicious_login_host_cannot_write_links_or_files_that_it_may_not_send(
    tmp_path: Path, home: Path, header: dict[str, Any]
):
    folder = submitted(tmp_path)
    before = {str(path): path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    lie(tmp_path, frame(header, b"{}") + frame({"over": True}))
    with pytest.raises(TargetError, match=r"login host head sent what can't be taken: the (link|name) '"):
        make_login().pull(folder, "/there")
    after = {str(path): path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    assert {name: text for name, text in after.items() if "mirror" not in name} == before


@pytest.mark.parametrize(
    ("said", "why"),
    [(b"Segmentation fault", "no answer that can be read"), (b"", "can't be used"), (b"\0", "can't be")],
)
def test_invalid_answer_of_a_login_host_is_reported_with_the_reason(tmp_path: Path, home: Path, said: bytes, why: str):
    folder = submitted(tmp_path)
    lie(tmp_path, said)
    with pytest.raises(AwayError, match=f"the login host head .*{why}"):
        make_login().pull(folder, "/there")


# --- Commands that run next to the workers


REQUEST: Any = {"argv": ["echo"], "rank": 1, "terminal": None, "term": None}


def there(tmp_path: Path) -> RunFolder:
    folder, fd = make_run(tmp_path / "there")
    os.close(fd)
    return folder


def hear(channel: LoginChannel, what: str) -> list[Any]:
    found: list[Any] = []
    wait_until(lambda: found.extend(dict(told)[what] for told in channel.receive() if what in told) or found, what, 60)
    return found


def is_clean(folder: RunFolder) -> bool:
    return not folder.exec_requests.exists() and not list(folder.path.rglob("exec_*"))


def test_exec_input_output_and_exit_code_pass_over_one_login_connection(home: Path, tmp_path: Path) -> None:
    folder = there(tmp_path)
    with answering(folder) as supervisor:
        channel = LoginChannel(make_login(), str(folder.path))
        channel.begin(REQUEST)
        for number in range(50):
            message: Any = {"data": "eA==" * 10_000, "number": number}
            channel.send(message)
        assert b"".join(out.encode() for out in hear(channel, "out"))[:4] == b"eA=="
        assert supervisor.requests == [REQUEST]
        assert (folder.exec_requests.stat().st_mode & 0o777) == 0o700
        channel.send({"end": True})
        assert hear(channel, "exit") == [3]
        # On a slow machine, messages that acknowledge the answers come between the numbered messages.
        assert [told["number"] for told in supervisor.heard if "number" in told] == list(range(50))
        assert supervisor.heard[-1] == {"end": True}
        channel.close()
        channel.close()
        wait_until(lambda: is_clean(folder), "nothing is left", 60)


def test_exec_command_reports_a_refusal_and_ends_when_the_workers_end(home: Path, tmp_path: Path) -> None:
    folder = there(tmp_path)
    with answering(folder):
        refused = LoginChannel(make_login(), str(folder.path))
        refused.begin(REQUEST | {"argv": ["refused"]})
        assert hear(refused, "error") == ["rank 0 has ended"]
        refused.close()
        channel = LoginChannel(make_login(), str(folder.path))
        channel.begin(REQUEST)
        wait_until(lambda: any(folder.exec_requests.glob("*/answer.json")), "it runs", 60)
        shutil.rmtree(folder.exec_requests)
        wait_until(lambda: channel.receive() or channel.is_over, "the end is told", 60)
        channel.close()
    assert is_clean(folder)


def test_lost_connection_ends_the_exec_command(home: Path, tmp_path: Path) -> None:
    folder = there(tmp_path)
    with answering(folder) as supervisor:
        channel = LoginChannel(make_login(), str(folder.path))
        channel.begin(REQUEST)
        channel.send({"data": "eA=="})
        hear(channel, "out")
        channel.close()
        wait_until(lambda: {"gone": True} in supervisor.heard, "the command was ended", 60)
        wait_until(lambda: is_clean(folder), "nothing is left", 60)
        lost = LoginChannel(make_login(), str(folder.path))
        lost.begin(REQUEST)
        lost.send({"data": "eA=="})
        hear(lost, "out")
        assert lost._process is not None
        processes.kill_descendants(lost._process.pid)
        lost._process.kill()
        with pytest.raises(AwayError, match="the login host head can't be used"):
            wait_until(lost.receive, "a word", 60)
        lost.close()


def test_exec_of_an_unknown_run_raises_target_error(home: Path, tmp_path: Path) -> None:
    channel = LoginChannel(make_login(), str(tmp_path / "a file" / "run"))
    (tmp_path / "a file").touch()
    channel.begin(REQUEST)
    with pytest.raises(TargetError, match="on the login host head: "):
        wait_until(channel.receive, "a word", 60)
    channel.close()


def test_files_of_exec_commands_are_not_copied_from_the_login_host(home: Path, tmp_path: Path) -> None:
    folder = there(tmp_path)
    write_tree(folder.path, {"attempts/1/exec_0a.jsonl": "{}", "attempts/1/rank_0.log": "1", "exec/0a/in_0.json": "{}"})
    here = submitted(tmp_path)
    make_login().pull(here, str(folder.path))
    assert (here.path / "attempts/1/rank_0.log").exists()
    assert not [path for path in here.path.rglob("*") if "exec" in path.name]


@pytest.mark.promise("checkpoints-go-nodes-promoted-trial")
def test_checkpoints_to_resume_from_are_sent_with_the_run(tmp_path: Path, home: Path):
    folder, login = submitted(tmp_path), make_login()
    write_tree(folder.checkpoints, {"step_3/model.pt": "weights"})
    there = login.push(folder, library(tmp_path))
    far = RunFolder(Path(there.run_dir))
    assert (far.checkpoints / "step_3/model.pt").read_text() == "weights"
    # The sent checkpoints come back unchanged, together with new ones.
    write_tree(far.checkpoints, {"step_4/model.pt": "more"})
    store.change(far, store.stored(far), states.COMPLETED, exit_code=0)
    login.pull(folder, there.run_dir)
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["step_3", "step_4"]
