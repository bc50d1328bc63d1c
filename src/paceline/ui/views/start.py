"""Start runs from the page: rerun a run with changes, or submit a job file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from paceline.errors import PacelineError, UserError
from paceline.job.job import BACKENDS
from paceline.job.sizes import range_text
from paceline.rerun import Parameter, RerunChanges, changed, has_checkpoints, parameters, rerun
from paceline.runs import read, states
from paceline.runs.folder import RunFolder
from paceline.runs.search.facts import RunFacts
from paceline.runs.search.index import RunIndex
from paceline.runs.visible import visible
from paceline.targets import configured
from paceline.ui import render
from paceline.ui.views.common import PATIENCE_S, folder_of, form_of, refuse_read_only, refuse_unknown_fields

#: Prefix of the form fields for the script's options. An option can then have the name of any other form field.
_OPTION = "option:"
_FIELDS = (
    *("display_name", "compute_target", "node_count", "process_count_per_node", "distributed_backend"),
    *("arguments", "resume"),
)
#: Maximum number of job files that the page lists. To find them, the server reads at most ten times as many YAML files.
_MOST_FILES = 100
#: Maximum number of earlier runs that fill in the form, of earlier runs whose options the form has, of values per option.
_EARLIER, _EARLIER_OPTIONS, _EARLIER_VALUES = 200, 5, 8


def routes() -> list[Route]:
    """Return the routes that start runs."""
    return [
        Route("/runs/{run_id}/rerun", _again),
        Route("/runs/{run_id}/rerun", _start_again, methods=["POST"]),
        Route("/new", _new),
        Route("/new", _start_new, methods=["POST"]),
    ]


# --- routes that start a run with the job of an earlier run


def _again(request: Request) -> Response:
    """Show the form that reruns a run with changes."""
    refuse_read_only(request)
    folder = folder_of(request)
    earlier = _earlier(request, folder)
    return _form(request, folder, _options(folder, earlier), earlier, {}, {})


def _earlier(request: Request, folder: RunFolder) -> list[RunFacts]:
    index: RunIndex = request.app.state.index
    index.refresh_within(PATIENCE_S)
    own = index.get(folder.run_id)
    if own is None:
        return []
    of = (own.experiment, own.script)
    alike = (
        facts
        for facts in index.entries()
        if (facts.experiment, facts.script) == of and facts is not own and facts.kind == "script"
    )
    return list(islice(alike, _EARLIER))


def _options(folder: RunFolder, earlier: Sequence[RunFacts]) -> list[Parameter]:
    """Return options for the rerun form: the run's options, then options of earlier runs.

    Options that only earlier runs have get the value None.
    """
    found = {option.name: option for option in parameters(folder)}
    for facts in earlier[:_EARLIER_OPTIONS]:
        # Skip an earlier run that was removed.
        with contextlib.suppress(PacelineError, OSError):
            for option in parameters(RunFolder(folder.path.with_name(facts.run_id))):
                found.setdefault(option.name, replace(option, value=None))
    return list(found.values())


def _values(option: Parameter, earlier: Sequence[RunFacts]) -> list[str]:
    name = option.name.lstrip("-")
    values = dict.fromkeys(str(facts.given[name]) for facts in earlier if name in facts.given)
    return list(values)[:_EARLIER_VALUES]


def _form(
    request: Request,
    folder: RunFolder,
    options: list[Parameter],
    earlier: Sequence[RunFacts],
    given: Mapping[str, str],
    errors: Mapping[str, str],
) -> Response:
    record = read.record(folder)
    job = record.job
    assert job is not None, "its options were read"
    job_values = {
        "compute_target": job.compute_target,
        "node_count": range_text(*job.node_range) if job.node_range else str(job.node_count),
        "process_count_per_node": str(job.process_count_per_node),
        "distributed_backend": job.distributed_backend or "",
        "arguments": "",
        "display_name": "",
        "resume": "",
    }
    targets = configured.names(request.app.state.workspace_dir)
    return render.page(
        request,
        "again.html",
        422 if errors else 200,
        run_id=folder.run_id,
        options=[
            (option, given.get(_OPTION + option.name, option.value), _values(option, earlier)) for option in options
        ],
        values={**job_values, **given},
        errors={name: visible(text, lines=True) for name, text in errors.items()},
        targets=targets if job.compute_target in targets else [*targets, job.compute_target],
        backends=["", *BACKENDS],
        has_servers=job.distributed_backend == "ps",
        has_checkpoints=has_checkpoints(folder),
        has_failed=record.status == states.FAILED,
        command=shlex.join([*job.entry_words, *job.arguments]),
    )


async def _start_again(request: Request) -> Response:
    form, folder = await form_of(request), folder_of(request)
    return await asyncio.to_thread(_submit_again, request, folder, form)


def _submit_again(request: Request, folder: RunFolder, form: Mapping[str, str]) -> Response:
    earlier = _earlier(request, folder)
    options = _options(folder, earlier)
    refuse_unknown_fields(form, (*_FIELDS, *(_OPTION + option.name for option in options)))
    job = read.record(folder).job
    assert job is not None, "its options were read"
    errors: dict[str, str] = {}
    changes = RerunChanges()
    try:
        changes = RerunChanges(
            parameters=_changed_options(options, form),
            arguments=shlex.split(form.get("arguments", "")),
            compute_target=form.get("compute_target") or None,
            node_count=form.get("node_count", "").strip() or None,
            process_count_per_node=None if job.worker_count else form.get("process_count_per_node", "").strip() or None,
            distributed_backend=form.get("distributed_backend"),
            resume="resume" in form,
        )
    except ValueError as error:
        errors["arguments"] = f"the arguments can't be split into words: {error}. Close the quotes"
    workspace_dir = request.app.state.workspace_dir
    errors |= changed(folder, job, changes, workspace_dir)[1]
    if not errors:
        try:
            name = form.get("display_name", "").strip() or None
            made = rerun(folder, workspace_dir, changes=changes, display_name=name)
            return RedirectResponse(f"../{made.run_id}", 303)
        except UserError as error:
            # The target, or another check before the submission, has refused the job. So no run has started.
            errors["job"] = str(error)
    return _form(request, folder, options, earlier, form, errors)


def _changed_options(options: list[Parameter], form: Mapping[str, str]) -> dict[str, str | None]:
    """Return a form's changed options as {name: value}; None removes an option."""
    found: dict[str, str | None] = {}
    for option in options:
        # A form from an older version of the page may lack a field for this option.
        given = form.get(_OPTION + option.name)
        if given is not None and given != (option.value or ""):
            found[option.name] = given or None
    return found


# --- routes that start a run from a job file


def _new(request: Request) -> Response:
    """Show the form for a job file (query `file`)."""
    refuse_read_only(request)
    files = _job_files(_project_of(request))
    chosen = request.query_params.get("file", "")
    if chosen and chosen not in files:
        raise HTTPException(
            404, f"{chosen!r} is not a job file of this project. There are {', '.join(files) or 'none'}."
        )
    text = (_project_of(request) / chosen).read_text(encoding="utf-8", errors="replace") if chosen else ""
    return render.page(
        request, "new.html", files=files, chosen=chosen, text=text, error="", folder=str(_project_of(request))
    )


def _project_of(request: Request) -> Path:
    workspace_dir: Path = request.app.state.workspace_dir
    return workspace_dir.parent


def _job_files(project: Path) -> list[str]:
    found = []
    for pattern in ("*.y*ml", "*/*.y*ml"):
        for path in sorted(project.glob(pattern))[: 10 * _MOST_FILES]:
            name = path.relative_to(project).as_posix()
            if name.startswith(".") or path.suffix not in (".yaml", ".yml") or not path.is_file():
                continue
            try:
                with path.open(encoding="utf-8") as file:
                    text = file.read(1 << 16)
            except (OSError, ValueError):
                continue
            if any(line.startswith(("entry_script:", "entry_module:")) for line in text.splitlines()):
                found.append(name)
    return found[:_MOST_FILES]


async def _start_new(request: Request) -> Response:
    form = await form_of(request)
    refuse_unknown_fields(form, ("text", "chosen"))
    return await asyncio.to_thread(_submit_file, request, form)


def _submit_file(request: Request, form: Mapping[str, str]) -> Response:
    from paceline.job_files import description, job_file

    project, text, chosen = _project_of(request), form.get("text", ""), form.get("chosen", "")
    files = _job_files(project)
    # Relative paths start from the folder of the chosen job file. For a pasted job file they start from the project's folder.
    path = project / (chosen if chosen in files else "job.yaml")
    try:
        asked = description.asked(job_file.read(path, text=text), request.app.state.workspace_dir)
        made = asked.submit(request.app.state.workspace_dir)
        return RedirectResponse(f"runs/{made.run_id}", 303)
    except PacelineError as error:
        said = visible(str(error).replace(repr(os.fspath(path)), "The file"), lines=True)
    return render.page(request, "new.html", 422, files=files, chosen=chosen, text=text, error=said, folder=str(project))
