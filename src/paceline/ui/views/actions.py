"""Actions of a page: end a run, submit it again, rename and tag it. By the command line's functions, and their rules."""

from __future__ import annotations

import asyncio
from urllib.parse import parse_qs

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from paceline.errors import RunStateError
from paceline.rerun import rerun as rerun_job
from paceline.runs import read, tags_and_properties
from paceline.runs.record import user_name
from paceline.runs.stacks import take
from paceline.runs.visible import visible
from paceline.ui.views.common import folder_of

#: Of a tag and its value, so many characters.
_LONGEST = 500


async def cancel(request: Request) -> Response:
    await _form(request)
    folder = folder_of(request)

    def ask() -> None:
        record = read.record(folder)
        if record.is_terminal:
            raise RunStateError(f"{folder.run_id} is {record.status} already.")
        read.request_cancel(folder, by=user_name())

    await asyncio.to_thread(ask)
    return RedirectResponse(f"../{folder.run_id}", 303)


async def stacks(request: Request) -> Response:
    """Show where each worker of the run is now, as `paceline stacks` does."""
    await _form(request)
    found = await asyncio.to_thread(take, folder_of(request))
    return PlainTextResponse(visible(str(found), lines=True))


async def rerun(request: Request) -> Response:
    await _form(request)
    folder = folder_of(request)
    made = await asyncio.to_thread(rerun_job, folder, request.app.state.workspace_dir)
    return RedirectResponse(f"../{made.run_id}", 303)


async def tag(request: Request) -> Response:
    """Set a tag (`key`, `value`), or take one away (`remove`)."""
    form = await _form(request)
    folder = folder_of(request)
    key, value, gone = (form.get(name, "").strip() for name in ("key", "value", "remove"))
    if max(len(key), len(value)) > _LONGEST:
        raise HTTPException(400, f"A tag and its value have at most {_LONGEST} characters each.")
    if gone:
        await asyncio.to_thread(tags_and_properties.remove_tags, folder.notes, [gone])
    else:
        await asyncio.to_thread(tags_and_properties.set_tags, folder.notes, {key: value or None})
    return RedirectResponse(f"../{folder.run_id}", 303)


async def rename(request: Request) -> Response:
    """Give the run another name (`name`)."""
    form = await _form(request)
    folder, name = folder_of(request), form.get("name", "").strip()
    if len(name) > _LONGEST:
        raise HTTPException(400, f"A name has at most {_LONGEST} characters.")
    await asyncio.to_thread(tags_and_properties.set_name, folder.notes, "display_name", name)
    return RedirectResponse(f"../{folder.run_id}", 303)


async def _form(request: Request) -> dict[str, str]:
    """The fields of a form that one of this server's pages has sent.

    Raises:
        HTTPException: it is no such form (403), or this server only shows (403).
    """
    if request.app.state.config.read_only:
        raise HTTPException(403, "This server only shows runs: it was started with --read-only.")
    # By hand: a form of three fields needs no parser of uploads, which would be one more package.
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/x-www-form-urlencoded":
        raise HTTPException(415, "A form is sent as application/x-www-form-urlencoded.")
    fields = parse_qs((await request.body()).decode("utf-8", "replace"), keep_blank_values=True)
    form = {name: values[-1] for name, values in fields.items()}
    if not request.app.state.token.is_form_key(form.get("form_key", "")):
        raise HTTPException(
            403, "This form is not of a page of this server, or of one from before its token changed. Open it anew."
        )
    return form
