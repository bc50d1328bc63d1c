from __future__ import annotations

import pytest

from paceline.compat.horovod.runner import discovery
from paceline.compat.horovod.runner.discovery import HostWatch, from_script
from paceline.compat.horovod.runner.hosts import Host
from paceline.errors import UserError
from tests.helpers import wait_until, write_program


def test_a_script_names_hosts_with_and_without_slots(tmp_path):
    script = write_program(tmp_path / "d.sh", "#!/bin/sh\nprintf 'a:2\\n\\n b\\n'\n")
    assert from_script(str(script), 3)() == [Host(name="a", slots=2), Host(name="b", slots=3)]
    assert from_script(str(script), None)()[1] == Host(name="b", slots=1)
    silent = write_program(tmp_path / "none.sh", "#!/bin/sh\n")
    assert from_script(str(silent), None)() == []


def test_a_script_is_a_shell_command_as_in_horovod(tmp_path, monkeypatch):
    """A script without `#!`, with arguments, in a folder with a blank, by a name alone, and a command."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b").mkdir()
    for name in ("plain.sh", "a b/plain.sh"):
        write_program(tmp_path / name, "printf '%s\\n' ${1:-a:2}\n")
    for command in (
        "plain.sh",
        "./plain.sh",
        str(tmp_path / "a b" / "plain.sh"),
        "./plain.sh a:2",
        "echo a | sed s/$/:2/",
    ):
        assert from_script(command, 3)() == [Host(name="a", slots=2)], command
    with pytest.raises(UserError, match=r"'\./none\.sh' ended with exit code 127: "):
        from_script("./none.sh", None)()


def test_a_script_that_takes_too_long_ends_with_what_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(discovery, "_SCRIPT_S", 0.5)
    with pytest.raises(UserError, match=r"can't be run: it took more than 0\.5 s"):
        from_script("sleep 600 | cat", None)()


@pytest.mark.parametrize(
    ("text", "told"),
    [("#!/bin/sh\necho gone >&2; exit 3\n", "exit code 3: gone"), ("#!/bin/sh\necho -x:y\n", "is no host")],
)
def test_a_script_that_does_not_work_is_one_sentence(tmp_path, text, told):
    script = write_program(tmp_path / "d.sh", text)
    with pytest.raises(UserError, match=told):
        from_script(str(script), None)()


def test_a_failed_host_is_left_out_for_good_or_for_a_while():
    found = [Host(name="a"), Host(name="b")]
    for cooldown, waits in ((None, [1e9, 1e9]), ((5, 12), [5, 10, 12, 12])):
        now = [0.0]
        watch = HostWatch(lambda: found, cooldown, lambda now=now: now[0])
        for wait in waits:
            watch.failed("a")
            now[0] += wait - 1
            assert watch.usable() == [Host(name="b")]
            now[0] += 1
            assert watch.usable() == (found if cooldown else [Host(name="b")])
        watch.close()


def test_what_changes_is_noticed_and_an_answer_that_fails_changes_nothing(monkeypatch):
    monkeypatch.setattr(discovery, "_LOOK_S", 0.01)
    answers = [[Host(name="a")]]

    def ask():
        if not answers[-1]:
            raise UserError("not now")
        return answers[-1]

    watch = HostWatch(ask, None)
    answers.append([])
    wait_until(lambda: watch.error is not None, "the error")
    assert watch.usable() == [Host(name="a")]
    answers.append([Host(name="a"), Host(name="b")])
    wait_until(lambda: len(watch.usable()) == 2 and watch.error is None, "b")
    watch.close()
