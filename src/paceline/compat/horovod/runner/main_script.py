"""The program of each rank: run the user's script, or the function of `horovod.run`, as `python script.py` would.

This program records the script's exception, and ends a failing rank without waiting for MPI. It adds the backend "mpi"
to torch if needed, and makes the store of torch.distributed listen only at MASTER_ADDR.

python .../runner/main_script.py script.py [argument ...]
"""

import os
import sys

# Python has put this file's folder first on the path. Remove it: the folder's modules, such as `output`, would hide modules of
# the script with the same name.
if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    del sys.path[0]

from paceline.collectives import store_address
from paceline.system.lazy_import import load_triton_before_tensorflow
from paceline.torch_mpi import backend
from paceline.worker import report, script

_SCRATCH = "HOROVODRUN_SCRATCH"


def main(argv: "list[str]") -> None:
    # Remove the scratch folder's variable before the script starts, because the script's child processes are not ranks.
    scratch, report_failure = os.environ.pop(_SCRATCH, None), report.failed

    def failed(error: BaseException) -> None:
        # Set variables such as PACELINE_RUN_DIR only after a failure, because with them a process counts as a worker of
        # a Paceline run. The parent process may have ended, and has then removed the scratch folder.
        if scratch is not None and os.path.isdir(scratch):
            os.environ |= {"PACELINE_RUN_DIR": scratch, "PACELINE_ATTEMPT": "1", "PACELINE_RANK": os.environ["RANK"]}
            report_failure(error)

    # `script.run` calls this function if the script raises an exception.
    report.failed = failed
    report.note_alone = lambda library: None
    load_triton_before_tensorflow()
    if os.environ.get("HOROVOD_CONTROLLER") == "mpi":
        backend.install_when_loaded()
    # Rank 0 serves torch's store, to which the other ranks connect. The store must listen only at MASTER_ADDR.
    if os.environ.get("RANK") == "0":
        store_address.keep_to_master_address()
    script.run(argv[0], argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
