"""The agent on each node, which starts commands, reports exits and sends files. Standard library only.

    supervisor  ── link (ssh, srun, a socket) ──  guardian ── agent ── commands
                     frames, pings both ways        │           └ mirror: files of the run, back to the supervisor
                                                    └ kills all of the agent's processes when the agent is gone

Nodes need no installation: the supervisor sends the program `boot` through the link, and `boot` finds or receives
Paceline. If the link ends for any reason, the agent ends all of its commands, removes temporary files, and exits.
"""
