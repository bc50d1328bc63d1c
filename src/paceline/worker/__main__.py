"""Run the user's script as `python script.py` would, and say how it ended.

    python .../paceline/worker/__main__.py [--mpi | --srun] [--set NAME=VALUE ...] [--kind KIND] -- script.py [argument ...]

--mpi: mpirun started this process: it takes its rank from Open MPI's variables, sends its output to its own log and
    waits, in a process of its own, for the script's end. --srun: so did srun, which has one command line for all workers:
    what follows `--for FIRST-LAST --on NODE` is for these ranks, which are on that node (`paceline.worker.srun`).
--set: a variable for the script. --kind: "module" for `python -m script`, "program" for what is not Python's to run.
Every word may have a `=` in front, by which mpirun does not take it for one of its own.

Kept to the modules that Python has loaded anyway: every import here is time before the user's first line.
"""

import os
import sys

# Python puts the script's folder there with its links resolved.
if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    del sys.path[0]

from paceline.worker import report, script


def main(argv: "list[str]") -> None:
    if argv[0].startswith("="):
        argv = [word[1:] for word in argv]
    end = argv.index("--")
    options, command = argv[:end], argv[end + 1 :]
    kind = options[-1] if options[-2:-1] == ["--kind"] else "script"
    if kind != "script":
        del options[-2:]
    launcher = options.pop(0) if options and options[0] in ("--mpi", "--srun") else None
    if launcher == "--srun":
        from paceline.worker import srun

        options = srun.take_place(os.environ, options)
    for option, value in zip(options, options[1:], strict=False):  # noqa: RUF007 - itertools is not loaded yet
        if option == "--set":
            name, _, text = value.partition("=")
            os.environ[name] = text
    if launcher is not None:
        from paceline.worker import monitor, ranks

        # In this order: the rank names the log, the log takes what the rest may say, and the fork comes before anything is loaded
        # that has threads.
        ranks.from_open_mpi(os.environ, "srun" if launcher == "--srun" else "mpirun")
        monitor.redirect_output()
        monitor.wait_for_child(under_srun=launcher == "--srun")
        _offer_mpi_to_torch()
        if launcher == "--srun":
            from paceline.worker import mpi_world

            mpi_world.check_when_loaded(int(os.environ["WORLD_SIZE"]))
    if os.environ.get("RANK") == "0":
        _keep_store_to_its_network()
    _offer_names()
    report.started()
    arguments = [_with_paths(word) for word in command[1:]]
    if kind == "program":
        script.become(command[0], arguments)
    script.run(command[0], arguments, is_module=kind == "module")


def _offer_mpi_to_torch() -> None:
    """Let `torch.distributed.init_process_group("mpi")` find a backend, which no torch wheel has; torch is not loaded yet."""
    from paceline.torch_mpi import backend

    backend.install_when_loaded()


def _keep_store_to_its_network() -> None:
    """Let the store that `init_process_group` makes on the first rank listen at MASTER_ADDR alone; torch is not loaded yet."""
    from paceline.collectives import store_address

    store_address.keep_to_master_address()


def _offer_names() -> None:
    """Let `import horovod` find ours where the real package is not installed: the last place on the path."""
    sys.path.append(
        os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "compat", "shim", "first")
    )


def _with_paths(word: str) -> str:
    """An argument with this worker's own folder where a data reference stands: `$AZUREML_DATAREFERENCE_train`."""
    for prefix in ("AZUREML_DATAREFERENCE_", "PACELINE_INPUT_"):
        if "$" + prefix in word:
            # The longest name first: one may be the beginning of another.
            for name in sorted((name for name in os.environ if name.startswith(prefix)), key=len, reverse=True):
                word = word.replace("$" + name, os.environ[name])
    return word


if __name__ == "__main__":
    main(sys.argv[1:])
