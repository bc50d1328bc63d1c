"""The timer of a workspace: with substitutes of crontab and systemctl, and with the real cron where it runs."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import ScheduleError
from paceline.schedules import timer
from paceline.schedules.__main__ import main
from paceline.schedules.schedule import Schedule
from paceline.schedules.schedules import Schedules
from paceline.schedules.tick import tick
from tests.helpers import wait_until, write_program

CRONTAB = """#!/bin/sh
# A substitute of crontab, whose table is the file $TABLE.
if [ "$1" = -l ]; then
    test -f "$TABLE" || { echo "no crontab for me" >&2; exit 1; }
    cat "$TABLE"
else
    cat > "$TABLE"
fi
"""
SYSTEMCTL = """#!/bin/sh
echo "$@" >> "$TABLE"
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home folder, and a PATH without cron and systemd."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    for program in ("sh", "cat", "test", "echo"):
        if found := shutil.which(program, path="/usr/bin:/bin"):
            (tmp_path / "bin" / program).symlink_to(found)
    for name, value in (("HOME", ""), ("XDG_CONFIG_HOME", "config"), ("XDG_STATE_HOME", "state"), ("TABLE", "table")):
        monkeypatch.setenv(name, str(tmp_path / value))
    return tmp_path


def test_installing_a_timer_without_systemd_and_cron_raises_an_error_with_the_tick_command(home: Path) -> None:
    with pytest.raises(ScheduleError) as raised:
        timer.install(home / "ws", "auto")

    assert "neither a systemd session of yours nor crontab" in str(raised.value)
    assert "--timer none and call `paceline schedule tick` each minute" in str(raised.value)
    assert timer.install(home / "ws", "none") == "none"
    assert "schedule tick" in timer.advice("none")
    with pytest.raises(ScheduleError, match="must be one of auto, systemd, cron, none"):
        timer.install(home / "ws", "daemon")


@pytest.mark.promise("schedule-crontab-kept")
def test_crontab_keeps_its_other_lines(home: Path) -> None:
    write_program(home / "bin" / "crontab", CRONTAB)
    table = home / "table"
    table.write_text("MAILTO=me\n0 1 * * * backup 100\\%\n")
    workspace_dir = home / "a folder" / "50% ws"

    assert timer.install(workspace_dir, "auto") == "cron"
    assert timer.install(workspace_dir, "auto") == "cron", "its line is there already"
    timer.install(home / "other", "cron")
    first, second, own, other = table.read_text().splitlines()
    assert (first, second) == ("MAILTO=me", "0 1 * * * backup 100\\%")
    command = own.removeprefix("* * * * * ").replace("\\%", "%").partition(" # ")[0]
    assert shlex.split(command) == [sys.executable, "-m", "paceline.schedules", str(workspace_dir)]
    assert timer.installed(workspace_dir) == "cron"
    timer.remove(workspace_dir)
    assert table.read_text().splitlines() == [first, second, other]
    assert timer.installed(workspace_dir) is None


@pytest.mark.promise("schedule-crontab-kept")
def test_crontab_that_can_t_be_read_is_not_replaced(home: Path) -> None:
    text = '#!/bin/sh\necho "crontab: you are not allowed" >&2\nexit 1\n'
    write_program(home / "bin" / "crontab", text)

    for act in (lambda: timer.install(home / "ws", "cron"), lambda: timer.remove(home / "ws")):
        with pytest.raises(
            ScheduleError, match=r"`crontab -l` failed: crontab: you are not allowed. Give --timer none"
        ):
            act()


def test_cron_timer_of_a_folder_with_a_backslash_is_refused(home: Path) -> None:
    """The real cron reads two backslashes as one, so it looked for schedules in another folder."""
    write_program(home / "bin" / "crontab", CRONTAB)

    with pytest.raises(ScheduleError, match="has a backslash in its path"):
        timer.install(home / r"a\\b", "cron")
    assert not (home / "table").exists()


def test_installing_a_systemd_timer_writes_and_enables_a_service_and_a_timer_unit(home: Path) -> None:
    write_program(home / "bin" / "systemctl", SYSTEMCTL)
    workspace_dir = home / "50% $ws"

    assert timer.install(workspace_dir, "auto") == "systemd"
    service, timer_file = sorted((home / "config" / "systemd" / "user").iterdir())
    text = service.read_text()
    assert "KillMode=process" in text
    words = f'"-m" "paceline.schedules" "{home}/50%% $$ws"'
    assert words in text
    assert "OnCalendar=minutely" in timer_file.read_text()
    asked = (home / "table").read_text().splitlines()
    assert asked[-2:] == ["--user daemon-reload", f"--user enable --now {timer_file.name}"]
    if shutil.which("systemd-analyze", path="/usr/bin:/bin"):
        done = subprocess.run(
            ["/usr/bin/systemd-analyze", "verify", "--user", str(timer_file), str(service)],
            capture_output=True, text=True, env={"XDG_RUNTIME_DIR": str(home)}, check=False,
        )  # fmt: skip
        assert "Unknown" not in done.stderr, done.stderr
    timer.remove(workspace_dir)
    assert [*(home / "config" / "systemd" / "user").iterdir()] == []


def test_timer_uses_cron_if_systemd_has_no_user_session(home: Path) -> None:
    write_program(home / "bin" / "systemctl", "#!/bin/sh\nexit 1\n")
    write_program(home / "bin" / "crontab", CRONTAB)

    assert timer.install(home / "ws", "auto") == "cron"
    with pytest.raises(ScheduleError, match="`systemctl --user daemon-reload` failed"):
        timer.install(home / "ws", "systemd")
    assert [*home.glob("config/systemd/user/paceline*")] == [], "units without systemd would look like a timer"


@pytest.mark.parametrize(("kind", "words"), [("cron", "crontab -l"), ("systemd", "systemctl --user daemon-reload")])
def test_timer_whose_program_is_not_installed_is_refused(home: Path, kind: str, words: str) -> None:
    """The message for a missing crontab was that it "did not answer within 30 s"."""
    why = f"No such file or directory: '{words.split(maxsplit=1)[0]}'"
    with pytest.raises(ScheduleError, match=rf"`{words}` failed: .*{why}. Give --timer none"):
        timer.install(home / "ws", kind)


def test_systemd_timer_is_removed_without_a_session_of_systemd(home: Path) -> None:
    write_program(home / "bin" / "systemctl", SYSTEMCTL)
    assert timer.install(home / "ws", "auto") == "systemd"
    enabled = home / "config" / "systemd" / "user" / "timers.target.wants"
    enabled.mkdir()
    (enabled / next(home.glob("config/systemd/user/*.timer")).name).symlink_to("anything")
    write_program(home / "bin" / "systemctl", "#!/bin/sh\necho 'Failed to connect to bus' >&2\nexit 1\n")

    timer.remove(home / "ws")

    assert timer.installed(home / "ws") is None
    assert [*home.glob("config/systemd/user/**/paceline*")] == []


def test_timer_ends_with_the_last_schedule_and_a_timer_without_schedules_removes_itself(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`workspace.schedules.remove` left the line of the crontab, and so did a killed `schedule add`."""
    write_program(home / "bin" / "crontab", CRONTAB)
    monkeypatch.setattr("sys.argv", ["schedules", str(home / "ws")])
    monkeypatch.setattr("os.execv", lambda *words: tick(home / "ws", print))
    schedules = Schedules(home / "ws")
    for name in ("one", "two"):
        schedules.save(Schedule(name=name, file="/job.yaml", on_model=("m",)), (), kind="cron")
    schedules.remove("one")
    assert main() == 0
    assert timer.installed(home / "ws") == "cron"
    schedules.remove("two")
    assert timer.installed(home / "ws") is None

    timer.install(home / "ws", "cron")
    main()
    assert timer.installed(home / "ws") is None

    timer.install(home / "ws", "cron")
    shutil.rmtree(home / "ws")
    assert main() == 1
    assert timer.installed(home / "ws") == "cron", "the workspace may be on a disk that is not mounted now"
    assert "If you have removed this workspace, remove its timer" in capsys.readouterr().err


def test_systemd_timer_without_lingering_gives_advice(home: Path) -> None:
    write_program(home / "bin" / "loginctl", "#!/bin/sh\necho Linger=no\n")
    assert "loginctl enable-linger" in timer.advice("systemd")
    write_program(home / "bin" / "loginctl", "#!/bin/sh\necho Linger=yes\n")
    assert timer.advice("systemd") == ""


@pytest.fixture
def cron() -> Iterator[None]:
    """A running cron. In the end the crontab of this user is restored."""
    if not shutil.which("crontab") or not shutil.which("cron", path=f"{os.environ['PATH']}:/usr/sbin"):
        pytest.skip("cron is not installed: apt install cron")
    runs = subprocess.run(["pgrep", "-x", "cron"], capture_output=True, check=False).returncode == 0
    if not runs and os.geteuid() != 0:
        pytest.skip("cron does not run, and only root can start it")
    before = subprocess.run(["crontab", "-l"], capture_output=True, text=True, check=False)
    daemon = None if runs else subprocess.Popen(["/usr/sbin/cron", "-f"], stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        if before.returncode == 0:
            subprocess.run(["crontab", "-"], input=before.stdout, text=True, check=True)
        else:
            subprocess.run(["crontab", "-r"], capture_output=True, check=False)
        if daemon is not None:
            daemon.kill()
            daemon.wait()


@pytest.mark.proof
@pytest.mark.usefixtures("cron")
def test_real_cron_starts_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "train.py").write_text("print('trained')\n")
    (tmp_path / "job.yaml").write_text("entry_script: train.py\n")
    workspace_dir = tmp_path / "50% für alle's Läufe"
    paceline = [sys.executable, "-m", "paceline"]
    environment = {**os.environ, "PACELINE_WORKSPACE": str(workspace_dir)}
    words = ["schedule", "add", "--timer", "cron", "* * * * *", str(tmp_path / "job.yaml")]
    subprocess.run([*paceline, *words], env=environment, check=True)
    try:
        logs = lambda: [*workspace_dir.glob("runs/*/logs/rank_0.log")]  # noqa: E731
        wait_until(lambda: any("trained" in log.read_text() for log in logs()), "a run that cron starts", 180)
    finally:
        subprocess.run([*paceline, "schedule", "remove", "job"], env=environment, check=True)
    assert timer.installed(workspace_dir) is None
