"""Submit a run's job again, with or without changes."""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.environments.environment import Environment
from paceline.errors import JobError, PacelineError, RunStateError
from paceline.job.entry import entry_file
from paceline.job.job import Job
from paceline.job.sizes import node_range, range_text
from paceline.runs import read
from paceline.runs.folder import RunFolder
from paceline.runs.ids import new_run_id
from paceline.runs.record import RunRecord
from paceline.submit import SourceCopy, in_places_of, submit
from paceline.system.files import names_in, read_json
from paceline.targets import configured

if TYPE_CHECKING:
    from paceline.sweeps.argparse_options import Declared, DeclaredOption

#: A word of a command line such as `name=value` or `+name=value`, by which Hydra overrides a setting.
_ASSIGNMENT = re.compile(r"(\+{0,2}[A-Za-z_][\w.@/-]*)=(.*)", re.DOTALL)
#: How many choices of one option a form shows at most.
_MOST_CHOICES = 200


@dataclass(frozen=True, kw_only=True)
class RerunChanges:
    """The changes of a job for a rerun. A field that is None changes nothing.

    Attributes:
        parameters: Option of the script, such as "--lr" or "lr" -> its value. "true" and "false" turn a switch on and off; the
            value None removes the option.
        arguments: Further arguments, which are added at the end.
        node_count: Number of nodes, or a range such as "2..4" for an elastic run.
        resume: Start from the checkpoints of the earlier run.
    """

    parameters: Mapping[str, str | None] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    compute_target: str | None = None
    node_count: int | str | None = None
    process_count_per_node: int | str | None = None
    distributed_backend: str | None = None
    resume: bool = False


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """An option of a run's script, for the web page's rerun form.

    Attributes:
        value: The run's value of the option; None if the run's arguments lack the option. For a switch: "true" or
            "false". For a list: its words joined by spaces.
        choices: Allowed values, if the script declares them.
        type: "int", "float", "str", "bool", or None if unknown.
    """

    name: str
    value: str | None
    choices: tuple[str, ...] = ()
    type: str | None = None
    is_switch: bool = False
    is_list: bool = False
    is_required: bool = False


def rerun(
    before: RunFolder,
    workspace_dir: Path,
    *,
    changes: RerunChanges | None = None,
    values: Mapping[str, str] | None = None,
    display_name: str | None = None,
) -> RunFolder:
    """Resubmit a run's job with its source and package versions. Return the new run's folder.

    values: Name of a secret of the job -> the secret's value. A secret in this dict is not read from its source.

    Raises:
        RunStateError: The run was not submitted but logged by a program, or it is a pipeline or a sweep.
        JobError: A change is wrong. The message names all wrong changes.
        UserError, TargetError: As for `paceline.submit.submit`.
    """
    old = read.record(before)
    job = _job_of(old)
    if changes is not None:
        job, problems = changed(before, job, changes, workspace_dir)
        if problems:
            raise JobError("; ".join(f"{name}: {problem}" for name, problem in problems.items()))
    run_id = new_run_id(old.experiment)
    return submit(
        _with_own_places(_with_locked_environment(job, before), old, run_id),
        # Only record the source folder, which may be missing by now: the new run uses the snapshot of the old run.
        SourceCopy(directory=Path(old.source_directory or "."), snapshot_id=old.snapshot_id, git=old.git),
        workspace_dir,
        old.experiment,
        tags={"rerun_of": old.run_id},
        display_name=display_name,
        values=values,
        run_id=run_id,
        checkpoints=before.checkpoints if changes is not None and changes.resume else None,
    )


def _job_of(old: RunRecord) -> Job:
    if old.pipeline is not None:
        raise RunStateError(
            f"run {old.run_id} is a pipeline. Submit it again as you did: its steps that have not changed are not run twice."
        )
    if old.sweep is not None:
        # A sweep can't run as a single run, because its job lacks the parameter values, which only trials have.
        raise RunStateError(
            f"run {old.run_id} is a sweep. Ask for further trials, paceline sweep more {old.run_id} --trials N, run one of its "
            "trials again by its own id, or submit the sweep again as you did."
        )
    if old.job is None or old.snapshot_id is None:
        raise RunStateError(f"run {old.run_id} was not submitted but logged by a program, which alone can run again.")
    return old.job


def _with_own_places(job: Job, old: RunRecord, run_id: str) -> Job:
    """Return a pipeline step's job whose outputs are stored under the new `run_id`."""
    if old.step is None:
        return job
    return in_places_of(job, run_id, old.step.get("reused_from") or old.run_id)


def _with_locked_environment(job: Job, folder: RunFolder) -> Job:
    """Return the job with the exact package versions that the run has used."""
    built = read_json(folder.environment)
    if not built:
        return job
    return dataclasses.replace(job, environment=Environment.from_json(built["locked"]))


# --- options of a run's script, and changes of its job


def parameters(folder: RunFolder) -> list[Parameter]:
    """Return the options of a run's script.

    These are the options that the script declares, and other options in the run's arguments.

    Raises:
        RunStateError: As for `rerun`.
    """
    job = _job_of(read.record(folder))
    known = _declared(folder, job)
    given: dict[str, list[_Piece]] = {}
    for piece in _pieces(job.arguments, known):
        given.setdefault(piece.name, []).append(piece)
    given.pop("", None)
    shown = [
        option for option in known.options if option.names and option.names[-1] not in ("-h", "--help", "--version")
    ]
    found = [_parameter(option, given.pop(_name(option), [])) for option in shown]
    found += [
        Parameter(name=name, value=_text(pieces), is_switch=pieces[-1].is_switch) for name, pieces in given.items()
    ]
    return list({one.name: one for one in found}.values())


def changed(folder: RunFolder, job: Job, changes: RerunChanges, workspace_dir: Path) -> tuple[Job, dict[str, str]]:
    """Return the job for a rerun, and a message for each wrong change."""
    problems: dict[str, str] = {}
    words = _with_parameters(folder, job, changes.parameters, problems)
    target = changes.compute_target or job.compute_target
    fields: dict[str, object] = {
        "arguments": (*words, *changes.arguments),
        "compute_target": target,
        "node_range": None,
    }
    try:
        configured.read(workspace_dir, target)
    except PacelineError as error:
        problems["compute_target"] = str(error).rstrip(".")
    nodes = changes.node_count or range_text(*(job.node_range or (job.node_count, job.node_count)))
    try:
        fields["node_count"] = range_text(*node_range(_whole(nodes)))
    except JobError as error:
        problems["node_count"] = str(error).rstrip(".")
    if changes.process_count_per_node is not None:
        fields["process_count_per_node"] = count = _whole(changes.process_count_per_node)
        if not isinstance(count, int) or count < 1:
            problems["process_count_per_node"] = f"must be a number of at least 1, got {count!r}"
    if changes.distributed_backend is not None:
        fields["distributed_backend"] = changes.distributed_backend or None
    if changes.resume and not has_checkpoints(folder):
        problems["resume"] = "the run has no checkpoint to start from"
    if not problems:
        # Create the changed job now, because this checks its fields against each other, such as number of processes and back end.
        try:
            job = dataclasses.replace(job, **fields)  # type: ignore[arg-type]
        except JobError as error:
            named = ("distributed_backend", "process_count_per_node", "node_count")
            problems[next((name for name in named if name in str(error)), "job")] = str(error).rstrip(".")
    return job, problems


def has_checkpoints(folder: RunFolder) -> bool:
    """Return whether a rerun can start from a run's checkpoints."""
    return any(not name.startswith(".") for name in names_in(folder.checkpoints))


def _whole(given: int | str) -> int | str:
    text = str(given).strip()
    return int(text) if text.isascii() and text.isdecimal() else text


def _with_parameters(
    folder: RunFolder, job: Job, changes: Mapping[str, str | None], problems: dict[str, str]
) -> list[str]:
    """Return the arguments with changed options. Add refused values to `problems`."""
    from paceline.sweeps.argparse_check import certain_way, refusal
    from paceline.sweeps.points import ADDITIONS, ASSIGNMENTS

    known = _declared(folder, job)
    pieces = _pieces(job.arguments, known)
    script = _script(folder, job)
    way = certain_way(script) if script is not None and changes else None
    for given, text in changes.items():
        name, option = _meant(given, known, pieces)
        is_assigned = not name.startswith("-") and (way in (ASSIGNMENTS, ADDITIONS) or _has(pieces, name))
        if not is_assigned and not name.startswith("-"):
            name = f"{'--'[: len(name)]}{name}"
        try:
            value = _parsed(option, text)
        except JobError as error:
            problems[given] = str(error)
            continue
        if is_assigned:
            plus = "+" * (way == ADDITIONS and not name.startswith("+"))
            new = [f"{plus}{name}={word}" for word in [text] if word is not None]
        else:
            new = _words(name, value, option, pieces)
            if refused := refusal(name, value, known):
                problems[given] = refused
        pieces = _put(pieces, name, new)
    return [word for piece in pieces for word in piece.words]


def _parsed(option: DeclaredOption, text: str | None) -> str | bool | list[str] | None:
    """Parse the text of an option's value. Raise JobError if it is wrong."""
    if text is None and option.is_required:
        raise JobError("the script requires this option")
    if text is None:
        return None
    if option.is_switch:
        if text.lower() not in ("true", "false"):
            raise JobError(f"it is a switch, which takes true or false, got {text!r}")
        return text.lower() == "true"
    if not option.takes_list:
        return text
    try:
        return shlex.split(text)
    except ValueError as error:
        raise JobError(f"{text!r} can't be split into words: {error}. Close the quotes") from None


def _words(name: str, value: object, option: DeclaredOption, pieces: Sequence[_Piece]) -> list[str]:
    from paceline.sweeps.points import ARGUMENTS, EQUALS, words

    has_equals = any(piece.name == name and "=" in piece.words[0] for piece in pieces)
    switches = [f"{name}/{option.opposite(name) or ''}"] * bool(option.is_switch)
    return words({name: value}, switches, option.takes_list or (EQUALS if has_equals else ARGUMENTS))


@dataclass(frozen=True)
class _Piece:
    """An option of a command line or, with the name "", a positional argument."""

    name: str
    words: tuple[str, ...]
    values: tuple[str, ...] = ()
    is_switch: bool = False


def _has(pieces: Sequence[_Piece], name: str) -> bool:
    return any(piece.name == name for piece in pieces)


def _put(pieces: Sequence[_Piece], name: str, words: Sequence[str]) -> list[_Piece]:
    at = [number for number, piece in enumerate(pieces) if piece.name == name]
    ends = [number for number, piece in enumerate(pieces) if piece.words == ("--",)]
    # Replace the last occurrence of the option, because it overrides the earlier ones. Put a new option before `--`.
    place = at[-1] if at else min(ends, default=len(pieces))
    before, behind = ([piece for piece in part if piece.name != name] for part in (pieces[:place], pieces[place:]))
    return [*before, *[_Piece(name, tuple(words))] * bool(words), *behind]


def _pieces(arguments: Sequence[str], known: Declared) -> list[_Piece]:
    """Split arguments into options and positionals."""
    found: list[_Piece] = []
    left = list(arguments)
    options = _by_name(known)
    while left:
        word = left.pop(0)
        if word == "--":
            return [*found, *(_Piece("", (one,)) for one in (word, *left))]
        given, equals, value = word.partition("=")
        if assigned := _ASSIGNMENT.fullmatch(word):
            found.append(_Piece(assigned[1], (word,), (assigned[2],)))
        elif not _is_option(word):
            found.append(_Piece("", (word,)))
        elif equals:
            found.append(_Piece(_name(options.get(given, _undeclared(given))), (word,), (value,)))
        else:
            option = options.get(given, _undeclared(given))
            # A switch takes no following words. Any other option takes up to `count` words, but stops at the next option.
            count = 0 if option.is_switch else option.count
            taken = tuple(itertools.takewhile(lambda one: not _is_option(one), left))[:count]
            del left[: len(taken)]
            is_off = given == option.opposite(_name(option))
            values = taken or (str(not is_off).lower(),)
            found.append(_Piece(_name(option), (word, *taken), values, is_switch=not taken))
    return found


def _is_option(word: str) -> bool:
    return re.fullmatch(r"--?[A-Za-z_].*", word, re.DOTALL) is not None


def _by_name(known: Declared) -> dict[str, DeclaredOption]:
    """Return {name: option} for all names, including those that turn switches off."""
    named = [option for option in known.options if option.names]
    return {
        name: option for option in named for name in (option.opposite(_name(option)), *option.names) if name is not None
    }


def _undeclared(name: str) -> DeclaredOption:
    from paceline.sweeps.argparse_options import DeclaredOption

    return DeclaredOption(names=(name,), line=0, type=None)


def _meant(given: str, known: Declared, pieces: Sequence[_Piece]) -> tuple[str, DeclaredOption]:
    """Return (name, declaration) of the option that `given` names, with or without dashes."""
    bare = given.lstrip("-")
    forms = [given, f"--{bare}", f"--{bare.replace('_', '-')}", f"--{bare.replace('-', '_')}", f"-{bare}"]
    options = _by_name(known)
    declared = [(_name(options[form]), options[form]) for form in forms if form in options]
    used = [(form, _undeclared(form)) for form in (*forms, f"+{bare}") if _has(pieces, form)]
    return (*declared, *used, (given, _undeclared(given)))[0]


def _name(option: DeclaredOption) -> str:
    """Return an option's first long name."""
    return next((name for name in option.names if name.startswith("--")), option.names[0])


def _parameter(option: DeclaredOption, given: Sequence[_Piece]) -> Parameter:
    return Parameter(
        name=_name(option),
        value=_text(given),
        choices=tuple(map(str, itertools.islice(option.choices or (), _MOST_CHOICES))),
        type=option.type,
        is_switch=bool(option.is_switch),
        is_list=option.takes_list is not None,
        is_required=option.is_required,
    )


def _text(given: Sequence[_Piece]) -> str | None:
    values = [value for piece in given for value in piece.values]
    return shlex.join(values) if len(values) > 1 else next(iter(values), None)


def _script(folder: RunFolder, job: Job) -> Path | None:
    """Return the path of the job's Python script in the snapshot, or None."""
    try:
        name = entry_file(job, folder.snapshot) if job.is_python else None
    except JobError:
        return None
    return folder.snapshot / name if name else None


def _declared(folder: RunFolder, job: Job) -> Declared:
    from paceline.sweeps.argparse_options import Declared, declared

    script = _script(folder, job)
    return declared(script) if script is not None else Declared(options=())
