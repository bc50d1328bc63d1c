"""Options of `horovodrun`: from the command line, from a YAML file, or from a launcher's `_HorovodArgs` object."""

from __future__ import annotations

import argparse
import os
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from paceline.errors import UserError

#: Section of the configuration file -> {key: option}. A key in `_OPPOSITES` means the opposite of its option.
_FILE_KEYS = {
    "params": {
        name: name
        for name in (
            *("fusion_threshold_mb", "cycle_time_ms", "cache_capacity"),
            *("hierarchical_allreduce", "hierarchical_allgather", "torus_allreduce"),
        )
    },
    "autotune": {
        "enabled": "autotune",
        "log_file": "autotune_log_file",
        "warmup_samples": "autotune_warmup_samples",
        "steps_per_sample": "autotune_steps_per_sample",
        "bayes_opt_max_samples": "autotune_bayes_opt_max_samples",
        "gaussian_process_noise": "autotune_gaussian_process_noise",
    },
    "timeline": {"filename": "timeline_filename", "mark_cycles": "timeline_mark_cycles"},
    "stall_check": {
        "enabled": "stall_check",
        "warning_time_seconds": "stall_check_warning_time_seconds",
        "shutdown_time_seconds": "stall_check_shutdown_time_seconds",
    },
    "library_options": {
        name: name
        for name in ("mpi_threads_disable", "num_nccl_streams", "thread_affinity", "gloo_timeout_seconds", "mpi_args")
    },
    "logging": {"level": "log_level", "hide_timestamp": "log_hide_timestamp", "with_timestamp": "log_hide_timestamp"},
}
#: Keys of the configuration file that mean the opposite of their option.
_OPPOSITES = ("with_timestamp",)
_NOT_IN_FILE = ("command", "config_file", "help")
_CONTROLLERS = ("gloo", "mpi", "jsrun")
_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")

#: Attribute of Horovod's argument object -> option of `horovodrun` with the same meaning, but a different name.
_RENAMED = {
    "num_proc": "np",
    "min_num_proc": "min_np",
    "max_num_proc": "max_np",
    "cooldown_range": "blacklist_cooldown_range",
    "tcp_flag": "tcp",
    "prefix_output_with_timestamp": "prefix_timestamp",
    "use_gloo": "gloo",
    "use_mpi": "mpi",
    "use_jsrun": "jsrun",
}
#: Attribute of Horovod's argument object -> option of `horovodrun` with the opposite meaning.
_OPPOSITE_ATTRIBUTES = {"no_stall_check": "stall_check", "log_with_timestamp": "log_hide_timestamp"}
#: Attributes of Horovod's argument object without an equal option. The function `options` reads `nics` and `nic`.
_OWN = ("run_func", "executable", "nics", "nic")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse `horovodrun`'s arguments: options, then a command.

    An invalid option exits with code 2. An absent option has the value None, an absent flag False. The command line overrides
    the file of `--config-file`, in any order. Horovod does this too, although its help says that the order counts.
    """
    parser = _parser()
    options = parser.parse_args(list(argv))
    # --gloo, --mpi and --jsrun exclude each other. One of them on the command line overrides the configuration file.
    chosen = any(getattr(options, name) for name in _CONTROLLERS)
    for dest, value in (_read(parser, options.config_file) if options.config_file else {}).items():
        # argparse does not say which options were given. An option that has its default value counts as not given.
        if getattr(options, dest) == parser.get_default(dest) and not (chosen and dest in _CONTROLLERS):
            setattr(options, dest, value)
    # Remove the `--` of `horovodrun -np 2 -- python train.py`, which argparse leaves in the command.
    if options.command[:1] == ["--"]:
        del options.command[0]
    return options


def usage_error(message: str) -> None:
    """Print an error about the command line, and exit with code 2."""
    _parser().error(message)


class _Interfaces(argparse.Action):
    """An argparse action that joins repeated network interface names with commas."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, value: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, ",".join(filter(None, (getattr(namespace, self.dest), value))))


def _read(parser: argparse.ArgumentParser, path: str) -> dict[str, object]:
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--config-file {path!r} can't be read: {error}. Give a YAML file of options.") from error
    if not isinstance(content, dict):
        raise UserError(f"--config-file {path!r} holds no mapping. Known: {', '.join(_FILE_KEYS)} and others.")
    # Accept all spellings of an option, such as `num-proc` and `num_proc`.
    known = {
        name.lstrip("-").replace("-", "_"): action
        for action in parser._actions
        for name in (*action.option_strings, action.dest)
        # Skip options that switch something off: with them, the value `true` would mean false.
        if not name.startswith("--no-") and action.const is not False
    }
    values: dict[str, object] = {}
    for key, value in content.items():
        if key == "controller":
            if str(value).lower() not in _CONTROLLERS:
                raise UserError(f"controller in --config-file {path!r} is {value!r}. Known: {', '.join(_CONTROLLERS)}.")
            values[str(value).lower()] = True
        elif key in _FILE_KEYS:
            # In YAML, an empty section (`timeline:`) has the value None.
            if not isinstance(value, dict | None):
                raise UserError(
                    f"{key} in --config-file {path!r} is {value!r}. Its keys are {', '.join(_FILE_KEYS[key])}."
                )
            for name, inner in (value or {}).items():
                if name not in _FILE_KEYS[key]:
                    raise UserError(
                        f"{key}.{name} in --config-file {path!r} is not an option. Known: {', '.join(_FILE_KEYS[key])}."
                    )
                dest = _FILE_KEYS[key][name]
                checked = _checked(inner, known[dest], f"{key}.{name} in --config-file {path!r}")
                values[dest] = not checked if name in _OPPOSITES and checked is not None else checked
        elif (option := known.get(str(key).replace("-", "_"))) and option.dest not in _NOT_IN_FILE:
            values[option.dest] = _checked(value, option, f"{key} in --config-file {path!r}")
        else:
            raise UserError(f"{key!r} in --config-file {path!r} is not an option. `horovodrun --help` lists them.")
    return values


def _checked(value: Any, option: argparse.Action, where: str) -> Any:
    """Convert a configuration file's value as argparse would, and check it."""
    if value is None:
        return None
    # The value of a flag must be a YAML boolean, because the text "false" would count as true.
    if option.nargs == 0:
        if not isinstance(value, bool):
            raise UserError(f"{where} is {value!r}. Write true or false.")
        return value
    kind = option.type if callable(option.type) else str
    try:
        converted = kind(str(value))
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise UserError(f"{where} is {value!r}, which is not a value for it: {error}.") from error
    if option.choices is not None and converted not in option.choices:
        raise UserError(f"{where} is {value!r}. Known: {', '.join(map(str, option.choices))}.")
    return converted


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="horovodrun",
        # Refuse abbreviated options: a future option with the same first letters would change their meaning.
        allow_abbrev=False,
        description="Start a training script on several processes: Horovod's command, on Paceline's collectives.",
        usage="horovodrun [options] -np N command [argument ...]",
        argument_default=None,
    )
    add = parser.add_argument
    add("-v", "--version", action="store_true", help="say which Horovod's interface this is")
    add("-np", "--num-proc", dest="np", type=_count, help="number of processes")
    add("-cb", "--check-build", action="store_true", help="say which frameworks and transports there are")
    add("--disable-cache", action="store_true", help="nothing is cached here")
    add("--start-timeout", type=_seconds, help="seconds that all processes may take to start (30)")
    add("--network-interfaces", "--network-interface", action=_Interfaces, help="interfaces, as eth0,eth1")
    add("--output-filename", help="folder that also gets each rank's output: rank.<n>/stdout and stderr")
    add("--verbose", action="store_true", help="also show what is started, and the launcher's own output")
    add("--config-file", help="YAML file of options; what is given here stands over it")
    add("-prefix-timestamp", "--prefix-output-with-timestamp", dest="prefix_timestamp", action="store_true")

    ssh = parser.add_argument_group("ssh").add_argument
    ssh("-p", "--ssh-port", type=_count)
    ssh("-i", "--ssh-identity-file")

    hosts = parser.add_argument_group("hosts").add_mutually_exclusive_group().add_argument
    hosts("-H", "--hosts", help="as host1:2,host2:4")
    hosts("-hostfile", "--hostfile", help="file with lines `host slots=2`")
    hosts("--host-discovery-script")

    tune = parser.add_argument_group("tuning").add_argument
    tune("--fusion-threshold-mb", type=_number)
    tune("--cycle-time-ms", type=_number)
    tune("--cache-capacity", type=_whole)
    for name in ("hierarchical-allreduce", "hierarchical-allgather", "torus-allreduce"):
        tune(f"--{name}", action=argparse.BooleanOptionalAction)
    tune("--autotune", action=argparse.BooleanOptionalAction)
    tune("--autotune-log-file")
    tune("--autotune-warmup-samples", type=_whole)
    tune("--autotune-steps-per-sample", type=_count)
    tune("--autotune-bayes-opt-max-samples", type=_count)
    tune("--autotune-gaussian-process-noise", type=_number)

    elastic = parser.add_argument_group("elastic").add_argument
    elastic("--min-np", "--min-num-proc", dest="min_np", type=_count)
    elastic("--max-np", "--max-num-proc", dest="max_np", type=_count)
    elastic("--slots-per-host", "--slots", dest="slots", type=_count)
    elastic("--elastic-timeout", type=_seconds)
    elastic("--reset-limit", type=_count)
    elastic("--blacklist-cooldown-range", type=_whole, nargs=2)

    watch = parser.add_argument_group("timeline and stalls").add_argument
    watch("--timeline-filename", type=os.path.abspath)
    watch("--timeline-mark-cycles", action=argparse.BooleanOptionalAction)
    watch("--stall-check", action=argparse.BooleanOptionalAction)
    watch("--stall-check-warning-time-seconds", type=_seconds)
    watch("--stall-check-shutdown-time-seconds", type=_seconds)

    library = parser.add_argument_group("library").add_argument
    library("--mpi-threads-disable", action=argparse.BooleanOptionalAction)
    library("--mpi-args", help='more arguments of mpirun, in one word: --mpi-args="--map-by node"')
    library("--tcp", action="store_true", help="MPI over TCP only")
    library("--binding-args", help="in place of mpirun's --bind-to none")
    library("--num-nccl-streams", type=_whole)
    library("--thread-affinity", type=_whole)
    library("--gloo-timeout-seconds", type=_seconds)
    library("--log-level", type=str.upper, choices=_LEVELS)
    library(
        "--log-hide-timestamp", "--log-without-timestamp", dest="log_hide_timestamp", action="store_true", default=None
    )
    library(
        "--no-log-hide-timestamp", "--log-with-timestamp", dest="log_hide_timestamp", action="store_false", default=None
    )

    controller = parser.add_argument_group("transport").add_mutually_exclusive_group().add_argument
    controller("--gloo", action="store_true", help="plain processes, without mpirun")
    controller("--mpi", action="store_true", help="mpirun")
    controller("--jsrun", action="store_true", help="not here")

    # All words from the first word that is not an option belong to the command, even if they look like options.
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _whole(text: str, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on")
    return int(text)


def _count(text: str) -> int:
    return _whole(text, 1)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    # This comparison also refuses nan, because every comparison with nan is false.
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return value


_seconds = _number


class _HorovodArgs:
    """A job's options, as attributes that launchers built on Horovod set.

    All attributes start as None, except num_proc, which is 1. `command` is a list of words. `run_func`, a function
    without arguments, runs instead of `command`, in the interpreter `executable`. `nics` is a list or `eth0,eth1`.
    """

    def __init__(self) -> None:
        for name in (*_attributes(parse([])), *_OPPOSITE_ATTRIBUTES, *_OWN):
            setattr(self, name, None)
        self.num_proc = 1


def options(args: Any, defaults: Namespace) -> Namespace:
    """Return the options of `horovodrun` for this `_HorovodArgs` or similar object."""
    made = Namespace(**vars(defaults))
    for name, option in _attributes(defaults).items():
        value = getattr(args, name, None)
        if value is not None and value != (None,):  # (None,) is the initial value in Horovod's own class
            setattr(made, option, value)
    for name, option in _OPPOSITE_ATTRIBUTES.items():
        if (value := getattr(args, name, None)) is not None:
            setattr(made, option, not value)
    nics = getattr(args, "nics", None) or getattr(args, "nic", None)
    if nics:
        made.network_interfaces = nics if isinstance(nics, str) else ",".join(nics)
    command = getattr(args, "command", None) or []
    made.command = command.split() if isinstance(command, str) else list(command)
    return made


def _attributes(defaults: Namespace) -> dict[str, str]:
    """Return {attribute of `_HorovodArgs`: option of `horovodrun`}."""
    of_others = (*_RENAMED.values(), *_OPPOSITE_ATTRIBUTES.values(), "network_interfaces", "version")
    return _RENAMED | {name: name for name in vars(defaults) if name not in of_others}
