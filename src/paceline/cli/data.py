"""data list, add, remove, ls, upload, download, cache, prune, freeze, check: datastores, datasets and the cache."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.common import key_value, print_json, print_table, warn, warn_left_out
from paceline.cli.options import JSON, VerbOption, takes
from paceline.errors import DataError
from paceline.runs.visible import visible
from paceline.system.files import walk_files
from paceline.system.names import counted
from paceline.workspace import Workspace

if TYPE_CHECKING:
    from paceline.cli.outputs import CheckedDataset, DatasetRow, FrozenDataset, StoreRow, Stores
    from paceline.data.datasets.dataset import FileDataset, TabularDataset
    from paceline.data.stores.datastore import Datastore

OVERWRITE = VerbOption("--overwrite", "Replace existing files; default: keep them.", type=bool)
PLACE = VerbOption(
    "place", "A datastore, or a folder, file or pattern of it.", "STORE[:PATH]", complete="datastores", needed=True
)

DATASET = VerbOption("dataset", "A registered dataset; default: its latest version.", "NAME[:VERSION]", needed=True)

# Matches `lab` and `lab:mnist/train`. Only the first colon separates the name; another colon is a part of the path.
_PLACE = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]*)(?::(.*))?", re.DOTALL)


@takes(JSON)
def list_stores(*, as_json: bool) -> None:
    """List the datastores and datasets of the workspace."""
    from paceline.data.stores.datastore import Datastore

    workspace = Workspace.from_config(create=False)
    stores: list[StoreRow] = [
        {"name": store.name, "kind": store.kind, "url": store.url, "is_default": store.is_default}
        for store in Datastore.list(workspace).values()
    ]
    datasets = _datasets(workspace)
    if as_json:
        found: Stores = {"datastores": stores, "datasets": datasets}
        print_json(found)
        return
    print_table(
        ("STORE", "KIND", "URL"),
        [(row["name"] + (" (default)" if row["is_default"] else ""), row["kind"], row["url"]) for row in stores],
    )
    if datasets:
        print()
        print_table(
            ("DATASET", "VERSION", "DESCRIPTION"),
            [(row["name"], str(row["version"]), row["description"] or "") for row in datasets],
        )


@takes(
    VerbOption("name", "Name of the store: letters, digits, '_' and '-'.", needed=True),
    VerbOption("url", "A folder, or a URL: s3://, abfs://, gs://, sftp://, https://.", needed=True),
    VerbOption("--option", "Option of fsspec's file system; may be repeated.", "KEY=VALUE", list),
    VerbOption(
        "--credential",
        "Place of a credential: env:VARIABLE, keyring:service/user or file:PATH; may be repeated.",
        "KEY=PLACE",
        list,
    ),
    VerbOption("--default", "Make this the default store.", type=bool),
    VerbOption("--overwrite", "Replace a store of this name.", type=bool),
)
def add(*, name: str, url: str, option: list[str], credential: list[str], default: bool, overwrite: bool) -> None:
    """Register a datastore. Name the places of its credentials; secrets themselves are refused."""
    from paceline.data.stores.datastore import Datastore

    store = Datastore.register(
        Workspace.from_config(),
        name,
        url,
        options=_options(option or []),
        credentials=dict(_pair("--credential", word) for word in credential) if credential else None,
        default=default,
        overwrite=overwrite,
    )
    print(f"{store.name}: {visible(store.url)}")


@takes(VerbOption("name", "The datastore.", complete="datastores", needed=True))
def remove(*, name: str) -> None:
    """Remove a datastore from the workspace. Its files stay."""
    from paceline.data.stores.datastore import Datastore

    Datastore.get(Workspace.from_config(create=False), name).unregister()
    print(f"{name} is not registered any longer; its files stay.")


@takes(PLACE, JSON)
def list_files(*, place: str, as_json: bool) -> None:
    """List the files of a datastore with their sizes."""
    from paceline.data.transfer.progress import size_text

    store, path = _place(place)
    infos = store.files(path)
    if as_json:
        print_json([asdict(info) for info in infos])
        return
    for info in infos:
        # The size is -1 if it is unknown, because a web server need not report the length of a file.
        print(f"{size_text(info.size) if info.size >= 0 else '?':>9}  {visible(info.path)}")
    print(f"{len(infos)} files, {size_text(sum(max(info.size, 0) for info in infos))}", file=sys.stderr)


@takes(VerbOption("source", "A file or a folder.", type=Path, needed=True), PLACE, OVERWRITE)
def upload(*, source: Path, place: str, overwrite: bool) -> None:
    """Store a file or a folder in a datastore."""
    store, path = _place(place)
    if not source.exists():
        raise DataError(f"there is no {str(source)!r} here. Name a file or a folder.")
    Workspace.from_config()  # creates the workspace, which contains the datastore `default`
    if source.is_dir():
        store.upload(source, path, overwrite=overwrite)
        warn_left_out(sorted(name for name, _, is_file in walk_files(source) if not is_file))
    else:
        store.upload_files([source], target_path=path, overwrite=overwrite)
    kept = "" if overwrite else "; files that were there stay as they are (--overwrite replaces them)"
    warn(f"{source} is stored in {place}{kept}.")


@takes(PLACE, VerbOption("target", "The folder to copy to.", type=Path, needed=True), OVERWRITE)
def download(*, place: str, target: Path, overwrite: bool) -> None:
    """Copy files of a datastore, with their paths, to a folder. Continues an interrupted copy."""
    store, path = _place(place)
    count = store.download(target, path, overwrite=overwrite)
    kept = "" if overwrite or count else ": what is there stays as it is (--overwrite replaces it)"
    print(f"{counted(count, 'file')} copied to {target}{kept}.", file=sys.stderr)


@takes(JSON)
def cache(*, as_json: bool) -> None:
    """Show this machine's cache of stores' files: place, size, limit."""
    from paceline.data.transfer.cache import DataCache
    from paceline.data.transfer.progress import size_text

    found = DataCache()
    use = found.use()
    if as_json:
        print_json({"folder": str(found.folder), **asdict(use), "limit_bytes": found.limit_bytes})
        return
    print(f"Folder:  {found.folder}")
    print(f"Size:    {size_text(use.bytes)} in {use.files} files, {size_text(use.linked_bytes)} of it in use by runs")
    print(f"Limit:   {size_text(found.limit_bytes)}")


@takes(VerbOption("--to", "Size to leave at most, such as 20GB.", "SIZE", default="0"))
def prune(*, to: str) -> None:
    """Remove the cache's least recently used files. Files that a run uses stay."""
    from paceline.data.transfer.cache import DataCache, parse_size
    from paceline.data.transfer.progress import size_text

    print(f"{size_text(DataCache().prune(parse_size(to)))} removed.")


@takes(
    DATASET,
    VerbOption("--to", "Place of the files; default: the folder frozen of the default datastore.", "STORE[:PATH]"),
    JSON,
)
def freeze(*, dataset: str, to: str | None, as_json: bool) -> None:
    """Copy the files of a dataset's version, to keep them unchanged."""
    found = _dataset(dataset).freeze(to)
    (source,) = found.sources
    place = source.path if source.datastore is None else f"{source.datastore}:{source.path}"
    if as_json:
        row: FrozenDataset = {
            "name": str(found.name),
            "version": found.version or 0,
            "place": place,
            "fingerprint": str(found.fingerprint),
        }
        print_json(row)
        return
    print(f"{found.name}:{found.version} is frozen in {visible(place)}")


@takes(DATASET, JSON)
def check(*, dataset: str, as_json: bool) -> int:
    """Compare a dataset's files with the registered or frozen ones. Exits with 1 if they differ."""
    found = _dataset(dataset).check()
    if as_json:
        row: CheckedDataset = {
            "dataset": found.dataset,
            "added": list(found.added),
            "removed": list(found.removed),
            "changed": list(found.changed),
        }
        print_json(row)
    else:
        print(visible(str(found)))
    return int(not found)


def _dataset(text: str) -> FileDataset | TabularDataset:
    from paceline.data.datasets.dataset import Dataset

    name, _, version = text.partition(":")
    return Dataset.get_by_name(Workspace.from_config(create=False), name, version or "latest")


def _place(text: str) -> tuple[Datastore, str]:
    """Return the datastore of `STORE[:PATH]`, and the path in this datastore."""
    from paceline.data.stores.datastore import Datastore

    found = _PLACE.fullmatch(text)
    if found is None:
        raise DataError(f"{text!r} must be STORE or STORE:PATH, as lab:mnist. `paceline data list` shows the stores.")
    return Datastore.get(Workspace.from_config(create=False), found[1]), found[2] or ""


def _datasets(workspace: Workspace) -> list[DatasetRow]:
    from paceline.data.datasets.dataset import Dataset

    return [
        {"name": name, "version": found.version, "description": found.description}
        for name, found in Dataset.get_all(workspace).items()
    ]


def _options(words: list[str]) -> dict[str, object]:
    """Parse KEY=VALUE, whose value may be JSON: true, 22, {"region_name": "eu-west-1"}."""
    options: dict[str, object] = {}
    for word in words:
        key, value = _pair("--option", word)
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


def _pair(option: str, word: str) -> tuple[str, str]:
    # Don't quote the user's word in the error message, because the word may be a secret that was given by mistake.
    return key_value(word, DataError(f"{option} takes KEY=VALUE, but the given word has no '='."))


verbs = {
    "list": list_stores,
    "add": add,
    "remove": remove,
    "ls": list_files,
    "upload": upload,
    "download": download,
    "cache": cache,
    "prune": prune,
    "freeze": freeze,
    "check": check,
}
