"""forward, dev: a tunnel to a port of a run, and sessions on a node."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.cli.cancel import end, execute
from paceline.cli.common import folder_of, warn
from paceline.cli.options import DETACH, JSON, NAMED_RUN, Duration, Given, VerbOption, takes
from paceline.cli.run_options import RUN, words
from paceline.cli.summary import print_submitted
from paceline.errors import EngineError, JobError, RunStateError, TransferError
from paceline.job_files.description import asked
from paceline.runs import read, states
from paceline.runs.folder import RunFolder
from paceline.runs.follow import state_text
from paceline.runs.record import user_name
from paceline.runs.remote_status import refresh
from paceline.runs.tunnel import Tunnel, listen
from paceline.runs.visible import visible
from paceline.sessions import KEY_VARIABLE, TOKEN_VARIABLE, Serving, serving
from paceline.submit import submit
from paceline.system.files import PRIVATE, write_whole
from paceline.system.scratch import Scratch
from paceline.system.signals import handled
from paceline.targets import configured
from paceline.workspace import Workspace

#: Seconds between two checks of a session: while the session starts, and after its start.
_START_LOOK_S, _LOOK_S = 0.05, 0.5
#: After the tunnel broke, wait this many seconds for the attempt's end, which the workers' grace period delays.
_LOST_S = 60.0
#: The command that starts the user's shell on the node.
_SHELL = ["/bin/sh", "-c", 'exec "${SHELL:-/bin/sh}"']
#: Options of `run` that a session refuses, because a session has one worker, a fixed program and fixed limits.
_NOT_OF_SESSIONS = frozenset(
    (
        *("script", "arguments", "module", "nodes", "backend", "ps", "compute", "gpu_visibility", "hang_after"),
        *("on_failure", "on_hang", "elastic_after", "restart_on_exception", "dry_run", "yaml", "as_json"),
    )
)

#: Options of a new session, which an open session ignores.
_OF_NEW = (
    VerbOption("target", "Compute target; default: local.", "[TARGET]", complete="targets"),
    VerbOption("--ssh", "Serve ssh, for VS Code and other programs, in place of JupyterLab.", type=bool),
    VerbOption(
        "--idle",
        "End the session after this time without activity; 0: never. Default: 30m.",
        type=Duration(),
        default=1800.0,
    ),
    VerbOption("--resume", "Start with the notebooks of an earlier session.", "RUN", complete="run_ids"),
)
_LOCAL_PORT = VerbOption("--local", "Port on this machine; default: a free one.", type=int, least=1, most=65535)


@takes(
    NAMED_RUN,
    VerbOption("port", "Port on the worker's node, such as 8888.", "PORT", int, least=1, most=65535, needed=True),
    _LOCAL_PORT,
    VerbOption("--rank", "The worker to whose node the tunnel leads.", type=int, least=0, default=0),
)
def forward(*, run_id: str, port: int, local: int | None, rank: int) -> None:
    """Open a tunnel to a port on a worker's node.

    It ends with the run, or with Ctrl-C. Only programs of this machine can use the tunnel.
    """
    with _until_interrupted(), Tunnel(folder_of(run_id), port, rank=rank, local_port=local or 0) as tunnel:
        print(
            f"127.0.0.1:{tunnel.local_port} leads to port {port} of rank {rank}'s node. Ctrl-C closes it.", flush=True
        )
        tunnel.serve()


@contextlib.contextmanager
def _until_interrupted() -> Iterator[None]:
    with handled(end, signal.SIGTERM, signal.SIGHUP), contextlib.suppress(KeyboardInterrupt):
        yield


@takes(
    _OF_NEW[0],
    VerbOption("--shell", "Open a shell in this terminal, in place of JupyterLab.", type=bool),
    *_OF_NEW[1:3],
    VerbOption("--run", "Open a session again that is running.", "RUN", complete="run_ids"),
    _OF_NEW[3],
    _LOCAL_PORT,
    *(option for option in RUN if option.name not in _NOT_OF_SESSIONS),
    DETACH,
    JSON,
)
def dev(**given: object) -> int | None:
    """Start a session on a node: JupyterLab, a shell, or ssh.

    The session is a run, with source, packages, data and leases. It outlives this command, and ends when idle.
    """
    if given["shell"] and given["ssh"]:
        raise JobError("--shell and --ssh: a session is of one kind. Leave one out.")
    kind = "shell" if given["shell"] else "ssh" if given["ssh"] else "jupyter"
    if isinstance(given["local"], int):
        # Refuse a port that is in use now. Otherwise the error would come after the wait for a node, which may take hours.
        listen(given["local"]).close()
    if given["run"] is not None:
        folder = folder_of(str(given["run"]))
        if not _is_session(folder):
            raise JobError(f"run {folder.run_id} is not a session. Use `paceline exec` or `paceline forward`.")
        own = (record := read.record(folder)).job and record.job.compute_target
        for option in (*_OF_NEW, *RUN):
            same = {"target": own}.get(option.name, option.default)
            if given.get(option.name, option.default) not in (option.default, [], same):
                raise JobError(f"--run opens a running session: leave out {option.long_word}.")
        if (status := record.status) in states.TERMINAL:
            raise RunStateError(
                f"session {folder.run_id} is {status}. Start another with its notebooks: paceline dev --resume {folder.run_id}"
            )
    else:
        folder = _submit(kind, given)
    if given["detach"]:
        hints = f"Open it:  paceline dev --run {folder.run_id}\nEnd it:   paceline cancel {folder.run_id}"
        return print_submitted(folder, hints, as_json=bool(given["as_json"]))
    with _until_interrupted(), contextlib.ExitStack() as stack:
        if given["shell"] and given["run"] is None:
            stack.callback(_end_with_shell, folder)
        else:
            again = f"Open it again: paceline dev --run {folder.run_id}. End it: paceline cancel {folder.run_id}"
            warn(f"Ctrl-C leaves the session. {again}")
        found = _when_it_serves(folder)
        if given["shell"] or found.kind == "shell":
            return execute(run_id=folder.run_id, command=_SHELL, rank=0, no_terminal=False)
        if found.kind == "ssh":
            _tell_ssh(folder, found)
            return None
        _jupyter(folder, found, given["local"])
    if given["shell"]:
        return 128 + signal.SIGINT
    record = read.record(folder)
    print(f"Session {folder.run_id} is {record.status}. {record.failure or ''}".strip(), file=sys.stderr)
    return None


def _is_session(folder: RunFolder) -> bool:
    job = read.record(folder).job
    return job is not None and job.entry_module == "paceline.sessions"


def _submit(kind: str, given: Given) -> RunFolder:
    of_run = {option.name: given.get(option.name, option.default) for option in RUN}
    arguments = [kind, f"{given['idle']:g}"]
    _, description = words(
        {**of_run, "module": "paceline.sessions", "arguments": arguments, "compute": given["target"]}
    )
    # Disable hang detection, because a session that waits for its user is idle and does not hang.
    wanted = asked({**description, "hang_seconds": 0})
    job, values = wanted.job, dict(wanted.values)
    former = None
    if given["resume"] is not None and not _is_session(former := folder_of(given["resume"])):
        raise JobError(f"--resume {given['resume']}: this run is not a session.")
    with Scratch("session") as scratch:
        key = scratch / "key"
        if kind == "ssh":
            variables = {**job.environment_variables, KEY_VARIABLE: _public_key(key)}
            job = dataclasses.replace(job, environment_variables=variables)
        elif kind == "jupyter":
            values[TOKEN_VARIABLE] = token = secrets.token_hex(24)
            job = dataclasses.replace(job, secrets={**job.secrets, TOKEN_VARIABLE: f"env:{TOKEN_VARIABLE}"})

        def fill(hidden: RunFolder) -> None:
            hidden.session.mkdir(mode=0o700)
            if kind == "ssh":
                shutil.copy2(key, hidden.session / "key")
            elif kind == "jupyter":
                # Store a copy of the token on this machine, because the run's copy is a secret that is sent to the cluster.
                write_whole(hidden.session / "token", token, mode=PRIVATE)

        return submit(
            job,
            wanted.source,
            Workspace.from_config().path,
            wanted.experiment,
            tags={**wanted.tags, "session": kind},
            display_name=wanted.display_name,
            values=values,
            leave_out=wanted.leave_out,
            checkpoints=former.checkpoints if former is not None else None,
            fill=fill,
        )


def _public_key(file: Path) -> str:
    if (keygen := shutil.which("ssh-keygen")) is None:
        raise JobError("--ssh needs ssh-keygen on this machine. Install OpenSSH's client, or use --shell.")
    subprocess.run([keygen, "-q", "-t", "ed25519", "-N", "", "-C", "paceline", "-f", str(file)], check=True)
    return file.with_suffix(".pub").read_text().strip()


def _when_it_serves(folder: RunFolder) -> Serving:
    """Print the session's states until users can connect.

    Return the session's address. Raise RunStateError if the session ends first.
    """
    told = ""
    while True:
        record = read.record(folder)
        if record.is_terminal:
            raise RunStateError(f"session {folder.run_id} is {record.status}. {record.failure or ''}".strip())
        refresh(folder)
        # Read the log only while the session runs. Between two attempts, the last log belongs to a server that has ended.
        if record.status == states.RUNNING:
            log = folder.rank_log(record.attempts[-1].number, 0)
            with contextlib.suppress(OSError):
                if (found := serving(log.read_text(errors="replace"))) is not None:
                    return found
        if (text := state_text(record)) != told:
            told = text
            warn(text)
        time.sleep(_START_LOOK_S)


def _jupyter(folder: RunFolder, found: Serving, local: object) -> None:
    """Print JupyterLab's address, and keep its tunnel open until the session ends.

    Each attempt of the session starts a new JupyterLab server. The tunnel gives every server the same address.
    """
    try:
        token = (folder.session / "token").read_text()
    except OSError:
        raise RunStateError(
            f"the token of session {folder.run_id} is not here: open it as its user, on the machine that submitted it."
        ) from None
    # If the session runs on this machine, the browser can connect to its port without a tunnel.
    is_direct = local is None and _is_here(folder)
    port, told = local if isinstance(local, int) else 0, 0
    while True:
        with contextlib.nullcontext() if is_direct else Tunnel(folder, int(found.at), local_port=port) as tunnel:
            port = int(found.at) if tunnel is None else tunnel.local_port
            if port != told:
                told = port
                print(f"http://127.0.0.1:{port}/lab?token={token}", flush=True)
            _hold(folder, tunnel)
        try:
            found = _when_it_serves(folder)
        except RunStateError:
            return


def _hold(folder: RunFolder, tunnel: Tunnel | None) -> None:
    """Serve a tunnel until the session's attempt ends or its node is unreachable.

    Raises:
        RunStateError: The tunnel has ended while the attempt continues.
    """
    attempt, lost, deadline = len(read.record(folder).attempts), None, math.inf
    try:
        if tunnel is not None:
            tunnel.serve()
    except (EngineError, TransferError) as error:
        warn(str(error))
        time.sleep(_LOOK_S)
        return
    except RunStateError as error:
        lost, deadline = error, time.monotonic() + _LOST_S
    while (record := read.record(folder)).status == states.RUNNING and len(record.attempts) == attempt:
        if lost is not None and time.monotonic() > deadline:
            raise lost
        time.sleep(_LOOK_S)


def _is_here(folder: RunFolder) -> bool:
    return configured.read(folder.path.parents[1], str(read.record(folder).target)).kind == configured.LOCAL


def _end_with_shell(folder: RunFolder) -> None:
    if not read.record(folder).is_terminal:
        read.request_cancel(folder, by=user_name(), reason="its shell has ended")


def _tell_ssh(folder: RunFolder, found: Serving) -> None:
    """Write a configuration for ssh, and print how to connect."""
    if not (folder.session / "key").exists():
        raise RunStateError(
            f"the key of session {folder.run_id} is not here: open it on the machine that submitted it."
        )
    file = folder.session / "ssh_config"
    # Delete the host keys of earlier attempts, because each attempt has a new host key.
    (folder.session / "known_hosts").unlink(missing_ok=True)
    file.write_text(ssh_config(folder, found), encoding="utf-8")
    print(f"ssh -F {shlex.quote(str(file))} {folder.run_id}")
    warn(
        f"For VS Code (Remote-SSH), begin ~/.ssh/config with this line, and connect to the host {folder.run_id}:\n    Include "
        f'"{visible(str(file))}"'
    )


def ssh_config(folder: RunFolder, found: Serving) -> str:
    """Return a configuration with which ssh reaches a session through `paceline exec`."""
    user, _, command = found.at.partition(" ")
    proxy = shlex.join(
        (
            *("env", f"PACELINE_WORKSPACE={folder.path.parents[1]}", sys.executable, "-m", "paceline"),
            *("exec", "--no-terminal", folder.run_id, "--", *shlex.split(command)),
        )
    ).replace("%", "%%")
    place = str(folder.session).replace("%", "%%")
    lines = (
        f"User {user}",
        f"ProxyCommand {proxy}",
        f'IdentityFile "{place}/key"',
        "IdentitiesOnly yes",
        "StrictHostKeyChecking accept-new",
        f'UserKnownHostsFile "{place}/known_hosts"',
    )
    return "\n    ".join((f"Host {folder.run_id}", *lines)) + "\n"
