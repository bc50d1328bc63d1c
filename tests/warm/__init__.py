"""Workers and scripts that are forked from a program with torch or TensorFlow loaded, which takes 2 to 5 CPU seconds to load.

Commands of tests/cli are forked too. Supervisors, controllers and servers start as users start them.

    program.py      loads the modules of its kind (kinds.py), listens at a socket, and forks
      hiding.py     hides loaded modules in a fork until it imports them
      as_main.py    runs the script in the fork as the interpreter would
    programs.py     starts such programs, and requests forks
    sharing.py      lets several pytest processes share the programs
    hand_over.py    lets a Python hand its script over: it forwards signals, waits, and exits with the script's code

Ways in:

    program(rank).start(...)        a rank, or any script
    ways.run_alone, run_command     a script or a command, until it ends
    ways.below_mpirun               the ranks of mpirun and of horovodrun
    python.warm_python              a Python whose workers are forked
    ways.fork_scripts               every `python train.py` that a test starts (site/sitecustomize.py)
"""

from tests.warm.kinds import EXAMPLES, KERAS_ON_TORCH, NUMPY, OLDER_KERAS, TENSORFLOW, TORCH
from tests.warm.programs import Process, close_all, program
from tests.warm.python import forking_in_environments, submitting_with, warm_python
from tests.warm.ways import below_mpirun, fork_scripts, forking_variables, run_alone, run_command

__all__ = [
    "EXAMPLES",
    "KERAS_ON_TORCH",
    "NUMPY",
    "OLDER_KERAS",
    "TENSORFLOW",
    "TORCH",
    "Process",
    "below_mpirun",
    "close_all",
    "fork_scripts",
    "forking_in_environments",
    "forking_variables",
    "program",
    "run_alone",
    "run_command",
    "submitting_with",
    "warm_python",
]
