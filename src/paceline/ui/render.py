"""Render pages from templates, with foreign text escaped and its control characters visible."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from dataclasses import replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

from jinja2 import Environment, FileSystemBytecodeCache, FileSystemLoader, StrictUndefined, bccache
from markupsafe import Markup, escape
from starlette.requests import Request
from starlette.responses import HTMLResponse

from paceline.data.transfer.progress import size_text
from paceline.runs import states
from paceline.runs.metrics import json_safe
from paceline.runs.record import duration_text
from paceline.runs.search.facts import HANGS, utc_of
from paceline.runs.visible import visible
from paceline.system.files import gone_is_fine, make_own, state_folder
from paceline.system.units import value_text
from paceline.ui.bundle import SHARED, STATIC, classic, styles
from paceline.ui.markup import RENDERED, render_markdown
from paceline.ui.visitors import may_change, shown_forms, visitor_of

#: Name -> value that a template displays. Only the template knows the types of the values, so they are Any.
TemplateValues: TypeAlias = "dict[str, Any]"

HERE = Path(__file__).parent
#: Seconds to sleep after compiling a template in advance, so that other threads can run.
_PAUSE_S = 0.02

#: State of a run -> (CSS class, sign). The sign identifies the state for readers who can't distinguish colours.
_SIGNS = {
    states.COMPLETED: ("good", "✓"),
    states.FAILED: ("bad", "✕"),
    states.CANCELED: ("stopped", "■"),
    states.RUNNING: ("running", "▶"),
    states.CANCEL_REQUESTED: ("stopped", "■"),
    states.NOT_RESPONDING: ("bad", "?"),
    HANGS: ("bad", "!"),
}


@cache
def static_version() -> str:
    """Return a hash of the static files, for URLs that browsers may cache."""
    digest = hashlib.sha256()
    for path in (*sorted(STATIC.iterdir()), *SHARED.values()):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:10]


def root_of(path: str) -> str:
    """Return the relative path from a page to the top page, such as "../"."""
    return "../" * (path.count("/") - 1) or "./"


def page(request: Request, template: str, status: int = 200, **values: Any) -> HTMLResponse:
    """Return a response with a page rendered from this template."""
    return HTMLResponse(text(request, template, **values), status)


def is_shared(request: Request) -> bool:
    """Return whether a request came by a share link instead of the token."""
    return "paceline.share" in request.scope


def text(request: Request, template: str, **values: Any) -> str:
    """Render the template of a page, or of a part of a page.

    Besides `values`, a template gets `root`, the relative path to the page of all runs, and `ui`, a `Heading`.
    """
    root = root_of(request.scope["path"])
    heading, by_link, visitor = request.app.state.ui, is_shared(request), visitor_of(request)
    if by_link:
        # Hide forms and the workspace's path from a visitor who uses a share link.
        heading = replace(heading, workspace=heading.workspace_name, is_shared=True)
        heading = replace(heading, read_only=True, can_start=False, can_share=False)
    else:
        heading = replace(heading, visitor=visitor, **shown_forms(request, heading.read_only, values.get("record")))
    values |= {"root": root, "static": f"{root}static/{static_version()}/", "ui": heading}
    values["may_change"] = partial(may_change, request)
    # A page that a browser opens contains its style and theme, so that its first picture waits for no other request.
    is_opened = request.headers.get("sec-fetch-mode") == "navigate"
    values["inlined"] = [Markup(one.text) for one in (classic("theme.js"), styles("ui.css"))] if is_opened else []
    key = "" if by_link else request.app.state.token.form_key(visitor.name)
    return _templates().get_template(template).render(form_key=key, **values)


def part(template: str, **values: Any) -> str:
    """Render a template with only `values`, not `root` and `ui`."""
    return _templates().get_template(template).render(**values)


def compile_templates() -> None:
    """Compile all templates in advance, with pauses for other threads."""
    for name in _templates().list_templates(extensions=["html"]):
        _templates().get_template(name)
        time.sleep(_PAUSE_S)


@cache
def _templates() -> Environment:
    made = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
        bytecode_cache=_compiled_templates(),
    )
    made.filters |= {
        "duration": lambda seconds: "" if seconds is None else duration_text(seconds),
        "size": lambda count: "" if count is None else size_text(count),
        "time": time_tag,
        "moment": lambda seconds: time_tag(utc_of(seconds)),
        "sign": lambda status: _SIGNS.get(status, ("waiting", "…"))[1],
        "tone": lambda status: _SIGNS.get(status, ("waiting", "…"))[0],
        "json_text": lambda value: json.dumps(json_safe(value), indent=2, ensure_ascii=False),
        "code": code_html,
        "number": lambda value: "" if value is None else value_text(value),
        "urlpath": lambda name: quote(os.fsencode(str(name)), safe="/"),
        "notes": lru_cache(256)(partial(render_markdown, has_only_web_links=True, longest=RENDERED)),
        "lines": lambda text: str(text).splitlines(),
    }
    made.globals |= {"terminal": states.TERMINAL}
    return made


class _CompiledTemplates(FileSystemBytecodeCache):
    """A folder of compiled templates, so that later servers need not compile them."""

    def dump_bytecode(self, bucket: bccache.Bucket) -> None:
        # On a full disk, later servers compile the templates again.
        with gone_is_fine():
            super().dump_bytecode(bucket)


def _compiled_templates() -> _CompiledTemplates | None:
    folder = state_folder() / "templates"
    with gone_is_fine():
        # The compiled templates are code, so the folder must belong to this user alone.
        if folder.is_absolute():
            folder.parent.mkdir(parents=True, exist_ok=True)
            make_own(folder)
            return _CompiledTemplates(str(folder))
    return None


def _shown(value: object) -> Any:
    if value is None:
        return ""
    if isinstance(value, Markup):
        return value
    return visible(value, lines=True) if isinstance(value, str) else value


def time_tag(utc: str | None) -> Markup:
    """Return HTML for a UTC time, shown in the browser's time zone."""
    if not utc:
        return Markup("")
    plain = str(utc)[:16].replace("T", " ")
    return Markup('<time datetime="{}">{} UTC</time>').format(str(utc), plain)


def code_html(text: str) -> Markup:
    """Return HTML for a text with `code` in backticks."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))
