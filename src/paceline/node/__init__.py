"""The program that runs once on each node beside the workers: before them it prepares what they need, after them it stores what
they left. Started by the supervisor as a command line of its own, so that it can be watched, ended, and run elsewhere.
"""
