"""Replicate a run's folder: `changes` lists changes on one machine, `apply` applies them to a copy on another.

    changes ── link ───────────── apply      nodes of a run supervised here; several at once, into one folder
            ── ssh call ───────── apply      a run behind a login host, queried for changes since `known`
            ── datastore object ─ apply      a Ray cluster without a shared folder

The carriers differ in when they look for changes and in the cost of a look.
"""
