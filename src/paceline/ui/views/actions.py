"""Changes of runs from the page: cancel, tag, rename, note, comment, archive, delete and restore."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from paceline.errors import PacelineError, RunNotFoundError, RunStateError
from paceline.rerun import rerun
from paceline.runs import read, tags_and_properties, trash
from paceline.runs.folder import RunFolder
from paceline.runs.ids import check_run_id
from paceline.runs.record import user_name
from paceline.runs.visible import visible
from paceline.ui import render
from paceline.ui.pieces import stamp_of
from paceline.ui.views import common
from paceline.ui.visitors import permit_runs

#: Maximum characters of a description, maximum runs in one request, and maximum runs on one page of the trash.
_LONGEST_NOTES, _MOST_RUNS, _TRASH_ROWS = 20_000, 200, 100


def routes() -> list[Route]:
    """Return the routes that change runs."""
    one = {
        "cancel": _cancel,
        "tag": _tag,
        "rename": _rename,
        "notes": _notes,
        "comment": lambda folder, form: tags_and_properties.add_comment(folder.notes, form.get("text", "")),
        # `permit` has already checked that the member is the comment's author or an admin. So skip the check in `remove_comment`.
        "uncomment": lambda folder, form: tags_and_properties.remove_comment(
            folder.notes, form.get("comment", ""), is_admin=True
        ),
        "archive": lambda folder, form: tags_and_properties.set_archived(folder.notes, "undo" not in form),
        "delete": lambda folder, form: trash.delete(folder.path.parent, [folder]),
    }
    return [
        *(Route(f"/runs/{{run_id}}/{name}", _changing(change), methods=["POST"]) for name, change in one.items()),
        Route("/runs/{run_id}/gone", _gone),
        Route("/actions", _bulk, methods=["POST"]),
        Route("/trash", _trash),
    ]


def _changing(change: Callable[[RunFolder, Mapping[str, str]], object]) -> Callable[[Request], object]:
    """Return a view that calls `change` with the run and the form of a request."""

    async def view(request: Request) -> Response:
        form, folder = await common.form_of(request), common.folder_of(request)
        try:
            await asyncio.to_thread(change, folder, form)
        except FileNotFoundError:
            raise RunNotFoundError(f"run {folder.run_id} was deleted meanwhile.") from None
        return RedirectResponse(f"../{folder.run_id}", 303)

    return view


def _cancel(folder: RunFolder, form: Mapping[str, str]) -> None:
    record = read.record(folder)
    if record.is_terminal:
        raise RunStateError(f"{folder.run_id} is {record.status} already.")
    read.request_cancel(folder, by=user_name())


def _tag(folder: RunFolder, form: Mapping[str, str]) -> None:
    """Set a tag (form fields `key`, `value`), or remove a tag (field `remove`)."""
    key, value, gone = common.tag_of(form)
    if gone:
        tags_and_properties.remove_tags(folder.notes, [gone])
    else:
        tags_and_properties.set_tags(folder.notes, {key: value})


def _rename(folder: RunFolder, form: Mapping[str, str]) -> None:
    name = form.get("name", "").strip()
    if len(name) > common.LONGEST_TAG:
        raise HTTPException(400, f"A name has at most {common.LONGEST_TAG} characters.")
    tags_and_properties.set_name(folder.notes, "display_name", name)


def _notes(folder: RunFolder, form: Mapping[str, str]) -> None:
    # A browser's text field ends lines with CR LF. Replace CR LF by LF.
    text = form.get("text", "").replace("\r\n", "\n")
    if len(text) > _LONGEST_NOTES:
        raise HTTPException(400, f"Notes have at most {_LONGEST_NOTES} characters, got {len(text)}.")
    # `was` is the stamp of the notes that the sender has read. If the form lacks this field, replace the notes without a check.
    if form.get("was") not in (None, stamp_of(tags_and_properties.read(folder.notes).description)):
        raise RunStateError(
            "somebody has changed these notes since you opened the page. Go back, copy your text, reload the page, and edit "
            "the new notes."
        )
    tags_and_properties.set_name(folder.notes, "description", text)


# --- routes that change many runs at once


@dataclass(frozen=True)
class _Bulk:
    """A change of many runs.

    done: A sentence about one changed run, and one about several runs. undo: The action that reverts the change, or "".
    """

    done: tuple[str, str]
    undo: str = ""


_BULK = {
    "archive": _Bulk(("1 run is archived.", "{} runs are archived."), "unarchive"),
    "unarchive": _Bulk(("1 run is listed again.", "{} runs are listed again."), "archive"),
    "delete": _Bulk(("1 run is in the trash for 7 days.", "{} runs are in the trash for 7 days."), "restore"),
    "restore": _Bulk(("1 run is restored.", "{} runs are restored.")),
    "tag": _Bulk(("1 run has the tag.", "{} runs have the tag."), "untag"),
    "untag": _Bulk(("The tag of 1 run is removed.", "The tag of {} runs is removed.")),
    "rerun": _Bulk(("1 run is submitted again.", "{} runs are submitted again.")),
    "cancel": _Bulk(("1 run is being canceled.", "{} runs are being canceled.")),
}


async def _bulk(request: Request) -> Response:
    """Change many runs. Form fields: `action`, `run` (several); for a tag `key`, `value`.

    If some runs can't be changed, change the other runs. The response then names the unchanged runs, with the reasons.
    """
    fields = await common.fields_of(request)
    form = {name: values[-1] for name, values in fields.items()}
    action, run_ids = form.get("action", ""), [*dict.fromkeys(fields.get("run", ()))]
    if action not in _BULK:
        raise HTTPException(400, f"action={action!r} is not a change of runs. There are {', '.join(_BULK)}.")
    common.refuse_unknown_fields(form, ("action", "run", "key", "value"))
    if not 0 < len(run_ids) <= _MOST_RUNS:
        raise HTTPException(400, f"Choose 1 to {_MOST_RUNS} runs, got {len(run_ids)}.")
    changed, failed = await asyncio.to_thread(_change_all, request, action, run_ids, form)
    bulk = _BULK[action]
    text = bulk.done[len(changed) != 1].format(len(changed)) if changed else "Nothing was changed."
    undo = bulk.undo if changed else ""
    result: render.TemplateValues = {
        "text": text,
        "done": changed,
        "failed": failed,
        "undo": undo,
        "key": form.get("key", "").strip(),
    }
    if "text/html" not in request.headers.get("accept", ""):
        return common.as_json(result)
    if action == "restore" and len(run_ids) == 1 and not failed:
        return RedirectResponse(f"runs/{run_ids[0]}", 303)
    return render.page(request, "done.html", **result)


def _change_all(
    request: Request, action: str, run_ids: Sequence[str], form: Mapping[str, str]
) -> tuple[list[str], list[dict[str, str]]]:
    """Change the runs. Return the changed runs' ids, and the unchanged runs' errors."""
    workspace_dir = request.app.state.workspace_dir
    change: dict[str, Callable[[RunFolder], object]] = {
        "archive": lambda folder: tags_and_properties.set_archived(folder.notes, True),
        "unarchive": lambda folder: tags_and_properties.set_archived(folder.notes, False),
        "delete": lambda folder: trash.delete(folder.path.parent, [folder]),
        "tag": lambda folder: _tag(folder, {"key": form.get("key", ""), "value": form.get("value", "")}),
        "untag": lambda folder: _tag(folder, {"remove": form.get("key", "")}),
        "rerun": lambda folder: rerun(folder, workspace_dir),
        "cancel": lambda folder: _cancel(folder, {}),
    }
    run_ids, failed = permit_runs(request, action, run_ids)
    if action == "delete":
        # Delete all runs by one call, which reads the runs' parents only once. If it fails, delete each run separately below.
        with contextlib.suppress(PacelineError, OSError):
            folders = [RunFolder(common.runs_dir(request) / check_run_id(run_id)) for run_id in run_ids]
            trash.delete(common.runs_dir(request), folders)
    changed: list[str] = []
    there = trash.deleted(workspace_dir) if action == "restore" else []
    for run_id in run_ids:
        try:
            if action == "delete" and trash.find(workspace_dir, run_id) is not None:
                pass
            elif action == "restore":
                trash.restore(workspace_dir, run_id, there)
            else:
                # Accept only complete ids: the page sends the complete ids of runs that the user has selected in a list.
                folder = RunFolder(common.runs_dir(request) / check_run_id(run_id))
                if not folder.path.is_dir():
                    raise RunNotFoundError("It was deleted meanwhile.")
                change[action](folder)
            changed.append(run_id)
        except (PacelineError, OSError) as error:
            failed.append({"run": run_id, "error": visible(str(error), lines=True)})
    return changed, failed


# --- routes of the trash


def deleted_page(request: Request) -> Response | None:
    """Return a deleted run's page; None for other runs."""
    run = _deleted(request) if "text/html" in request.headers.get("accept", "") else None
    if run is None:
        return None
    return render.page(request, "gone.html", 410, run=run)


def _deleted(request: Request) -> trash.DeletedRun | None:
    try:
        return trash.find(request.app.state.workspace_dir, request.path_params.get("run_id", ""))
    except PacelineError:
        return None


def _gone(request: Request) -> Response:
    """Return HTML for a page whose run was deleted meanwhile; 204 if the run exists."""
    if (common.runs_dir(request) / check_run_id(request.path_params["run_id"])).is_dir():
        return Response(status_code=204)
    return render.page(request, "gone_part.html", run=_deleted(request), run_id=request.path_params["run_id"])


def _trash(request: Request) -> Response:
    """Show the deleted runs. Query: `page`."""
    runs = trash.deleted(request.app.state.workspace_dir)
    pages = max(1, -(-len(runs) // _TRASH_ROWS))
    number = common.whole(request, "page", 1, least=1, most=pages)
    shown = runs[(number - 1) * _TRASH_ROWS : number * _TRASH_ROWS]
    return render.page(request, "trash.html", runs=shown, total=len(runs), page=number, pages=pages)
