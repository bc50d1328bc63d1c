"""status, list, show, rename, note, comment, tag, archive: runs, their states and notes."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.common import (
    age,
    coloured,
    columns,
    folder_of,
    folders_of,
    has_colour,
    pairs_text,
    print_fields,
    print_json,
    print_table,
    state_colour,
    state_named,
)
from paceline.cli.options import JSON, LATEST_RUN, NAMED_RUN, NAMED_RUNS, VerbOption, takes
from paceline.cli.run_options import pairs
from paceline.cli.summary import command_text, data_texts, details, environment_text, summary
from paceline.data.transfer.progress import size_text
from paceline.errors import QueryError, UserError
from paceline.job.sizes import range_text
from paceline.observe import loads
from paceline.runs import excluded_files, read, removal, states, store, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.ids import experiment_of, is_trial
from paceline.runs.read import matches
from paceline.runs.record import Attempt, RunRecord, duration_text, hang_status, parse_utc, utc_now
from paceline.runs.search.facts import RunFacts
from paceline.runs.search.fields import STATISTICS, RunField, cell_text, field_of, quoted, split_fields
from paceline.runs.search.groups import RunGroup, grouped
from paceline.runs.search.index import facts_of, find_runs
from paceline.runs.search.query import parse
from paceline.runs.search.summaries import main_metric
from paceline.runs.visible import visible
from paceline.system import linked
from paceline.system.files import tree_size
from paceline.system.names import did_you_mean, some
from paceline.system.units import value_text
from paceline.targets import configured
from paceline.workspace import Workspace

if TYPE_CHECKING:
    from paceline.cli.outputs import GitState

_SHOWN = 25
#: `show` prints at most this many values of a list: the last values.
_LAST_VALUES = 5
#: `show` prints the load of at most this many workers. `top` shows all workers.
_RANKS = 16
#: `list` shows at most this many columns of parameters, and at most this many characters in a cell.
_PARAMS, _LONGEST_CELL = 6, 48


@takes(LATEST_RUN, JSON)
def status(*, run_id: str | None, as_json: bool) -> None:
    """Show the state of a run."""
    folder = folder_of(run_id)
    found = summary(folder)
    if as_json:
        print_json(found)
        return
    word = "in" if found["status"] in states.TERMINAL else "for"
    took = f" {word} {duration_text(found['duration_s'])}" if found["duration_s"] is not None else ""
    name = f" ({visible(found['display_name'])})" if found["display_name"] != found["run_id"] else ""
    record = store.stored(folder)
    state = hang_status(record) if found["status"] == record.status else found["status"]
    print(f"{found['run_id']}{name}  {_coloured_state(state)}{took}")
    if state != found["status"]:
        print(visible(record.hang["text"] if record.hang else "", lines=True))
        print(f"See all stacks: paceline stacks {found['run_id']}")
    if found["size"]:
        print(found["size"][0].upper() + found["size"][1:])
    if found["waiting_for"]:
        print(visible(found["waiting_for"], lines=True))
    for text in excluded_files.lines(store.stored(folder)):
        print(f"Left out: {visible(text)}")
    if found["failure"]:
        print(visible(found["failure"]["message"], lines=True))
    for warning in found["warnings"]:
        print(f"Warning: {visible(warning, lines=True)}")


@takes(
    VerbOption("-e --experiment", "Only runs of this experiment.", "NAME", complete="experiments"),
    VerbOption("--status", "Only runs in this state, such as Running.", "STATE", complete="run_states"),
    VerbOption("--tag", "Only runs with this tag; may be repeated.", "KEY[=VALUE]", list, complete="tags"),
    VerbOption("--where", "Only runs that match a query, such as 'metrics.acc > 0.9 state=failed'.", "QUERY"),
    VerbOption(
        "--view", "List the runs of a view that the page has saved, with its order, columns and groups.", "NAME"
    ),
    VerbOption("--sort", "Sort by a field, such as metrics.acc.best or -created, which is descending.", "FIELD"),
    VerbOption("--columns", "Show these fields, such as name,params.lr,metrics.acc.", "FIELD,..."),
    VerbOption(
        "--group", "One line for each value of a field, with the mean, deviation and count of the columns.", "FIELD"
    ),
    VerbOption("-n --limit", "Most runs to list, newest first.", "N", int, least=1, default=_SHOWN),
    VerbOption("--all", "List all runs.", type=bool, name="everything"),
    VerbOption("--trials", "List the trials of sweeps and the steps of pipelines, too.", type=bool),
    VerbOption("--archived", "Only archived runs, which the list leaves out.", type=bool),
    VerbOption("-l --long", "Show the backend, tags, and the size on disk.", type=bool),
    JSON,
)
def list_runs(
    *,
    experiment: str | None,
    status: str | None,
    tag: list[str],
    where: str | None,
    view: str | None,
    sort: str | None,
    columns: str | None,
    group: str | None,
    limit: int,
    everything: bool,
    trials: bool,
    archived: bool,
    long: bool,
    as_json: bool,
) -> None:
    """List the workspace's runs, newest first."""
    if status is not None:
        status = state_named(status)
    workspace = Workspace.from_config(create=False)
    runs_dir = workspace.runs_dir
    removal.sweep(runs_dir)
    if view is not None:
        saved = workspace.views.find(view)
        where = " and ".join(f"({text})" for text in (saved.where, where) if text)
        sort, group = sort or saved.sort, group or saved.group or None
        # With --group, the first column shows the value that the grouped runs share, so leave out the column of names.
        first = [] if group else ["name"]
        columns = columns or ",".join([*first, *saved.columns] if saved.columns else ())
        trials, archived = trials or saved.has_children, archived or saved.is_archived
    # `--tag key=` and `--tag key` both select runs that have the tag with any value.
    tags: dict[str, Any] = {key: value or None for key, _, value in (word.partition("=") for word in tag or ())}
    fields, by = _listed("--columns", columns), _listed("--group", group)
    facts = _find(runs_dir, where, sort, trials=trials) if where or sort else {}
    records = read.records_of(runs_dir, facts) if where or sort else read.all_records(runs_dir, trials=trials)
    found = (
        (record, folder)
        for record in records
        for folder in [RunFolder(runs_dir / record.run_id)]
        if (experiment is None or record.experiment == experiment)
        and matches(
            record,
            folder,
            status=status,
            tags=tags,
            children=True,
            archived=None if "archived" in (where or "") else archived,
        )
    )
    # Read only the records that are shown: a workspace may have ten thousand runs, of which `list` shows 25.
    shown = list(found if everything or by else islice(found, limit))
    facts = facts or facts_of(runs_dir, [record.run_id for record, _ in shown])
    of_shown = [facts[record.run_id] for record, _ in shown if record.run_id in facts]
    if by:
        _print_groups(of_shown, by[0], fields, sort or "", as_json=as_json)
        return
    if as_json:
        sizes = [{"size_bytes": tree_size(folder.path)} if long else {} for _, folder in shown]
        print_json(
            [
                {**_summary(folder, record, facts.get(record.run_id)), **size}
                for (record, folder), size in zip(shown, sizes, strict=True)
            ]
        )
        return
    if not shown:
        names = (experiment_of(run_id) for run_id in store.ids(runs_dir))
        meant = did_you_mean(experiment or "", dict.fromkeys(filter(None, names)))
        print(
            f"No {'such ' if experiment or status or tag or where or archived else ''}runs in {runs_dir.parent}.{meant}"
        )
        return
    if fields:
        print_table([field.name for field in fields], [[cell_text(one, field) for field in fields] for one in of_shown])
        return
    differing = _differing(of_shown)
    lines: list[tuple[str, ...]] = [
        ("RUN", "NAME", "STATUS", "SIZE", "CREATED", "TOOK", "SCRIPT", *map(visible, differing), "METRIC"),
        *(_row(record, facts.get(record.run_id), differing) for record, _ in shown),
    ]
    # Leave out the column TARGET if all runs are on this machine, as is usual.
    targets = ["TARGET", *(record.target or "-" for record, _ in shown)]
    if set(targets[1:]) - {configured.LOCAL, "-"}:
        lines = [(*line[:3], target, *line[3:]) for line, target in zip(lines, targets, strict=True)]
    if long:
        more = [("BACKEND", "DISK", "TAGS"), *(_more(folder, record) for record, folder in shown)]
        lines = [(*line, *cells) for line, cells in zip(lines, more, strict=True)]
    print_table(lines[0], lines[1:])
    # Count the runs by their ids, without reading their records.
    total = sum(trials or not is_trial(run_id) for run_id in store.ids(runs_dir))
    # If the user filters the runs, don't print how many more match, because this would require reading all records.
    if (
        not everything
        and len(shown) == limit
        and total > limit
        and not (experiment or status or tag or where or archived)
    ):
        print(f"... and {total - limit} older ones (--all)")


def _find(runs_dir: Path, where: str | None, sort: str | None, *, trials: bool) -> dict[str, RunFacts]:
    """Return the runs that match the query `where`, sorted by the field `sort`, by id."""
    for text, check in ((where or "", parse), ((sort or "").removeprefix("-"), field_of)):
        try:
            check(text) if text else None
        except QueryError as error:
            raise UserError(error.pointed(text)) from error
    return {facts.run_id: facts for facts in find_runs(runs_dir, where or "", sort or "", children=trials)}


def _listed(option: str, names: str | None) -> list[RunField]:
    try:
        return [field_of(name.strip()) for name in split_fields(names or "")]
    except QueryError as error:
        raise UserError(f"{option}: {error.problem} Expected: {error.expected}.") from error


def _summary(folder: RunFolder, record: RunRecord, facts: RunFacts | None) -> dict[str, object]:
    """Return the JSON of a run in `list`. Without `facts`, the parameters and metric summaries are None."""
    found = summary(folder, record)
    facts_json: dict[str, object] = dict.fromkeys(("script", "params", "main_metric", "metric_summaries", "resources"))
    if facts is not None:
        # `summary` reads only the ends of the logs. There a metric may be missing, or its value may be from an earlier attempt.
        found["latest_metrics"] |= {name: one.last for name, one in facts.metrics.items()}
        numbers = {
            name: {statistic: getattr(one, statistic) for statistic in STATISTICS}
            for name, one in facts.metrics.items()
        }
        facts_json |= {
            "script": facts.script,
            "params": dict(facts.params),
            "main_metric": main_metric(facts.metrics),
            "metric_summaries": numbers,
            "resources": dict(facts.resources),
        }
    return {**found, **facts_json}


def _differing(runs: Sequence[RunFacts]) -> list[str]:
    """Return up to `_PARAMS` parameters that differ between runs, the most frequent first."""
    counts = Counter(name for facts in runs for name in facts.params)
    differ = [name for name, _ in counts.most_common() if len({facts.params.get(name) for facts in runs}) > 1]
    return differ[:_PARAMS]


def _print_groups(
    runs: Sequence[RunFacts], by: RunField, fields: Sequence[RunField], sort: str, *, as_json: bool
) -> None:
    """Print groups of runs with equal `by`. `fields` are the columns, by default duration and main metric."""
    main = next(filter(None, (main_metric(facts.metrics) for facts in runs)), None)
    shown = list(fields) or [field_of(name) for name in ("duration", *([f"metrics.{quoted(main)}"] if main else []))]
    groups = grouped(runs, by, sort)
    if as_json:
        print_json(
            [
                {
                    "value": group.value,
                    "runs": [facts.run_id for facts in group.runs],
                    "columns": {
                        field.name: asdict(found) if (found := group.spread(field)) is not None else None
                        for field in shown
                    },
                }
                for group in groups
            ]
        )
        return
    rows = [[group.text, str(len(group.runs)), *(_group_cell(group, field) for field in shown)] for group in groups]
    print_table([by.name, "RUNS", *(field.name for field in shown)], rows)


def _group_cell(group: RunGroup, field: RunField) -> str:
    found = group.spread(field)
    if found is not None:
        return found.text(duration_text if field.kind == "duration" else value_text)
    return cell_text(group.runs[0], field) if group.common(field) is not None else "-"


@takes(NAMED_RUN, VerbOption("name", "The new display name.", "NAME", needed=True))
def rename(*, run_id: str, name: str) -> None:
    """Give a run another display name. Its id stays."""
    if not name.strip():
        raise UserError(f"NAME {name!r} is empty. Write a name, such as brave-otter-12.")
    folder = folder_of(run_id)
    tags_and_properties.set_name(folder.notes, "display_name", name)
    print(f"{folder.run_id} ({visible(name)})")


@takes(
    LATEST_RUN,
    VerbOption(
        "text", "The new notes, in Markdown; - reads them from standard input. Default: print the notes.", "[TEXT]"
    ),
)
def note(*, run_id: str | None, text: str | None) -> None:
    """Write notes on a run in Markdown, or print them."""
    folder = folder_of(run_id)
    if text is None:
        print(visible(tags_and_properties.read(folder.notes).description or "", lines=True))
        return
    tags_and_properties.set_name(folder.notes, "description", sys.stdin.read() if text == "-" else text)


@takes(
    LATEST_RUN,
    VerbOption("text", "The text of a new comment. Default: print all comments.", "[TEXT]"),
    VerbOption("--remove", "Remove the comment with this id.", "ID"),
    JSON,
)
def comment(*, run_id: str | None, text: str | None, remove: str | None, as_json: bool) -> None:
    """Comment on a run, or print its comments."""
    if text is not None and remove is not None:
        raise UserError("TEXT adds a comment, and --remove removes one. Give one of them.")
    folder = folder_of(run_id)
    if remove is not None:
        tags_and_properties.remove_comment(folder.notes, remove)
    if text is not None:
        tags_and_properties.add_comment(folder.notes, text)
    comments = [*tags_and_properties.read(folder.notes).comments.values()]
    if as_json:
        print_json([asdict(comment) for comment in comments])
        return
    for comment in comments:
        print(visible(f"{comment.id}  {comment.author}  {comment.time_utc[:16].replace('T', ' ')} UTC"))
        print("".join(f"    {line}\n" for line in visible(comment.text, lines=True).splitlines()), end="")


@takes(
    NAMED_RUN,
    VerbOption("tags", "Tags to set.", "[KEY[=VALUE]]...", list),
    VerbOption("--remove", "Tag to remove; may be repeated.", "KEY", list),
)
def tag(*, run_id: str, tags: list[str], remove: list[str]) -> None:
    """Set or remove tags of a run, and print its tags."""
    folder = folder_of(run_id)
    tags_and_properties.remove_tags(folder.notes, remove)
    tags_and_properties.set_tags(folder.notes, pairs("tag", tags))
    print(visible(pairs_text(tags_and_properties.read(folder.notes).tags)))


@takes(NAMED_RUNS, VerbOption("--undo", "List the runs again.", type=bool))
def archive(*, run_ids: list[str], undo: bool) -> None:
    """Leave runs out of lists. Their records, logs and files stay."""
    for folder in folders_of(run_ids):
        tags_and_properties.set_archived(folder.notes, not undo)
        print(f"{folder.run_id}: {'listed again' if undo else 'archived'}")


@takes(LATEST_RUN, JSON)
def show(*, run_id: str | None, as_json: bool) -> None:
    """Show a run: its job, attempts, metrics, files, and failure."""
    folder = folder_of(run_id)
    found = details(folder)
    if as_json:
        print_json(found)
        return
    record = read.record(folder)
    took = f", {duration_text(record.duration_s)}" if record.duration_s is not None else ""
    lines: list[tuple[str, str | Sequence[str]]] = [
        ("Run", record.run_id),
        ("Name", found["display_name"] if found["display_name"] != record.run_id else ""),
        ("Status", f"{hang_status(record)}{took}" + (f" (exit code {record.exit_code})" if record.exit_code else "")),
        ("Waits for", record.waiting_for or ""),
        ("Hang", _hang(record)),
        ("Canceled by", record.canceled_by or ""),
        ("Warnings", record.warnings),
        ("Experiment", record.experiment),
        ("Submitted", f"{record.created_utc} by {record.submitted_by}"),
        ("Parent", record.parent_run_id or ""),
        ("Step", (record.step or {}).get("name") or ""),
        ("Steps", _steps(folder, record)),
        ("Reused from", (record.step or {}).get("reused_from") or ""),
        ("From", (record.trial or {}).get("from") or ""),
        ("Why", (record.trial or {}).get("why") or ""),
        ("Size", _size(record)),
        ("Elastic", record.size or ""),
        ("Target", record.target or ""),
        ("Command", command_text(record)),
        ("Environment", environment_text(record.job, found["environment"])),
        ("Data", data_texts(found["data"])),
        ("Source", record.source_directory or ""),
        ("Git", _git(found["git"])),
        ("Tags", pairs_text(found["tags"])),
        ("Notes", (tags_and_properties.read(folder.notes).description or "").splitlines()),
        ("Properties", pairs_text(found["properties"])),
        *_load(folder, record, found["load"]),
        ("Attempts", _attempts(record.attempts) if len(record.attempts) > 1 else ""),
        ("Models", ", ".join(found["models"])),
        ("Not copied", [visible(linked.text_of(one)) for one in linked.read(folder.linked)]),
        ("Left out", excluded_files.lines(record, limit=excluded_files.LIMIT)),
        ("Disk", size_text(found["size_bytes"])),
        ("Folder", str(folder.path)),
    ]
    print_fields(lines, Status=state_colour(record.status))
    if found["metrics"]:
        print("\nMetrics:")
        for name, value in found["metrics"].items():
            print(f"  {visible(name)}: {visible(_metric_text(value))}")
    if found["files"]:
        print("\nFiles:")
        for name in _folded(found["files"]):
            print(f"  {visible(name)}")
    if record.failure is not None:
        print(f"\nFailure ({record.failure.cause}):\n{visible(str(record.failure), lines=True)}")


def _folded(names: Sequence[str]) -> Iterator[str]:
    """Yield file names. Merge more than 16 names with different numbers: `logs/rank_*.log (512 files)`."""
    patterns = [re.sub(r"(.*?)\d+(\D*)$", r"\1*\2", name, flags=re.DOTALL) for name in names]
    counts = Counter(patterns)
    yield from dict.fromkeys(
        name if counts[pattern] <= 16 else f"{pattern} ({counts[pattern]:,} files)"
        for pattern, name in zip(patterns, names, strict=True)
    )


def _steps(folder: RunFolder, record: RunRecord) -> Sequence[str]:
    if record.pipeline is None:
        return ""
    from paceline.pipelines import pipeline_run

    return [
        f"{row['number']}  {row['step']}  {row['status']}{'  ' + row['run_id'] if row['run_id'] else ''}"
        + (f"  reused from {row['reused_from']}" if row["reused_from"] else "")
        for row in pipeline_run.rows(folder, record)
    ]


def _attempts(attempts: Sequence[Attempt]) -> Sequence[str]:
    has_changed = len({attempt.world_size for attempt in attempts}) > 1
    return [_attempt(attempt, has_changed=has_changed) for attempt in attempts]


def _attempt(attempt: Attempt, *, has_changed: bool) -> str:
    nodes = some(attempt.nodes, 4)
    end = parse_utc(attempt.ended_utc or utc_now())
    took = duration_text(max(0.0, (end - parse_utc(attempt.started_utc)).total_seconds()))
    how = f"runs for {took}" if attempt.ended_utc is None else f"{attempt.cause or 'completed'} after {took}"
    why = f"  ({visible(attempt.reason)})" if has_changed and attempt.reason and attempt.number > 1 else ""
    size = f" ({attempt.world_size} workers)" if has_changed and attempt.world_size else ""
    return f"{attempt.number}  {attempt.started_utc}  {how}{f'  on {nodes}{size}' if nodes else ''}{why}"


def _row(record: RunRecord, facts: RunFacts | None, names: Sequence[str]) -> tuple[str, ...]:
    main = None if facts is None else main_metric(facts.metrics)
    return (
        record.run_id,
        (facts.name if facts else "") or "-",
        hang_status(record),
        _size(record),
        age(record.created_utc),
        duration_text(record.duration_s) if record.duration_s is not None else "-",
        _cut(facts.script if facts else "") or "-",
        *(_cut(value_text(facts.params.get(name) if facts else None)) for name in names),
        _cut(f"{main}={value_text(facts.metrics.value(main))}") if facts and main else "-",
    )


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_CELL else f"{text[: _LONGEST_CELL - 3]}..."


def _hang(record: RunRecord) -> Sequence[str]:
    return [str(record.hang["text"]), f"all of it: {record.hang['report']}"] if record.hang else ""


def _load(
    folder: RunFolder, record: RunRecord, sample: Mapping[str, Any] | None
) -> list[tuple[str, str | Sequence[str]]]:
    if sample is None:
        return []
    is_over = record.is_terminal
    if is_over:
        sample = loads.whole(folder, sample)
    head = loads.NODE_HEADER
    nodes = [
        ", ".join(
            f"{name.lower()} {cell}" if name != "NODE" else cell
            for name, cell in zip(head, row, strict=True)
            if cell != "-"
        )
        for row in loads.node_rows(sample)
    ]
    ranks = columns(loads.shown_columns(loads.RANK_HEADER, loads.rank_rows(sample)))
    more = [f"and {len(ranks) - 1 - _RANKS} more: paceline top {record.run_id}"] if len(ranks) - 1 > _RANKS else []
    time = loads.pace_lines(sample, is_over=is_over)
    return [("Load", nodes), ("Workers", [*ranks[: _RANKS + 1], *more] if sample["ranks"] else ""), ("Time", time)]


def _more(folder: RunFolder, record: RunRecord) -> tuple[str, str, str]:
    backend = (record.job.distributed_backend or "-") if record.job else "-"
    return backend, size_text(tree_size(folder.path)), pairs_text(tags_and_properties.read(folder.notes).tags)


def _size(record: RunRecord) -> str:
    job = record.job
    if job is None:
        return "-"
    if job.distributed_backend == "ps":
        return f"{job.worker_count}+{job.parameter_server_count} on {job.node_count}"
    if record.size and record.attempts:
        # An elastic run may change its number of nodes. Show the last number first, then the range, such as "3x2 of 2..4".
        return f"{len(record.attempts[-1].nodes)}x{job.process_count_per_node} of {range_text(*(job.node_range or (1, 1)))}"
    return job.size_text


def _git(git: GitState) -> str:
    if not git:
        return ""
    commit = str(git.get("commit", "no commit yet"))[:12]
    return f"{commit}{' on ' + str(git['branch']) if git.get('branch') else ''}{' with changes' if git.get('dirty') else ''}"


def _metric_text(value: Any) -> str:
    if isinstance(value, list) and len(value) > _LAST_VALUES:
        return f"{len(value)} values, last {', '.join(map(str, value[-_LAST_VALUES:]))}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_metric_text(item)}" for key, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _coloured_state(state: str) -> str:
    import sys

    return coloured(state, state_colour(state), has_colour(sys.stdout))
