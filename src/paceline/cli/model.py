"""model register, list, show, alias, update, diff, download, verify, delete, push, pull: registered models."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.cli.common import (
    age,
    folder_of,
    key_value,
    pairs_text,
    print_fields,
    print_json,
    print_list,
    print_table,
    refuse,
    warn,
)
from paceline.cli.options import JSON, YES, VerbOption, takes
from paceline.cli.remove import confirmed
from paceline.cli.run_options import pairs
from paceline.data.transfer.progress import Meter, size_text, terminal_bar
from paceline.errors import ModelChangedError, ModelError, ModelNotFoundError
from paceline.models import check, compare, described, mlflow_registry, on_store, registry
from paceline.models.model import Model, register_of_run, remove
from paceline.models.names import check_version, parse
from paceline.runs.visible import visible
from paceline.system.names import counted, did_you_mean, some
from paceline.workspace import Workspace

#: Without --tensors, `model show` lists at most this many tensors.
_TENSORS = 8
_DECLINED = _CHANGED = 1

_COLUMNS: dict[str, Callable[[Model], str]] = {
    "MODEL": lambda model: model.id,
    "ALIASES": lambda model: ", ".join(model.aliases) or "-",
    "FRAMEWORK": lambda model: " ".join(filter(None, (model.framework, model.framework_version))) or "-",
    "SIZE": lambda model: size_text(model.record.size_bytes),
    "RUN": lambda model: model.run_id or "-",
    "REGISTERED": lambda model: age(model.created_utc),
}

REFERENCE = VerbOption("reference", "NAME, NAME:VERSION or NAME@ALIAS.", "MODEL", complete="models", needed=True)
REFERENCES = VerbOption("references", "NAME:VERSION or NAME@ALIAS.", "MODEL...", list, complete="models", needed=True)
NAME = VerbOption("name", "The model's name.", complete="model_names", needed=True)
TAGS = VerbOption("--tag", "Tag; may be repeated.", "KEY[=VALUE]", list)


@takes(
    NAME,
    VerbOption("path", "A local file or folder, or with --run its name in the run; default: NAME."),
    VerbOption("--run", "Register a file or folder of this run.", "RUN", complete="run_ids"),
    VerbOption("--made-by", "PATH is local, but this run made it.", "RUN", complete="run_ids"),
    TAGS,
    VerbOption("--property", "Property, which can't change later; may be repeated.", "KEY=VALUE", list, name="prop"),
    VerbOption("--description", "Description of the model.", "TEXT"),
    VerbOption("--framework", "Framework, such as sklearn; default: detected from the files and the run."),
    VerbOption("--framework-version", "", "VERSION"),
    JSON,
)
def register(
    *,
    name: str,
    path: str | None,
    run: str | None,
    made_by: str | None,
    tag: list[str],
    prop: list[str],
    description: str | None,
    framework: str | None,
    framework_version: str | None,
    as_json: bool,
) -> None:
    """Register a file or a folder as a model's next version. Equal content is stored once."""
    refuse(ModelError, (run is not None and made_by is not None, "--run and --made-by: give one of the two."))
    given: dict[str, Any] = {
        "tags": pairs("--tag", tag),
        "properties": dict(
            key_value(word, ModelError(f"--property {word!r} is not KEY=VALUE.")) for word in prop or ()
        ),
        "description": description,
        "model_framework": framework,
        "model_framework_version": framework_version,
        "progress": terminal_bar("reading"),
    }
    if run is not None:
        folder = folder_of(run)
        model = register_of_run(Workspace(folder.path.parent.parent), folder, name, path, **given)
    else:
        maker = folder_of(made_by).run_id if made_by is not None else None
        model = Model.register(Workspace.from_config(), path if path is not None else name, name, run=maker, **given)
    if as_json:
        print_json(described.summary(model))
        return
    print(model.id)
    record = model.record
    print(
        f"{counted(len(record.files), 'file')}, {size_text(record.size_bytes)}{_framework(model)}\n"
        f"See it:      paceline model show {model.id}\nPoint at it: paceline model alias {model.name} production "
        f"{model.version}",
        file=sys.stderr,
    )
    _warn_of_pickles(model)


@takes(
    VerbOption("name", "Only versions of this model.", complete="model_names"),
    VerbOption("--latest", "Only the latest version of each model.", type=bool),
    VerbOption("--run", "Only models of this run.", "RUN", complete="run_ids"),
    TAGS,
    VerbOption("--at", "Models in this datastore instead of the workspace.", "STORE[:PATH]", complete="datastores"),
    JSON,
)
def list_models(
    *, name: str | None, latest: bool, run: str | None, tag: list[str], at: str | None, as_json: bool
) -> None:
    """List the workspace's models with their versions, newest first."""
    if at is not None:
        _list_at(at, as_json=as_json)
        return
    workspace = Workspace.from_config(create=False)
    run_id = folder_of(run).run_id if run is not None else None
    tags = [key if value is None else (key, value) for key, value in pairs("--tag", tag).items()]
    found = Model.list(workspace, name, tags=tags, run_id=run_id, latest=latest)
    none = f"No {'such ' if name or run or tag else ''}models in {workspace.path}."
    print_list(found, _COLUMNS, as_json=as_json, to_json=described.summary, none=none)


@takes(REFERENCE, VerbOption("--tensors", "Show all tensors of safetensors files.", type=bool), JSON)
def show(*, reference: str, tensors: bool, as_json: bool) -> None:
    """Show a model version: its files, and the run that made it."""
    model = Model(Workspace.from_config(create=False), reference)
    found = described.details(model)
    if as_json:
        print_json(found)
        return
    run = found["run"]
    environment = run.get("environment") or {}
    print_fields(
        [
            ("Model", model.id),
            ("Aliases", ", ".join(found["aliases"])),
            ("Description", found["description"] or ""),
            ("Framework", " ".join(filter(None, (model.framework, model.framework_version)))),
            ("Registered", f"{model.created_utc} by {found['registered_by']}"),
            ("Run", run.get("run_id") or "none is named"),
            ("Snapshot", run.get("snapshot_id") or ""),
            ("Git", " ".join(str(run["git"].get(key, "")) for key in ("commit", "branch")) if run.get("git") else ""),
            ("Command", " ".join([*run.get("entry", ()), *run.get("arguments", ())])),
            ("Topology", _topology(run.get("topology") or {})),
            ("Environment", _environment(environment)),
            ("Data", described.data_texts(model.record)),
            ("Tags", pairs_text(found["tags"])),
            ("Properties", pairs_text(found["properties"])),
            ("Files", f"{counted(len(found['files']), 'file')}, {size_text(found['size_bytes'])}"),
            ("Folder", found["path"]),
            ("Make again", f"paceline rerun {run['run_id']}" if found["can_be_made_again"] else ""),
        ]
    )
    if run.get("metrics"):
        print("\nMetrics:")
        for name, one in run["metrics"].items():
            values = f" ({one['min']} to {one['max']} in {one['count']} values)" if one["count"] > 1 else ""
            print(f"  {visible(name)}: {visible(str(one['last']))}{values}")
    print("\nFiles:")
    for file in found["files"]:
        kind = f"  [{file['kind']}]" if file["kind"] else ""
        print(f"  {size_text(file['size_bytes']):>9}  {file['sha256'][:12]}  {visible(file['name'])}{kind}")
    _print_tensors(found["files"], everything=tensors)
    _warn_of_pickles(model)


@takes(
    NAME,
    VerbOption("word", "Alias, such as production.", "[ALIAS]"),
    VerbOption("version", "The version to point at.", "[VERSION]"),
    VerbOption("--remove", "Remove the alias.", type=bool),
    JSON,
)
def alias(*, name: str, word: str | None, version: str | None, remove: bool, as_json: bool) -> None:
    """Point an alias at a model version. Without a version, show the alias's history."""
    workspace = Workspace.from_config(create=False)
    if word is not None and remove and version is None:
        Model(workspace, name, alias=word).remove_alias(word)
    elif word is not None and version is not None and not remove:
        was = Model(workspace, name, version=check_version(version)).set_alias(word)
        if not as_json:
            print(f"{name}@{word}: {name}:{version}{f', before it {name}:{was}' if was else ''}")
            return
    elif remove or version is not None:
        raise ModelError("give NAME ALIAS VERSION to point an alias at a version, or NAME ALIAS --remove.")
    changes = Model(workspace, name).alias_history(word)
    if as_json:
        print_json(changes)
        return
    if word is not None and not changes:
        Model(workspace, name, alias=word)  # raises an error that lists the aliases that exist
    print_table(
        ("WHEN", "WHO", "ALIAS", "VERSION", "BEFORE"),
        [
            (one["time_utc"], one["by"], one["alias"], str(one["version"] or "-"), str(one["was"] or "-"))
            for one in changes
        ],
    )


@takes(
    REFERENCE,
    TAGS,
    VerbOption("--remove-tag", "Tag to remove; may be repeated.", "KEY", list),
    VerbOption("--description", "Description of the version, in Markdown; '' removes it.", "TEXT"),
    JSON,
)
def update(*, reference: str, tag: list[str], remove_tag: list[str], description: str | None, as_json: bool) -> None:
    """Change a model version's tags and description. Its files never change."""
    if not (tag or remove_tag or description is not None):
        raise ModelError("nothing to update. Give --tag KEY=VALUE, --remove-tag KEY or --description TEXT.")
    model = Model(Workspace.from_config(create=False), reference)
    if remove_tag:
        model.remove_tags(remove_tag)
    model.update(tags=pairs("--tag", tag), description=description)
    if as_json:
        print_json(described.summary(model))
    else:
        print(f"{model.id}: {pairs_text(model.tags) or 'no tags'}")


@takes(
    VerbOption("references", "Versions, such as digits:1 digits:2.", "MODEL...", list, complete="models", needed=True),
    VerbOption("--all", "Show equal facts too.", type=bool, name="everything"),
    JSON,
)
def diff(*, references: list[str], everything: bool, as_json: bool) -> None:
    """Compare model versions: metrics, parameters, files and packages."""
    if len(references) < 2:
        raise ModelError(f"one version is named, {references[0]!r}. Name two or more, such as digits:1 digits:2.")
    workspace = Workspace.from_config(create=False)
    chosen = [Model(workspace, each) for each in references]
    found = compare.compare(workspace.path, [model.record for model in chosen])
    if as_json:
        print_json({"models": [model.id for model in chosen], "facts": [fact.to_json() for fact in found]})
        return
    shown = [fact for fact in found if everything or fact.is_different]
    if not shown:
        print("The versions do not differ.")
        return
    rows = [(fact.part, fact.name, *(value or "-" for value in fact.values)) for fact in shown]
    print_table(("PART", "NAME", *(model.id for model in chosen)), rows)


@takes(
    REFERENCE,
    VerbOption("--to", "Folder to copy into.", "DIR", Path, default=Path()),
    VerbOption("--overwrite", "Replace an existing file or folder.", type=bool),
)
def download(*, reference: str, to: Path, overwrite: bool) -> None:
    """Copy a model version's file or folder under its own name. Checks each file."""
    print(Model(Workspace.from_config(create=False), reference).download(to, exist_ok=overwrite))


@takes(VerbOption("references", "Versions; default: all.", "[MODEL]...", list, complete="models"), JSON)
def verify(*, references: list[str], as_json: bool) -> int:
    """Report model files that have changed since they were registered. Exits with 1 if some have changed."""
    workspace = Workspace.from_config(create=False)
    chosen = [Model(workspace, each) for each in references or ()] or Model.list(workspace)
    meter = Meter(
        terminal_bar("reading"),
        sum(model.record.size_bytes for model in chosen),
        sum(len(m.record.files) for m in chosen),
    )
    looked = [
        (model, check.changes(registry.files_dir(workspace.path, model.record), model.record, on_read=meter.add))
        for model in chosen
    ]
    meter.finish(files=sum(len(model.record.files) for model in chosen))
    results = []
    for model, found in looked:
        record = model.record
        results.append({"id": model.id, "changed": [{"name": one.name, "why": one.why} for one in found]})
        if as_json:
            continue
        try:
            check.refuse(record, found)
            print(f"{model.id}: {counted(len(record.files), 'file')} as registered, {size_text(record.size_bytes)}")
        except ModelChangedError as error:
            warn(f"paceline: error: {error}")
    if as_json:
        print_json(results)
    return _CHANGED if any(one["changed"] for one in results) else 0


@takes(REFERENCES, YES)
def delete(*, references: list[str], yes: bool) -> int:
    """Remove model versions for good. Their numbers are never used again.

    A version stays if an alias points at it or a service serves it.
    """
    workspace = Workspace.from_config(create=False)
    for each in references:
        if parse(each) == parse(parse(each).name):
            raise ModelError(f"{each!r}: say which version, such as {each}:{Model(workspace, each).version}.")
    chosen = list(dict.fromkeys(Model(workspace, each) for each in references))
    named = ", ".join(model.id for model in chosen)
    if not confirmed(f"Remove {named}, for good?", yes=yes, as_json=False):
        return _DECLINED
    for model in chosen:
        freed = remove(model)
        print(f"{model.id}: removed, {size_text(freed)} freed")
    return 0


@takes(
    REFERENCE,
    VerbOption(
        "to",
        "A datastore, with a folder of it (default: models), or a URL such as s3://bucket/models.",
        "[STORE[:PATH]]",
        complete="datastores",
    ),
    VerbOption("--mlflow", "MLflow's registry, such as http://host:5000 or sqlite:///mlflow.db.", "URI"),
    VerbOption("--verify", "Read all files that are stored already, and replace those that have changed.", type=bool),
)
def push(*, reference: str, to: str | None, mlflow: str | None, verify: bool) -> None:
    """Store a model version in a datastore, or register it in MLflow. Continues an interrupted push."""
    refuse(
        ModelError,
        ((to is None) == (mlflow is None), "name a datastore (STORE[:PATH], s3://bucket/models), or --mlflow URI."),
        (mlflow is not None and verify, "--verify goes with a datastore; MLflow's registry takes whole versions."),
    )
    workspace = Workspace.from_config(create=False)
    model = Model(workspace, reference)
    if mlflow is not None:
        there = mlflow_registry.push(workspace.path, model.record, mlflow)
        print(
            f"{model.id} {'is' if there.is_new else 'was already'} version {there.version} of {there.name!r} in MLflow"
        )
        return
    place = on_store.place(str(to))
    pushed = on_store.push(workspace.path, model.record, place, terminal_bar("uploading"), verify=verify)
    print(
        f"{model.id}: {'stored' if pushed.is_new else 'there already'} in {visible(pushed.place)}: "
        f"{counted(pushed.stored, 'new content')}, {size_text(pushed.stored_bytes)}"
    )


@takes(
    VerbOption("place", "Place of the push.", "STORE[:PATH]", complete="datastores", needed=True),
    VerbOption("reference", "NAME:VERSION, or NAME for the latest version there.", "MODEL", needed=True),
)
def pull(*, place: str, reference: str) -> None:
    """Fetch a model version from a datastore into the workspace. It keeps its name and number."""
    meant, workspace, source = parse(reference), Workspace.from_config(), on_store.place(place)
    refuse(ModelError, (meant.alias, f"{reference!r}: aliases are each workspace's own. Give NAME:VERSION."))
    version = meant.version
    if version is None:
        there = on_store.listed(workspace.path, source)
        numbers = [number for name, number in there if name == meant.name]
        if not numbers:
            known = registry.listed([f"{name}:{number}" for name, number in there])
            hint = did_you_mean(meant.name, [name for name, _ in there])
            raise ModelNotFoundError(f"there is no model {meant.name!r} in {place}.{hint} There are: {known}.")
        version = numbers[-1]
    on_store.pull(workspace.path, source, meant.name, version, terminal_bar("downloading"))
    print(f"{meant.name}:{version}")


def _list_at(place: str, *, as_json: bool) -> None:
    found = on_store.listed(Workspace.from_config(create=False).path, on_store.place(place))
    if as_json:
        print_json([{"name": name, "version": version} for name, version in found])
    else:
        for name, version in found:
            print(f"{name}:{version}")


def _print_tensors(files: Sequence[dict[str, Any]], *, everything: bool) -> None:
    for file in files:
        if not (header := file.get("safetensors")):
            continue
        shown = header["tensors"] if everything else header["tensors"][:_TENSORS]
        print(
            f"\n{visible(file['name'])}: {counted(len(header['tensors']), 'tensor')}, {header['parameters']:,} parameters"
        )
        for tensor in shown:
            shape = "x".join(map(str, tensor["shape"])) or "scalar"
            print(f"  {tensor['dtype']:<8} {shape:<16} {visible(tensor['name'])}")
        if len(shown) < len(header["tensors"]):
            print(f"  ... and {len(header['tensors']) - len(shown)} more (--tensors)")


def _warn_of_pickles(model: Model) -> None:
    if names := described.pickles(model.record):
        warn(
            f"paceline: warning: {some(names, 5)}: a pickle runs code of its author's when it is loaded. Paceline "
            "never loads one; load it only if you trust who made it. safetensors, ONNX and skops hold none."
        )


def _framework(model: Model) -> str:
    return f", {model.framework} {model.framework_version or ''}".rstrip() if model.framework else ""


def _topology(found: dict[str, Any]) -> str:
    if not found:
        return ""
    size = f"{found['node_count']}x{found['process_count_per_node']}" if "node_count" in found else ""
    parts = [size, found.get("distributed_backend") or "", f"on {found['target']}" if found.get("target") else ""]
    return " ".join(filter(None, parts))


def _environment(found: dict[str, Any]) -> str:
    packages = found.get("packages") or found.get("pip") or ()
    if not packages:
        return ""
    python = f"Python {found['python_version']}, " if found.get("python_version") else ""
    seen = f", seen {found['seen']}" if found.get("seen") else ""
    return f"{python}{counted(len(packages), 'package')} with exact versions{seen} (--json lists them)"


verbs = {
    "register": register,
    "list": list_models,
    "show": show,
    "alias": alias,
    "update": update,
    "diff": diff,
    "download": download,
    "verify": verify,
    "delete": delete,
    "push": push,
    "pull": pull,
}
