"""A timer that checks a workspace's schedules each minute: a systemd user timer or a crontab line."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from paceline.errors import ScheduleError
from paceline.system import locks, processes
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
    if shutil.which("crontab"):
        lines = _crontab()
        if len(_without(lines, workspace_dir)) < len(lines):
            return CRON
    return None


def remove(workspace_dir: Path) -> None:
    """Remove a workspace's timer, if it exists."""
    kind = installed(workspace_dir)
    if kind == SYSTEMD:
        name = _name(workspace_dir)
        _systemctl("disable", "--now", f"{name}.timer")
        for unit in (f"{name}.timer", f"{name}.service"):
            unit_path(unit).unlink(missing_ok=True)
        _systemctl("daemon-reload")
    elif kind == CRON:
        _change_crontab(workspace_dir, [])


def advice(kind: str) -> str:
    """Return what the user must do to make a timer of this kind work, or ""."""
    if kind == NONE:
        return "Call `paceline schedule tick` each minute: nothing else starts the runs."
    if kind == SYSTEMD and shutil.which("loginctl"):
        done = _said("loginctl", "show-user", str(os.geteuid()), "--property=Linger")
        if done is not None and done.stdout.strip() == "Linger=no":
            return "The timer runs while you are logged in. `loginctl enable-linger` keeps it running."
    return ""


# --- timers of systemd


def _has_systemd() -> bool:
    done = _said("systemctl", "--user", "show-environment") if shutil.which("systemctl") else None
    return done is not None and done.returncode == 0


def _install_units(workspace_dir: Path) -> None:
    name = _name(workspace_dir)
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
    _systemctl("daemon-reload")
    _systemctl("enable", "--now", f"{name}.timer")


def _systemctl(*words: str) -> None:
    _checked("systemctl", "--user", *words)


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
            _write_crontab([*_without(_crontab(), workspace_dir), *own])
    except OSError as error:
        raise ScheduleError(f"{str(state)!r} can't be locked: {error}. Give --timer none without it.") from error


def _without(lines: list[str], workspace_dir: Path) -> list[str]:
    return [line for line in lines if not line.endswith(f"# {_name(workspace_dir)}")]


def _crontab() -> list[str]:
    done = _said("crontab", "-l")
    if done is None:
        raise ScheduleError(f"`crontab -l` did not answer within {_TIMEOUT_S:.0f} s. Give --timer none without it.")
    # Only this error means that the crontab is empty. After another error, writing a crontab would delete the user's lines.
    if done.returncode != 0 and not re.search(r"no crontab for", done.stderr):
        raise ScheduleError(f"`crontab -l` failed: {' '.join(done.stderr.split())}. Give --timer none without it.")
    return done.stdout.splitlines() if done.returncode == 0 else []


def _write_crontab(lines: list[str]) -> None:
    try:
        done = subprocess.run(
            ["crontab", "-"],
            input="".join(f"{line}\n" for line in lines),
            env={**os.environ, "LC_ALL": "C"},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ScheduleError(f"`crontab -` failed: {error}. Give --timer none without it.") from error
    if done.returncode != 0:
        raise ScheduleError(f"`crontab -` failed: {' '.join(done.stderr.split())}. Give --timer none without it.")


# --- functions for both systemd and cron


def _name(workspace_dir: Path) -> str:
    """Return a name for the workspace's systemd units, which also marks its crontab line."""
    return f"paceline-schedules-{hashlib.sha256(os.fsencode(os.path.realpath(workspace_dir))).hexdigest()[:10]}"


def _checked(*words: str) -> None:
    done = _said(*words)
    if done is None or done.returncode != 0:
        why = " ".join(done.stderr.split()) if done is not None else f"no answer within {_TIMEOUT_S:.0f} s"
        raise ScheduleError(f"`{shlex.join(words)}` failed: {why}. Give --timer cron or --timer none.")


def _said(*words: str) -> subprocess.CompletedProcess[str] | None:
    try:
        return processes.said_by(words, timeout_s=_TIMEOUT_S, environment={**os.environ, "LC_ALL": "C"})
    except (OSError, subprocess.TimeoutExpired):
        return None
