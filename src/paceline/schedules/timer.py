"""A timer that checks a workspace's schedules each minute: a systemd user timer or a crontab line."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from paceline.errors import ScheduleError
from paceline.system import locks
from paceline.system.files import state_folder, write_whole
from paceline.system.names import is_one_line
from paceline.system.systemd import plain, unit_path, word

AUTO, SYSTEMD, CRON, NONE = KINDS = ("auto", "systemd", "cron", "none")
_TIMEOUT_S = 30.0


def install(workspace_dir: Path, kind: str) -> str:
    """Install a timer for a workspace, and return its kind, such as "cron".

    Raises:
        ScheduleError: `kind` is unknown, or this machine lacks such a timer or refuses to install it.
    """
    if kind not in KINDS:
        raise ScheduleError(f"--timer {kind!r} must be one of {', '.join(KINDS)}.")
    if kind == AUTO and (found := installed(workspace_dir)) is not None:
        return found
    for text in (sys.executable, str(workspace_dir)):
        if not is_one_line(text):
            raise ScheduleError(
                f"{text!r} has a line break or a control character, which no timer can have. Rename it."
            )
    if kind == AUTO:
        kind = SYSTEMD if _has_systemd() else CRON if shutil.which("crontab") else ""
    if kind == SYSTEMD:
        _install_units(workspace_dir)
    elif kind == CRON:
        _change_crontab(workspace_dir, [_line(workspace_dir)])
    elif kind != NONE:
        raise ScheduleError(
            "this machine has neither a systemd session of yours nor crontab, so nothing would start the runs. Install cron "
            "(apt install cron), or give --timer none and call `paceline schedule tick` each minute."
        )
    return kind


def installed(workspace_dir: Path) -> str | None:
    """Return the kind of the workspace's timer on this machine, or None."""
    if unit_path(f"{_name(workspace_dir)}.timer").exists():
        return SYSTEMD
    if shutil.which("crontab") and len(_without(lines := _crontab(), workspace_dir)) < len(lines):
        return CRON
    return None


def remove(workspace_dir: Path) -> None:
    """Remove a workspace's timer, if it exists."""
    kind = installed(workspace_dir)
    if kind == SYSTEMD:
        name = _name(workspace_dir)
        # Remove the files also if systemd does not answer, for example because the user has no session.
        _said("systemctl", "--user", "disable", "--now", f"{name}.timer")
        for unit in (f"timers.target.wants/{name}.timer", f"{name}.timer", f"{name}.service"):
            unit_path(unit).unlink(missing_ok=True)
        _said("systemctl", "--user", "daemon-reload")
    elif kind == CRON:
        _change_crontab(workspace_dir, [])


def advice(kind: str) -> str:
    """Return what the user must do to make a timer of this kind work, or ""."""
    if kind == NONE:
        return "Call `paceline schedule tick` each minute: nothing else starts the runs."
    linger = ("loginctl", "show-user", str(os.geteuid()), "--property=Linger")
    if kind == SYSTEMD and _said(*linger).stdout.strip() == "Linger=no":
        return "The timer runs while you are logged in. `loginctl enable-linger` keeps it running."
    return ""


# --- timers of systemd


def _has_systemd() -> bool:
    return _said("systemctl", "--user", "show-environment").returncode == 0


def _install_units(workspace_dir: Path) -> None:
    name = _name(workspace_dir)
    # Ask systemd before the units exist: `installed` would return them as a timer also if nothing starts the runs.
    _checked(_said("systemctl", "--user", "daemon-reload"))
    words = " ".join(map(word, (sys.executable, "-m", "paceline.schedules", str(workspace_dir))))
    service = f"""[Unit]
Description=Schedules of the Paceline workspace {plain(str(workspace_dir))}

[Service]
Type=oneshot
ExecStart={words}
# The runs go on when the look at the schedules ends.
KillMode=process
"""
    timer = f"""[Unit]
Description=Schedules of the Paceline workspace {plain(str(workspace_dir))}, each minute

[Timer]
OnCalendar=minutely
AccuracySec=1s

[Install]
WantedBy=timers.target
"""
    try:
        unit_path(name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(unit_path(f"{name}.service"), service)
        write_whole(unit_path(f"{name}.timer"), timer)
    except OSError as error:
        raise ScheduleError(f"the timer can't be written: {error}. Give --timer cron instead.") from error
    _checked(_said("systemctl", "--user", "daemon-reload"))
    _checked(_said("systemctl", "--user", "enable", "--now", f"{name}.timer"))


# --- lines of the user's crontab


def _line(workspace_dir: Path) -> str:
    command = shlex.join([sys.executable, "-m", "paceline.schedules", str(workspace_dir)])
    # In a crontab, % is a line break, and a backslash is an escape only before some characters.
    if "\\" in command:
        raise ScheduleError(
            f"the workspace {str(workspace_dir)!r} or the interpreter {sys.executable!r} has a backslash in its path, which "
            "cron would change. Rename the folder, or give --timer systemd or --timer none."
        )
    return f"* * * * * {command} # {_name(workspace_dir)}".replace("%", r"\%")


def _change_crontab(workspace_dir: Path, own: list[str]) -> None:
    state = state_folder()
    try:
        state.mkdir(parents=True, exist_ok=True)
        # Take a lock: if two processes edited the crontab at the same time, one of the two new lines would be lost.
        with locks.locked(state / "crontab.lock", patience_s=_TIMEOUT_S):
            lines = [*_without(_crontab(), workspace_dir), *own]
            _checked(_said("crontab", "-", text="".join(f"{line}\n" for line in lines)))
    except OSError as error:
        raise ScheduleError(f"{str(state)!r} can't be locked: {error}. Give --timer none without it.") from error


def _without(lines: list[str], workspace_dir: Path) -> list[str]:
    return [line for line in lines if not line.endswith(f"# {_name(workspace_dir)}")]


def _crontab() -> list[str]:
    done = _said("crontab", "-l")
    # Only this error means that the crontab is empty. After another error, writing a crontab would delete the user's lines.
    return [] if "no crontab for" in done.stderr else _checked(done).stdout.splitlines()


# --- functions for both systemd and cron


def _name(workspace_dir: Path) -> str:
    """Return a name for the workspace's systemd units, which also marks its crontab line."""
    return f"paceline-schedules-{hashlib.sha256(os.fsencode(os.path.realpath(workspace_dir))).hexdigest()[:10]}"


def _checked(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    if done.returncode != 0:
        why = " ".join(done.stderr.split())
        raise ScheduleError(f"`{shlex.join(done.args)}` failed: {why}. Give --timer none without it, or another timer.")
    return done


def _said(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program. If it can't start or does not answer, return exit code 127 and the reason as standard error."""
    env = {**os.environ, "LC_ALL": "C"}
    try:
        return subprocess.run(
            words, input=text, env=env, capture_output=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(words, 127, "", str(error))
