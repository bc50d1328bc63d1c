"""Templates: job files that a workspace keeps by name."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import JobError
from paceline.system.names import name_rule
from paceline.system.registry import Documents, NamedDocuments

_NAME = name_rule("._-", 80)


@dataclass(frozen=True, kw_only=True)
class Template:
    """A job file that a workspace keeps.

    Attributes:
        path: Path of the original file. Relative paths in `text` start from its folder.
        text: The file's text.
    """

    name: str
    path: Path
    text: str


class Templates(NamedDocuments[Template]):
    """The templates of a workspace by name.

    `[name]` raises KeyError for an unknown name.

    Args:
        workspace_dir: The workspace's folder.

    Examples:
        >>> templates = Templates(workspace_dir)
        >>> templates.save("nightly", "job.yaml")
        >>> list(templates)
        ['nightly']
    """

    _error, _title, _advice = JobError, "template", "`paceline template add NAME job.yaml` keeps one."

    def __init__(self, workspace_dir: Path) -> None:
        self._documents = Documents(workspace_dir / "templates", _NAME)

    def save(self, name: str, path: str | os.PathLike[str], *, replace: bool = False) -> Template:
        """Store a copy of a job file under a name.

        Args:
            name: Name of the template: a letter or digit, then letters, digits, `.`, `_` and `-`; at most 80 characters.
            path: The job file.
            replace: Replace a template of this name.

        Raises:
            JobError: The name is wrong or taken, or the file can't be read.
        """
        if not _NAME.fullmatch(name):
            raise JobError(
                f"the template's name {name!r} must begin with a letter or digit and have only letters, digits, '.', '_' "
                "and '-', at most 80 characters."
            )
        file = Path(os.path.abspath(path))
        try:
            made = Template(name=name, path=file, text=file.read_text(encoding="utf-8"))
        except OSError as error:
            raise JobError(f"{str(path)!r} can't be read: {error.strerror}.") from error
        except UnicodeDecodeError:
            raise JobError(f"{str(path)!r} is not UTF-8. Save it as UTF-8.") from None
        document = {"version": 1, "path": str(made.path), "text": made.text}
        try:
            self._documents.put(name, document) if replace else self._documents.add(name, document)
        except FileExistsError:
            raise JobError(f"a template {name!r} exists already. Choose another name, or replace it.") from None
        except OSError as error:
            raise JobError(f"the template {name!r} can't be saved: {error.strerror}.") from error
        return made

    def remove(self, name: str) -> None:
        """Remove a template.

        Raises:
            JobError: There is no such template, or the workspace can't be written.
        """
        self.find(name)
        try:
            self._documents.remove(name)
        except OSError as error:
            raise JobError(f"the template {name!r} can't be removed: {error.strerror}.") from error

    def _names(self) -> Iterable[str]:
        return self._documents.names()

    def _read(self, name: str) -> Template | None:
        found = self._documents.read(name) if _NAME.fullmatch(name) else None
        # Other programs may write a shared folder, so a damaged document counts as missing.
        if not isinstance(found, dict) or not all(isinstance(found.get(key), str) for key in ("path", "text")):
            return None
        return Template(name=name, path=Path(found["path"]), text=found["text"])
