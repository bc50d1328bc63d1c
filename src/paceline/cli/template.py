"""template add, list, show, remove: job files that the workspace keeps by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.common import print_fields, print_json, print_list
from paceline.cli.options import JSON, VerbOption, takes
from paceline.errors import JobError
from paceline.job.secret_values import looks_secret
from paceline.job.template import Template
from paceline.job_files import job_file
from paceline.job_files.parameters import found_in
from paceline.runs.visible import visible
from paceline.workspace import Workspace

if TYPE_CHECKING:
    from paceline.cli.outputs import TemplateDetails, TemplateRow

NAME = VerbOption("name", "The template.", complete="templates", needed=True)


@takes(
    VerbOption("name", "Name of the template.", needed=True),
    VerbOption("file", "The job file (.yaml), whose text the workspace keeps.", type=Path, needed=True),
    VerbOption("--replace", "Replace a template of this name.", type=bool),
)
def add(*, name: str, file: Path, replace: bool) -> None:
    """Keep a job file by name, for `paceline run --template NAME`."""
    path = file.absolute()
    node = job_file.composed(path)
    parameters = found_in(path, node)
    _refuse_secrets(file, node)
    # Check the file now if all of its parameters have defaults. Otherwise it can only be checked when it runs.
    if all(one.default is not None for one in parameters.values()):
        job_file.read(path, sections=("sweep",))
    Workspace.from_config().templates.save(name, path, replace=replace)
    takes = f" It takes {', '.join(parameters)}." if parameters else ""
    print(f"Template {name} is kept.{takes} Run it with: paceline run --template {name}")


def _refuse_secrets(file: Path, node: object) -> None:
    pairs = [value for key, value in getattr(node, "value", ()) if key.value == "environment_variables"]
    for mapping in pairs:
        for entry in mapping.value if isinstance(mapping.value, list) else ():
            name, value = entry if isinstance(entry, tuple) else (entry, entry)
            if isinstance(value.value, str) and looks_secret(str(name.value), value.value):
                raise JobError(
                    f"{str(file)!r}: the value of {name.value} looks like a secret, which a template would keep for all "
                    f"readers of the workspace. Write `secrets: [{name.value}]` instead."
                )


@takes(JSON)
def list_templates(*, as_json: bool) -> None:
    """List the templates of the workspace."""
    found = [*Workspace.from_config(create=False).templates.values()]
    print_list(
        found,
        {
            "TEMPLATE": lambda one: one.name,
            "PARAMETERS": lambda one: ", ".join(_parameters(one)) or "-",
            "FILE": lambda one: str(one.path),
        },
        as_json=as_json,
        to_json=_row,
        none="There is no template. `paceline template add NAME job.yaml` keeps one.",
    )


@takes(NAME, JSON)
def show(*, name: str, as_json: bool) -> None:
    """Print a template's text and parameters."""
    template = Workspace.from_config(create=False).templates.find(name)
    if as_json:
        found: TemplateDetails = {**_row(template), "text": template.text}
        print_json(found)
        return
    defaults = [
        f"{key} = {value}" if value is not None else f"{key}, to be given"
        for key, value in _parameters(template).items()
    ]
    print_fields([("Template", template.name), ("File", str(template.path)), ("Parameters", defaults)])
    print(f"\n{visible(template.text.rstrip(), lines=True)}")


@takes(NAME)
def remove(*, name: str) -> None:
    """Remove a template. Its file and runs stay."""
    Workspace.from_config(create=False).templates.remove(name)
    print(f"Template {name} is removed.")


def _row(template: Template) -> TemplateRow:
    return {"name": template.name, "path": str(template.path), "parameters": _parameters(template)}


def _parameters(template: Template) -> dict[str, str | None]:
    found = found_in(template.path, job_file.composed(template.path, template.text))
    return {name: one.default for name, one in found.items()}


verbs = {"add": add, "list": list_templates, "show": show, "remove": remove}
