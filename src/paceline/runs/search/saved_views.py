"""Named views that users keep in a workspace: lists of runs, comparisons, layouts of charts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import parse_qs

from paceline.errors import UserError
from paceline.runs.search.fields import quoted, split_fields
from paceline.system.files import names_in, read_json, write_json
from paceline.system.names import name_rule
from paceline.system.registry import NamedDocuments

#: Pages of `paceline ui` for which users can save views.
PAGES = ("runs", "compare", "run")
_NAME = name_rule(" ._-", 80)
#: Maximum size of a view's file in bytes, and maximum number of views to list.
_LARGEST, _MOST = 1 << 17, 1000


@dataclass(frozen=True, kw_only=True)
class SavedView:
    """A view of a page of `paceline ui` under a name.

    Args:
        name: An ASCII letter or digit, then letters, digits, spaces, `.`, `_` and `-`; at most 80 characters.
        page: "runs" (the list), "compare", or "run" (the charts of any run).
        query: Query of the page's address, such as "q=state%3Dfailed&sort=-created".
        layout: Pinned charts and folded sections of the page "run", as JSON; "" for other pages.

    Raises:
        UserError: A value breaks these rules.

    Examples:
        >>> SavedView(name="failed", query="q=metrics.loss+%3C+1&state=Failed").where
        '(metrics.loss < 1) and state = Failed'
    """

    name: str
    page: str = "runs"
    query: str = ""
    layout: str = ""

    def __post_init__(self) -> None:
        if not all(isinstance(value, str) for value in (self.name, self.page, self.query, self.layout)):
            raise UserError("a view has a name, a page, a query and a layout, all of them texts.")
        if not _NAME.fullmatch(self.name):
            raise UserError(
                f"the view's name {self.name!r} must begin with a letter or digit and have only letters, digits, spaces, "
                "'.', '_' and '-', at most 80 characters."
            )
        if self.page not in PAGES:
            raise UserError(f"page {self.page!r} of a view must be one of {', '.join(PAGES)}.")
        if len(self.query) + len(self.layout) > _LARGEST // 2:
            raise UserError(f"the view {self.name!r} is too long: {_LARGEST // 2} characters are the most.")
        if self.layout and not _is_layout(self.layout):
            raise UserError(f"the layout of the view {self.name!r} must be JSON with the lists 'pinned' and 'folded'.")

    @property
    def where(self) -> str:
        """The query text with the view's filters, as for `paceline list --where`."""
        parts = [f"({self._last('q')})"] if self._last("q") else []
        parts += [
            f"{name} = {quoted(value)}"
            for name in ("experiment", "state", "target", "user", "parent")
            if (value := self._last(name))
        ]
        for key, equals, value in (tag.partition("=") for tag in self._fields.get("tag", ())):
            parts.append(f"tags.{quoted(key)}" + (f" = {quoted(value)}" if equals and value else ""))
        return parts[0][1:-1] if len(parts) == 1 and self._last("q") else " and ".join(parts)

    @property
    def sort(self) -> str:
        """The field by which the list is sorted; "" for newest first."""
        return self._last("sort")

    @property
    def group(self) -> str:
        """The field by which the list is grouped; "" without groups."""
        return self._last("group")

    @property
    def columns(self) -> list[str]:
        """The fields that the user chose as columns; empty for the default columns."""
        names = (name.strip() for name in split_fields(self._last("columns")))
        # Skip "latest" and "tags": they are columns of the page, but not fields of a run.
        return [name for name in names if name and name not in ("latest", "tags")]

    @property
    def has_children(self) -> bool:
        """Whether the list has trials of sweeps and steps of pipelines."""
        return self._last("trials") == "1" or bool(self._last("parent"))

    @property
    def is_archived(self) -> bool:
        """Whether the list has only archived runs."""
        return self._last("archived") == "1"

    @property
    def _fields(self) -> dict[str, list[str]]:
        return parse_qs(self.query.removeprefix("?"))

    def _last(self, name: str) -> str:
        return self._fields.get(name, [""])[-1].strip()


def _is_layout(text: str) -> bool:
    try:
        layout = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(layout, dict) and all(isinstance(layout.get(key), list) for key in ("pinned", "folded"))


class SavedViews(NamedDocuments[SavedView]):
    """The views of a workspace by name, one JSON file each.

    `[name]` raises KeyError for an unknown name.

    Args:
        workspace_dir: The workspace's folder.

    Examples:
        >>> views = SavedViews(workspace_dir)
        >>> views.save(SavedView(name="failed", query="state=Failed"))
        >>> list(views)
        ['failed']
    """

    _error, _title, _advice = UserError, "view", "The page of `paceline ui` saves them."

    def __init__(self, workspace_dir: Path) -> None:
        self._folder = workspace_dir / "views"

    def save(self, view: SavedView, *, replace: bool = False) -> None:
        """Save a view under its name.

        Raises:
            UserError: The name is taken and `replace` is False, or the workspace can't be written.
        """
        if not replace and os.path.lexists(self._path(view.name)):
            raise UserError(f"a view {view.name!r} exists already. Choose another name, or replace it.")
        try:
            self._folder.mkdir(exist_ok=True)
            write_json(self._path(view.name), {"version": 1, **asdict(view)})
        except OSError as error:
            raise UserError(f"the view {view.name!r} can't be saved: {error.strerror}.") from error

    def rename(self, name: str, new_name: str) -> None:
        """Give a saved view another name.

        Raises:
            UserError: There is no such view, the new name is wrong or taken, or the workspace can't be written.
        """
        view = self.find(name)
        self.save(SavedView(**{**asdict(view), "name": new_name}))
        self.remove(name)

    def remove(self, name: str) -> None:
        """Remove a saved view from the workspace.

        Raises:
            UserError: There is no such view, or the workspace can't be written.
        """
        self.find(name)
        try:
            self._path(name).unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"the view {name!r} can't be removed: {error.strerror}.") from error

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def _names(self) -> Iterable[str]:
        stems = (name.removesuffix(".json") for name in names_in(self._folder) if name.endswith(".json"))
        return sorted(stems)[:_MOST]

    def _read(self, name: str) -> SavedView | None:
        if not _NAME.fullmatch(name):
            return None
        path = self._path(name)
        try:
            found = read_json(path) if path.stat().st_size <= _LARGEST else None
            if not isinstance(found, dict) or found.get("version") != 1:
                return None
            return SavedView(**{**{key: value for key, value in found.items() if key in _FIELDS}, "name": name})
        except (OSError, UserError, RecursionError):
            return None


_FIELDS = ("page", "query", "layout")
