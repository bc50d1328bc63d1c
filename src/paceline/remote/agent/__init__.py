"""The agent, which runs on each node of a run: starts command lines, reports their ends, sends files; standard library only.

    supervisor  ── link (ssh, srun, a socket) ──  guardian ── agent ── commands
                     frames, pings both ways        │           └ mirror: files of the run, back to the supervisor
                                                    └ kills all below it when the agent is gone

Nothing has to be installed on a node: `boot` is sent through the link, finds the library or takes it from there.
Whatever happens to the link, the agent ends all that it has started, removes what it made in passing, and goes.
"""
