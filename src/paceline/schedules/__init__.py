"""Schedules: runs that start at times, on new versions, and after other runs, without a daemon of Paceline.

    systemd's timer, or cron ── each minute ── python -m paceline.schedules ── if something is due ── paceline schedule tick

`times` evaluates cron expressions. `occurrences` stores events and the runs that they start. `tick` decides what
starts. `timer` installs the entry in systemd or cron. `start` submits the runs, for `paceline schedule tick`.
"""
