"""Run the user's script as `python script.py` would, and say how it ended.

    python .../paceline/worker/__main__.py [--mpi | --srun] [--set NAME=VALUE ...] [--kind KIND] -- script.py [argument ...]

--mpi: mpirun started this process: it takes its rank from Open MPI's variables, sends its output to its own log and
    waits, in a process of its own, for the script's end. --srun: so did srun, which has one command line for all workers:
    what follows `--for FIRST-LAST --on NODE` is for these ranks, which are on that node (`paceline.worker.ranks`).
--set: a variable for the script. --kind: "module" for `python -m script`, "program" for what is not Python's to run.
Every word may have a `=` in front, by which mpirun does not take it for one of its own.

Kept to the modules that Python has loaded anyway: every import here is time before the user's first line.
"""

import os
import sys

# Python puts the script's folder there with its links resolved.
if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    del sys.path[0]

from paceline.system.lazy_import import load_triton_before_tensorflow
from paceline.worker import nested, report, scheduling, script, watched

_SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "fish")


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
        from paceline.worker import ranks

        options = ranks.take_place(os.environ, options)
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
            from paceline.worker import ranks

            ranks.check_when_loaded(int(os.environ["PACELINE_WORLD_SIZE"]))
    if os.environ.get("PACELINE_RANK") == "0":
        _keep_store_to_its_network()
    load_triton_before_tensorflow()
    _import_from_copy()
    _offer_names()
    _listen_to_trackers()
    _set_old_variables()
    nested.begin_worker()
    scheduling.begin()
    watched.begin(kind)
    report.started()
    # A shell puts variables in place by itself, where its quotes allow it, and has some of its own.
    is_shell = kind == "program" and os.path.basename(command[0]) in _SHELLS
    arguments = command[1:] if is_shell else [_with_variables(word) for word in command[1:]]
    if kind == "program":
        # `bash -c "python train.py"` means the interpreter that the job has, not the first one of the shell that submits.
        own = os.path.dirname(sys.executable)
        if own and own not in os.environ.get("PATH", "").split(os.pathsep)[:1]:
            os.environ["PATH"] = os.pathsep.join((own, os.environ.get("PATH", os.defpath)))
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


def _import_from_copy() -> None:
    """Let what is installed by `pip install -e` from the copied project be imported from the copy, here and in what the script
    starts: its path leads to the user's own folder, which may have been edited since.

    A path in a run's `work` is the user's own path behind it (`paceline.runs.work_dir`), unless a link is on the way.
    """
    top = os.path.join(os.path.realpath(os.environ.get("PACELINE_RUN_DIR") or "/nowhere"), "work")
    if not os.getcwd().startswith(f"{top}/"):
        return

    def copied(path: str) -> "str | None":
        copy = top + os.path.realpath(path)
        return copy if path.startswith("/") and os.path.exists(copy) and os.path.realpath(copy) == copy else None

    found = []
    for index, path in enumerate(sys.path):
        if not path.startswith(top) and (copy := copied(path)) is not None:
            sys.path[index] = copy
            found.append(copy)
    # Setuptools' own finders: https://setuptools.pypa.io/en/latest/userguide/development_mode.html
    for name, module in list(sys.modules.items()):
        mapping: dict[str, str] = getattr(module, "MAPPING", {}) if name.startswith("__editable__") else {}
        for package, path in mapping.items():
            if (copy := copied(path)) is not None:
                mapping[package] = copy
                found.append(os.path.dirname(copy))
    if found:
        library, *others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        others = [copied(path) or path for path in others]
        paths = (library, *(path for path in found if path not in others), *others)
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)


def _offer_names() -> None:
    """Let `import horovod` find ours where the real package is not installed: the last place on the path. `import azureml`
    finds ours first, here and in what the script starts: the real one would log to nowhere, and say nothing of it.
    """
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path.append(os.path.join(package, "compat", "shim", "first"))
    azureml = os.path.join(package, "compat", "shim", "azureml_names")
    # Behind the folder that holds `paceline`, so before all that is installed, and behind the script's own folder.
    library = os.path.dirname(package)
    sys.path.insert(sys.path.index(library) + 1 if library in sys.path else 0, azureml)
    first, *others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(part for part in (first, azureml, *others) if part)


def _listen_to_trackers() -> None:
    """Let values that the script logs with other libraries land in the run's metrics; none of them is loaded yet."""
    from paceline.trackers import hooks

    hooks.install()


def _set_old_variables() -> None:
    """Set what scripts for Azure read beside all else: the folder of an input under its bare name, unless that is taken, and
    the rank under Batch AI's.
    """
    for word in os.environ.get("AZUREML_DATASET_ENVIRONMENT_VARS", "").split(","):
        name = word.partition(":")[0]
        if (folder := os.environ.get(f"PACELINE_INPUT_{name}")) is not None:
            os.environ.setdefault(name, folder)
    if "AZ_BATCH_MASTER_NODE" in os.environ:
        os.environ.setdefault("AZ_BATCHAI_TASK_INDEX", os.environ["RANK"])


def _with_variables(word: str) -> str:
    """An argument with this worker's own values where `$NAME` or `${NAME}` stands: its folder of the data
    (`$AZUREML_DATAREFERENCE_train`), its rank (`$RANK`). What is no variable here stays as it is.
    """
    return os.path.expandvars(word) if "$" in word else word


if __name__ == "__main__":
    main(sys.argv[1:])
