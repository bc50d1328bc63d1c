"""The target for existing Ray clusters, where a placement group provides a run's nodes.

    settings.py           the settings of such a target
    client.py             the cluster's HTTP interface: jobs, nodes, packages (submitting machine)
    target.py             the compute target (both sides)
    entry.py              the script of a Ray job: finds interpreters, starts the supervisor (cluster)
    demand.py             the resources of each node, and whether a cluster can ever provide them
    placement_group.py    the placement group of a run, held through a driver process (cluster)
    listener.py           the port to which the group's nodes connect (cluster)
    allocate.py           the group's nodes, as links to agents (cluster)
    driver_process.py     start, adopt and end the driver process (cluster)
    driver.py             the driver process beside the supervisor, the only module that loads Ray (cluster)
    remote_supervisor.py  the job's program without a shared folder (cluster)
    object_sync.py        run folders and snapshots through a datastore, without a shared folder
    store_objects.py      the datastore's objects: whole, encrypted, checked
    delta.py              the changes of a run's folder, as a sequence of parts in a store
    channel.py            messages of `paceline exec` through that store
    examine.py            links to nodes for the doctor (submitting machine)

Workers neither load Ray nor see its environment variables.
"""

from paceline.targets.ray.target import RayTarget

__all__ = ["RayTarget"]
