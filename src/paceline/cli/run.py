"""rerun, and how `run` and `submit` start a run and follow it to its end."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from paceline.cli.common import folder_of, key_value, print_json
from paceline.cli.options import Given, takes
from paceline.cli.run_options import RERUN, nodes_of
from paceline.cli.summary import print_submitted, summary
from paceline.cli.view import RunView, print_end
from paceline.errors import JobError, ModelError
from paceline.job.sizes import range_text
from paceline.job_files.description import Asked, asked, read_env_files
from paceline.rerun import RerunChanges
from paceline.rerun import rerun as rerun_job
from paceline.runs import read, states, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.follow import Show
from paceline.runs.record import RunRecord, user_name
from paceline.runs.visible import visible
from paceline.system import linked
from paceline.workspace import Workspace


def begin(
    file: Path | None, description: dict[str, Any], given: Given, *, follow: bool, run_id: str | None = None
) -> int:
    """Submit the run, or print it with --dry-run. Return the exit code.

    `file` is the path of a job file, or None. `description` has the job's settings from the command line, which
    override the job file. If `paceline.cli.quick` has started the run's supervisor already, `run_id` is the run's id.
    """
    if given["yaml"] and not given["dry_run"]:
        raise JobError("--yaml belongs to --dry-run: together they print the job as a file that `paceline run` takes.")
    if file is not None:
        from paceline.job_files import job_file

        description = job_file.under(file, description)
    wanted = asked(description)
    if given["dry_run"]:
        from paceline.cli.dry_run import print_file, print_plan

        return print_file(wanted, description) if given["yaml"] else print_plan(wanted, as_json=given["as_json"])
    return _tell_or_follow(_submit(wanted, run_id), given, follow=follow)


@takes(*RERUN)
def rerun(**given: Any) -> int:
    """Submit a run's job again, with the same source and packages.

    Options change the job's arguments, target and size. The packages have the same exact versions. If you name a
    registered model, the run that made the model is repeated. Secrets come from your shell or from --env-file.
    """
    values, _ = read_env_files([Path(path) for path in given["env_file"] or ()])
    folder = rerun_job(
        folder_of(_run_meant(given["run_id"])),
        Workspace.from_config().path,
        changes=_changes(given),
        values=values,
        display_name=given["name"],
    )
    return _tell_or_follow(folder, given, follow=not given["detach"])


def _changes(given: Given) -> RerunChanges:
    lacking = JobError("--set takes NAME=VALUE, such as --set lr=0.1. `--unset NAME` leaves an option out.")
    parameters = dict(key_value(word, lacking) for word in given["set"] or ())
    nodes, processes = nodes_of(given["nodes"]) if given["nodes"] is not None else (None, None)
    return RerunChanges(
        parameters={**parameters, **dict.fromkeys(given["unset"] or ())},
        compute_target=given["compute"],
        node_count=nodes,
        process_count_per_node=processes,
        distributed_backend=given["backend"],
        resume=given["resume"],
    )


def _run_meant(text: str) -> str:
    """Return a run's id: `text`, or for a model's version `text` the run that made it."""
    if ":" not in text and "@" not in text:
        return text
    from paceline import models

    made = models.resolve(Workspace.from_config(create=False).path, text)
    if made.run_id is None:
        raise ModelError(
            f"{made.id} was registered without the run that made it (--made-by), so it can't be made again. "
            "`paceline list` shows the runs there are."
        )
    return made.run_id


def _submit(wanted: Asked, run_id: str | None) -> RunFolder:
    progress = _HashingProgress()
    folder = wanted.submit(Workspace.from_config().path, progress=progress, run_id=run_id)
    progress.clear()
    return folder


class _HashingProgress:
    """A terminal's progress line for copying the source, shown after half a second."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._shown = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        # \r moves to the beginning of the line, and \x1b[2K clears the line for the next text.
        if sys.stderr.isatty() and now - self._start > 0.5 and now - self._shown > 0.1:
            self._shown = now
            print(
                f"\r\x1b[2KCopying the source: {done / 2**20:.0f} of {total / 2**20:.0f} MiB",
                end="",
                file=sys.stderr,
                flush=True,
            )

    # Clear the line only if progress was printed on it: in a log file, the terminal codes would be visible.
    def clear(self) -> None:
        if self._shown:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def _tell_or_follow(folder: RunFolder, given: Given, *, follow: bool) -> int:
    if follow:
        return _follow(folder, as_json=given["as_json"], quiet=given["quiet"])
    run_id = folder.run_id
    for text in _not_copied(folder, read.record(folder)) if not given["quiet"] else ():
        print(text, file=sys.stderr)
    hints = f"Follow it:  paceline logs -f {run_id}\nSee it:     paceline status {run_id}\nEnd it:     paceline cancel {run_id}"
    return print_submitted(folder, hints, as_json=given["as_json"], quiet=given["quiet"])


def _not_copied(folder: RunFolder, record: RunRecord) -> list[str]:
    return linked.lines(linked.read(folder.linked), os.path.relpath(record.source_directory or "."))


def _follow(folder: RunFolder, *, as_json: bool, quiet: bool) -> int:
    record = read.record(folder)
    if as_json:
        # Reserve standard output for the JSON. Redirect it before RunView checks whether standard output is a terminal.
        sys.stdout, kept = sys.stderr, sys.stdout
    try:
        view = RunView(record.world_size, quiet=quiet, nodes=record.job.node_count if record.job else 1)
        view.say(_headline(folder, record))
        for text in _not_copied(folder, record):
            view.say(text)
        record, is_interrupted = _follow_with_interrupts(folder, view)
    finally:
        if as_json:
            sys.stdout = kept
    if not record.is_terminal:
        view.say(f"Detached. The run goes on; follow it with: paceline logs -f {folder.run_id}")
        return 0
    print_end(folder, record, view)
    if as_json:
        print_json(summary(folder))
    if is_interrupted and record.status == states.CANCELED:
        return 128 + signal.SIGINT
    return record.exit_code if record.exit_code is not None else 1


def _headline(folder: RunFolder, record: RunRecord) -> str:
    job = record.job
    assert job is not None
    if job.world_size == 1:
        shape = "1 process"
    elif job.distributed_backend == "ps":
        shape = f"{job.worker_count} workers, {job.parameter_server_count} parameter servers"
    else:
        count = range_text(*(job.node_range or (job.node_count,) * 2))
        nodes = f"{count} node{'s' * (job.node_count > 1)}"
        shape = f"{nodes} x {job.process_count_per_node} process{'es' * (job.process_count_per_node > 1)}"
    backend = f", {job.distributed_backend}" if job.distributed_backend else ""
    name = tags_and_properties.read(folder.notes).name
    called = f"{visible(name)} ({record.run_id})" if name else record.run_id
    return f"Run {called}: {' '.join(job.entry_words)} on {record.target}, {shape}{backend}"


def _follow_with_interrupts(folder: RunFolder, view: RunView) -> tuple[RunRecord, bool]:
    """Follow the run to its end. Return its record, and whether Ctrl-C canceled it.

    The first Ctrl-C asks whether to detach or cancel. A later Ctrl-C, or any without a terminal, cancels the run.
    """
    # Use a single `Show` object, because after an interrupt it continues with the line at which it stopped.
    following = Show(folder, line=view.line, state=view.state, note=view.note, attempt=view.attempt)
    asked = canceled = False
    with _Interrupts() as interrupts:
        while True:
            try:
                interrupts.let_one_through()
                return following.to_the_end(), canceled
            except KeyboardInterrupt:
                record = read.record(folder)
                # The run has ended meanwhile, so don't ask the user whether to cancel it.
                if record.is_terminal:
                    return record, canceled
                # An earlier interrupt has already canceled the run, so ignore this interrupt.
                if canceled:
                    continue
                # Without a terminal, Paceline can't ask the user. Then an interrupt cancels the run.
                if not asked and sys.stdin.isatty() and sys.stderr.isatty():
                    asked = True
                    answer = _ask(interrupts)
                    if answer == "d":
                        return record, False
                    if answer != "c":
                        continue
                read.request_cancel(folder, by=user_name(), reason="Ctrl-C")
                canceled = True
                view.say("Canceling; the workers have their grace period to end.")


class _Interrupts:
    """A handler of Ctrl-C that ignores Ctrl-C except when the program permits it.

    Each call of `let_one_through` permits one KeyboardInterrupt. So a second Ctrl-C can't interrupt the code for the first.
    """

    def __init__(self) -> None:
        self._through = False

    def __enter__(self) -> _Interrupts:
        # Replace Python's own handler, whose KeyboardInterrupt could come anywhere, even in the middle of a cancel request.
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def let_one_through(self) -> None:
        self._through = True

    def _handle(self, number: int, frame: object) -> None:
        if self._through:
            self._through = False
            raise KeyboardInterrupt


def _ask(interrupts: _Interrupts) -> str:
    """Ask whether to detach from the run or cancel it. Return the answer's first letter."""
    question = "\nInterrupted. [d]etach and let the run go on, [c]ancel it, or Enter to keep following? "
    try:
        # Let another Ctrl-C interrupt the question: the handler raises an exception only once for each call of this method.
        interrupts.let_one_through()
        print(question, end="", file=sys.stderr, flush=True)
        return sys.stdin.readline().strip().lower()[:1]
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return "c"
