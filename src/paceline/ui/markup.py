"""HTML from Markdown and from source code, with all foreign text escaped."""

from __future__ import annotations

import html
import os
from collections.abc import Callable, MutableMapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from paceline.runs.visible import visible

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

#: Maximum number of characters to show in colour. More coloured characters would take a browser long to draw.
_COLOURED = 1 << 17
#: Maximum characters of Markdown to render. For some texts, the rendering time grows with the square of the length.
RENDERED = 50_000
_WEB = ("http:", "https:", "mailto:")


def render_markdown(
    text: str,
    image: Callable[[str], str | None] | None = None,
    *,
    has_only_web_links: bool = False,
    longest: int | None = None,
) -> Markup:
    r"""Return the HTML of a Markdown text. HTML in the text is escaped.

    Args:
        text: Markdown, also from untrusted users.
        image: Gets an image's address. Returns the URL to load the image from, or None to show a link. By default all
            images become links, because loading an image from another site would tell that site who reads the text.
        has_only_web_links: Show links that are neither http, https nor mailto as text.
        longest: Maximum number of characters to show.

    Example:
        >>> render_markdown("*a* <b>")
        Markup('<p><em>a</em> &lt;b&gt;</p>\n')
    """
    html = _markdown(has_only_web_links).render(visible(text[:longest], lines=True), {"image": image})
    if longest is not None and len(text) > longest:
        html += f'<p class="note">The page shows the first {longest:,} of {len(text):,} characters.</p>'
    return Markup(html)


@cache
def _markdown(has_only_web_links: bool) -> MarkdownIt:
    from markdown_it import MarkdownIt

    made = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    if has_only_web_links:
        made.validateLink = lambda url: url.lower().startswith(_WEB)  # type: ignore[method-assign]
    made.add_render_rule("image", _image)
    made.add_render_rule("link_open", _link)
    return made


def _link(renderer: Any, tokens: Sequence[Token], at: int, options: Any, _: MutableMapping[str, Any]) -> str:
    tokens[at].attrSet("rel", "noreferrer noopener nofollow")
    return str(renderer.renderToken(tokens, at, options, {}))


def _image(_: Any, tokens: Sequence[Token], at: int, __: Any, env: MutableMapping[str, Any]) -> str:
    source, text = str(tokens[at].attrGet("src") or ""), tokens[at].content
    address = env["image"](source) if env.get("image") else None
    if address is not None:
        return f'<img class="whole" src="{html.escape(address)}" alt="{html.escape(text)}">'
    return f'<a href="{html.escape(source)}" rel="noreferrer noopener nofollow">{html.escape(text or source)}</a>'


def highlighted(text: str, name: str) -> str:
    """Return the HTML of source code with syntax highlighting.

    The language follows from the file's name. Return "" if it is unknown, the text is too long, or pygments is missing.

    Example:
        >>> highlighted("x = 1", "unknown.xyz")
        ''
    """
    try:
        from pygments import highlight
        from pygments.formatters import HtmlFormatter
        from pygments.lexers import get_lexer_for_filename
        from pygments.util import ClassNotFound
    except ImportError:
        return ""
    if len(text) > _COLOURED or name.lower().endswith((".txt", ".log")):
        return ""
    try:
        lexer = get_lexer_for_filename(os.path.basename(name), stripnl=False)
    except ClassNotFound:
        return ""
    made: str = highlight(visible(text, lines=True), lexer, HtmlFormatter(nowrap=True, classprefix="hl-"))
    return f'<pre class="file" tabindex="0">{made}</pre>'
