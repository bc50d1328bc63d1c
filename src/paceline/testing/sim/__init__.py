"""The compute target `sim`, whose nodes exist only in a few processes of this machine.

    supervisor ── socket ── simulating process ── agents of some hundred nodes, the real code
                  real frames, late or lost         └ workers: events of the script, by a clock

Jobs are submitted as for other targets. Instead of running the script, a simulated worker plays the list `EVENTS` of it.
"""
