"""A run's folder at two places: `changes` says on one machine what is new in it, `apply` does the same to the copy on another.

    changes ── link ───────────── apply      nodes of a run whose supervisor is here; several at once, into one folder
            ── ssh call ───────── apply      a run behind a login host, asked for what is new since `known`
            ── datastore object ─ apply      a Ray cluster without a shared folder

The carriers differ in when they look and in what a look may cost; what is new, and how it is put in its place, is one thing.
"""
