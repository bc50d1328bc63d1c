"""Run the user's script as `python script.py` does, and report its end.

    python .../paceline/worker/__main__.py [--mpi | --srun | --spare] [--set NAME=VALUE ...] [--kind KIND] -- script.py [word ...]

--mpi: mpirun has started this process. Take the rank from Open MPI's variables, write to the rank's log, and wait for
    the script in a parent process. --srun: as --mpi, but srun has started this process, with one command line for all
    workers. Options after `--for FIRST-LAST --on NODE` are only for these ranks (`paceline.worker.ranks`).
--spare: load the modules that earlier workers have imported, and fork later workers (`paceline.worker.spare`).
--set: a variable for the script. --kind: "module" for `python -m script`, "program" for other programs. Any word may have a
leading `=`, so that mpirun does not interpret it.

This program imports only modules that Python has loaded already, because other imports delay the script's first line.
"""

import os
import sys

# Python has put the folder of this file first on sys.path, with symbolic links resolved. Remove this folder.
if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    del sys.path[0]

from paceline.system.lazy_import import load_triton_before_tensorflow
from paceline.worker import nested, report, scheduling, script, watched

_SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "fish")


def main(argv: "list[str]") -> None:
    if argv[0] == "--spare":
        from paceline.worker import spare

        argv = spare.serve()
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
        from paceline.worker import monitor, ranks, spare

        # Keep this order: the log's name needs the rank, and the worker is forked before imports may start threads.
        ranks.from_open_mpi(os.environ, "srun" if launcher == "--srun" else "mpirun")
        if launcher == "--mpi":
            spare.hand_over(sys.argv)
        monitor.redirect_output()
        monitor.wait_for_child(under_srun=launcher == "--srun")
        _offer_mpi_to_torch()
        if launcher == "--srun":
            from paceline.worker import ranks

            ranks.check_when_loaded(int(os.environ["PACELINE_WORLD_SIZE"]))
    if os.environ.get("PACELINE_SPARE"):
        from paceline.worker import spare

        spare.record()
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
    # Don't expand variables in the arguments of a shell, because the shell itself expands them.
    is_shell = kind == "program" and os.path.basename(command[0]) in _SHELLS
    arguments = command[1:] if is_shell else [_with_variables(word) for word in command[1:]]
    if kind == "program":
        # Put the job's interpreter first on PATH: in `bash -c "python train.py"`, `python` is then the job's interpreter.
        own = os.path.dirname(sys.executable)
        if own and own not in os.environ.get("PATH", "").split(os.pathsep)[:1]:
            os.environ["PATH"] = os.pathsep.join((own, os.environ.get("PATH", os.defpath)))
        script.become(command[0], arguments)
    script.run(command[0], arguments, is_module=kind == "module")


def _offer_mpi_to_torch() -> None:
    """Register the backend "mpi" of `init_process_group`, once torch is loaded."""
    from paceline.torch_mpi import install_when_loaded

    install_when_loaded()


def _keep_store_to_its_network() -> None:
    from paceline.collectives import keep_to_master_address

    keep_to_master_address()


def _import_from_copy() -> None:
    """Redirect imports of editable installs to the run's copy.

    An editable install points to the user's folder, which may have changed since the submission. The copy has the same
    path below the run's folder `work` (`paceline.runs.work_dir`). A path with a link is not redirected.
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
    # Editable installs map packages to paths: https://setuptools.pypa.io/en/latest/userguide/development_mode.html
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
    """Make Paceline's `azureml` importable, and its `horovod` if Horovod is missing.

    Paceline's `azureml` comes before an installed `azureml`, which would log to a service that no longer exists.
    """
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path.append(os.path.join(package, "compat", "shim", "first"))
    azureml = os.path.join(package, "compat", "shim", "azureml_names")
    # Insert Paceline's `azureml` after the script's folder and before all installed packages.
    library = os.path.dirname(package)
    sys.path.insert(sys.path.index(library) + 1 if library in sys.path else 0, azureml)
    first, *others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(part for part in (first, azureml, *others) if part)


def _listen_to_trackers() -> None:
    from paceline.trackers import hooks

    hooks.install()


def _set_old_variables() -> None:
    """Set variables that old Azure scripts read: input folders, and Batch AI's rank."""
    for word in os.environ.get("AZUREML_DATASET_ENVIRONMENT_VARS", "").split(","):
        name = word.partition(":")[0]
        if (folder := os.environ.get(f"PACELINE_INPUT_{name}")) is not None:
            os.environ.setdefault(name, folder)
    if "AZ_BATCH_MASTER_NODE" in os.environ:
        os.environ.setdefault("AZ_BATCHAI_TASK_INDEX", os.environ["RANK"])


def _with_variables(word: str) -> str:
    return os.path.expandvars(word) if "$" in word else word


if __name__ == "__main__":
    main(sys.argv[1:])
