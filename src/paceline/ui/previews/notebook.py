"""Blocks of a Jupyter notebook (https://nbformat.readthedocs.io): cells and outputs, never scripts."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping

from paceline.ui.markup import highlighted, render_markdown
from paceline.ui.previews import FilePreview, PreviewBlock

#: Maximum number of a notebook's cells, of its outputs in HTML, and of characters of one text.
_CELLS, _FRAMES, _CHARS = 500, 50, 20_000
_PICTURES = ("image/png", "image/jpeg", "image/gif", "image/webp", "image/svg+xml")
_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")


def notebook(content: object, output: int | None) -> FilePreview:
    """Return the preview of a Jupyter notebook.

    Args:
        content: The notebook's JSON.
        output: Return only the HTML output of this number, counted from 0; None for all blocks.

    Raises:
        ValueError: The content is not a notebook of version 4.

    Example:
        >>> notebook({"cells": [{"cell_type": "raw", "source": "a"}]}, None)["blocks"]
        [{'kind': 'text', 'text': 'a'}]
    """
    about = _mapping(content)
    cells = about.get("cells")
    if not isinstance(cells, list):
        raise ValueError("a notebook of version 4 has a list of cells")
    language = _mapping(_mapping(about.get("metadata")).get("language_info")).get("file_extension")
    frames: list[str] = []
    blocks = [block for cell in cells[:_CELLS] for block in _cell(_mapping(cell), str(language or ".py"), frames)]
    if output is not None:
        return {"blocks": [{"kind": "html", "html": frames[output]}], "notes": []}
    notes = [f"The page shows the first {_CELLS} of {len(cells):,} cells."] if len(cells) > _CELLS else []
    if frames:
        notes.append("Scripts of the notebook do not run here. Download the notebook for interactive outputs.")
    return {"blocks": blocks, "notes": notes}


def _cell(cell: Mapping[str, object], language: str, frames: list[str]) -> Iterator[PreviewBlock]:
    source = _text(cell.get("source"))
    if cell.get("cell_type") == "markdown":
        yield {"kind": "html", "html": f'<div class="card markdown">{render_markdown(source)}</div>'}
        return
    html = highlighted(source, f"cell{language}") if cell.get("cell_type") == "code" else ""
    if html:
        yield {"kind": "html", "html": html}
    elif source:
        yield {"kind": "text", "text": source}
    outputs = cell.get("outputs")
    for one in outputs if isinstance(outputs, list) else []:
        yield from _output(_mapping(one), frames)


def _output(output: Mapping[str, object], frames: list[str]) -> Iterator[PreviewBlock]:
    data = _mapping(output.get("data"))
    for kind in _PICTURES:
        if kind in data and (source := _picture(kind, _text(data[kind]))):
            yield {"kind": "picture", "source": source}
            return
    if "text/html" in data and len(frames) < _FRAMES:
        frames.append(_text(data["text/html"], most=1 << 24))
        yield {"kind": "frame", "output": len(frames) - 1}
        return
    text = _text(data.get("text/plain") or output.get("text"))
    if output.get("output_type") == "error":
        traceback = output.get("traceback")
        text = "\n".join(map(str, traceback)) if isinstance(traceback, list) else _text(output.get("evalue"))
    if text:
        yield {"kind": "text", "title": "Output", "text": _COLOURS.sub("", text)[:_CHARS]}


def _picture(kind: str, text: str) -> str | None:
    if kind == "image/svg+xml":
        text = base64.b64encode(text.encode("utf-8", "replace")).decode()
    try:
        base64.b64decode(text, validate=False)
    except binascii.Error:
        return None
    return f"data:{kind};base64,{''.join(text.split())}"


def _text(value: object, most: int = 1 << 22) -> str:
    text = "".join(map(str, value)) if isinstance(value, list) else value if isinstance(value, str) else ""
    return text[:most]


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}
