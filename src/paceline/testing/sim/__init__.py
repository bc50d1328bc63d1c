"""The compute target `sim`, whose nodes are simulated by a few processes on this machine.

    supervisor ── socket ── simulating process ── agents of some hundred nodes, the real code
                  real frames, late or lost         └ workers: the script's events at their times

Jobs are submitted as for other targets. Simulated workers do not run the script, but carry out the events in its list `EVENTS`.
"""
