"""The README as the package index shows it: links and pictures lead to the repository, at the version's tag.

hatchling reads it as a hook when it builds (pyproject.toml). `[project.urls]` has the repository's address.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
#: A link or a picture to a file of the repository.
_LINK = re.compile(r"(!?)(\[[^\]]*\]\()(?![a-z]+:|#)([^)\s]+)(?=\))")


class PackagePage(MetadataHookInterface):
    """Sets the field `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        page = with_absolute_links(text, metadata["urls"]["Source"], f"v{metadata['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": page}


def with_absolute_links(text: str, repository: str, tag: str) -> str:
    """Return the Markdown text with links to the repository's files as URLs. Blocks of code stay as they are."""

    def absolute(link: re.Match[str]) -> str:
        mark, label, name = link.groups()
        return f"{mark}{label}{repository}/{'raw' if mark else 'blob'}/{tag}/{name}"

    parts = _FENCE.split(text)
    parts[::2] = [_LINK.sub(absolute, part) for part in parts[::2]]
    return "".join(parts)
