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
