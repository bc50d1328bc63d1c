"""Hints for users of other launchers: the counterparts of their options and verbs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import click

from paceline.cli.run_options import RUN
from paceline.system.names import did_you_mean

#: Hint for an option of another program, such as torchrun. {n} stands for the option's value.
_PROCESSES = "-j {n}, or -j 2x{n} for as many on each of two nodes"
_NODES = "-j {n}x4 for {n} nodes of 4 processes each"
_HOSTS = "hosts belong to a compute target: paceline compute add lab --kind ssh --host HOST, then --compute lab"
_FOUND = "workers find each other by themselves: leave it out"
_SLURM = "what Slurm is asked for belongs to its compute target: paceline compute add NAME --kind slurm --help"
_OPTIONS = {
    "nproc_per_node": ("torchrun", _PROCESSES),
    "nnodes": ("torchrun", _NODES),
    **dict.fromkeys(("node_rank", "master_addr", "master_port", "standalone"), ("torchrun", _FOUND)),
    **dict.fromkeys(("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "local_addr"), ("torchrun", _FOUND)),
    "no_python": ("torchrun", "a program that is not Python is run as it is: leave it out"),
    "log_dir": ("torchrun", "logs are kept in the run: paceline logs RUN --rank N"),
    "num_processes": ("accelerate", _PROCESSES),
    "num_machines": ("accelerate", _NODES),
    **dict.fromkeys(("machine_rank", "main_process_ip", "main_process_port"), ("accelerate", _FOUND)),
    "multi_gpu": ("accelerate", "one process a GPU is -j N --backend nccl --gpu"),
    "multi_cpu": ("accelerate", "several processes without GPUs are -j N --backend gloo, or mpi"),
    "gpu_ids": ("accelerate", "--gpu gives each process a GPU of its own; PACELINE_GPUS says which there are"),
    "mixed_precision": ("accelerate", "--env ACCELERATE_MIXED_PRECISION={n} tells the script's Accelerator"),
    "config_file": (
        "accelerate",
        "that file isn't read: give machines by -j, --compute and --gpu, and settings of the model in the script",
    ),
    "cpu": ("accelerate", "workers are on processors without --gpu: leave it out"),
    "use_fsdp": ("accelerate", "--env ACCELERATE_USE_FSDP=true tells the script's Accelerator"),
    "num_cpu_threads_per_process": ("accelerate", "--env OMP_NUM_THREADS={n}"),
    "np": ("mpirun", "-j {n} --backend mpi"),
    "n": ("mpirun", "-j {n} --backend mpi"),
    **dict.fromkeys(("hostfile", "machinefile", "host", "hosts", "H"), ("mpirun", _HOSTS)),
    "x": ("mpirun", "--env NAME=VALUE, or --env NAME for the value of your shell"),
    **dict.fromkeys(
        ("bind_to", "map_by", "oversubscribe", "allow_run_as_root"), ("mpirun", "that is seen to: leave it out")
    ),
    "mca": ("mpirun", "--env OMPI_MCA_<name>=<value> sets a parameter of Open MPI"),
    "gloo": ("horovodrun", "--backend gloo"),
    "mpi": ("horovodrun", "--backend mpi"),
    "network_interface": (
        "horovodrun",
        "the interface belongs to a compute target: paceline compute doctor NAME names it",
    ),
    **dict.fromkeys(
        ("min_np", "max_np"), ("horovodrun", "-j 2..4x2 goes on with as many nodes of two processes as there are")
    ),
    "num_gpus": ("deepspeed", "one process a GPU is -j {n} --backend nccl --gpu"),
    "num_nodes": ("deepspeed", _NODES),
    "ntasks": ("srun", _PROCESSES),
    "ntasks_per_node": ("srun", _PROCESSES),
    **dict.fromkeys(("partition", "account", "qos", "gres", "mem", "constraint", "reservation"), ("sbatch", _SLURM)),
    **dict.fromkeys(
        ("gpus", "gpus_per_node", "gpus_per_task"), ("sbatch", "--gpu gives each process a GPU of its own")
    ),
    "time": ("sbatch", "--max-duration {n}"),
    "display_name": ("an estimator", "--name"),
    "config": ("other programs", "a job file is the first word: paceline run job.yaml"),
    "workdir": ("other programs", "--source FOLDER is the folder that is copied and run in"),
    "detach": ("docker", "`paceline submit` returns at once"),
    "d": ("docker", "`paceline submit` returns at once"),
    "v": ("docker", "data is named with --input NAME=PATH"),
    "volume": ("docker", "data is named with --input NAME=PATH"),
}
#: Option that other programs have for their command `logs` -> the program, and the equivalent option of `paceline logs`.
_LOG_OPTIONS = {
    **dict.fromkeys(("lines", "line", "num_lines", "last", "max_lines"), ("tail", "-n {n}, or --tail {n}")),
    **dict.fromkeys(
        ("timestamps", "t"), ("docker", "a line has no time of its own: --since 10m, or a time, chooses lines by it")
    ),
    **dict.fromkeys(("worker", "process", "container", "c"), ("other programs", "--rank {n} is one worker's lines")),
    **dict.fromkeys(("stderr", "stdout"), ("other programs", "a worker's log has both: leave it out")),
    **dict.fromkeys(("p", "previous"), ("kubectl", "--attempt 1 is the first one before a restart")),
}
#: Command of another program -> the equivalent command of Paceline.
_VERBS = {
    **dict.fromkeys(("ps", "ls", "jobs", "runs", "history", "squeue", "top", "queue"), "paceline list"),
    **dict.fromkeys(("stop", "kill", "abort", "terminate", "scancel", "end"), "paceline cancel RUN"),
    **dict.fromkeys(("rm", "delete", "remove", "del"), "paceline rm RUN"),
    **dict.fromkeys(("undelete", "recover", "trash"), "paceline restore RUN"),
    **dict.fromkeys(("unarchive", "hide"), "paceline archive RUN"),
    **dict.fromkeys(("notes", "annotate"), "paceline note RUN TEXT"),
    **dict.fromkeys(("launch", "start", "train", "torchrun", "mpirun", "srun", "execute"), "paceline run SCRIPT"),
    **dict.fromkeys(("sbatch", "queue_up"), "paceline submit SCRIPT"),
    **dict.fromkeys(("tail", "attach", "follow", "watch"), "paceline logs -f RUN"),
    **dict.fromkeys(("describe", "inspect", "info", "get"), "paceline show RUN"),
    **dict.fromkeys(("retry", "restart", "resume"), "paceline rerun RUN"),
    **dict.fromkeys(("targets", "clusters", "nodes", "sinfo"), "paceline compute list"),
    **dict.fromkeys(("ssh", "shell", "attach_shell"), "paceline exec RUN --rank 0 -- COMMAND"),
    **dict.fromkeys(("cp", "pull", "fetch"), "paceline download RUN"),
    **dict.fromkeys(("gc", "clean", "cleanup"), "paceline prune"),
    **dict.fromkeys(("envs", "environments"), "paceline env list"),
    **dict.fromkeys(("datastores", "datasets"), "paceline data list"),
    **dict.fromkeys(("doctor", "diagnose"), "paceline compute doctor TARGET"),
    **dict.fromkeys(("tune", "hyperdrive"), "paceline sweep run SCRIPT"),
    "register": "paceline model register",
    "deploy": "paceline service deploy",
}
_OWN_ARGUMENTS = "The script's own arguments go behind `--`: paceline run train.py -- --epochs 5."


def usage_message(error: click.UsageError, command: str, argv: Sequence[str]) -> str:
    """Return the parser's message, with hints for options and subcommands of other launchers.

    `command` is the failed command, such as "paceline run". `argv` is the whole command line.
    """
    text = error.format_message()
    if isinstance(error, click.NoSuchOption):
        # Don't use click's own message, because its text differs between versions of click.
        text = f"No such option: {error.option_name}."
        if error.possibilities:
            text += f" Did you mean {' or '.join(error.possibilities)}?"
        has_hints = command.endswith((" run", " submit", " logs"))
        return option_message(error.option_name, text, argv) if has_hints else text
    if command.endswith(" exec") and text.startswith("Missing argument"):
        return "Name a run and the command to run beside its worker: paceline exec RUN -- COMMAND."
    # Replace click's suggestions of similar commands by Paceline's own.
    if (unknown := re.match(r"No such command '(.+?)'\.", text)) and error.ctx is not None:
        group = error.ctx.command
        assert isinstance(group, click.Group)
        hint = verb_hint(unknown[1], group.list_commands(error.ctx), in_group=error.ctx.parent is not None)
        return f"{unknown[0]} {hint}".rstrip()
    return text if text.endswith((".", "?", "!")) else f"{text}."


def option_message(option: str, text: str, argv: Sequence[str]) -> str:
    """Return the message for an option that `run`, `submit` or `logs` does not have.

    `text` is the parser's message, which names the `option`. For a word of several short options, such as `-np`,
    `option` is only the letter that the parser does not know.
    """
    # Ignore words behind `--`: they belong to the user's script, which may have options of the same names.
    words = [*argv[: argv.index("--")]] if "--" in argv else [*argv]
    found = next((word for word in words if word.split("=")[0] == option), None)
    # click reads -np as -n and -p, and its error names only the first of these letters that is no option.
    if found is None and not option.startswith("--"):
        # Find the word, such as -np, that contains the letter that click reports.
        clusters = [word for word in words if word.startswith("-") and option[-1:] in word.split("=")[0][1:]]
        found = next((word for word in clusters if not word.startswith("--")), None)
    name, _, value = (found or option).partition("=")
    key = name.lstrip("-").replace("-", "_")
    is_logs = argv[:1] == ["logs"]
    known = _LOG_OPTIONS if is_logs else _OPTIONS
    if key not in known:
        return text if is_logs else f"{text} {_OWN_ARGUMENTS}"
    if not value and found is not None:
        following = words[words.index(found) + 1 :]
        value = following[0] if following and not following[0].startswith("-") else ""
    whose, meaning = known[key]
    # -j takes the number of nodes and of processes together, so combine torchrun's two options into one value.
    shape = _shape(words) if key in ("nproc_per_node", "nnodes") else None
    return f"No such option: {name}, which is {whose}'s. Here: {shape or meaning.replace('{n}', value or 'N')}."


def _shape(words: Sequence[str]) -> str | None:
    """Return "-j 2x4" for torchrun's `--nnodes=2 --nproc_per_node=4`, or None without these options."""
    given = {}
    for number, word in enumerate(words):
        name, _, value = word.partition("=")
        following = words[number + 1] if number + 1 < len(words) else ""
        given[name.lstrip("-").replace("-", "_")] = value or following
    nodes, processes = given.get("nnodes", ""), given.get("nproc_per_node", "")
    if not re.fullmatch(r"\d+(:\d+)?", nodes) or not (processes.isdecimal() or ":" in nodes):
        return None
    return f"-j {nodes.replace(':', '..')}x{processes if processes.isdecimal() else 'M'}"


def verb_hint(verb: str, known: Iterable[str], *, in_group: bool) -> str:
    """Return a hint for an unknown subcommand: Paceline's counterpart, or similar names.

    `in_group` is True for a subcommand in a group, such as `add` in `paceline compute add`.
    """
    known = [*known]
    text = _VERBS.get(verb.lower().replace("-", "_"))
    if in_group:
        text = {"ls": "list", "rm": "remove", "delete": "remove", "check": "doctor", "info": "show"}.get(verb, "")
    if text and (text if in_group else text.split()[1]) in known:
        return f"That is `{text}`."
    return did_you_mean(verb, known, most=2).lstrip()


#: Field of a Python class such as `Job` -> its command-line option, if their names differ.
_FIELDS = {
    **{option.key: option.name for option in RUN if option.key},
    "docker_image": "image",
    "drain_s": "drain",
    "entry_module": "module",
    "entry_script": "entry",
    "environment_variables": "env",
    "load_timeout_s": "load_timeout",
    "max_body_bytes": "max_body",
    "max_duration_seconds": "max_sweep_duration",
    "memory_limit_bytes": "memory_limit",
    "pip_requirements_file": "requirements",
    "source_directory": "source",
    "target": "compute",
    "timeout_s": "timeout",
}
#: Advice in an error message for Python users -> the same advice for users of the command line.
_STEPS = {
    "Give one with as_named_input(...) or data_reference_name=.": "Write such as --input train=PATH.",
    "Rename one of them with as_named_input(...) or data_reference_name=.": "Give each --input a name of its own.",
}


def in_options(text: str, words: Sequence[str], options: Mapping[str, str]) -> str:
    """Return the message with options in place of Python parameters: "--gpu" for "use_gpu=True".

    `words` is the command line. If `words` name a job file, return `text` unchanged. `options` maps the subcommand's
    parameters to its options: {"gpu": "--gpu", "rank": "--rank"}.
    """
    if _names_job_file(words):
        return text
    for step, here in _STEPS.items():
        text = text.replace(step, here)
    if "entry" not in options:
        text = re.sub(r"\bentry_script\b=?", "script ", text).replace("script  ", "script ")
    if "nodes" in options:
        text = re.sub(r"node_count=(\d+) and process_count_per_node=(\d+)", r"-j \1x\2", text)
        text = re.sub(r"\bnode_count=(\d+(?:\.\.\d+)?)", r"-j \1", text)
    # Replace "overwrite=True (--overwrite)" by "--overwrite".
    text = re.sub(r"\b(?:\w+=True|\w+_\w+) \((--[\w-]+)\)", r"\1", text)
    text = re.sub(r"(--[\w-]+) \(\w+=True\)", r"\1", text)
    for field, name in {**{name: name for name in options}, **_FIELDS}.items():
        if (word := options.get(name)) is None:
            continue
        text = re.sub(rf"\b(?:[Ss]et )?{field}=False\b", f"Leave out {word}", text)
        text = re.sub(rf"\b[Ss]et {field}=True\b", f"Add {word}", text)
        text = re.sub(rf"\b{field}=True\b", word, text)
        # Replace a list with one item, such as `field=['a']`, by `--field 'a'`.
        text = re.sub(rf"(?<![\w-]){field}=\[('[^']*')\]", rf"{word} \1", text)
        text = re.sub(rf"(?<![\w-]){field}=", f"{word} ", text)
        if "_" in field:  # a name with an underscore can't be an English word, so it is the field's name
            text = re.sub(rf"\b{field}\b", word, text)
    return text.replace(", or None.", ", or leave it out.")


def _names_job_file(words: Sequence[str]) -> bool:
    """Return whether the subcommand's first argument is a YAML file."""
    takes_value = {word for option in RUN if option.type is not bool for word in option.words.split()}
    rest = iter(words[2 if words[:1] in (["sweep"], ["pipeline"]) else 1 :])
    for word in rest:
        if word == "--":
            return False
        if not word.startswith("-"):
            return word.endswith((".yaml", ".yml"))
        if word in takes_value:
            next(rest, None)
    return False
