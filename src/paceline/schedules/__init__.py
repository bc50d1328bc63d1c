"""Schedules: runs that start at times, on new versions, and after other runs, without a daemon of Paceline's.

    systemd's timer, or cron ── each minute ── python -m paceline.schedules ── if something is due ── paceline schedule tick

`times` knows cron expressions, `occurrences` keeps events and their runs, `tick` decides, `timer` installs the entry
in systemd or cron. `start` submits the runs, for `paceline schedule tick`.
"""
