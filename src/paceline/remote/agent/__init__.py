"""The agent on each node of a run: starts commands, reports their ends, sends files. Standard library only.

    supervisor  ── link (ssh, srun, a socket) ──  guardian ── agent ── commands
                     frames, pings both ways        │           └ mirror: files of the run, back to the supervisor
                                                    └ kills everything below it when the agent is gone

Nodes need no installation: `boot` is sent through the link, and finds the library or receives it. When the link ends in any
way, the agent ends all its commands, removes temporary files, and exits.
"""
