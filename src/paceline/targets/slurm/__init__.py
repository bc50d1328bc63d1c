"""Runs on a Slurm cluster: sbatch gives the nodes, and the run's supervisor is the batch script's one command.

submitting program ── sbatch ──> batch script on the first node: exec python -m paceline.supervisor
  (or ssh LOGIN sbatch)            ├── agent, a process beside it
                                   └── srun -w NODE agent, for each other node

settings    what a target of this kind can be told
script      the batch script, a pure function of job and settings
arrays      runs that are alike as tasks of one job array
scheduler   the engine's programs, called here or through the login host, with patience for a controller that is away
states      what squeue, sacct, scontrol and sinfo print, in each shape that their versions have
reasons     why a job waits, in words
query       one question for all runs of a user, shared between processes
allocation  the supervisor's side: from the environment of a batch step to nodes with an agent each
mpi         MPI's workers by srun, where the cluster has PMIx
login       the run's folder on the far side of a login host
target      what the other layers see
"""

from paceline.targets.slurm.target import SlurmTarget

__all__ = ["SlurmTarget"]
