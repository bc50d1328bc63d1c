"""Runs on a Ray cluster that is there already: a Ray job looks after the run, a placement group gives its nodes.

    settings.py           what may be set on such a target
    client.py             the cluster's HTTP interface: jobs, nodes, packages (submitting machine)
    jobs.py               what the cluster knows of all jobs, asked once for all runs (submitting machine)
    target.py             the compute target (both sides)
    entry.py              what a Ray job runs: finds its interpreters, starts the supervisor (cluster)
    demand.py             what a run asks of each node, and whether a cluster can ever hold it
    placement_group.py    a placement group, held by a driver beside the supervisor (cluster)
    listener.py           the port on which its nodes report
    allocate.py           its nodes, as links to agents (cluster)
    driver_process.py     that driver's process
    driver.py             the one module that loads Ray: a process beside the supervisor (cluster)
    remote_supervisor.py  what the job runs instead where no folder is shared (cluster)
    object_sync.py        run folders and snapshots through a datastore, where no folder is shared
    library.py            Paceline as a package of Ray's (submitting machine)
    examine.py            links to nodes for doctor (submitting machine)
    delta.py              a run folder that changes, as a sequence of parts in a store
    passage.py            what is said to commands beside workers, through that store

A worker never loads Ray, nor sees its variables.
"""

from paceline.targets.ray.target import RayTarget

__all__ = ["RayTarget"]
