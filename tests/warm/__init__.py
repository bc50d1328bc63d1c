"""Scripts that are forked from programs which have torch, or TensorFlow, loaded: to load it takes a processor two to five
seconds in each process.

    program.py      loads what its kind says (kinds.py), listens at a socket, and forks
      hiding.py     in a child that is to find nothing loaded: hides it until the child imports it
      as_main.py    the child runs the script as the interpreter would
    programs.py     starts such programs, and asks them for processes
    sharing.py      with several processes of pytest, all ask the same programs
    asked.py        how such a program is asked
    hand_over.py    a Python hands its script over: it passes signals on, waits, and ends as the script does

    supervising.py  has loaded what a supervisor loads, and forks them
    supervisors.py  starts it, for this process (tests/conftest.py) and for commands that are forked themselves
    asking.py       asks it, in the place of `subprocess.Popen`

Ways in:

    program(rank).start(...)        a rank, or any script
    ways.run_alone, run_command     one that is waited for
    ways.below_mpirun               the ranks of mpirun and of horovodrun
    python.warm_python              a Python whose workers are forked
    ways.fork_scripts               every `python train.py` that a test starts (site/sitecustomize.py)
"""

from tests.warm.kinds import EXAMPLES, KERAS_ON_TORCH, NUMPY, OLDER_KERAS, SERVER, TENSORFLOW, TORCH
from tests.warm.programs import Process, close_all, program
from tests.warm.python import forking_in_environments, submitting_with, warm_python
from tests.warm.ways import below_mpirun, fork_scripts, forking_variables, run_alone, run_command

__all__ = [
    "EXAMPLES",
    "KERAS_ON_TORCH",
    "NUMPY",
    "OLDER_KERAS",
    "SERVER",
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
