"""Runs in simulated time: the real supervisor, guardian and agents in one process and one order, which a seed decides.

    kernel       tasks (greenlets) instead of threads, a clock that jumps to the next timer, processes that can be killed
    descriptors  pipes and sockets, and the network between machines
    disks        real files below /dev/shm, on disks that fill up, fail or are slow
    patches      puts all of this in the place of the standard library's threads, clocks, sockets and files
    machines     the simulated nodes, their agents and workers
    world        a run and its faults, drawn from a seed
    checks       what must hold in every world

`python -m tests.worlds --seed 7` repeats one world, and prints its events.
"""
