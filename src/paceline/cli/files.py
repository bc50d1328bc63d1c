"""files, download: the files of a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.common import folder_of, print_json, warn_left_out
from paceline.cli.options import JSON, LATEST_RUN, NAMED_RUN, VerbOption, takes
from paceline.data.transfer.progress import Meter, size_text, terminal_bar
from paceline.errors import RunNotFoundError, UserError
from paceline.runs import artifacts, downloads, read
from paceline.runs.folder import RunFolder
from paceline.runs.visible import visible
from paceline.system.names import counted

if TYPE_CHECKING:
    from paceline.cli.outputs import CopiedFile, FileRow

PATTERNS = VerbOption(
    "names", "Names, folders or patterns such as '*.pt'; default: all.", "[NAME]...", list, complete="file_names"
)


@takes(LATEST_RUN, PATTERNS, JSON)
def files(*, run_id: str | None, names: list[str], as_json: bool) -> None:
    """List a run's files with their sizes: outputs, logs, uploads."""
    folder = _folder(run_id)
    found = downloads.files(folder, names or ())
    if as_json:
        rows: list[FileRow] = [{"name": file.name, "size_bytes": file.size_bytes} for file in found]
        print_json(rows)
        return
    for file in found:
        print(f"{size_text(file.size_bytes):>9}  {visible(file.name)}")
    print(_counted(found), file=sys.stderr)
    warn_left_out(artifacts.left_out(folder))


@takes(
    NAMED_RUN,
    PATTERNS,
    VerbOption("--to", "Folder to copy to; default: ./<run id>.", "DIR", Path),
    VerbOption("--overwrite", "Replace existing files of these names.", type=bool),
    JSON,
)
def download(*, run_id: str, names: list[str], to: Path | None, overwrite: bool, as_json: bool) -> None:
    """Copy files of a run to a folder. They keep their names."""
    folder = _folder(run_id)
    chosen = downloads.files(folder, names or ())
    if not chosen:
        raise RunNotFoundError(f"run {folder.run_id} has no files yet. `paceline status {folder.run_id}` says more.")
    target = to if to is not None else Path(folder.run_id)
    meter = Meter(terminal_bar("copying"), sum(file.size_bytes for file in chosen), len(chosen))
    try:
        done = downloads.download(chosen, target, overwrite=overwrite, came=meter.add)
    except OSError as error:
        raise UserError(
            # If a rename failed, the error's `filename` is the temporary file and `filename2` is the copy. Name the copy.
            f"{str(error.filename2 or error.filename or target)!r} can't be written: {error.strerror or error}. "
            "Name another folder with --to."
        ) from error
    if as_json:
        copies: list[CopiedFile] = [
            {"name": file.name, "path": str(target / file.name), "size_bytes": file.size_bytes}
            for file in sorted([*done.copied, *done.same], key=lambda file: file.name)
        ]
        print_json(copies)
        return
    rest = [f"{len(done.same)} there already"] if done.same else []
    rest += [f"{len(done.gone)} gone, for the run has removed them"] if done.gone else []
    print("; ".join([f"{_counted(done.copied)}, copied to {visible(str(target))}", *rest]) + ".")
    warn_left_out(artifacts.left_out(folder))


def _folder(run_id: str | None) -> RunFolder:
    folder = folder_of(run_id)
    read.record(folder)  # reading the record also refreshes the folder of a remote run
    return folder


def _counted(found: list[downloads.RunFile]) -> str:
    return f"{counted(len(found), 'file')}, {size_text(sum(file.size_bytes for file in found))}"
