"""Run a script as `python script.py` would: its exception is written down, a failing rank leaves MPI alone, torch has the
backend "mpi" where the ranks talk over it, and its store listens at MASTER_ADDR alone.

python .../runner/main_script.py script.py [argument ...]
"""

import os
import sys

if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    del sys.path[0]

from paceline.collectives import store_address
from paceline.torch_mpi import backend
from paceline.worker import report, script

_SCRATCH = "HOROVODRUN_SCRATCH"


def main(argv: "list[str]") -> None:
    scratch, told = os.environ.pop(_SCRATCH, None), report.failed

    def failed(error: BaseException) -> None:
        # Only now: a process that has them takes itself for a worker of a Paceline run.
        if scratch is not None and os.path.isdir(scratch):
            os.environ |= {"PACELINE_RUN_DIR": scratch, "PACELINE_ATTEMPT": "1"}
            told(error)

    report.failed = failed
    if os.environ.get("HOROVOD_CONTROLLER") == "mpi":
        backend.install_when_loaded()
    if os.environ.get("RANK") == "0":
        store_address.keep_to_master_address()
    script.run(argv[0], argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
