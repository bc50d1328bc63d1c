"""The checked settings of a `slurm` target, and a parser of sbatch's times."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import TargetError
from paceline.targets.options import PRICES, SILENCE, Option, SettingValues, check_settings
from paceline.targets.ssh.hosts import read_login

OPTIONS: tuple[Option, ...] = (
    Option("partition", "partition, or several with commas between them"),
    Option("account", "account that is charged"),
    Option("qos", "quality of service"),
    Option("constraint", "features that the nodes must have, such as 'ib&a100'"),
    Option("time", "time limit as sbatch has it, such as 2:00:00, 1-12 or a number of minutes"),
    Option("memory", "memory of each node, such as 64G; 0 for all of it"),
    Option("cpus_per_process", "cores of each process", int, 1, least=1),
    Option("gpu_type", "with use_gpu: the type of GPU, such as a100"),
    Option("gres", "generic resources of each node; if it names gpu, use_gpu asks for no others"),
    Option("reservation", "reservation to run in"),
    Option("nodelist", "nodes that must be among the run's"),
    Option("exclude", "nodes that must not"),
    Option("exclusive", "no other jobs on the run's nodes", bool, False),
    Option("options", "another option of sbatch, as it is: --licenses=matlab:1", list, ()),
    Option("setup", "a line of shell that the batch script runs first, such as 'module load cuda'", list, ()),
    Option("login", "host where sbatch is, reached by ssh; this machine if not set"),
    Option("ssh_config", "for the login host, in place of ~/.ssh/config", Path),
    Option("ssh_options", "for the login host, as for ssh -o, such as Port=2222", list, ()),
    Option("folder", "with login: a folder there that all nodes see, for runs and snapshots", default="~/.paceline"),
    Option("python", "Python 3.10 or later as the nodes see it; if not set, the submitting one, or with login python3"),
    Option("interface", "network interface between the nodes, such as ib0"),
    Option("mpi", "what starts MPI's workers: mpirun, or srun with the plugin pmix, pmix_v4, ...", default="mpirun"),
    SILENCE,
    *PRICES,
)

#: sbatch option -> Paceline's setting with the same meaning, for options that select nodes, account and time.
SELECTING: Mapping[str, str] = {
    **{name: name for name in ("partition", "account", "qos", "constraint", "time", "gres", "reservation")},
    **{name: name for name in ("nodelist", "exclude")},
    "mem": "memory",
}
#: sbatch option -> Paceline's setting with the same meaning, or None if Paceline determines the option's value.
MANAGED: Mapping[str, str | None] = {
    **SELECTING,
    "cpus-per-task": "cpus_per_process",
    "exclusive": "exclusive",
    **dict.fromkeys(
        (
            *(
                "job-name",
                "comment",
                "output",
                "error",
                "input",
                "open-mode",
                "chdir",
                "signal",
                "requeue",
                "no-requeue",
            ),
            *("nodes", "ntasks", "ntasks-per-node", "array", "parsable", "wait", "wrap", "test-only", "export"),
            *("export-file", "clusters", "hold", "kill-on-invalid-dep", "quiet", "verbose", "help", "usage", "version"),
            *("uid", "gid", "get-user-env", "propagate", "no-kill"),
        )
    ),
}
#: sbatch options that look like abbreviations of an option that Paceline sets (`MANAGED`), but are different options.
_OWN_NAMES = frozenset({"mem-per-cpu", "mem-per-gpu", "gpus", "time-min"})
_OPTION = re.compile(r"--([a-z][a-z0-9-]*)(=.*)?")
_MPI = re.compile(r"mpirun|pmix(_v[0-9]+)?")
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


@dataclass(frozen=True, kw_only=True)
class SlurmSettings:
    """The settings of a Slurm target, with a field for each of `OPTIONS`."""

    partition: str | None
    account: str | None
    qos: str | None
    constraint: str | None
    time: str | None
    memory: str | None
    cpus_per_process: int
    gpu_type: str | None
    gres: str | None
    reservation: str | None
    nodelist: str | None
    exclude: str | None
    exclusive: bool
    options: tuple[str, ...]
    setup: tuple[str, ...]
    login: str | None
    ssh_config: str | None
    ssh_options: tuple[str, ...]
    folder: str
    python: str | None
    interface: str | None
    mpi: str
    silence_s: float
    core_price: float | None
    gpu_price: float | None

    @classmethod
    def of(cls, name: str, settings: SettingValues) -> SlurmSettings:
        """Return the checked settings, with defaults for missing settings.

        Raises:
            TargetError: A setting is unknown, has a wrong type or form, or repeats another setting as an sbatch option.
        """
        values = check_settings("slurm", OPTIONS, settings, name)
        values |= {key: tuple(value) for key, value in values.items() if isinstance(value, (list, tuple))}
        _check(f"compute target {name!r}", values)
        return cls(**values)

    @property
    def time_s(self) -> float | None:
        """The time limit in seconds; None if no limit is set."""
        return None if self.time is None else time_s(self.time)

    @property
    def asks_for_gpus(self) -> bool:
        """Return whether the user's own sbatch options request GPUs."""
        return "gpu" in (self.gres or "") or any(
            option.startswith(("--gpus", "--tres-per-")) for option in self.options
        )


def time_s(text: str) -> float | None:
    """Return an sbatch time, such as 1-12:30:00, in seconds; None for UNLIMITED.

    Raises:
        ValueError: The text has none of the forms M, M:S, H:M:S, D-H, D-H:M and D-H:M:S.
    """
    if text.upper() in ("UNLIMITED", "INFINITE", "-1"):
        return None
    found = _TIME.fullmatch(text)
    if found is None:
        raise ValueError(text)
    days, *parts = found.groups()
    numbers = [int(part) for part in parts if part is not None]
    # Without days, one or two numbers are minutes and seconds.
    hours, minutes, seconds = [*[0] * (days is None and len(numbers) < 3), *numbers, 0, 0][:3]
    return int(days or 0) * 86400.0 + hours * 3600 + minutes * 60 + seconds


def _check(title: str, values: SettingValues) -> None:
    if values["time"] is not None:
        try:
            time_s(values["time"])
        except ValueError:
            raise TargetError(
                f"{title}: time={values['time']!r} is not a time limit of sbatch's. "
                "Write minutes, 'hours:minutes:seconds' or 'days-hours:minutes:seconds'."
            ) from None
    if not _MPI.fullmatch(values["mpi"]):
        raise TargetError(
            f"{title}: mpi={values['mpi']!r} is nothing that starts MPI's workers. Write 'mpirun', or 'pmix' for srun with "
            "Slurm's PMIx plugin, or one of its versions that `srun --mpi=list` names, such as 'pmix_v4'."
        )
    if values["login"] is not None:
        read_login(values["login"], title)
    for name in (*SELECTING.values(), "gpu_type"):
        if values[name] is not None and not values[name].strip():
            raise TargetError(f"{title}: {name} is empty. Leave it out, or give its value.")
    for option in values["options"]:
        _check_option(title, option)


def _check_option(title: str, option: str) -> None:
    found = _OPTION.fullmatch(option)
    if found is None:
        raise TargetError(
            f"{title}: options has {option!r}, which is not a long option of sbatch in one word. Write '--name=value', "
            "or '--name' if it takes no value."
        )
    name = found[1]
    for managed, setting in MANAGED.items():
        # sbatch accepts abbreviations of options, such as `--part` for `--partition`, so refuse these too.
        if name == managed or (managed.startswith(name) and name not in _OWN_NAMES):
            instead = f"Use the setting {setting}." if setting else "Paceline gives it a value by itself; leave it out."
            raise TargetError(f"{title}: options has {option!r}, but --{managed} is not to be given there. {instead}")
