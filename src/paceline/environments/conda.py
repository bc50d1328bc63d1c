"""Conda packages, solved and installed by py-rattler in a separate process.

    python -m paceline.environments.conda < request.json

prints progress, and writes its answer to the file that the request names. The process is separate, because a solve in
native code can be interrupted only by ending its process, and because a crash of native code must not end the supervisor.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.environments import program
from paceline.environments.program import Say
from paceline.errors import EnvironmentBuildError, EnvironmentSpecError
from paceline.job.environment import EnvironmentSpec
from paceline.job.secret_values import hidden

DEFAULT_CHANNELS = ("conda-forge",)
_ANSWER = "conda-answer.json"


def check(environment: EnvironmentSpec) -> None:
    """Raise EnvironmentSpecError if py-rattler can't read the conda packages.

    Raise it too if py-rattler is not installed, or if a channel's folder does not exist.
    """
    if importlib.util.find_spec("rattler") is None:
        raise EnvironmentSpecError(
            "conda packages need py-rattler, which is not installed. Run: pip install 'paceline[conda]'"
        )
    import rattler

    for spec in environment.conda_packages:
        try:
            rattler.MatchSpec(spec)
        except Exception as error:
            raise EnvironmentSpecError(
                f"conda_packages has {spec!r}, which is not a conda package: {_flat(error)}. Write name, name=1.2 or "
                "'name >=1.2,<2'."
            ) from error
    for channel in environment.conda_channels:
        folder = channel_folder(channel)
        if folder is not None and not folder.is_dir():
            raise EnvironmentSpecError(
                f"conda_channels has {channel!r}, and there is no folder {str(folder)!r}. Give the folder that holds noarch/ "
                "and the like, or a channel's name or URL."
            )


def install(
    environment: EnvironmentSpec, prefix: Path, variables: Mapping[str, str], say: Say, lock_fd: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Install the conda packages at `prefix`.

    Returns:
        "name=version=build" and "URL#sha256" of each package.

    Raises:
        EnvironmentBuildError: There is no solution, a package can't be fetched or has a wrong hash, or the disk is full.
    """
    answer = prefix / "paceline" / _ANSWER
    answer.parent.mkdir(parents=True, exist_ok=True)
    specs = list(environment.conda_packages)
    if environment.python_version:
        specs.append(f"python {environment.python_version}.*")
    request = {
        "prefix": str(prefix),
        "answer": str(answer),
        "specs": specs,
        "channels": [_url(channel) for channel in environment.conda_channels or DEFAULT_CHANNELS],
        "locked": list(environment.locked_conda),
    }
    # Pass on this process's sys.path, because Paceline itself may come from the submitter's PYTHONPATH.
    environ = {**variables, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    # Run rattler in a separate process: it has native threads, and a build must end with its parent.
    code, lines = program.run(
        [sys.executable, "-m", "paceline.environments.conda"], environ, say, lock_fd=lock_fd, stdin=json.dumps(request)
    )
    # Write the answer to a file: standard output has the progress, and native code may write to it.
    try:
        outcome = json.loads(answer.read_bytes()) if answer.exists() else None
    except ValueError:
        outcome = None
    if code != 0 or not isinstance(outcome, dict):
        output = [line for line in lines if line.strip()]
        reason = (
            outcome["error"]
            if isinstance(outcome, dict) and "error" in outcome
            else (output or [f"exit code {code}"])[-1]
        )
        raise EnvironmentBuildError(hidden(f"the conda packages could not be installed: {reason}"))
    return tuple(outcome["packages"]), tuple(outcome["urls"])


def _flat(error: BaseException) -> str:
    # Join the lines: rattler draws the causes as a tree over several lines.
    text = " ".join(re.sub(r"[├└─│]+", " ", str(error)).split())
    parts = [part.strip().rstrip(".") for part in text.split("Caused by:")]
    return ": ".join(dict.fromkeys(parts))


def channel_folder(channel: str) -> Path | None:
    if channel.startswith("file:"):
        from urllib.parse import unquote, urlsplit

        return Path(unquote(urlsplit(channel).path))
    if channel.startswith(("/", "./", "../", "~")) or channel in (".", ".."):
        return Path(os.path.abspath(os.path.expanduser(channel)))
    return None


def _url(channel: str) -> str:
    folder = channel_folder(channel)
    return channel if folder is None else folder.as_uri()


def _main() -> int:
    import asyncio

    request = json.loads(sys.stdin.read())
    try:
        answer = asyncio.run(_solve_and_install(request))
    except Exception as error:
        answer = {"error": f"{_flat(error)}."}
        # Print the tree of causes for the log. The answer has the causes in one line.
        print(f"error: {error}", flush=True)
    Path(request["answer"]).write_text(json.dumps(answer), encoding="utf-8")
    return 1 if "error" in answer else 0


async def _solve_and_install(request: dict[str, Any]) -> dict[str, Any]:
    import rattler

    client = rattler.Client.default_client()
    if request["locked"]:
        records = [_locked(text) for text in request["locked"]]
    else:
        print(f"solving {', '.join(request['specs'])} from {', '.join(request['channels'])}", flush=True)
        records = await rattler.solve(
            request["channels"],
            request["specs"],
            gateway=rattler.Gateway(client=client),
            # Detect properties of the machine that packages may require, such as glibc and CUDA.
            virtual_packages=rattler.VirtualPackage.detect(rattler.VirtualPackageOverrides.from_env()),
        )
    for record in records:
        print(f"  {record.name.normalized} {record.version} {record.build}", flush=True)
    for record in records:
        _check_hash(record)
    print(f"installing {len(records)} packages", flush=True)
    await rattler.install(records, target_prefix=request["prefix"], show_progress=False, client=client)
    return {
        "packages": sorted(f"{record.name.normalized}={record.version}={record.build}" for record in records),
        "urls": sorted(_lock(record) for record in records),
    }


def _check_hash(record: Any) -> None:
    """Verify the hash of a local archive: rattler verifies only downloads."""
    import hashlib

    folder = channel_folder(record.url)
    if folder is None or not record.sha256 or not folder.is_file():
        return
    digest = hashlib.sha256()
    with open(folder, "rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    if digest.digest() != record.sha256:
        raise ValueError(
            f"{record.file_name} has another content than the channel says: its hash is {digest.hexdigest()}, not "
            f"{record.sha256.hex()}"
        )


def _lock(record: Any) -> str:
    return f"{record.url}#{record.sha256.hex()}" if record.sha256 else str(record.url)


def _locked(text: str) -> Any:
    import rattler

    url, _, digest = text.partition("#")
    file_name = url.rsplit("/", 1)[-1]
    stem = re.sub(r"\.(conda|tar\.bz2)$", "", file_name)
    # A file is called name-version-build.conda, and only the name may contain dashes.
    name, version, build = stem.rsplit("-", 2)
    channel, subdir = url.rsplit("/", 2)[0], url.rsplit("/", 2)[1]
    record = rattler.PackageRecord(
        name,
        version,
        rattler.BuildString.new_unchecked(build),
        0,
        subdir,
        sha256=bytes.fromhex(digest) if digest else None,
    )
    return rattler.RepoDataRecord(record, file_name, url, channel)


if __name__ == "__main__":
    exit_code = _main()
    sys.stdout.flush()
    # Skip Python's shutdown, during which native threads that still run may crash the interpreter.
    os._exit(exit_code)
