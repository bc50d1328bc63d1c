"""The target for Slurm clusters, where a batch job runs a run's supervisor.

submitting program ── sbatch ──> batch script on the first node: exec python -m paceline.supervisor
  (or ssh LOGIN sbatch)            ├── agent, a process beside it
                                   └── srun -w NODE agent, for each other node

settings    the settings of a Slurm target
script      batch scripts and job arrays, as pure functions of job and settings
scheduler   calls of Slurm's programs, here or through the login host, retried while the controller is unreachable
states      parsers for squeue, sacct, scontrol and sinfo in all their versions
query       one query for all runs of a user, shared between processes; why jobs wait
submission  submits exactly one job for a run, and a second job with more nodes for elastic runs
allocation  reads a batch step's environment variables, and starts an agent on each node, for the supervisor
mpi         start of MPI workers by srun, if the cluster has PMIx
login       the run's folder on a cluster behind a login host
target      the compute target
"""

from paceline.targets.slurm.target import SlurmTarget

__all__ = ["SlurmTarget"]
