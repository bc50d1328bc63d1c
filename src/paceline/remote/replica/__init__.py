"""Replicate a run's folder: `changes` lists its changes, `apply` applies them to a copy on another machine.

    changes ── link ───────────── apply      nodes of a run that this machine supervises; all into one folder
            ── ssh call ───────── apply      a run behind a login host, queried for changes since `known`
            ── datastore object ─ apply      a Ray cluster without a shared folder

These three transports check for changes at different intervals.
"""
