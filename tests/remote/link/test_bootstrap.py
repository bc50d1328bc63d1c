from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.remote.link import Link, LinkError, bootstrap_words
from paceline.remote.link.bootstrap import Ends
from tests.helpers import fill_disk, write_program

WORDS = bootstrap_words(sys.executable)


@pytest.fixture
def open_link(open_link):
    """Links to nodes that do not see the library."""

    def open_one(name: str = "node-0", **values):
        return open_link(name, **({"shared_library": False} | values))

    return open_one


def libraries(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "lib"))


@pytest.mark.promise("nothing-installed-host-python-3")
def test_paceline_library_is_sent_once_to_a_node_without_it(open_link, tmp_path):
    first = open_link()
    assert libraries(tmp_path / "node") == [Path(first.hello.library).name]
    made = os.stat(first.hello.library).st_ino
    assert open_link("node-1").hello.library == first.hello.library
    assert os.stat(first.hello.library).st_ino == made


def test_damaged_library_copy_is_replaced(open_link, tmp_path):
    library = Path(open_link().hello.library)
    (library / "paceline/remote/agent/agent.py").unlink()
    assert open_link("node-1").run(["echo", "here"]).stdout == b"here\n"
    assert (library / "paceline/remote/agent/agent.py").exists()
    assert libraries(tmp_path / "node") == [library.name]


def test_paceline_library_on_a_shared_file_system_is_not_sent(open_link, library, tmp_path):
    assert open_link(shared_library=True).hello.library == str(library)
    assert not (tmp_path / "node/lib").exists()


def test_agent_starts_in_a_folder_with_special_characters(open_link, tmp_path):
    folder = tmp_path / "no de'\"; $(touch x)\n größe"
    assert open_link(folder=str(folder)).hello.library.startswith(str(folder))
    assert not (tmp_path / "x").exists()


def test_agent_starts_if_the_bootstrap_command_is_quoted_through_two_nested_shells(open_link):
    text = shlex.join(WORDS)
    link = open_link(words=["sh", "-c", f"exec sh -c {shlex.quote(text)}"])
    assert link.run(["echo", "here"]).stdout == b"here\n"


def test_login_shell_output_is_ignored(open_link):
    noise = "echo Welcome; head -c 300000 /dev/zero; echo 'PACELINE-x {}'; echo warning >&2;"
    link = open_link(words=["sh", "-c", f"{noise} exec {shlex.join(WORDS)}"])
    assert link.run(["echo", "here"]).stdout == b"here\n"


def test_agent_imports_no_modules_from_the_folder_where_its_shell_starts(open_link, tmp_path):
    write_program(tmp_path / "json.py", "raise SystemExit('mine')")
    assert open_link().run(["echo", "here"]).stdout == b"here\n"


def test_a_node_without_python_is_named(open_link):
    with pytest.raises(LinkError, match=r"node-0: no Python was found there \(exit code 127\).*no-such-python"):
        open_link(words=["sh", "-c", "exec no-such-python"])


@pytest.mark.promise("nothing-installed-host-python-3")
def test_bootstrap_error_names_a_python_that_is_too_old(open_link):
    old = "import sys;sys.version_info=(3,8,10);sys.executable='/opt/old';exec(sys.stdin.buffer.readline())"
    with pytest.raises(LinkError, match=r"its Python \(/opt/old\) is 3\.8\.10, and Paceline needs 3\.10"):
        open_link(words=[sys.executable, "-c", old])


def test_bootstrap_error_names_a_node_that_has_only_python_2(open_link):
    told = "AttributeError: 'file' object has no attribute 'buffer'"
    with pytest.raises(LinkError, match="its Python is Python 2"):
        open_link(words=["sh", "-c", f"echo {shlex.quote(told)} >&2; exit 1"])


def test_ssh_error_text_is_in_the_link_error(open_link):
    with pytest.raises(LinkError, match=r"exit code 255.*No route to host") as raised:
        open_link(words=["sh", "-c", "echo 'ssh: connect to host a port 22: No route to host' >&2; exit 255"])
    assert (raised.value.exit_code, raised.value.stderr) == (255, "ssh: connect to host a port 22: No route to host")


def test_unresponsive_agent_times_out_and_is_killed(open_link, tmp_path):
    with pytest.raises(LinkError, match=r"node-0: no agent answered within 12 s\. It said: Password:"):
        open_link(words=["sh", "-c", f"echo $$ > {tmp_path}/pid; echo Password:; exec sleep 600"], timeout_s=12)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_process_that_never_answers_as_an_agent_raises_a_link_error_with_the_timeout(open_link):
    """Regression: a timeout is an OSError, so it was reported as "the program could not be started"."""
    with pytest.raises(LinkError, match=r"node-0: no agent answered within 0 s\."):
        open_link(words=["sleep", "600"], timeout_s=0)


def test_missing_ssh_program_is_named_in_the_error(open_link):
    with pytest.raises(LinkError, match="node-0: '/no/ssh' could not be started: No such file"):
        open_link(words=["/no/ssh"])


def test_full_disk_at_bootstrap_is_named_and_leaves_no_partial_library(open_link, small_disk):
    (small_disk / "node/lib").mkdir(parents=True)
    fill_disk(small_disk)
    with pytest.raises(LinkError, match=r"node-0: the library can't be put into .*/node'.*No space left"):
        open_link(folder=str(small_disk / "node"))
    assert libraries(small_disk / "node") == []


@pytest.mark.promise("folder-somebody-else-may-write")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a folder somebody else's")
def test_folder_of_another_user_in_tmp_is_refused(open_link, tmp_path):
    (tmp_path / "tmp/node").mkdir(parents=True)
    (tmp_path / "tmp").chmod(0o1777)
    os.chown(tmp_path / "tmp/node", 12345, 12345)
    with pytest.raises(LinkError, match="belongs to another user"):
        open_link(folder=str(tmp_path / "tmp/node"))


def test_node_link_over_a_socket_runs_commands_and_ends_the_agent_on_close(library, tmp_path):
    mine, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(WORDS, stdin=theirs, stdout=theirs)
    link = Link.over(Ends.of_socket(mine), name="node-0", library_dir=library, folder=str(tmp_path / "node"))
    assert link.run(["cat"], input=b"x" * 100000).stdout == b"x" * 100000
    link.close()
    assert process.wait(60) == 0


def test_agent_reports_host_name_python_cores_gpus_and_network_interfaces_of_its_machine(
    open_link, tmp_path, monkeypatch
):
    monkeypatch.setenv("PACELINE_GPUS", "0,2")
    monkeypatch.setenv("PACELINE_SUPERVISOR", "somebody's")
    hello = open_link().hello
    assert hello.host == socket.gethostname()
    assert hello.python == (sys.executable, sys.version_info[:3])
    assert hello.cores == len(os.sched_getaffinity(0))
    assert hello.gpus == ("0", "2")
    assert hello.interfaces["lo"] == ("127.0.0.1", 8)
    assert hello.env["PATH"] == os.environ["PATH"]
    assert "PACELINE_SUPERVISOR" not in hello.env
    # The agent must not have this variable: a process with it counts as a supervisor, and would not be killed with a
    # run.
    assert b"PACELINE_SUPERVISOR" not in Path(f"/proc/{hello.pid}/environ").read_bytes()
    assert hello.folder == str(tmp_path / "node")


def test_copied_library_equals_the_local_one(open_link, library, tmp_path):
    there = Path(open_link().hello.library) / "paceline"
    shutil.rmtree(there / "remote/agent/__pycache__", ignore_errors=True)
    for name in ("remote/agent/boot.py", "py.typed", "__init__.py"):
        assert (there / name).read_bytes() == (library / "paceline" / name).read_bytes()
