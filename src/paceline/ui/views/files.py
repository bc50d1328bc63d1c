"""The pages of a run's files: the tree, one file, and the bytes of files."""

from __future__ import annotations

import os

from starlette.convertors import PathConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from paceline.runs.folder import check_file_name
from paceline.ui import files, render, run_page
from paceline.ui.guard import POLICY
from paceline.ui.pieces import stamp_of
from paceline.ui.previews import FilePreview, preview
from paceline.ui.views import common

#: Content-Security-Policy of the page that shows one file, perhaps by a frame, a player or a notebook's pictures.
_POLICY = POLICY.replace("img-src 'self'", "img-src 'self' data:") + "; frame-src 'self'; media-src 'self'"


class _AnyName(PathConvertor):
    """A path parameter that may contain newlines, as names of files may."""

    regex = r"[\s\S]*"


register_url_convertor("any", _AnyName())


def routes() -> list[Route]:
    """Return the routes of a run's files."""
    top = "/runs/{run_id}"
    return [
        Route(f"{top}/files", _tree),
        Route(f"{top}/files/live", _tree_live),
        Route(f"{top}/folder/{{name:any}}", _tree),
        Route(f"{top}/folder-live/{{name:any}}", _tree_live),
        Route(f"{top}/look/{{name:any}}", _look),
        Route(f"{top}/file/{{name:any}}", _file),
        Route(f"{top}/frame/{{name:any}}", _frame),
        Route(f"{top}/zip", _archive),
        Route(f"{top}/zip/{{name:any}}", _archive),
    ]


def _tree(request: Request) -> Response:
    return common.page(request, "files", _find(request, "folder"))


async def _tree_live(request: Request) -> Response:
    return common.live(request, "files", _find(request, "folder-live"))


def _find(request: Request, part: str) -> common.Find:
    below = check_file_name(common.file_name(request, part)) if "name" in request.path_params else ""
    wanted = request.query_params.get("find", "").strip()
    return lambda folder, _: {"tree": files.tree(files.files_of(folder), below, wanted)}


def _look(request: Request) -> Response:
    folder = common.folder_of(request)
    file, name = files.opened(folder, common.file_name(request, "look"))
    head, kind = run_page.head(folder), files.kind_of(name)
    with file:
        size = os.fstat(file.fileno()).st_size
        seen: FilePreview = {"blocks": [], "notes": []}
        if kind == "other":
            seen = preview(file.fileno(), name, common.reader_check(request))
    place = f"head:{stamp_of(head)}"
    response = render.page(
        request, "run_look.html", tab="files", file=name, size=size, kind=kind, seen=seen, place=place, **head
    )
    response.headers["content-security-policy"] = _POLICY
    return response


def _file(request: Request) -> Response:
    return files.download(common.folder_of(request), common.file_name(request, "file"), request.headers)


def _frame(request: Request) -> Response:
    output = common.whole(request, "output", -1, least=-1)
    check_reader, name = common.reader_check(request), common.file_name(request, "frame")
    return files.frame(common.folder_of(request), name, None if output < 0 else output, check_reader)


def _archive(request: Request) -> Response:
    below = check_file_name(common.file_name(request, "zip")) if "name" in request.path_params else ""
    return files.archive(common.folder_of(request), below)
