"""sweep run, show, best, stop, more, again, resume: tune hyperparameters over runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.children import child
from paceline.cli.common import folder_of, print_fields, print_json, print_table, refuse, with_children
from paceline.cli.options import DETACH, JSON, VerbOption, takes
from paceline.cli.run_options import words
from paceline.cli.summary import print_submitted, summary
from paceline.cli.sweep_options import AGAIN, QUIET, SWEEP
from paceline.errors import SweepError
from paceline.job.job import Job
from paceline.job_files import job_file, sweep_file
from paceline.job_files.description import Asked, asked
from paceline.runs import read, states
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord, user_name
from paceline.runs.visible import visible, visible_line
from paceline.sweeps import live_trials, results, start, trial_runs, warm_start
from paceline.sweeps import live_trials as live
from paceline.sweeps.again import changed, submit_again
from paceline.sweeps.expressions import parse
from paceline.sweeps.live_trials import Standing
from paceline.sweeps.pictures import draw
from paceline.sweeps.pictures import png as pngs
from paceline.sweeps.points import ENVIRONMENT, WAYS, job_of, text_of, variable
from paceline.sweeps.policies.pausing import budget, pausing
from paceline.sweeps.samplers.samplers import Proposals
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.trial import SHOWN_PAUSED, Leg, Trial, ordered
from paceline.system.names import counted
from paceline.system.units import value_text
from paceline.workspace import Workspace

#: `sweep run --dry-run` prints at most this many points.
_SHOWN = 10

SWEEP_ID = VerbOption("run_id", "Sweep: its id, the beginning of it, or its name.", "RUN", needed=True)
ANY_SWEEP = VerbOption("run_id", "Sweep: its id, the beginning of it, or its name; default: the latest.", "[RUN]")
TOP = VerbOption("--top", "Only the best N trials; 0: all.", "N", int, default=0)
FOLLOW = VerbOption("-f --follow", "Follow the sweep until it ends.", type=bool)
HTML = VerbOption("--html", "Draw the present state into one HTML file.", "FILE", Path)
PNG = VerbOption("--png", "Draw the present state as PNG files into a folder; needs matplotlib.", "FOLDER", Path)
TRIALS = VerbOption("--trials", "Number of further trials.", "N", int, needed=True)


@takes(*SWEEP)
def run(**given: Any) -> int:
    """Run a script many times with different hyperparameters.

    Each trial is its own run, described by options of `paceline run`. Ctrl-C only stops following; the sweep goes on.
    """
    file, description = words(given)
    section: Any = {}
    if file is not None:
        description = job_file.under(file, description, sections=("sweep",))
        section = description.pop("sweep", {})
    section = sweep_file.checked_section(section, file)
    wanted, sweep = asked(description), sweep_file.spec(given, section, file, lambda run_id: folder_of(run_id).run_id)
    if given["dry_run"]:
        return _print_points(wanted, sweep, as_json=given["as_json"])
    folder = sweep_file.AskedSweep(**vars(wanted), spec=sweep).submit(Workspace.from_config().path)
    return _started(folder, as_json=given["as_json"], detach=given["detach"], quiet=given["quiet"])


def _started(folder: RunFolder, *, as_json: bool, detach: bool, quiet: bool) -> int:
    if detach:
        run_id = folder.run_id
        hints = f"See it:      paceline sweep show {run_id}\nThe best:    paceline sweep best {run_id}\n"
        return print_submitted(
            folder, f"{hints}End it:      paceline sweep stop {run_id}", as_json=as_json, quiet=quiet
        )
    return _follow(folder, as_json=as_json, quiet=quiet)


@takes(ANY_SWEEP, TOP, FOLLOW, HTML, PNG, JSON)
def show(*, run_id: str | None, top: int, follow: bool, html: Path | None, png: Path | None, as_json: bool) -> int:
    """Show a sweep's trials, the best first."""
    refuse(SweepError, (top < 0, f"--top must be 0 (all) or more, got {top}."))
    folder, record, sweep = _sweep(run_id)
    if html is not None or png is not None:
        return _draw(folder, sweep, html, png)
    if follow and not record.is_terminal:
        return _follow(folder, as_json=as_json, quiet=False, top=top)
    trials = trial_runs.trials(folder, sweep)
    # The number 0 means all trials: a slice that ends with None has no end.
    order = ordered(trials, sweep.goals)[: top or None]
    if as_json:
        runs = {"runs": results.lineage(trials, sweep)} if pausing(sweep.stop) else {}
        print_json({**summary(folder, record), "sweep": sweep.to_json(), "trials": results.rows(order, sweep), **runs})
        return 0
    paused = sum(trial.shown == SHOWN_PAUSED for trial in trials)
    over = sum(trial.is_over for trial in trials) - paused
    running = f"{len(trials) - over - paused} running{f', {paused} paused' if paused else ''}"
    print_fields(
        [
            ("Sweep", record.run_id),
            ("Status", record.status),
            ("Metric", "; ".join(f"{name}, to {goal}" for name, goal in zip(sweep.metrics, sweep.goals, strict=True))),
            ("Front", _front(trials, sweep) if sweep.further else ""),
            ("Knows", ", ".join(sweep.warm_start)),
            ("Trials", f"{over} of {sweep.trials} ended, {running}"),
            ("Waits for", record.waiting_for or ""),
            ("Why", record.failure.message if record.failure else ""),
            ("More", (record.failure.see or "") if record.failure else ""),
            *[("Warning", warning) for warning in record.warnings],
        ]
    )
    if order:
        print()
        _print_trials(order, sweep)
    return 0


def _draw(folder: RunFolder, sweep: SweepSpec, html: Path | None, png: Path | None) -> int:
    if png is not None and (why := draw.without_png()):
        raise SweepError(why)
    drawn = draw.sketched(f"Sweep {folder.run_id}", sweep, trial_runs.trials(folder, sweep))
    try:
        if html is not None:
            refuse(SweepError, (html.is_dir(), f"--html {str(html)!r} is a folder. Name a file, such as sweep.html."))
            draw.write_page(html, drawn)
            print(html)
        if png is not None:
            png.mkdir(parents=True, exist_ok=True)
            for path in pngs.write(drawn, png):
                print(path)
    except OSError as error:
        raise SweepError(f"the pictures can't be written: {error}. Name another place.") from error
    for remark in drawn.remarks:
        print(remark, file=sys.stderr)
    return 0


@takes(ANY_SWEEP, JSON)
def best(*, run_id: str | None, as_json: bool) -> None:
    """Show the best trial, or the Pareto front of several metrics."""
    folder, _, sweep = _sweep(run_id)
    all_best = results.best_trials(trial_runs.trials(folder, sweep), sweep)
    if not all_best:
        raise SweepError(f"no trial of {folder.run_id} has logged {' and '.join(map(repr, sweep.metrics))} yet.")
    if sweep.further:
        _print_front(all_best, sweep, as_json=as_json)
        return
    found = all_best[0]
    if as_json:
        print_json(results.best_row(found, sweep))
        return
    leg = found.best_leg(sweep.goal)
    print(leg.run_id)
    print(f"{sweep.metric} {found.best(sweep.goal):g}", *_said(leg), sep="\n", file=sys.stderr)


def _print_front(trials: Sequence[Trial], sweep: SweepSpec, *, as_json: bool) -> None:
    if as_json:
        print_json(results.rows(trials, sweep))
        return
    for trial in trials:
        print(trial.run_id)
        print(f"{visible(results.values_text(trial, sweep))}: {', '.join(_said(trial.legs[-1]))}", file=sys.stderr)


def _front(trials: Sequence[Trial], sweep: SweepSpec) -> str:
    numbers = [str(trial.number) for trial in results.best_trials(trials, sweep)]
    return f"trial{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}" if numbers else "no trial yet"


@takes(SWEEP_ID, JSON)
def stop(*, run_id: str, as_json: bool) -> None:
    """Stop a sweep. Its trials get a grace period, and keep their results."""
    folder, record, _ = _sweep(run_id)
    if not record.is_terminal:
        read.request_cancel(folder, by=user_name(), reason="paceline sweep stop")
    _told(folder, f"is {record.status if record.is_terminal else states.CANCEL_REQUESTED}.", as_json=as_json)


@takes(SWEEP_ID, TRIALS, JSON)
def more(*, run_id: str, trials: int, as_json: bool) -> None:
    """Add trials to a sweep, also to one that has ended."""
    folder, _, _ = _sweep(run_id)
    start.more(folder, trials)
    _told(folder, f"goes on. Follow it: paceline sweep show -f {folder.run_id}", as_json=as_json)


@takes(SWEEP_ID, *AGAIN, DETACH, JSON, QUIET)
def again(
    *,
    run_id: str,
    param: list[str],
    without: list[str],
    trials: int | None,
    concurrent: int | None,
    sampler: str | None,
    learn: bool,
    detach: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Start a new sweep from another, with a changed space. All other settings stay."""
    before, _, old = _sweep(run_id)
    changes = {name: parse(text) for name, text in sweep_file.params(param).items()}
    folder = submit_again(
        before,
        Workspace.from_config().path,
        space=changed(old.space, changes, without or ()),
        trials=trials,
        concurrent=concurrent,
        sampler=sampler,
        learn=learn,
    )
    return _started(folder, as_json=as_json, detach=detach, quiet=quiet)


@takes(SWEEP_ID, JSON)
def resume(*, run_id: str, as_json: bool) -> None:
    """Resume a sweep whose controller was killed."""
    # Reading the record is enough: if the sweep has no controller, `paceline.runs.read` restarts the controller.
    folder, record, _ = _sweep(run_id)
    _told(folder, f"is {record.status}.", as_json=as_json)


def _told(folder: RunFolder, what: str, *, as_json: bool) -> None:
    if as_json:
        print_json(summary(folder))
    else:
        print(f"{folder.run_id} {what}", file=sys.stderr)


def _sweep(run_id: str | None) -> tuple[RunFolder, RunRecord, SweepSpec]:
    folder, record = with_children(run_id, "sweep")
    return folder, record, SweepSpec.from_json(record.sweep or {})


def _print_points(wanted: Asked, sweep: SweepSpec, *, as_json: bool) -> int:
    workspace = Workspace.from_config(create=False)
    known = start.checked(wanted.job, sweep, wanted.source, workspace.path, wanted.experiment, wanted.values)
    sweep = known.spec
    proposals = Proposals(sweep, wanted.directory, warm_start.as_trials(known.results))
    points: list[dict[str, Any]] = []
    trials: list[Trial] = []
    for number in range(min(_SHOWN, sweep.trials)):
        # A dry run starts no trials, so the sampler proposes points without results of earlier trials.
        proposal = proposals.propose(number, trials)
        if proposal is None:
            break
        values = sweep.space.values(proposal.chosen)
        trials.append(Trial(number=number, run_id="", chosen=proposal.chosen, values=values, notes=proposal.notes))
        points.append(values)
    first = budget(sweep.stop)
    jobs = [
        job_of(wanted.job, {**values, **first}, sweep.pass_as, wanted.directory, sweep.switches) for values in points
    ]
    if as_json:
        print_json({"sweep": sweep.to_json(), "points": points, "arguments": [list(job.arguments) for job in jobs]})
        return 0
    size = sweep.space.size
    there = "no end of points" if size is None else counted(size, "point")
    print(f"{there}; the first {len(points)} of {sweep.trials} trials:", file=sys.stderr)
    for job, values in zip(jobs, points, strict=True):
        print(visible(_line(job, values, sweep.pass_as)))
    return 0


def _line(job: Job, values: Mapping[str, Any], pass_as: str) -> str:
    command = " ".join([*job.entry_words, *job.arguments])
    if pass_as == ENVIRONMENT:
        return " ".join([*(f"{variable(name)}={text_of(v)}" for name, v in values.items() if v is not None), command])
    return command if pass_as in WAYS else f"{command}  # {pass_as}: {json.dumps(json.loads(job.files[pass_as]))}"


def _follow(folder: RunFolder, *, as_json: bool, quiet: bool, top: int = _SHOWN) -> int:
    def line(text: str) -> None:
        if not quiet:
            print(visible_line(text), file=sys.stderr, flush=True)

    line(f"Sweep {folder.run_id}")
    try:
        # Show the live table on standard error, and erase it at the end. Then print the final table on standard output.
        record = child.follow_log(folder, line) if quiet else live.follow(folder, sys.stderr, line, stays=False)
    except KeyboardInterrupt:
        line(f"\n{live.way_back(folder)}")
        raise
    sweep = SweepSpec.from_json(record.sweep or {})
    trials = trial_runs.trials(folder, sweep)
    order = ordered(trials, sweep.goals)
    if as_json:
        print_json({**summary(folder, record), "sweep": sweep.to_json(), "trials": results.rows(order, sweep)})
    elif not quiet:
        _print_trials(order[: top or None], sweep)
        if top and len(order) > top:
            line(f"and {len(order) - top} more: paceline sweep show {folder.run_id}")
        for text in live_trials.lines(Standing(record=record, spec=sweep, trials=tuple(trials))):
            line(text)
        if (page := folder.outputs / draw.PAGE).exists():
            line(f"Pictures: {page}")
    if record.failure is not None and (quiet or as_json):
        print(visible(record.failure.message), file=sys.stderr)
    return record.exit_code if record.exit_code is not None else 1


def _print_trials(trials: Sequence[Trial], sweep: SweepSpec) -> None:
    names = live_trials.parameters(trials)
    print_table(live_trials.header(names, sweep), [live_trials.cells(trial, names, sweep) for trial in trials])


def _said(trial: Leg) -> list[str]:
    return [visible(f"{name.lstrip('-')} {value_text(value)}") for name, value in trial.values.items()]


verbs = {"run": run, "show": show, "best": best, "stop": stop, "more": more, "again": again, "resume": resume}
