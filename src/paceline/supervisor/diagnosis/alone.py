"""Workers of one run that each trained a model of their own: said, for it is seldom meant."""

from __future__ import annotations

from paceline.job.job import Job
from paceline.runs.folder import RunFolder
from paceline.system.files import read_json

#: What makes one model of all workers, by the library that they trained with.
_HOW = {
    "torch": "Call torch.distributed.init_process_group() and wrap the model in DistributedDataParallel, or use "
    "paceline.parallel",
    "lightning": "Give the Trainer devices={per_node}, num_nodes={nodes}, strategy='ddp'",
    "tensorflow": "Make the model under tf.distribute.MultiWorkerMirroredStrategy (distributed_backend='tensorflow'), or use "
    "Horovod's calls",
    "jax": "Call jax.distributed.initialize() before the first computation",
}


def alone_text(job: Job, folder: RunFolder, attempt: int) -> str | None:
    """The warning that no worker of an attempt that ended well knew of another; None where one did, or that can't be told."""
    if job.world_size < 2 or job.distributed_backend == "ps":
        return None
    found = [read_json(folder.worker_alone(attempt, rank)) for rank in range(job.world_size)]
    if not all(found):
        return None
    how = _HOW.get(str(found[0].get("library")), "")
    text = f"{job.world_size} workers, none joined a process group: each has trained alone."
    if how:
        text += " " + how.format(per_node=job.process_count_per_node, nodes=job.node_count) + "."
    return f"{text} Where it is meant, set PACELINE_SEPARATE_WORKERS=1."
